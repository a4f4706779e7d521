"""Queries the ranks of a job for their Store calls in flight."""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from tracedstore.attach.child_process import ChildTimeoutError, run_in_child
from tracedstore.attach.token_policy import TokenPolicy
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.inflight_client import Reply, ResponseError, fetch, request_each

# Seconds for one rank, and for all of them together.
_RANK_TIMEOUT = 1.0
_TOTAL_TIMEOUT = 2.0
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
    serving = [info for info in ranks if info.metrics or info.answers]
    tls = ssl.create_default_context() if _any_tls(serving) else None

    async def fetch_in_flight(info: RankInfo) -> bytes:
        if info.metrics is None:
            host, _, number = str(info.answers).rpartition(":")
            return await fetch(host, int(number))
        url = urlsplit(info.metrics)
        path = url.path.removesuffix("/metrics") + "/inflight"
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


def _any_tls(infos: Iterable[RankInfo]) -> bool:
    return any(str(info.metrics).startswith("https:") for info in infos)
