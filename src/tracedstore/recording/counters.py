"""What recording counts into: plain integers, each with a single writer.

Every thread has counters of its own, so counting takes no lock and loses nothing.
They are found by the thread's id and not by a ``threading.local``: a thread of torch's
C++ gets a new Python thread state for every call it makes, and would leave a
``threading.local`` behind each time. The id of a thread that ended is used again, and
so are its counters.

The counts of a series are a flat list of integers, which the native base fills as well
(`NativeCalls`).
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tracedstore.common.identity import StoreIdentity
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.common.weak_table import WeakTable
from tracedstore.recording.operation import Arguments, Attempts, Method
from tracedstore.recording.telemetry import Telemetry

if TYPE_CHECKING:
    from tracedstore.recording.recorder import Recorder

# Bounds of histograms, in nanoseconds. A call is sorted once, into the union of all;
# each exported histogram is a coarser view of that. The native base gets the union from
# here.
_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
# `compact`: what dashboards and alerts ask for, because every bound is a series of
# every operation of every rank. Calls that do not block: a round trip on one host, one
# on a network, `slow_after`, the slow traces of the dashboards.
OPERATION_BOUNDS: tuple[int, ...] = (100 * _US, *(n * _MS for n in (1, 10, 100)))
# Waits: the key was there, it was not, the wait of the alert on stragglers, the slow
# barriers of the dashboards, `stall_after`, the alert on stalled calls.
WAIT_BOUNDS: tuple[int, ...] = (
    *(n * _MS for n in (1, 100)),
    *(n * _S for n in (1, 10, 30, 300)),
)
# `full`.
FULL_OPERATION_BOUNDS: tuple[int, ...] = (
    *(n * _US for n in (5, 10, 25, 50, 100, 250, 1_000, 2_500)),
    *(n * _MS for n in (10, 50, 250)),
    *(n * _S for n in (1, 10)),
)
FULL_WAIT_BOUNDS: tuple[int, ...] = (
    *(n * _MS for n in (1, 10, 50, 250)),
    *(n * _S for n in (1, 10, 30, 60, 300, 600, 1800, 3600)),
)
# What the agent of a node sums over its ranks: a quantile that is interpolated between
# two bounds is within 25 % of the true one, from 1 ms to 10 minutes.
NODE_WAIT_BOUNDS: tuple[int, ...] = tuple(
    accumulate(range(60), lambda bound, _: bound // _US * 5 // 4 * _US, initial=_MS)
)
NODE_OPERATION_BOUNDS: tuple[int, ...] = (100 * _US, *NODE_WAIT_BOUNDS)
BOUNDS: tuple[int, ...] = tuple(
    sorted(
        {
            *NODE_OPERATION_BOUNDS,
            *OPERATION_BOUNDS,
            *WAIT_BOUNDS,
            *FULL_OPERATION_BOUNDS,
            *FULL_WAIT_BOUNDS,
        }
    )
)

# The counts of a series: four sums, then one count per bucket; the last bucket is
# beyond all bounds.
NANOSECONDS, BYTES, SWAPS_WON, SWAPS_LOST, BUCKETS = range(5)
_EMPTY_COUNTS = (0,) * (BUCKETS + len(BOUNDS) + 1)
SeriesCounts = list[int]

MAX_STORE_KINDS = 16
MAX_ERROR_TYPES = 16
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

    Attributes:
        probed: The kinds of stores whose requests inside a call are counted (`Probe`).
    """

    def __init__(self) -> None:
        self.probed: set[str] = set()
        self._all: dict[tuple[str, str, str], Series] = {}
        self._stores: set[str] = set()
        self._error_types: set[str] = set()

    def of(self, store: str, method: Method, error_type: str = "") -> Series:
        """Return the one Series of a label set."""
        store = bounded(store, self._stores, MAX_STORE_KINDS)
        if error_type:
            error_type = bounded(error_type, self._error_types, MAX_ERROR_TYPES)
        # setdefault is atomic: two threads that create one together get the same.
        return self._all.setdefault(
            (store, method.name, error_type), Series(store, method, error_type)
        )

    def all(self) -> list[Series]:
        """Return every label set, in the order of creation."""
        return list(self._all.values())


