"""Write down how a call went: always into a counts, and to observers if it is notable.

The counts is all that a call normally pays for. Only a call that is slow, fails,
retries, keeps losing, or is let through by the span budget becomes an `Operation`
that observers are told about.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Final

from tracedstore import names
from tracedstore.core.barrier_stats import BarrierStats
from tracedstore.core.budget import Budget, nothing
from tracedstore.core.clock import SYSTEM_CLOCK, Clock
from tracedstore.core.counters import (
    BOUNDS,
    BUCKETS,
    NANOSECONDS,
    RETRIES,
    SWAPS_LOST,
    SWAPS_WON,
    Call,
    CountersByThread,
    Probe,
    SeriesCounts,
    SeriesTable,
    StoreState,
    ThreadCounters,
)
from tracedstore.core.errors import TIMEOUT, error_type, is_ordinary_answer
from tracedstore.core.keys import KeyFamilies, shown
from tracedstore.core.observer import Failures, Observers
from tracedstore.core.operation import Attempts, Operation
from tracedstore.core.rendezvous_stats import RendezvousStats
from tracedstore.core.timeouts import run_with_timeout

# Seconds that finding out more about a call that failed may take.
_EXPLAIN_WITHIN = 2.0


class Recorder:
    """What the stores of one process record into, and by which rules.

    Attributes:
        on: Calls are recorded; off, they are only forwarded.
        ticks: The clock of the fast path.
        slow_ns: From how long on a call is told of, whatever else it is.
        contended_after: Lost compare-and-sets in a row that are told of.
        budget: Which ordinary calls are told of.
        counters: What was counted, by thread.
        series: The label sets that appeared.
        families: The key families that appeared.
        failures: The telemetry that broke.
        observers: Who is told.
        barriers: What the barriers did.
        rendezvous: What the rendezvous did.
        emit: Writes an event, by its name and fields.
        set_up: Sets the telemetry up, unless it is.
        detailed: Whether anybody reads events of debug level.
        tracing: Whether anybody takes spans.
        start_span: Starts a span, by its name; what it gives is OpenTelemetry's.
        flush: Has spans exported, run_with_timeout so many seconds.
    """

    # After a round trip to a server the caches are cold, and what a call costs is the
    # memory it touches: slots, and what every call reads next to each other.
    __slots__ = (  # noqa: RUF023 - in the order of use
        "on",
        "counters",
        "ticks",
        "budget",
        "slow_ns",
        "clock",
        "barriers",
        "contended_after",
        "detailed",
        "emit",
        "families",
        "failures",
        "flush",
        "observers",
        "rendezvous",
        "series",
        "set_up",
        "start_span",
        "tracing",
    )

    def __init__(self) -> None:
        self.on = True
        self.barriers = BarrierStats()
        self.rendezvous = RendezvousStats()
        self.emit: Callable[..., None] = _nobody
        self.detailed: Callable[[], bool] = bool
        self.set_up: Callable[[], None] = _nothing
        self.tracing: Callable[[], bool] = bool
        self.start_span: Callable[..., Any] = _nobody
        self.flush: Callable[[float], None] = _nothing
        self.clock = SYSTEM_CLOCK
        self.ticks: Callable[[], int] = SYSTEM_CLOCK.ticks
        self.slow_ns = 10_000_000
        self.contended_after = 5
        self.budget: Budget = nothing()
        self.counters = CountersByThread()
        self.series = SeriesTable()
        self.families = KeyFamilies()
        self.failures = Failures()
        self.observers = Observers(self.failures)

    def use_clock(self, clock: Clock) -> None:
        """Take the time from another clock."""
        self.clock = clock
        self.ticks = clock.ticks

    def reset(self) -> None:
        """Start counting from nothing, as a forked child must.

        The parent's calls are not the child's, and neither are the threads that
        were in them.
        """
        self.counters = CountersByThread(self.counters.on_first_call)
        self.barriers.reset()
        self.rendezvous.reset()
        self.families.reset()
        self.failures.reset()

    def broke(self, error: Exception) -> None:
        """Stop recording: the recording itself raised, so it cannot be trusted."""
        self.on = False
        self.failures.add(names.RECORDING, error)

    def swap(
        self, state: StoreState, counts: SeriesCounts, *, won: bool | None
    ) -> bool:
        """Count a compare-and-set, and tell whether its store keeps losing them."""
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
        """Tell of a call that returned, if it is notable or the budget allows it."""
        method, state, args, started, _ = call
        attempts = _count_attempts(counts, state.probe) if state.probe else None
        swapped = method.swapped(args, result) if method.swapped else None
        if (
            now >= self.budget.opens_at
            or now - started >= self.slow_ns
            or swapped is False
            or (attempts is not None and attempts.swaps_lost)
        ):
            self._tell(
                counters,
                call,
                now,
                value_bytes=method.size(args, result) if method.size else 0,
                swapped=swapped,
                attempts=attempts,
                attributes=(
                    method.attributes(args, result) if method.attributes else None
                ),
            )
        elif self.budget.counting:
            counters.over_budget += 1

    def failed(
        self, counters: ThreadCounters, call: Call, error: BaseException
    ) -> None:
        """Write down a call that raised."""
        try:
            method, state, _, started, _ = call
            now = self.ticks()
            duration = now - started
            name = error_type(error)
            counts = counters.by_series[
                self.series.of(state.identity.kind, method, name)
            ]
            counts[BUCKETS + bisect_left(BOUNDS, duration)] += 1
            counts[NANOSECONDS] += duration
            attempts = _count_attempts(counts, state.probe) if state.probe else None
            if not is_ordinary_answer(name):
                self._tell(
                    counters,
                    call,
                    now,
                    error=error,
                    error_type=name,
                    attempts=attempts,
                    explained=self.explained(call) if name == TIMEOUT else None,
                )
        except Exception as recording_error:
            self.broke(recording_error)

    def explained(self, call: Call) -> Mapping[str, Any]:
        """Say more of a call that waits in vain, where its store has more to say."""
        method, state, args, *_ = call
        explain = state.explain
        if explain is None:
            return {}
        try:
            # Whoever waits in vain may do so because the store hangs.
            return run_with_timeout(_EXPLAIN_WITHIN, lambda: explain(method, args))
        except TimeoutError:
            return {}
        except Exception as error:
            self.failures.add(names.RENDEZVOUS, error)
            return {}

    def _tell(
        self, counters: ThreadCounters, call: Call, now: int, **facts: Any
    ) -> None:
        method, state, args, started, _ = call
        admitted = now >= self.budget.opens_at
        if admitted:
            self.budget.spend(now)
        keys, key_count = method.keys_of(args)
        keys_shown = shown(keys)
        duration = now - started
        self.observers.tell(
            Operation(
                method=method,
                store=state.identity,
                keys=keys_shown,
                key_count=key_count,
                family=self.families.of_all(keys_shown),
                started_ns=self.clock.wall() - duration,
                duration_ns=duration,
                losses_in_a_row=state.losses_in_a_row,
                thread_id=counters.thread_id,
                in_flight=self._beside(state) if "error" not in facts else 0,
                slow=duration >= self.slow_ns,
                admitted=admitted,
                **facts,
            )
        )

    def _beside(self, state: StoreState) -> int:
        """Count the calls in flight on a store, which may be why one was slow."""
        under_way = (counters.call for counters in list(self.counters.values()))
        return sum(call is not None and call[1] is state for call in under_way)


def _count_attempts(counts: SeriesCounts, probe: Probe) -> Attempts:
    attempts = probe.stop()
    counts[SWAPS_WON] += attempts.swaps_won
    counts[SWAPS_LOST] += attempts.swaps_lost
    counts[RETRIES] += attempts.swaps_lost
    return attempts


def _nothing(*_args: Any) -> None:
    pass


def _nobody(_what: str, **_facts: Any) -> None:
    """Tell nobody, while nothing is set up."""


# What every store of this process records into. It does nothing by itself: no thread,
# no registration, no clock read until the first call of a wrapped store.
RECORDER: Final = Recorder()
