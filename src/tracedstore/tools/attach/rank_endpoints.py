"""Queries the endpoints of a job's ranks: Store calls in flight, and metrics."""

import asyncio
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.tools.attach.child_process import ChildTimeoutError, run_in_child
from tracedstore.tools.attach.inflight_client import (
    Reply,
    ResponseError,
    fetch,
    request_each,
)
from tracedstore.tools.attach.token_policy import TokenPolicy

# Seconds for one rank, and for all of them together.
_RANK_TIMEOUT = 1.0
_TOTAL_TIMEOUT = 2.0
# Seconds for a page of metrics. An agent waits 2 s for a worker that does not answer.
_SCRAPE_TIMEOUT = 3.0
# Seconds for the process that queries them; longer, because the machine may be busy.
_PROCESS_TIMEOUT = 5.0


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
