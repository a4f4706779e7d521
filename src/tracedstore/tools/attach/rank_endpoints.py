"""Queries the endpoints of a job's ranks: Store calls in flight, and metrics."""

import asyncio
import re
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.child_process import (
    ChildTimeoutError,
    Heartbeat,
    run_in_child,
)
from tracedstore.tools.attach.token_policy import TokenPolicy

# Seconds for the calls in flight of one rank, and of all ranks together.
_CALLS_TIMEOUT, _ALL_CALLS_TIMEOUT = 1.0, 2.0
# Seconds for pages of metrics. An agent waits 2 s for a worker that does not answer.
_METRICS_TIMEOUT = 3.0
# Seconds beyond these for the process that queries them: the machine may be busy.
_SLACK = 3.0
# Below the limit of open files, which is commonly 1024.
_MAX_REQUESTS = 512
_MAX_NAME_LOOKUPS = 32
_MAX_RESPONSE_BYTES = 4 << 20

ReplyState = Literal["answered", "silent", "absent"]


class ResponseError(ValueError):
    """The response cannot be used; the text has the reason.

    Attributes:
        unauthorized: Its status is 401.
    """

    def __init__(self, reason: str, *, unauthorized: bool = False) -> None:
        super().__init__(reason)
        self.unauthorized = unauthorized


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a request to one rank.

    Attributes:
        state: It responded (`answered`); it did not (`silent`); or it serves no
            endpoint (`absent`).
        status: Its status.
        error: Why there is no status.
    """

    state: ReplyState
    status: ProcessFacts | None = None
    error: str = ""

    @property
    def reason(self) -> str:
        """Why there is no status, or that there is no endpoint."""
        return "no endpoint" if self.state == "absent" else self.error


def query_ranks(
    infos: Iterable[RankInfo], tokens: TokenPolicy
) -> dict[RankInfo, Reply]:
    """Return a reply for each rank: `absent` without an endpoint, else in 5 seconds.

    Args:
        infos: The ranks.
        tokens: The bearer token of their endpoints. A rank that does not get it, and
            requires one, has a reply with the remedy.
    """
    ranks = list(infos)
    # An agent has the status of all its workers on one page.
    urls = {info.metrics for info in ranks if info.metrics}
    pages = _fetch_pages(urls, "/inflight", tokens, _CALLS_TIMEOUT, _ALL_CALLS_TIMEOUT)
    return {
        info: _reply(info, pages[info.metrics])
        if info.metrics
        else Reply(state="absent")
        for info in ranks
    }


def _reply(info: RankInfo, page: bytes | str) -> Reply:
    """Return the reply of a rank on a page, or with the reason why there is none."""
    if isinstance(page, str):
        return Reply(state="silent", error=page)
    try:
        if info.agent is None:
            status: ProcessFacts | None = ProcessFacts.from_page(page)
        else:
            status = ProcessFacts.of_worker(page, info.agent, info.rank)
    except ValueError as error:
        return Reply(state="silent", error=f"{type(error).__name__}: {error}")
    if status is None:
        return Reply(state="silent", error="it does not answer its agent")
    if not _is(status, info):
        error_text = "another process responds at its address"
        return Reply(state="silent", error=error_text)
    return Reply(state="answered", status=status)


def _is(facts: ProcessFacts, info: RankInfo) -> bool:
    """Return whether the rank itself responded: an address may be in use again.

    The pid has to match, and rank and host where the process knows them.
    """
    return (
        facts.pid == info.pid
        and facts.rank in (None, info.rank)
        and facts.host in ("", info.host)
    )


def scrape_ranks(
    infos: Iterable[RankInfo], tokens: TokenPolicy
) -> dict[RankInfo, bytes]:
    """Return the metrics of each rank whose endpoint answers in time.

    Of the page of an agent, a rank has the samples with its label.
    """
    served = {info: info.metrics for info in infos if info.metrics}
    agents = {url for info, url in served.items() if info.agent is not None}
    pages: dict[str, bytes | str] = {}
    for path, urls in (
        ("/metrics/ranks", agents),
        ("/metrics", set(served.values()) - agents),
    ):
        pages |= _fetch_pages(urls, path, tokens, _METRICS_TIMEOUT, _METRICS_TIMEOUT)
    return {
        info: page if info.agent is None else _lines_of(page, info.rank)
        for info, url in served.items()
        if isinstance(page := pages[url], bytes)
    }


def _lines_of(page: bytes, rank: int) -> bytes:
    """Return the samples of one rank on the page of a node."""
    label = re.compile(rb'[{,]rank="%d"[,}]' % rank)
    return b"\n".join(filter(label.search, page.splitlines()))


def _fetch_pages(
    urls: set[str], page: str, tokens: TokenPolicy, seconds: float, total: float
) -> dict[str, bytes | str]:
    """Return a page of each endpoint, or the reason why there is none.

    Args:
        urls: The URLs of the metrics of the endpoints.
        page: The path of the page.
        tokens: The bearer token of the endpoints.
        seconds: Seconds for each page.
        total: Seconds for all of them.
    """
    pages: dict[str, bytes | str] = dict.fromkeys(
        urls, f"no response within {total:g} s"
    )
    if not urls:
        return pages
    secure = any(url.startswith("https:") for url in urls)
    tls = ssl.create_default_context() if secure else None

    async def fetch_all() -> dict[str, bytes | str]:
        slots = asyncio.Semaphore(_MAX_REQUESTS)
        # Python's default is a few threads, and a name server that is down blocks each.
        asyncio.get_running_loop().set_default_executor(
            ThreadPoolExecutor(_MAX_NAME_LOOKUPS)
        )
        found: dict[str, bytes | str] = {}

        async def request(url: str) -> None:
            async with slots:
                found[url] = await _page_or_reason(url, page, tokens, tls, seconds)

        await asyncio.wait(
            [asyncio.ensure_future(request(url)) for url in urls], timeout=total
        )
        return found

    def work(_heartbeat: Heartbeat) -> dict[str, bytes | str]:
        # Not asyncio.run, which waits for name lookups. The process ends without it.
        return asyncio.new_event_loop().run_until_complete(fetch_all())

    # In a child, because threads that wait for a dead name server outlive the query,
    # and --watch repeats it.
    with suppress(ChildTimeoutError, ChildProcessError):
        pages |= run_in_child(total + _SLACK, work)
    return pages


async def _page_or_reason(
    metrics: str,
    page: str,
    tokens: TokenPolicy,
    tls: ssl.SSLContext | None,
    seconds: float,
) -> bytes | str:
    """Return a page of the endpoint that serves a rank's metrics, or why not."""
    url = urlsplit(metrics)
    path = url.path.removesuffix("/metrics") + page
    headers = {"Host": url.netloc, **tokens.headers(url)}
    context = tls if url.scheme == "https" else None
    port = url.port or (443 if context else 80)
    request = fetch(url.hostname or "", port, path, headers, context)
    try:
        return await asyncio.wait_for(request, seconds)
    except TimeoutError:
        return f"no response within {seconds:.0f} s"
    except ResponseError as error:
        return (tokens.refusal(url) if error.unauthorized else None) or str(error)
    except ConnectionRefusedError:
        return "connection refused"
    except Exception as error:  # no route, a closed connection, or no HTTP
        return f"{type(error).__name__}: {error}"


async def fetch(
    host: str,
    port: int,
    path: str = "/",
    extra: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """Return the body of an HTTP response; with extra headers, over TLS if given.

    Redirects are not followed, because the headers may have a token.

    Raises:
        ResponseError: The status is not 200, or the body has no or a too high length.
    """
    lines = [f"GET {path} HTTP/1.0"]
    lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = await reader.readuntil(b"\r\n\r\n")
        status, _, headers = head.partition(b"\r\n")
        code = status.split()[1:2]
        if code != [b"200"]:
            raise ResponseError(
                f"responded {str(status.partition(b' ')[2], 'latin-1'):.60}",
                unauthorized=code == [b"401"],
            )
        length = _length(headers)
        if length > _MAX_RESPONSE_BYTES:
            raise ResponseError(f"the response has {length} bytes")
        return await reader.readexactly(length)
    finally:
        writer.close()


def _length(headers: bytes) -> int:
    for line in headers.splitlines():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ResponseError("the response has no Content-Length")
