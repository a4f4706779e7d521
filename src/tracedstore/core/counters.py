"""What recording writes into: plain numbers, each with a single writer.

Every thread has a counters of its own, so counting takes no lock and loses nothing.
Counters are found by the thread's id and not by a ``threading.local``: a thread of
torch's C++ gets a new Python thread state for every call it makes, and would leave a
``threading.local`` behind each time. An id is used again once its thread is gone,
and so is its counters.

A counts is a flat list of integers, which a C++ base could fill just as well.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from tracedstore.core.identity import StoreIdentity
from tracedstore.core.operation import Arguments, Attempts, Method

if TYPE_CHECKING:
    from tracedstore.core.recorder import Recorder

# The bounds, in nanoseconds, of tracedstore_operation_duration_seconds and
# tracedstore_wait_duration_seconds. A call is sorted once, into the union of both;
# each histogram is a coarser view of that.
_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
OPERATION_BOUNDS: tuple[int, ...] = (
    *(n * _US for n in (5, 10, 25, 50, 100, 250, 1_000, 2_500)),
    *(n * _MS for n in (10, 50, 250)),
    *(n * _S for n in (1, 10)),
)
WAIT_BOUNDS: tuple[int, ...] = (
    *(n * _MS for n in (1, 10, 50, 250)),
    *(n * _S for n in (1, 10, 30, 60, 300, 600, 1800, 3600)),
)
BOUNDS: tuple[int, ...] = tuple(sorted({*OPERATION_BOUNDS, *WAIT_BOUNDS}))

# A counts: five sums, then one count per bucket, the last one beyond all bounds.
NANOSECONDS, BYTES, SWAPS_WON, SWAPS_LOST, RETRIES, BUCKETS = range(6)
_EMPTY_COUNTS = (0,) * (BUCKETS + len(BOUNDS) + 1)
SeriesCounts = list[int]

MOST_STORE_KINDS = 16
MOST_ERROR_TYPES = 16
OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The labels of a per-call metric; one object a label set, compared by identity."""

    store: str
    method: Method
    error_type: str


class SeriesTable:
    """The label sets of a process, bounded whatever the job does.

    Store kinds and error types beyond the first sixteen of each are ``other``.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[str, str, str], Series] = {}
        self._stores: set[str] = set()
        self._error_types: set[str] = set()

    def of(self, store: str, method: Method, error_type: str = "") -> Series:
        """Give the one Series of a label set."""
        store = _bounded(store, self._stores, MOST_STORE_KINDS)
        if error_type:
            error_type = _bounded(error_type, self._error_types, MOST_ERROR_TYPES)
        # setdefault is atomic: two threads that are first together get the same.
        return self._all.setdefault(
            (store, method.name, error_type), Series(store, method, error_type)
        )

    def all(self) -> list[Series]:
        """List every label set that was asked for, in that order."""
        return list(self._all.values())


def _bounded(name: str, names: set[str], most: int) -> str:
    if name not in names:
        if len(names) >= most:
            return OTHER
        names.add(name)
    return name


class Probe(Protocol):
    """Sees what a store does inside one call, where the store lets it be seen."""

    def start(self) -> None:
        """A call of this thread begins."""

    def stop(self) -> Attempts:
        """It ended: this is what happened inside it."""


# Says more of a call, from its method and its arguments, as fields of an event.
Explain = Callable[[Method, Arguments], Mapping[str, Any]]


class StoreState:
    """What the wrapper of one store keeps.

    It is one object, apart from the wrapper, so that the wrapper has a single
    attribute of its own and every other name is the inner store's.

    Attributes:
        inner: The store that does the work. Any: torch's stubs know less than
            half of its methods, and it may have more of its own.
        identity: What it is called in every signal.
        recorder: Where its calls are written down.
        series: The label set of each method's successes, by `Method.index`.
        below: The state of the traced store that this one stands on through
            PrefixStores, if it does: what this one records, that one need not.
        clones: The traced clones of this one that are still there; they are
            released with it.
        probe: Sees what happens inside a call.
        explain: Says more of a call that waits in vain, by asking the store: only
            for a call that timed out or stalls.
        timeout: The timeout that `inner` was last known to have, where it has one.
        losses_in_a_row: Compare-and-sets lost since one was won.
    """

    __slots__ = (
        "below",
        "clones",
        "explain",
        "identity",
        "inner",
        "losses_in_a_row",
        "probe",
        "recorder",
        "series",
        "timeout",
    )

    def __init__(
        self, inner: Any, identity: StoreIdentity, recorder: "Recorder"
    ) -> None:
        self.inner = inner
        self.identity = identity
        self.recorder = recorder
        self.series: tuple[Series, ...] = ()
        self.below: StoreState | None = None
        self.clones: WeakSet[Any] = WeakSet()
        self.probe: Probe | None = None
        self.explain: Explain | None = None
        self.timeout = timedelta()
        self.losses_in_a_row = 0

    def stands_on(self, other: "StoreState") -> bool:
        """Tell whether this one's calls go through the other one."""
        below = self.below
        while below is not None and below is not other:
            below = below.below
        return below is other


# A call under way: what, on which store, with what, since when (ticks), and the call
# of the same thread that it is inside of. A plain tuple, because a named one takes five
# times as long to make and every call makes one.
Call = tuple[Method, StoreState, Arguments, int, "Call | None"]


class ThreadCounters:
    """What one thread counted, and the calls it is in.

    Attributes:
        thread_id: Whose it is.
        call: The call this thread is in; its last item is the one around it.
        by_series: Its counts by series.
        over_budget: Ordinary calls the span budget had no room for.
    """

    __slots__ = ("by_series", "call", "over_budget", "thread_id")

    def __init__(self, thread_id: int) -> None:
        self.thread_id = thread_id
        self.call: Call | None = None
        self.by_series: defaultdict[Series, SeriesCounts] = defaultdict(_new_counts)
        self.over_budget = 0


def _new_counts() -> SeriesCounts:
    return list(_EMPTY_COUNTS)


class CountersByThread(dict[int, ThreadCounters]):
    """The counters of all threads, by thread id; asking for a new one makes it.

    Attributes:
        on_first_call: Called when a thread makes its first call.
    """

    def __init__(self, on_first_call: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.on_first_call = on_first_call

    def __missing__(self, thread_id: int) -> ThreadCounters:
        counters = self[thread_id] = ThreadCounters(thread_id)
        if self.on_first_call is not None:
            self.on_first_call()
        return counters

    def sums(self) -> Mapping[Series, SeriesCounts]:
        """Add up the by_series of all threads."""
        totals: defaultdict[Series, SeriesCounts] = defaultdict(_new_counts)
        for counters in list(self.values()):
            for series, counts in list(counters.by_series.items()):
                total = totals[series]
                for position, number in enumerate(counts):
                    total[position] += number
        return totals

    def over_budget(self) -> int:
        """Count the ordinary calls the span budget had no room for."""
        return sum(counters.over_budget for counters in list(self.values()))

    def calls(self) -> list[tuple[int, Call]]:
        """List the calls under way, each with its thread's id, oldest first."""
        under_way: list[tuple[int, Call]] = []
        for counters in list(self.values()):
            call = counters.call
            while call is not None:
                under_way.append((counters.thread_id, call))
                call = call[4]
        return sorted(under_way, key=lambda found: found[1][3])


def thread_names() -> dict[int, str]:
    """Name the threads Python knows; torch's own are not among them."""
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None
    }
