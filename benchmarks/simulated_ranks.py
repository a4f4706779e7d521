"""Simulated ranks that wait for a key: the diagnosis of each, without its thread.

Each rank has a `Diagnosis` and a `StallReporter` of its own. They take their steps in
turn, in one process. The clock is simulated too: a turn takes as long as the longest
step in it, because the ranks of a job run on processors of their own.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from log_lines import LogLines

from tracedstore import names
from tracedstore.common.identity import ProcessIdentity, identify
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis import rounds, service, store_diagnosis
from tracedstore.diagnosis.judgement import inquiry
from tracedstore.diagnosis.observe import waits
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.diagnosis.store_diagnosis import StoreDiagnoses, StoreDiagnosis
from tracedstore.recording.counters import ActiveCall, StoreState
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import RECORDER, Clock
from tracedstore.recording.store_proxy import RECORDED
from tracedstore.recording.telemetry import TELEMETRY, Telemetry
from tracedstore.signals.events import Events
from tracedstore.signals.inflight import StallReporter

# Ranks that take their steps at the same time: the two that look take seconds.
_THREADS = 8


class SimulatedClock:
    """The time of the simulated job, in place of the module ``time``."""

    def __init__(self) -> None:
        self._began = time.time()
        self.elapsed = 0.0

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return self._began + self.elapsed

    def monotonic(self) -> float:
        """Return the seconds since an unknown moment."""
        return self._began + self.elapsed

    def ticks(self) -> int:
        """Return the nanoseconds since an unknown moment."""
        return int(self.monotonic() * 1e9)


CLOCK = SimulatedClock()


def simulate_time() -> None:
    """Let the diagnosis of this process measure the time of the simulated job."""
    for module in (service, inquiry, rounds, store_diagnosis, waits):
        module.time = CLOCK  # type: ignore[attr-defined]


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


_current = threading.local()


class _CurrentRank(Telemetry):
    """Emits events as the rank whose step this thread takes."""

    def emit(self, event: str, *, level: str | None = None, **fields: Any) -> None:
        _current.events.emit(event, level=level, **fields)


class _OneCall:
    """The recorder of a rank with one call in flight."""

    clock = Clock(ticks=CLOCK.ticks, wall=CLOCK.ticks)
    ticks = staticmethod(CLOCK.ticks)
    families = RECORDER.families
    failures = RECORDER.failures

    def __init__(self, active: ActiveCall) -> None:
        self.counters = self
        self._active = active

    def calls(self) -> list[ActiveCall]:
        return [self._active]


class _LineWriter(QueueWorker):
    """Takes the lines of a rank, in place of the event writer."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__("lines", names.EVENTS, RECORDER.failures)
        self._lines = lines

    def submit(self, work: Any, *, wait: float = 0.0) -> None:  # noqa: ARG002 - of the base
        """Add the line at once."""
        self._lines.add(work.args[0], CLOCK.time())


def _events(rank: int, world_size: int, lines: LogLines) -> Events:
    identity = ProcessIdentity("simulated", rank, rank % 8, world_size)
    return Events(RECORDER, identity, _LineWriter(lines), log_format="json")


def as_rank(rank: int, world_size: int, lines: LogLines) -> None:
    """Emit events of this thread as a rank, from now on."""
    TELEMETRY.install(_CurrentRank())
    _current.events = _events(rank, world_size, lines)


class _OneStore(StoreDiagnoses):
    def __init__(self, only: StoreDiagnosis) -> None:
        self._only = only

    def of(self, _state: StoreState, _thread_id: int) -> StoreDiagnosis:
        return self._only

    def of_pending(self, _pending: waits.Pending) -> StoreDiagnosis:
        return self._only

    def unregistered(self) -> list[StoreDiagnosis]:
        return []

    def registered(self) -> list[StoreDiagnosis]:
        return [self._only]


class SimulatedRank:
    """A rank that waits for a key.

    Args:
        store: Where it waits.
        rank: The rank.
        world_size: The number of ranks.
        key: The key.
        stall_after: The setting.
        waited: For how many seconds it has waited.
        lines: Where its log lines go.

    Attributes:
        store: Counts its requests.
        looked: It was elected to look for the verdict.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        key: str,
        *,
        stall_after: float,
        waited: float,
        lines: LogLines,
    ) -> None:
        self.store = CountingStore(store)
        self.looked = False
        state = StoreState(self.store, identify(store), RECORDER)
        state.timeout = timedelta(minutes=30)
        started = CLOCK.ticks() - int(waited * 1e9)
        call = (RECORDED["get"], state, (key,), started, None)
        self._active = ActiveCall(*call, threading.get_ident(), call)
        recorder: Any = _OneCall(self._active)
        self._diagnosis = Diagnosis(recorder, stall_after, answers=False)
        member = Member(rank=rank, world_size=world_size, host_of=lambda _rank: "")
        own = StoreDiagnosis(self.store, member, recorder, stall_after, answers=False)
        self._own = own
        self._diagnosis._stores = _OneStore(own)  # noqa: SLF001 - drives it
        self._events = _events(rank, world_size, lines)
        self._reporter = StallReporter(
            recorder, _CurrentRank(), stall_after, self._diagnosis.covers
        )
        self._report_at = 0.0

    def step(self) -> float:
        """Take the step that is due; return the seconds that it would take alone."""
        _current.events = self._events
        began = time.thread_time()
        self._diagnosis.visit_stores()
        if CLOCK.monotonic() >= self._report_at:
            self._report_at = CLOCK.monotonic() + self._reporter.report()
        seconds = time.thread_time() - began
        if self.wait is not None and self.wait.elected and not self.looked:
            self.looked = True
            # No process answers.
            seconds += store_diagnosis._ANSWER_TIMEOUT  # noqa: SLF001 - see above
        return seconds

    @property
    def wait(self) -> Any:
        """What its diagnosis knows about the call; None before it is examined."""
        return self._diagnosis._waits.get(waits.key_of(self._active))  # noqa: SLF001 - drives it

    def time_out(self) -> None:
        """Check the verdict, as a call does that has just timed out."""
        _current.events = self._events
        pending = self._diagnosis._pending.of(self._active)  # noqa: SLF001 - drives it
        assert pending is not None
        self._diagnosis._requests.append((pending, threading.Event()))  # noqa: SLF001 - drives it
        self._diagnosis.visit_stores()

    def end(self) -> None:
        """The call returns."""
        _current.events = self._events
        self._own.end(self.wait)


def _longest_step(ranks: Sequence[SimulatedRank]) -> float:
    return max((rank.step() for rank in ranks), default=0.0)


def take_turns(
    ranks: Sequence[SimulatedRank],
    shortest: float,
    limit: float,
    until: Callable[[], bool],
) -> None:
    """Let all ranks take their steps until a condition holds.

    Args:
        ranks: The ranks.
        shortest: Seconds from one turn to the next at least.
        limit: Seconds of the simulated clock after which this returns in any case.
        until: The condition.
    """
    TELEMETRY.install(_CurrentRank())
    began = CLOCK.elapsed
    # A thread for each share, because a task for each rank takes longer than its step.
    shares = [ranks[number::_THREADS] for number in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as threads:
        while CLOCK.elapsed - began < limit:
            steps = threads.map(_longest_step, shares)
            CLOCK.elapsed += max(shortest, *steps)
            if until():
                break
