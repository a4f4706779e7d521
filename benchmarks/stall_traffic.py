"""Counts what a stall costs the store: requests and bytes of every rank.

All ranks of a world but a few wait in ``init_process_group``. The ranks are simulated:
each is a `Diagnosis` of its own, which runs the steps of its thread in turn, in one
process and on a HashStore. Exits with 1 if a bar is missed.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch.distributed as dist
from harness import Bar, finish, parser

from tracedstore.coordination import rank_registry
from tracedstore.core.counters import ActiveCall, StoreState
from tracedstore.core.identity import identify
from tracedstore.core.recorder import RECORDER
from tracedstore.core.store_proxy import RECORDED
from tracedstore.diagnosis import groups
from tracedstore.diagnosis.blocked_call import Member
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.diagnosis.session import Session

WORLDS = (4, 64, 16_384)
STALL_AFTER = 5.0
MAX_REQUESTS_OF_A_RANK = 40
MAX_KILOBYTES_OF_A_RANK = 64
# Two look, and two more after each 6 s without a verdict.
MAX_REPORTS = 8
_KEY = "default_pg/0//cpu//0/{}"
_LIMIT = 1800.0
# Ranks that take their steps at the same time: the two that look take seconds.
_THREADS = 8


class CountingStore:
    """Counts the requests of one rank, and the bytes that they send and receive."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.requests = 0
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def counted(*args: Any) -> Any:
            result = method(*args)
            self.requests += 1
            self.bytes += _size(args) + _size(result)
            return result

        return counted


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


class SimulatedRank:
    """A rank that waits for a key.

    Attributes:
        store: Counts its requests.
        looked: It was elected to look for the verdict.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, key: str) -> None:
        self.store = CountingStore(store)
        self.looked = False
        self._diagnosis = Diagnosis(RECORDER, STALL_AFTER, answers=False)
        member = Member(rank=rank, world_size=world_size, host_of=lambda _rank: "")
        session = Session(self.store, member, answers=False)
        self._diagnosis._sessions = _OneSession(session)  # type: ignore[assignment]  # noqa: SLF001 - drives it
        state = StoreState(self.store, identify(store), RECORDER)
        state.timeout = timedelta(minutes=30)
        call = (RECORDED["get"], state, (key,), 0, None)
        self._active = ActiveCall(*call, threading.get_ident(), call)

    def step(self, elapsed: float) -> None:
        """Take the step that is due."""
        self._diagnosis._advance(self._active, STALL_AFTER + elapsed)  # noqa: SLF001 - drives it
        self.looked |= self.wait.elected

    @property
    def wait(self) -> Any:
        """What its diagnosis knows about the call."""
        return self._diagnosis._waits.get(id(self._active.call))  # noqa: SLF001 - drives it

    def end(self) -> None:
        """The call returns."""
        self._diagnosis._end(self.wait)  # noqa: SLF001 - drives it


class _OneSession:
    def __init__(self, session: Session) -> None:
        self.of: Callable[[ActiveCall], Session] = lambda _call: session


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a stall costs the store, until all ranks know the verdict.

    Attributes:
        ranks: The world size.
        reports: How many ranks report.
        requests: Of a waiting rank, the median.
        max_requests: Of a waiting rank that does not look, the maximum.
        kilobytes: Of such a rank, the maximum.
        looker_requests: Of a rank that looks, the maximum.
        looker_kilobytes: Of such a rank, the maximum.
        total_megabytes: Of all ranks.
        requests_at_the_end: Of a rank, when its call returns.
        named: The ranks that the verdict names.
    """

    ranks: int
    reports: int
    requests: float
    max_requests: int
    kilobytes: float
    looker_requests: int
    looker_kilobytes: float
    total_megabytes: float
    requests_at_the_end: int
    named: tuple[int, ...]


def measure(world_size: int) -> tuple[Traffic, bool]:
    """Make one stall; return its traffic, and whether the verdict is right."""
    store = dist.HashStore()
    absent = tuple(sorted({world_size // 3, world_size // 2, world_size - 1}))[-3:]
    absent = absent if world_size > len(absent) + 1 else absent[-1:]
    waiting = [rank for rank in range(world_size) if rank not in absent]
    groups.record("0", (), world_size)
    for rank in waiting:
        rank_registry.register_early(store, rank, world_size)
        store.set(_KEY.format(rank), "an address")
    first = _KEY.format(absent[0])
    ranks = [SimulatedRank(store, rank, world_size, first) for rank in waiting]
    began = time.monotonic()
    with ThreadPoolExecutor(_THREADS) as threads:
        while time.monotonic() - began < _LIMIT:
            list(threads.map(lambda rank: rank.step(time.monotonic() - began), ranks))
            if all(rank.wait.verdict is not None for rank in ranks):
                break
            time.sleep(0.2)
    lookers = [rank for rank in ranks if rank.looked]
    others = [rank for rank in ranks if not rank.looked]
    verdicts = {rank.wait.verdict.awaited_ranks for rank in ranks if rank.wait.verdict}
    counted = [(rank.store.requests, rank.store.bytes) for rank in ranks]
    traffic = Traffic(
        ranks=world_size,
        reports=len(lookers),
        requests=median(requests for requests, _ in counted),
        max_requests=max((rank.store.requests for rank in others), default=0),
        kilobytes=max((rank.store.bytes for rank in others), default=0) / 1e3,
        looker_requests=max(rank.store.requests for rank in lookers),
        looker_kilobytes=max(rank.store.bytes for rank in lookers) / 1e3,
        total_megabytes=sum(size for _, size in counted) / 1e6,
        requests_at_the_end=_requests_at_the_end(others),
        named=absent,
    )
    return traffic, verdicts == {absent}


def _requests_at_the_end(ranks: list[SimulatedRank]) -> int:
    before = {rank: rank.store.requests for rank in ranks}
    for rank in ranks:
        rank.end()
    return max((rank.store.requests - before[rank] for rank in ranks), default=0)


def _print(results: list[Traffic]) -> None:
    print(
        f"{'ranks':>8}{'reports':>9}{'requests of a rank':>20}{'kB':>8}"
        f"{'of a looker':>13}{'kB':>10}{'all, MB':>10}{'at the end':>12}"
    )
    for row in results:
        requests = f"{row.requests:.0f} (max {row.max_requests})"
        print(
            f"{row.ranks:>8}{row.reports:>9}{requests:>20}{row.kilobytes:>8.1f}"
            f"{row.looker_requests:>13}{row.looker_kilobytes:>10.1f}"
            f"{row.total_megabytes:>10.1f}{row.requests_at_the_end:>12}"
        )


def main() -> int:
    """Measure all worlds, print the results and return the exit code."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="*", default=WORLDS)
    arguments = options.parse_args()
    measured = [measure(world_size) for world_size in arguments.ranks]
    results = [traffic for traffic, _ in measured]
    _print(results)
    wrong = sum(not right for _, right in measured)
    bars = [
        Bar.at_most("verdicts that do not name the absent ranks", wrong, 0),
        Bar.at_most(
            "ranks that report", max(row.reports for row in results), MAX_REPORTS
        ),
        Bar.at_most(
            "requests of a rank that does not look",
            max(row.max_requests for row in results),
            MAX_REQUESTS_OF_A_RANK,
        ),
        Bar.at_most(
            "kilobytes of a rank that does not look",
            max(row.kilobytes for row in results),
            MAX_KILOBYTES_OF_A_RANK,
        ),
    ]
    worlds = {"worlds": [asdict(row) for row in results]}
    return finish(bars, worlds, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
