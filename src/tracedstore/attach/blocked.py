"""Ask the ranks of a job what they are blocked in, those that can be asked."""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

from tracedstore.attach.child_process import ChildTimeoutError, run_in_child
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.inflight_client import Reply, ask_each, fetch

# Seconds that one rank has, and all of them together.
_ONE_WITHIN = 1.0
_ALL_WITHIN = 2.0
# And more than that, where the machine is busy.
_SURELY_WITHIN = 5.0


def ask(infos: Iterable[RankInfo], token: str | None) -> dict[RankInfo, Reply]:
    """Ask those that serve; the others are `absent`."""
    everybody = list(infos)
    serving = [info for info in everybody if info.metrics or info.answers]
    tls = ssl.create_default_context() if _any_tls(serving) else None

    async def in_flight_at(info: RankInfo) -> bytes:
        if info.metrics is None:
            host, _, number = str(info.answers).rpartition(":")
            return await fetch(host, int(number))
        url = urlsplit(info.metrics)
        path = url.path.removesuffix("/metrics") + "/inflight"
        headers = {"Host": url.netloc}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        return await fetch(
            url.hostname or "", port, path, headers, tls if secure else None
        )

    asked: dict[RankInfo, Reply] = {}
    if serving:
        # Apart, because threads that look up names stay behind when a name server is
        # gone, and this may be done again and again.
        with suppress(ChildTimeoutError, ChildProcessError):
            asked = run_in_child(
                _SURELY_WITHIN,
                lambda _: ask_each(serving, in_flight_at, _ONE_WITHIN, _ALL_WITHIN),
            )
    late = Reply(state="silent", why=f"no response within {_ALL_WITHIN:g} s")
    absent = Reply(state="absent")
    return dict.fromkeys(everybody, absent) | {
        info: asked.get(info, late) for info in serving
    }


def _any_tls(infos: Iterable[RankInfo]) -> bool:
    return any(str(info.metrics).startswith("https:") for info in infos)
