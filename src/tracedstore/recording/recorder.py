"""Records calls: into counters always, and to observers if a call is notable.

Counting is all that an ordinary call pays for. A call that is slow, fails, retries,
keeps losing compare-and-sets, or is within the span budget becomes an `Operation`,
which the observers get. Whether it does is decided here, once (`Recorder._reasons`).
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final, Protocol

from tracedstore import names
from tracedstore.common.errors import error_message, error_type, is_ordinary_answer
from tracedstore.common.keys import KeyFamilies, shown
from tracedstore.common.signal_safety import off_main_thread, raised_by_handler
from tracedstore.recording.cold_metrics import ColdMetrics
from tracedstore.recording.counters import (
    BOUNDS,
    BUCKETS,
    NANOSECONDS,
    SWAPS_LOST,
    SWAPS_WON,
    UNRECORDED,
    Call,
    CountersByThread,
    NativeCalls,
    Probe,
    SeriesCounts,
    SeriesTable,
    StoreState,
    ThreadCounters,
)
from tracedstore.recording.operation import Attempts, Operation, Reason
from tracedstore.recording.telemetry import REST, TELEMETRY, Failures, Telemetry


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock and the time of day, replaceable in tests.

    Attributes:
        ticks: A monotonic time in nanoseconds; durations are differences of it.
        wall: The time of day in nanoseconds since the epoch. It may jump, so it only
            dates what ``ticks`` measured.
    """

    ticks: Callable[[], int] = time.perf_counter_ns
    wall: Callable[[], int] = time.time_ns

    def wall_of(self, ticks: int) -> int:
        """Return the time of day of an earlier reading of ``ticks``."""
        return self.wall() - (self.ticks() - ticks)


SYSTEM_CLOCK = Clock()


# Integers like ticks: the fast path compares them.
ALWAYS = -(2**63)
NEVER = 2**63


class Budget:
    """A token bucket that costs a call one comparison. Without a rate it is empty.

    This is the generic cell rate algorithm. It does not count tokens; it keeps the
    time from which the next call is admitted, so the fast path only compares
    ``opens_at`` with the time that it has read anyway.

    Attributes:
        opens_at: Ticks from which a call is admitted.
        counting: Calls that are not admitted are counted; off while there is no
            tracer provider.
    """

    __slots__ = ("_due", "_interval", "_tolerance", "counting", "opens_at")

    def __init__(self, rate: float = 0, burst: int = 1) -> None:
        self._interval = int(1e9 / rate) if rate > 0 else NEVER
        # The call being tested is one of the burst.
        self._tolerance = (burst - 1) * self._interval
        self._due = ALWAYS
        self.opens_at = ALWAYS if rate > 0 else NEVER
        self.counting = False

    def spend(self, now: int) -> None:
        """Take one call off the budget. A race admits one call too many, no more."""
        self._due = max(self._due, now) + self._interval
        self.opens_at = self._due - self._tolerance

    def pause(self, until: int) -> None:
        """Admit nothing before a time, and count nothing until then."""
        self.opens_at = until
        self.counting = False


class Unlimited(Budget):
    """Admits every call."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(rate=1, burst=1)

    def spend(self, now: int) -> None:
        """Do nothing."""


def budget_of(spans: str, rate: float, burst: int) -> Budget:
    """Return the budget for a setting of ``spans``."""
    if spans == "all":
        return Unlimited()
    if spans == "budget":
        return Budget(rate, burst)
    return Budget()


class Observer(Protocol):
    """Observes finished calls, with the context variables of their callers.

    Calls of the main thread are observed in a helper thread, the others in the thread
    that made them. The caller waits.
    """

    name: str

    def observe(self, operation: Operation) -> None:
        """Observe one call; must be quick and must not call the store."""


class Observers:
    """The observers of a process, in order."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._observers: tuple[Observer, ...] = ()
        # Until when an observer that raised gets nothing, by its identity.
        self._resting: dict[int, float] = {}

    def set(self, observers: Iterable[Observer]) -> None:
        """Replace all observers."""
        self._observers = tuple(observers)
        self._resting = {}

    def notify(self, operation: Operation) -> None:
        """Let every observer observe a call, but for those that raised lately."""
        for observer in self._observers:
            rests_until = self._resting.get(id(observer))
            if rests_until is not None and time.monotonic() < rests_until:
                continue
            try:
                observer.observe(operation)
            except Exception as error:
                self._resting[id(observer)] = time.monotonic() + REST
                self._failures.add(_part_of(observer), error)


