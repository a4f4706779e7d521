"""What is blocked now: the calls in flight, and a warning while one stays there.

A histogram hears of a wait when it *ends*; a job that hangs is one whose waits do
not. So a thread looks at the calls in flight and reports those that stay.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tracedstore import names
from tracedstore.core.counters import Call, thread_names
from tracedstore.core.keys import shown
from tracedstore.core.recorder import Recorder

# More than this at a time would drown the log that should help.
_MOST_REPORTED_AT_ONCE = 16

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A call that has not returned yet, as people and programs read it.

    Attributes:
        operation: The Store method.
        store: The kind of store.
        server: Where that is.
        key: Its key, or the first of its keys, printable.
        key_count: How many keys it has.
        key_family: The family its keys share, or "".
        started: When it began, in seconds since the epoch.
        waited_seconds: How long ago that is.
        thread: The thread that is in it.
    """

    operation: str
    store: str
    server: str
    key: str
    key_count: int
    key_family: str
    started: float
    waited_seconds: float
    thread: str


def in_flight(recorder: Recorder) -> list[InFlight]:
    """List the calls in flight, oldest first."""
    names_by_id = thread_names()
    now = recorder.ticks()
    return [
        _described(recorder, names_by_id, thread_id, call, now)
        for thread_id, call in recorder.counters.calls()
    ]


def _described(
    recorder: Recorder,
    names_by_id: dict[int, str],
    thread_id: int,
    call: Call,
    now: int,
) -> InFlight:
    method, state, args, started, _ = call
    keys, key_count = method.keys_of(args)
    keys_shown = shown(keys)
    return InFlight(
        operation=method.name,
        store=state.identity.kind,
        server=state.identity.server,
        key=keys_shown[0] if keys_shown else "",
        key_count=key_count,
        key_family=recorder.families.of_all(keys_shown),
        started=recorder.clock.wall_of(started) / 1e9,
        waited_seconds=(now - started) / 1e9,
        thread=names_by_id.get(thread_id, f"native-{thread_id}"),
    )


class StallWatch:
    """Reports calls that stay in flight: after a while, then at doubling intervals.

    It sleeps until the next report is due. A call that begins after it looked
    cannot be due sooner than `after` from then, so it never has to look more often.
    """

    name = names.INFLIGHT

    def __init__(self, recorder: Recorder, emit: Emit, after: float) -> None:
        self._recorder = recorder
        self._emit = emit
        self._after_ns = int(after * 1e9)
        # When to report a call again that was reported. The call itself is kept
        # with it, so that its id is not given to another one meanwhile.
        self._again: dict[int, tuple[Call, int]] = {}
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure_running(self) -> None:
        """Begin to watch, in a thread that does not keep the process alive.

        Asked for whenever a thread makes its first call, because a forked child
        has the watch but not its thread.
        """
        with self._starting:
            if self._stopped.is_set() or self._recorder.failures.has(self.name):
                return
            if self._thread is not None and self._thread.is_alive():
                return
            try:
                thread = threading.Thread(
                    target=self._run, name="tracedstore-stall-watch", daemon=True
                )
                thread.start()
                self._thread = thread
            except Exception as error:
                self._recorder.failures.add(self.name, error)

    def reset(self) -> None:
        """Let go of what the parent's threads may have held."""
        self._starting = threading.Lock()
        self._stopped = threading.Event()
        self._thread = None
        self._again = {}

    def stop(self, timeout: float) -> None:
        """End the watch, waiting no longer than a time for a report under way."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.look()):
                pass
        except Exception as error:
            self._recorder.failures.add(self.name, error)

    def look(self) -> float:
        """Report what is due, and give the seconds until something can be again."""
        now = self._recorder.ticks()
        calls = self._recorder.counters.calls()
        reported = {id(call) for _, call in calls} & self._again.keys()
        self._again = {found: self._again[found] for found in reported}
        due = [found for found in calls if self._due(found[1]) <= now]
        names_by_id = thread_names() if due else {}
        for thread_id, call in due[:_MOST_REPORTED_AT_ONCE]:
            described = _described(self._recorder, names_by_id, thread_id, call, now)
            self._emit(
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
                **self._recorder.explained(call),
            )
        for _, call in due:
            # Doubling from its start: after 30 s, then at 60 s, 120 s, ...
            self._again[id(call)] = (call, call[3] + 2 * (now - call[3]))
        next_dues = [self._due(call) for _, call in calls]
        return (min([*next_dues, now + self._after_ns]) - now) / 1e9

    def _due(self, call: Call) -> int:
        _, due = self._again.get(id(call), (call, call[3] + self._after_ns))
        return due
