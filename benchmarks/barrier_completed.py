"""Measures completed barriers: duration, and round trips per rank.

Durations are those of `barrier_durations`, with ranks as processes. Round trips are
counted on the wire, in a separate run with ranks as threads. Each rank registers itself
in its first barrier on a connection; that barrier is counted, and not timed.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import barrier_durations
from barrier_durations import FLOORS, VARIANTS, configure
from wire import CountingStore, Relay, relay

from tracedstore.coordination.arrivals import BarrierKeys

WORLDS = (2, 8, 16, 64)
# No bar is for the floors, so fewer sets of processes are enough.
_MAX_FLOOR_SETS = 3


@dataclass(frozen=True, slots=True)
class Completed:
    """Completed barriers of one world size: milliseconds, and round trips of a rank.

    Ours is compared with torch's in the same processes, so there are several of
    torch's. The floors are the ratios of `barrier_durations.FLOORS` to torch's.
    Round trips are those of the rank with the most. ``before_release`` counts the round
    trips of the last rank before it released the others, ``first`` those of the first
    barrier on a connection.
    """

    ranks: int
    torch_ms: float
    ours_ms: float
    configured_torch_ms: float
    configured_ms: float
    floor: float
    configured_floor: float
    torch_round_trips: int
    ours_round_trips: int
    configured_round_trips: int
    torch_before_release: int
    ours_before_release: int
    configured_before_release: int
    ours_first_round_trips: int
    torch_calls: int
    ours_calls: int
    configured_calls: int

    @property
    def ratio(self) -> float:
        """How many times as long as torch's."""
        return self.ours_ms / self.torch_ms

    @property
    def configured_ratio(self) -> float:
        """The same, with structlog and tracing configured."""
        return self.configured_ms / self.configured_torch_ms


def measure(
    port: int, worlds: tuple[int, ...], repeats: int, sets: int
) -> list[Completed]:
    """Measure these world sizes on the TCPStore at a port.

    Args:
        port: The port.
        worlds: The world sizes.
        repeats: Barriers of each kind in a set of processes.
        sets: Number of sets of processes.
    """
    ours_timed, configured_timed = (
        barrier_durations.measure(port, variant, worlds, repeats, sets)
        for variant in ("ours", "configured")
    )
    floor_timed, configured_floor_timed = (
        barrier_durations.measure(
            port, floor, worlds, repeats, min(sets, _MAX_FLOOR_SETS)
        )
        for floor in FLOORS
    )
    rows = []
    with relay(port) as through:
        for world in worlds:
            counts = {variant: _count(through, variant, world) for variant in VARIANTS}
            torch, ours, configured = (counts[variant] for variant in VARIANTS)
            rows.append(
                Completed(
                    ranks=world,
                    torch_ms=ours_timed[world].torch,
                    ours_ms=ours_timed[world].ours,
                    configured_torch_ms=configured_timed[world].torch,
                    configured_ms=configured_timed[world].ours,
                    floor=floor_timed[world].ratio,
                    configured_floor=configured_floor_timed[world].ratio,
                    torch_round_trips=torch.round_trips,
                    ours_round_trips=ours.round_trips,
                    configured_round_trips=configured.round_trips,
                    torch_before_release=torch.before_release,
                    ours_before_release=ours.before_release,
                    configured_before_release=configured.before_release,
                    ours_first_round_trips=ours.first,
                    torch_calls=torch.calls,
                    ours_calls=ours.calls,
                    configured_calls=configured.calls,
                )
            )
    configure("ours")
    return rows


# Round trips, in this process.


@dataclass(frozen=True, slots=True)
class _Counts:
    round_trips: int
    before_release: int
    calls: int
    first: int


def _count(through: Relay, variant: str, world: int) -> _Counts:
    """Count the round trips and calls of the rank with the most, in two barriers."""
    configure(variant)
    stores = [CountingStore(through) for _ in range(world)]
    maxima: list[tuple[int, int, int]] = []
    for turn in ("first", "second"):
        prefix = f"counted/{world}/{variant}/{turn}"
        before = [store.connection.round_trips for store in stores]
        for store in stores:
            store.calls.clear()
        with ThreadPoolExecutor(world) as pool:
            calls = [
                pool.submit(VARIANTS[variant], store, world, prefix, rank)
                for rank, store in enumerate(stores)
            ]
            for call in calls:
                call.result()
        release = BarrierKeys(prefix).last_member
        maxima.append(
            (
                max(
                    store.connection.round_trips - earlier
                    for store, earlier in zip(stores, before, strict=True)
                ),
                max(
                    store.round_trips_before_set[release] - earlier
                    for store, earlier in zip(stores, before, strict=True)
                    if release in store.round_trips_before_set
                ),
                max(store.calls.total() for store in stores),
            )
        )
    (first, _, _), (round_trips, before_release, calls_made) = maxima
    return _Counts(round_trips, before_release, calls_made, first)
