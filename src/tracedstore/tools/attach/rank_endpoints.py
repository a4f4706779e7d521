"""Queries the endpoints of a job's ranks: Store calls in flight, and metrics."""

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from tracedstore.common.threads import DaemonThread
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.child_process import ChildTimeoutError, run_in_child
from tracedstore.tools.attach.token_policy import TokenPolicy

# Seconds for one rank, and for all of them together.
_RANK_TIMEOUT = 1.0
_TOTAL_TIMEOUT = 2.0
# Seconds for a page of metrics. An agent waits 2 s for a worker that does not answer.
_SCRAPE_TIMEOUT = 3.0
# Seconds for the process that queries them; longer, because the machine may be busy.
_PROCESS_TIMEOUT = 5.0
# Below the limit of open files, which is commonly 1024.
_MAX_REQUESTS = 512
_MAX_NAME_LOOKUPS = 32
_MAX_RESPONSE_BYTES = 4 << 20

State = Literal["answered", "silent", "absent"]


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
        info: Its registration, where it has one.
        status: Its status.
        error: Why there is no status.
    """

    state: State
    info: RankInfo | None = None
    status: ProcessFacts | None = None
    error: str = ""

    @property
    def reason(self) -> str:
        """Why there is no status, or that there is no endpoint."""
        return "no endpoint" if self.state == "absent" else self.error


def request_each(
    infos: Iterable[RankInfo],
    fetch: Callable[[RankInfo], Awaitable[bytes]],
    rank_timeout: float,
    total_timeout: float,
) -> dict[RankInfo, Reply]:
    """Request the status of ranks concurrently; return the replies in time.

    Args:
        infos: The ranks.
        fetch: Requests the status of one rank.
        rank_timeout: Timeout of one request, in seconds.
        total_timeout: Timeout of all requests, in seconds.
    """
    replies: dict[RankInfo, Reply] = {}
    done = threading.Event()
    requests = _request_all(infos, fetch, rank_timeout, replies, done)
    # Not joined: it ends when the last name lookup has timed out.
    DaemonThread(lambda: asyncio.run(requests)).start()
    done.wait(total_timeout)
    # A copy: replies may still arrive.
    return dict(replies)


async def _request_all(
    infos: Iterable[RankInfo],
    fetch: Callable[[RankInfo], Awaitable[bytes]],
    rank_timeout: float,
    replies: dict[RankInfo, Reply],
    done: threading.Event,
) -> None:
    slots = asyncio.Semaphore(_MAX_REQUESTS)
    # Python's default is a few threads, and a name server that is down blocks each.
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(_MAX_NAME_LOOKUPS)
    )

    async def request(info: RankInfo) -> None:
        async with slots:
            replies[info] = await _reply(info, fetch, rank_timeout)

    await asyncio.gather(*map(request, infos))
    done.set()


async def _reply(
    info: RankInfo, fetch: Callable[[RankInfo], Awaitable[bytes]], rank_timeout: float
) -> Reply:
    try:
        body = await asyncio.wait_for(fetch(info), rank_timeout)
        status = _status(body, info)
    except TimeoutError:
        reason = f"no response within {rank_timeout:.0f} s"
    except ResponseError as error:
        reason = str(error)
    except ConnectionRefusedError:
        reason = "connection refused"
    except Exception as error:  # no route, a closed connection, or no HTTP
        reason = f"{type(error).__name__}: {error}"
    else:
        if _is(status, info):
            return Reply(state="answered", info=info, status=status)
        reason = "another process responds at its address"
    return Reply(state="silent", info=info, error=reason)


def _status(body: bytes, info: RankInfo) -> ProcessFacts:
    if info.agent is None:
        return ProcessFacts.from_page(body)
    status = ProcessFacts.of_worker(body, info.agent, info.rank)
    if status is None:
        raise ResponseError("it does not answer its agent")
    return status


def _is(facts: ProcessFacts, info: RankInfo) -> bool:
    """Return whether the rank itself responded: an address may be in use again.

    The pid has to match, and rank and host where the process knows them.
    """
    return (
        facts.pid == info.pid
        and facts.rank in (None, info.rank)
        and facts.host in ("", info.host)
    )


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
    serving = [info for info in ranks if info.metrics]
    tls = _tls_context(serving)

    # An agent has the status of all its workers on one page.
    of_nodes: dict[str, asyncio.Future[bytes]] = {}

    async def fetch_in_flight(info: RankInfo) -> bytes:
        url = str(info.metrics)
        request = _fetch_page(url, "/inflight", tokens, tls)
        if info.agent is None:
            return await request
        if url in of_nodes:
            request.close()
        else:
            of_nodes[url] = asyncio.ensure_future(request)
        # The timeout of one rank does not end the request of the others.
        return await asyncio.shield(of_nodes[url])

    replies: dict[RankInfo, Reply] = {}
    if serving:
        # In a child, because threads that wait for a dead name server outlive the
        # query, and --watch repeats it.
        with suppress(ChildTimeoutError, ChildProcessError):
            replies = run_in_child(
                _PROCESS_TIMEOUT,
                lambda _: request_each(
                    serving, fetch_in_flight, _RANK_TIMEOUT, _TOTAL_TIMEOUT
                ),
            )
    silent = Reply(state="silent", error=f"no response within {_TOTAL_TIMEOUT:g} s")
    absent = Reply(state="absent")
    return dict.fromkeys(ranks, absent) | {
        info: replies.get(info, silent) for info in serving
    }


def scrape_ranks(
    infos: Iterable[RankInfo], tokens: TokenPolicy
) -> dict[RankInfo, bytes]:
    """Return the metrics of each rank whose endpoint answers in time.

    Of the page of an agent, a rank has the samples with its label.
    """
    served: dict[str, list[RankInfo]] = {}
    for info in infos:
        if info.metrics:
            served.setdefault(info.metrics, []).append(info)
    tls = _tls_context(info for ranks in served.values() for info in ranks)
    pages: dict[RankInfo, bytes] = {}

    async def scrape(url: str, ranks: list[RankInfo]) -> None:
        with suppress(Exception):  # silent, or its response cannot be used
            request = _fetch_page(url, "/metrics", tokens, tls)
            page = await asyncio.wait_for(request, _SCRAPE_TIMEOUT)
            for info in ranks:
                is_node = info.agent is not None
                pages[info] = _lines_of(page, info.rank) if is_node else page

    async def scrape_all() -> dict[RankInfo, bytes]:
        await asyncio.gather(*(scrape(*one) for one in served.items()))
        return pages

    if served:
        # In a child, for the same reason.
        with suppress(ChildTimeoutError, ChildProcessError):
            return run_in_child(_PROCESS_TIMEOUT, lambda _: asyncio.run(scrape_all()))
    return {}


def _lines_of(page: bytes, rank: int) -> bytes:
    """Return the samples of one rank on the page of a node."""
    label = re.compile(rb'[{,]rank="%d"[,}]' % rank)
    return b"\n".join(filter(label.search, page.splitlines()))


async def _fetch_page(
    metrics: str, page: str, tokens: TokenPolicy, tls: ssl.SSLContext | None
) -> bytes:
    """Return a page of the endpoint that serves a rank's metrics."""
    url = urlsplit(metrics)
    path = url.path.removesuffix("/metrics") + page
    headers = {"Host": url.netloc, **tokens.headers(url)}
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    try:
        return await fetch(
            url.hostname or "", port, path, headers, tls if secure else None
        )
    except ResponseError as error:
        refusal = tokens.refusal(url)
        if error.unauthorized and refusal is not None:
            raise ResponseError(refusal) from None
        raise


def _tls_context(infos: Iterable[RankInfo]) -> ssl.SSLContext | None:
    secure = any(str(info.metrics).startswith("https:") for info in infos)
    return ssl.create_default_context() if secure else None