def bounded(name: str, names: set[str], limit: int) -> str:
    """Return a name, which becomes a label: ``other`` beyond the first so many."""
    if name not in names:
        if len(names) >= limit:
            return OTHER
        names.add(name)
    return name


class Probe(Protocol):
    """Counts the requests that a store makes inside one call (EtcdStore)."""

    def start(self) -> None:
        """Begin to count, for a call of this thread."""

    def stop(self) -> Attempts:
        """Return what was counted since `start`."""


def _freed() -> None:
    return None


# The states of the traced stores of this process.
STORES: Final[WeakTable[None]] = WeakTable()


class StoreState:
    """The state of one wrapper.

    It is one object, apart from the wrapper, so that the wrapper has a single
    attribute of its own and every other attribute is the inner store's.

    Attributes:
        inner: The wrapped store. Any: torch's stubs know less than half of its
            methods, and it may have more of its own.
        identity: What it is called in every signal.
        recorder: What its calls are recorded into.
        series: The label set of each method's successes, by `Method.index`.
        below: The state of the traced store below this one, where PrefixStores are
            between them. A call is recorded once, by the upper one.
        clones: The open traced clones of this store, which live as long as it does, by
            their identity.
        original: Returns the state of the store that this one is a clone of, if that
            lives.
        probe: Counts the requests inside a call.
        timeout: The timeout that `inner` was last known to have, where it has one.
        losses_in_a_row: Compare-and-sets lost since one was won.
        wrapper: Returns the wrapper; None once that is freed.
    """

    __slots__ = (
        "__weakref__",
        "below",
        "clones",
        "identity",
        "inner",
        "losses_in_a_row",
        "original",
        "probe",
        "recorder",
        "series",
        "timeout",
        "wrapper",
    )

    def __init__(
        self, inner: Any, identity: StoreIdentity, recorder: "Recorder"
    ) -> None:
        self.inner = inner
        self.identity = identity
        self.recorder = recorder
        self.series: tuple[Series, ...] = ()
        self.below: StoreState | None = None
        self.clones: dict[int, Any] = {}
        self.original: Callable[[], StoreState | None] = _freed
        self.probe: Probe | None = None
        self.timeout = timedelta()
        self.losses_in_a_row = 0
        self.wrapper: Callable[[], Any] = _freed
        STORES.set(self, None)

    def stands_on(self, other: "StoreState") -> bool:
        """Return whether this store's calls go through the other one."""
        below = self.below
        while below is not None and below is not other:
            below = below.below
        return below is other


def handle_of(store: Any) -> Any:
    """Return what lives as long as a store, to refer to it weakly.

    It is the state of a traced store, and any other store itself. The Python object of
    a native store may be freed while C++ goes on using the store.
    """
    return getattr(store, "_traced", store)


def store_of(handle: Any) -> Any:
    """Return the store to use for a handle: below the wrapper, if there is one.

    None once a native store is freed.
    """
    return handle.inner if isinstance(handle, StoreState) else handle


# A call in flight: method, state of its store, arguments, start (ticks), and the call
# of the same thread that it is inside of. A plain tuple: a NamedTuple takes five times
# as long to create, and every call creates one. `ActiveCall` is the same for readers.
Call = tuple[Method, StoreState, Arguments, int, "Call | None"]


class _UnrecordedState(StoreState):
    """The state of no store; every store's calls go through it."""

    def __init__(self) -> None:
        """Leave all attributes unset: no call is made on it."""

    def stands_on(self, other: "StoreState") -> bool:  # noqa: ARG002 - of the base
        return True


# A thread is in this call while its calls are not recorded.
UNRECORDED: Call = (Method(name="", parameters=()), _UnrecordedState(), (), 0, None)


class ActiveCall(NamedTuple):
    """A call in flight, as `CountersByThread.calls` returns it.

    Attributes:
        method: The Store method.
        state: The state of the wrapper that was called.
        args: Its arguments, by position.
        started: When it began, in ticks.
        outer: The call of the same thread that it is inside of.
        thread_id: The thread that made it.
        call: The tuple that the recording keeps. Its identity is the call's.
    """

    method: Method
    state: StoreState
    args: Arguments
    started: int
    outer: Call | None
    thread_id: int
    call: Call