def _part_of(observer: Observer) -> str:
    """Return the part of the telemetry that failures of an observer are counted for."""
    is_ours = type(observer).__module__.startswith(f"{__package__.partition('.')[0]}.")
    # An observer of the application may have the name of one of our parts, which must
    # not rest because of it.
    if observer.name in names.OBSERVERS and not is_ours:
        return f"{names.APPLICATION_PREFIX}{observer.name}"
    return observer.name


# What the native base has a copy of.
_RULES = frozenset({"on", "budget", "slow_ns", "contended_after"})


class Recorder:
    """What the stores of one process record into, and by which rules.

    Attributes:
        on: Calls are recorded; off, they are only forwarded.
        ending: The process ends.
        rests_until: When to record again after a failure, by ``time.monotonic``; None
            without one.
        ticks: The clock of the fast path.
        slow_ns: Duration from which a call is slow.
        overdue_ns: Duration from which a call that may block is overdue.
        contended_after: Lost compare-and-sets in a row that are contention.
        budget: Which ordinary calls get a span.
        began_ns: When counting began, in nanoseconds since the epoch.
        counters: The counts, by thread.
        series: The label sets that exist.
        families: The key families that exist.
        failures: The failures of the telemetry itself.
        observers: What notable calls go to.
        cold: Counts and gauges of what is rare: barriers, rendezvous, stalls.
        core: The base that new stores get, by the settings.
        native: The calls of the native base, where it is loaded.
        without_call_spans: The threads whose calls get no spans.
    """

    # After a round trip to a server the caches are cold, and the cost of a call is the
    # memory it touches: slots, and what every call reads next to each other.
    __slots__ = (  # noqa: RUF023 - in the order of use
        "on",
        "counters",
        "ticks",
        "budget",
        "slow_ns",
        "clock",
        "began_ns",
        "cold",
        "contended_after",
        "core",
        "ending",
        "families",
        "failures",
        "native",
        "observers",
        "overdue_ns",
        "rests_until",
        "series",
        "without_call_spans",
        "_telemetry",
    )

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.native: NativeCalls | None = None
        self.core = "auto"
        self.on = True
        self.ending = False
        self.rests_until: float | None = None
        self.clock = SYSTEM_CLOCK
        self.ticks: Callable[[], int] = SYSTEM_CLOCK.ticks
        self.began_ns = SYSTEM_CLOCK.wall()
        self.slow_ns = 10_000_000
        self.overdue_ns = 30e9
        self.contended_after = 5
        self.budget: Budget = Budget()
        self.counters = CountersByThread(telemetry)
        self.series = SeriesTable()
        self.families = KeyFamilies()
        self.cold = ColdMetrics()
        self.failures = Failures(telemetry)
        self.observers = Observers(self.failures)
        self.without_call_spans: set[int] = set()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _RULES and self.native is not None:
            self.native.take_rules()

    def record_natively(self, native: NativeCalls) -> None:
        """Include the calls of the native base from now on."""
        self.native = self.counters.native = native
        native.take_rules()

    def use_clock(self, clock: Clock) -> None:
        """Take the time from another clock."""
        self.clock = clock
        self.ticks = clock.ticks

    def reset(self) -> None:
        """Start from zero, as a forked child must.

        Neither the parent's counts nor its threads are the child's.
        """
        if self.native is not None:
            self.native.reset()
        self.ending = False
        self.began_ns = self.clock.wall()
        self.counters = CountersByThread(self._telemetry, self.native)
        self.without_call_spans = set()
        self.cold.reset()
        self.families.reset()
        self.failures.reset()

    def stop_recording(self, error: Exception) -> None:
        """Record nothing for a minute: recording itself raised.

        Raises:
            Exception: The error, if a signal handler raised it. Then it is the job's,
                and recording goes on.
        """
        if raised_by_handler(error):
            raise error
        self.on = False
        self.rests_until = time.monotonic() + REST
        self.failures.add(names.RECORDING, error)

    def resume_recording(self) -> None:
        """Record again, if a failure has stopped that a minute ago."""
        if self.rests_until is not None and time.monotonic() >= self.rests_until:
            self.rests_until = None
            self.on = True

    def count_swap(
        self, state: StoreState, counts: SeriesCounts, *, won: bool | None
    ) -> bool:
        """Count a compare-and-set; return whether its store keeps losing them."""
        if won is None:
            return False
        if won:
            counts[SWAPS_WON] += 1
            state.losses_in_a_row = 0
            return False
        counts[SWAPS_LOST] += 1
        state.losses_in_a_row += 1
        return state.losses_in_a_row >= self.contended_after

    def returned(
        self,
        counters: ThreadCounters,
        call: Call,
        now: int,
        counts: SeriesCounts,
        result: Any,
    ) -> None:
        """Record a call that returned and may be notable.

        The fast path calls this for every call that is sampled, slow or contended, and
        for every call with a probe, whose compare-and-sets only `Probe.stop` knows.
        """
        method, state, args, _, _ = call
        attempts = _count_attempts(counts, state.probe) if state.probe else None
        swapped = method.swapped(args, result) if method.swapped else None
        reasons = self._reasons(call, now, swapped=swapped, attempts=attempts)
        if reasons:
            # What is computed from the arguments may be the code of a user's class.
            off_main_thread(
                lambda: self._notify_returned(
                    counters.thread_id,
                    call,
                    now,
                    reasons,
                    value_bytes=method.size(args, result) if method.size else 0,
                    swapped=swapped,
                    attempts=attempts,
                    attributes=(
                        method.attributes(args, result) if method.attributes else None
                    ),
                )
            )
        elif self.budget.counting:
            counters.over_budget += 1

    def returned_natively(
        self,
        thread_id: int,
        call: Call,
        now: int,
        *,
        value_bytes: int,
        swapped: bool | None,
    ) -> bool:
        """Notify the observers of a native call that returned, if it is notable.

        The native base has counted it. Returns whether it is notable.
        """
        reasons = self._reasons(call, now, swapped=swapped)
        if reasons:
            self._notify_returned(
                thread_id, call, now, reasons, value_bytes=value_bytes, swapped=swapped
            )
        return bool(reasons)

    def _notify_returned(
        self, thread_id: int, call: Call, now: int, reasons: Reason, **details: Any
    ) -> None:
        method, state, _, _, _ = call
        overdue = method.blocks and Reason.OVERDUE in reasons
        self._notify(
            thread_id,
            call,
            now,
            reasons,
            in_flight=self.counters.in_flight_on(state),
            explained=self._explain(call, None) if overdue else None,
            **details,
        )

    def failed(
        self,
        counters: ThreadCounters,
        call: Call,
        error: BaseException,
        now: int | None = None,
        *,
        explain: bool = True,
    ) -> None:
        """Record a call that raised.

        Args:
            counters: The counters of its thread.
            call: The call.
            error: What it raised.
            now: When that was, in ticks; now if it is not given.
            explain: Find out whom it waited for, which may take 2 s.
        """
        try:
            method, state, _, started, _ = call
            ended = self.ticks() if now is None else now
            duration = ended - started
            # The text of an exception is the code of its class.
            name = off_main_thread(error_type, error)
            series = self.series.of(state.identity.kind, method, name)
            counts = counters.by_series[series]
            counts[BUCKETS + bisect_left(BOUNDS, duration)] += 1
            counts[NANOSECONDS] += duration
            attempts = _count_attempts(counts, state.probe) if state.probe else None
            # What a signal handler raises is no failure of the store.
            if is_ordinary_answer(name) or raised_by_handler(error):
                return
            # A user's own store may quote values in its texts.
            quotes = not state.identity.from_torch
            off_main_thread(
                lambda: self._notify(
                    counters.thread_id,
                    call,
                    ended,
                    self._reasons(call, ended, failed=True, attempts=attempts),
                    error=error,
                    error_message="" if quotes else error_message(error),
                    error_type=name,
                    attempts=attempts,
                    explained=self._explain(call, error) if explain else None,
                )
            )
        except Exception as recording_error:
            self.stop_recording(recording_error)

    def _explain(
        self, call: Call, error: BaseException | None
    ) -> Mapping[str, Any] | None:
        explained: Mapping[str, Any] | None = self.failures.guarded(
            names.DIAGNOSIS, self._telemetry.explain_wait, call, error
        )
        return explained

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record no call that this thread makes: they are the telemetry's own."""
        counters = self.counters[get_ident()]
        outer, counters.call = counters.call, UNRECORDED
        try:
            with self.native.unrecorded() if self.native else nullcontext():
                yield
        finally:
            counters.call = outer

    @contextmanager
    def no_call_spans(self) -> Iterator[None]:
        """Create no spans for calls that this thread makes."""
        native, thread_id = self.native, get_ident()
        if native is not None:
            # It would call Python for each call within the span budget, for no span.
            native.enter_unsampled()
        before = thread_id in self.without_call_spans
        self.without_call_spans.add(thread_id)
        try:
            yield
        finally:
            if native is not None:
                native.exit_unsampled()
            if not before:
                self.without_call_spans.discard(thread_id)

    def _reasons(
        self,
        call: Call,
        now: int,
        *,
        failed: bool = False,
        swapped: bool | None = None,
        attempts: Attempts | None = None,
    ) -> Reason:
        """Decide why a call is notable; no other code does."""
        method, state, _, started, _ = call
        duration = now - started
        retries = attempts.swaps_lost if attempts else 0
        lost = swapped is False or retries > 0
        reasons = Reason.NONE
        if now >= self.budget.opens_at:
            reasons |= Reason.SAMPLED
        if duration >= self.slow_ns:
            reasons |= Reason.SLOW
        # Waiting is what a call that may block is for.
        if duration >= (self.overdue_ns if method.blocks else self.slow_ns):
            reasons |= Reason.OVERDUE
        if failed:
            reasons |= Reason.FAILED
        if retries:
            reasons |= Reason.RETRIED
        if lost and max(retries, state.losses_in_a_row) >= self.contended_after:
            reasons |= Reason.CONTENDED
        return reasons

    def _notify(
        self, thread_id: int, call: Call, now: int, reasons: Reason, **details: Any
    ) -> None:
        method, state, args, started, _ = call
        # A thread that could not be started before may be now.
        self._telemetry.thread_called()
        if Reason.SAMPLED in reasons:
            self.budget.spend(now)
        keys, key_count = method.keys_of(args)
        keys_shown = shown(keys)
        duration = now - started
        self.observers.notify(
            Operation(
                method=method,
                store=state.identity,
                keys=keys_shown,
                key_count=key_count,
                family=self.families.of_all(keys_shown),
                started_ns=self.clock.wall_of(started),
                duration_ns=duration,
                reasons=reasons,
                losses_in_a_row=state.losses_in_a_row,
                thread_id=thread_id,
                **details,
            )
        )


def _count_attempts(counts: SeriesCounts, probe: Probe) -> Attempts:
    attempts = probe.stop()
    counts[SWAPS_WON] += attempts.swaps_won
    counts[SWAPS_LOST] += attempts.swaps_lost
    return attempts


# What every store of this process records into. It has no effect by itself: no thread,
# and no registration until the first call of a wrapped store.
RECORDER: Final = Recorder(TELEMETRY)
