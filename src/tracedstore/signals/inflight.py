"""The Store calls in flight, and reports of those that stay in flight.

A histogram counts a wait when it *ends*. The waits of a hung job do not end, so the
watcher reports them while they last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tracedstore import names
from tracedstore.common.codec import Cut, Large, Seconds
from tracedstore.common.keys import shown
from tracedstore.recording.counters import ActiveCall, Call, thread_names
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.telemetry import Telemetry

# Between two looks at a call that waits for its verdict.
_PENDING_NS = 200_000_000
# More events at a time would drown the log.
_MAX_REPORTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A Store call that has not returned yet.

    Attributes:
        operation: The Store method.
        store: The kind of store.
        server: The store's location.
        key: Its key, or the first of its keys, printable.
        key_count: Number of keys.
        key_family: The family that its keys share, or "".
        started: When it began, in seconds since the epoch.
        waited_seconds: Seconds since then.
        thread: The thread that made it.
    """

    operation: Cut
    store: Cut
    server: Cut
    key: Cut
    key_count: Large
    key_family: Cut
    started: Seconds
    waited_seconds: Seconds
    thread: Cut


def in_flight(recorder: Recorder) -> list[InFlight]:
    """Return the calls in flight, oldest first."""
    threads = thread_names()
    now = recorder.ticks()
    return [
        _describe(recorder, threads, call, now) for call in recorder.counters.calls()
    ]


def _describe(
    recorder: Recorder,
    threads: dict[int, str],
    call: ActiveCall,
    now: int,
    key: str = "",
) -> InFlight:
    keys, key_count = call.method.keys_of(call.args)
    keys_shown = shown(keys)
    return InFlight(
        operation=call.method.name,
        store=call.state.identity.kind,
        server=call.state.identity.server,
        key=key or (keys_shown[0] if keys_shown else ""),
        key_count=key_count,
        key_family=recorder.families.of_all(keys_shown),
        started=recorder.clock.wall_of(call.started) / 1e9,
        waited_seconds=(now - call.started) / 1e9,
        thread=threads.get(call.thread_id, f"native-{call.thread_id}"),
    )


class StallReporter:
    """Reports calls that stay in flight: after a delay, then at doubling intervals.

    A call that begins after a report cannot be due sooner than `after` from then, so
    the watcher need not run it more often.
    """

    def __init__(
        self,
        recorder: Recorder,
        telemetry: Telemetry,
        after: float,
        is_diagnosed: Callable[[Call], bool | None] = lambda _call: False,
        absent_key: Callable[[Call], str] = lambda _call: "",
    ) -> None:
        self._recorder = recorder
        # True if a verdict covers a call, None if one is still to be expected. A call
        # that is covered is reported at debug level: `job.stalled` is one event for
        # all ranks that wait for the same.
        self._is_diagnosed = is_diagnosed
        # A call may wait for many keys, the first of which exists.
        self._absent_key = absent_key
        self._telemetry = telemetry
        self._after_ns = int(after * 1e9)
        # When to report a call again, by its identity. The call is kept as well, so
        # that its identity is not used again.
        self._reported: dict[int, tuple[Call, int]] = {}

    def reset(self) -> None:
        """Forget the parent's calls, as a forked child must."""
        self._reported = {}

    def report(self) -> float:
        """Report the calls that are due; return the seconds until the next can be."""
        now = self._recorder.ticks()
        calls = self._recorder.counters.calls()
        reported = {id(active.call) for active in calls} & self._reported.keys()
        self._reported = {call: self._reported[call] for call in reported}
        due = [
            active
            for active in calls
            if self._due(active) <= now and self._is_diagnosed(active.call) is not None
        ]
        threads = thread_names() if due else {}
        for active in due[:_MAX_REPORTS_AT_ONCE]:
            key = self._absent_key(active.call)
            described = _describe(self._recorder, threads, active, now, key)
            emit = self._telemetry.emit
            if self._is_diagnosed(active.call):
                emit = partial(emit, level="debug")
            emit(
                names.OPERATION_STALLED,
                operation=described.operation,
                store=described.store,
                server=described.server,
                key=described.key,
                key_count=described.key_count,
                key_family=described.key_family,
                waited_seconds=round(described.waited_seconds, 3),
                thread=described.thread,
                stalled_calls=len(due),
            )
        for active in due:
            # Doubling from its start: after 30 s, then at 60 s, 120 s, ...
            again = active.started + 2 * (now - active.started)
            self._reported[id(active.call)] = (active.call, again)
        next_dues = [self._due(active) for active in calls]
        delay = min([*next_dues, now + self._after_ns]) - now
        # A call whose verdict is pending is overdue.
        return (delay if delay > 0 else _PENDING_NS) / 1e9

    def _due(self, active: ActiveCall) -> int:
        first = active.started + self._after_ns
        _, due = self._reported.get(id(active.call), (active.call, first))
        return due