class NativeCalls(Protocol):
    """The calls that the native base records, outside of Python.

    Attributes:
        enter_unsampled: Gives no span to ordinary calls that this thread makes from
            now on.
        exit_unsampled: Undoes that.
        store_class: The class of its stores.
    """

    store_class: type[Any]
    enter_unsampled: Callable[[], None]
    exit_unsampled: Callable[[], None]

    def sums(self) -> Iterable[tuple[Series, SeriesCounts]]:
        """Return the sums over all threads."""

    def over_budget(self) -> int:
        """Return how many ordinary calls got no span because the budget was spent."""

    def dropped(self) -> int:
        """Return how many notable calls were counted, but not observed."""

    def calls(self) -> list[ActiveCall]:
        """Return the calls in flight."""

    def take_rules(self) -> None:
        """Take over which calls are notable, after the recorder's rules changed."""

    def unrecorded(self) -> AbstractContextManager[None]:
        """Record no call that this thread makes."""

    def reset(self) -> None:
        """Start from zero, as a forked child must."""

    def end(self) -> None:
        """Let no other thread return to Python from a call while that finalizes."""


class ThreadCounters:
    """The counts of one thread, and the calls it is in.

    Attributes:
        thread_id: The thread.
        call: The innermost call that the thread is in.
        by_series: Its counts.
        over_budget: Ordinary calls that got no span because the budget was spent.
    """

    __slots__ = ("by_series", "call", "over_budget", "thread_id")

    def __init__(self, thread_id: int) -> None:
        self.thread_id = thread_id
        self.call: Call | None = None
        self.by_series: defaultdict[Series, SeriesCounts] = defaultdict(new_counts)
        self.over_budget = 0


def new_counts() -> SeriesCounts:
    """Return the counts of a series at zero."""
    return list(_EMPTY_COUNTS)


class CountersByThread(dict[int, ThreadCounters]):
    """The counters of all threads, by thread id; a lookup creates missing ones.

    Attributes:
        native: The calls of the native base, which the sums and lists include.
    """

    def __init__(self, telemetry: Telemetry, native: NativeCalls | None = None) -> None:
        super().__init__()
        self._telemetry = telemetry
        self.native = native

    def __missing__(self, thread_id: int) -> ThreadCounters:
        counters = self[thread_id] = ThreadCounters(thread_id)
        off_main_thread(self._telemetry.thread_called)
        return counters

    def sums(self) -> Mapping[Series, SeriesCounts]:
        """Return the sums over all threads."""
        totals: defaultdict[Series, SeriesCounts] = defaultdict(new_counts)
        for counters in list(self.values()):
            for series, counts in list(counters.by_series.items()):
                total = totals[series]
                for position, number in enumerate(counts):
                    total[position] += number
        for series, counts in self.native.sums() if self.native else ():
            total = totals[series]
            for position, number in enumerate(counts):
                total[position] += number
        return totals

    def over_budget(self) -> int:
        """Return how many ordinary calls got no span because the budget was spent."""
        native = self.native.over_budget() if self.native else 0
        return native + sum(counters.over_budget for counters in list(self.values()))

    def dropped(self) -> int:
        """Return how many notable calls were counted, but not observed."""
        return self.native.dropped() if self.native else 0

    def in_flight_on(self, state: StoreState) -> int:
        """Return how many threads are in a call of a store."""
        calls = [counters.call for counters in list(self.values())]
        if self.native:
            calls += [active.call for active in self.native.calls()]
        return sum(call is not None and call[1] is state for call in calls)

    def calls(self) -> list[ActiveCall]:
        """Return the calls in flight, oldest first."""
        active = self.native.calls() if self.native else []
        for counters in list(self.values()):
            call = counters.call
            while call is not None and call is not UNRECORDED:
                found = ActiveCall(*call, counters.thread_id, call)
                active.append(found)
                call = found.outer
        return sorted(active, key=lambda found: found.started)


def thread_names() -> dict[int, str]:
    """Return the names of the threads that Python knows; torch's own are not there."""
    return {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident is not None
    }
