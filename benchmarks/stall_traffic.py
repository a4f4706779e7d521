"""Counts what a stall costs the store: requests and bytes of every rank.

All ranks of a world but a few wait in ``init_process_group``. The ranks are simulated,
on a HashStore (see `simulated_ranks`). Exits with 1 if a bar is missed.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch.distributed as dist
from harness import Bar, finish, parser
from log_lines import LogLines
from simulated_ranks import SimulatedRank, simulate_time, take_turns

from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.observe import torch_keys

WORLDS = (4, 64, 16_384)
STALL_AFTER = 5.0
MAX_REQUESTS_OF_A_RANK = 40
MAX_KILOBYTES_OF_A_RANK = 64
MAX_KILOBYTES_OF_A_TIMEOUT = 8
MAX_REPORTS = 2
_KEY = "default_pg/0//cpu//0/{}"
_LIMIT = 300.0
# Seconds between two turns at least.
_TURN = 0.2


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
        timeout_requests: Of a rank whose call times out then, the maximum.
        timeout_kilobytes: Of such a rank, the maximum.
        timeout_megabytes: Of all ranks, when the calls of all time out.
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
    timeout_requests: int
    timeout_kilobytes: float
    timeout_megabytes: float
    requests_at_the_end: int
    named: tuple[int, ...]


def measure(world_size: int) -> tuple[Traffic, bool]:
    """Make one stall; return its traffic, and whether the verdict is right."""
    absent, ranks = stalled_ranks(dist.HashStore(), world_size, STALL_AFTER)
    take_turns(
        ranks,
        _TURN,
        _LIMIT,
        until=lambda: all(rank.wait and rank.wait.verdict for rank in ranks),
    )
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
        **_at_the_end(ranks, others),
        named=absent,
    )
    return traffic, verdicts == {absent}


def stalled_ranks(
    store: dist.Store,
    world_size: int,
    stall_after: float,
    *,
    waited: float | None = None,
    lines: LogLines | None = None,
) -> tuple[tuple[int, ...], list[SimulatedRank]]:
    """Return the absent ranks, and the others, which wait for the first of them."""
    simulate_time()
    absent = tuple(sorted({world_size // 3, world_size // 2, world_size - 1}))[-3:]
    absent = absent if world_size > len(absent) + 1 else absent[-1:]
    waiting = [rank for rank in range(world_size) if rank not in absent]
    torch_keys.record_members("0", (), world_size)
    for rank in waiting:
        rank_registry.register_early(store, rank, world_size)
        store.set(_KEY.format(rank), "an address")
    ranks = [
        SimulatedRank(
            store,
            rank,
            world_size,
            _KEY.format(absent[0]),
            stall_after=stall_after,
            waited=stall_after if waited is None else waited,
            lines=lines or LogLines(),
        )
        for rank in waiting
    ]
    return absent, ranks


def _at_the_end(
    ranks: list[SimulatedRank], others: list[SimulatedRank]
) -> dict[str, Any]:
    timeouts = _counted(ranks, SimulatedRank.time_out)
    ends = _counted(others, SimulatedRank.end)
    return {
        "timeout_requests": max(requests for requests, _ in timeouts),
        "timeout_kilobytes": max(size for _, size in timeouts) / 1e3,
        "timeout_megabytes": sum(size for _, size in timeouts) / 1e6,
        "requests_at_the_end": max((requests for requests, _ in ends), default=0),
    }


def _counted(
    ranks: list[SimulatedRank], step: Callable[[SimulatedRank], None]
) -> list[tuple[int, int]]:
    """Let ranks take a step; return the requests and the bytes of each."""
    counted = []
    for rank in ranks:
        before = rank.store.requests, rank.store.bytes
        step(rank)
        counted.append((rank.store.requests - before[0], rank.store.bytes - before[1]))
    return counted


def _print(results: list[Traffic]) -> None:
    print(
        f"{'ranks':>8}{'reports':>9}{'requests of a rank':>20}{'kB':>8}"
        f"{'of a looker':>13}{'kB':>10}{'all, MB':>10}{'timeout':>10}"
        f"{'kB':>10}{'all, MB':>10}{'at the end':>12}"
    )
    for row in results:
        requests = f"{row.requests:.0f} (max {row.max_requests})"
        print(
            f"{row.ranks:>8}{row.reports:>9}{requests:>20}{row.kilobytes:>8.1f}"
            f"{row.looker_requests:>13}{row.looker_kilobytes:>10.1f}"
            f"{row.total_megabytes:>10.1f}{row.timeout_requests:>10}"
            f"{row.timeout_kilobytes:>10.1f}{row.timeout_megabytes:>10.1f}"
            f"{row.requests_at_the_end:>12}"
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
    bars += [
        Bar.at_most(
            "kilobytes of a rank whose call times out",
            max(row.timeout_kilobytes for row in results),
            MAX_KILOBYTES_OF_A_TIMEOUT,
        ),
    ]
    worlds = {"worlds": [asdict(row) for row in results]}
    return finish(bars, worlds, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
