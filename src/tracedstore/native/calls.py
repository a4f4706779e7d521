"""The calls that the native base records, as the rest of the package reads them.

The C++ half (store.cpp) counts. It calls `NativeRecording` for notable calls of threads
that Python knows. Those of other threads wait in its ring until the calls or the counts
are read.
"""

import threading
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from tracedstore.common.identity import StoreIdentity
from tracedstore.common.signal_safety import HELPERS
from tracedstore.recording.counters import (
    BOUNDS,
    OTHER,
    UNRECORDED,
    ActiveCall,
    Call,
    Series,
    SeriesCounts,
    StoreState,
    ThreadCounters,
)
from tracedstore.recording.operation import Arguments, Method
from tracedstore.recording.recorder import Recorder
from tracedstore.recording.store_proxy import RECORDED, create_series

# What C++ compares with ticks.
_MIN, _MAX = -(2**63), 2**63 - 1
# A call that ended is kept for a while, because its thread still asks for its tuple
# when it explains the failure. Seconds, of which explaining takes two at most; and how
# many calls, which is more than there are threads that explain one.
_KEPT = 4.0
_MAX_ENDED = 256
# Identifies a call: the record of its thread, and its number there.
_CallKey = tuple[int, int]
# A call as C++ passes it: both parts of its key, the index of its method, its arguments
# and its start, in ticks.
_NativeCall = tuple[int, int, int, tuple[Any, ...], int]
# A call that ended: the call, its end in ticks, the compare-and-sets that its store has
# lost in a row, the bytes of values, and whether it swapped one.
_EndedCall = tuple[_NativeCall, int, int, int, bool | None]


class _FirstKeys(Sequence[Any]):
    """The first keys of a call that has more; its length is that of all."""

    def __init__(self, keys: tuple[Any, ...], count: int) -> None:
        self._keys = keys
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._keys[index]


class NativeState(StoreState):
    """The state of a native store, which C++ keeps as long as the store.

    It refers to the store weakly: a reader that still has the state of a call must not
    keep the store.

    Args:
        weak: The store, as a ``WeakStore`` of the extension.
        identity: What it is called in every signal.
        recorder: What its calls are recorded into.
    """

    __slots__ = ()

    def __init__(self, weak: Any, identity: StoreIdentity, recorder: Recorder) -> None:
        super().__init__(None, identity, recorder)
        self.wrapper = weak

    @property
    def inner(self) -> Any:
        """The wrapped store; None once it is freed."""
        return self.wrapper.inner  # type: ignore[attr-defined] # of a WeakStore

    @inner.setter
    def inner(self, inner: None) -> None:
        """Ignore what the base class sets."""


class NativeRecording:
    """Joins the C++ half with the recorder; one a process.

    Args:
        module: The extension.
        recorder: What observes notable calls and exports the counts.
    """

    def __init__(self, module: Any, recorder: Recorder) -> None:
        self._module = module
        self._recorder = recorder
        # A method that this torch lacks is never called.
        self._methods = [
            RECORDED.get(name) or Method(name=name) for name in module.METHODS
        ]
        self._kinds: dict[int, str] = {}
        self.store_class: type[Any] = module.TracedStore
        self.enter_unsampled: Callable[[], None] = module.enter_unsampled
        self.exit_unsampled: Callable[[], None] = module.exit_unsampled
        self.reset()
        module.set_helpers(
            threading.main_thread().ident,
            HELPERS.idle,
            HELPERS.unfinished,
            start_new_thread,
            HELPERS.serve,
            allocate_lock,
        )
        module.set_up(
            BOUNDS, self._new_thread, self._returned, self._failed, self._new_state
        )

    def wrap(self, inner: Store, identity: StoreIdentity) -> Any:
        """Return a native store that forwards to another one; None for one too many.

        The number of kinds of stores is limited.
        """
        for kind in range(self._module.MAX_KINDS):
            # One step: threads that wrap at once agree on the number of a kind.
            if self._kinds.setdefault(kind, identity.kind) == identity.kind:
                break
        else:
            return None
        # Later calls may all come from threads that Python does not know, which cannot
        # start the watch.
        self._new_thread()
        store = self._module.wrap(inner, kind, identity)
        _ = store._traced  # noqa: SLF001 - its label sets are exported from now on
        return store

    # What `recording.counters.NativeCalls` asks for.

    def sums(self) -> Iterator[tuple[Series, SeriesCounts]]:
        """Return the sums over all threads."""
        self._drain()
        for kind, method, counts, untyped_failures in self._module.sums():
            error_type = OTHER if untyped_failures else ""
            series = self._recorder.series.of(
                self._kinds[kind], self._methods[method], error_type
            )
            yield series, counts

    def over_budget(self) -> int:
        """Return how many ordinary calls got no span because the budget was spent."""
        return int(self._module.over_budget())

    def calls(self) -> list[ActiveCall]:
        """Return the calls in flight."""
        self._drain()
        with self._lock:
            return self._read_calls()

    def take_rules(self) -> None:
        """Pass on which calls are notable."""
        recorder = self._recorder
        budget = recorder.budget
        self._module.set_rules(
            recorder.on,
            budget.counting,
            max(_MIN, min(budget.opens_at, _MAX)),
            recorder.slow_ns,
            recorder.contended_after,
        )

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record no call that this thread makes."""
        self._module.enter_unrecorded()
        try:
            yield
        finally:
            self._module.exit_unrecorded()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._lock = threading.RLock()
        self._draining = threading.Lock()
        # The tuples of calls in flight, as of the last reading. A call keeps its tuple,
        # which is its identity.
        self._seen: dict[_CallKey, Call] = {}
        # Those that have ended since, the latest last, and when that was seen: a call
        # that has ended asks for its own, and may do so after further readings.
        self._ended: dict[_CallKey, tuple[Call, float]] = {}
        self._module.reset()

    def end(self) -> None:
        """Let no other thread return to Python from a call while that finalizes."""
        self._module.end()

    def dropped(self) -> int:
        """Return how many notable calls of other threads the ring had no room for."""
        return int(self._module.dropped())

    # What C++ calls: for the main thread in a helper thread, else in that of the call.

    def _new_thread(self) -> None:
        # The telemetry watches calls from the first one on.
        _ = self._recorder.counters[threading.get_ident()]

    def _new_state(self, identity: StoreIdentity, weak: Any) -> StoreState:
        state = NativeState(weak, identity, self._recorder)
        create_series(state)
        state.timeout = _timeout(state.inner)
        return state

    def _returned(self, thread_id: int, state: StoreState, ended: _EndedCall) -> bool:
        try:
            return self._notify(thread_id, state, ended)
        except Exception as error:
            self._recorder.stop_recording(error)
            return False
        finally:
            # The call may have spent some of the budget.
            self.take_rules()

    def _failed(
        self,
        thread_id: int,
        state: StoreState,
        ended: _EndedCall,
        error: BaseException | None,
    ) -> str | None:
        """Record a failed call; return the note on its exception."""
        native, now, state.losses_in_a_row, _, _ = ended
        state.timeout = _timeout(state.inner)
        error = RuntimeError() if error is None else error
        counters = self._counters(thread_id)
        self._recorder.failed(counters, self._call(native, state), error, now)
        self.take_rules()
        return "\n".join(getattr(error, "__notes__", ())) or None

    def _notify(self, thread_id: int, state: StoreState, ended: _EndedCall) -> bool:
        """Tell of a call that returned; return whether it is notable."""
        native, now, state.losses_in_a_row, value_bytes, swapped = ended
        return self._recorder.returned_natively(
            thread_id,
            self._call(native, state),
            now,
            value_bytes=value_bytes,
            swapped=swapped,
        )

    def _call(
        self, native: _NativeCall, state: StoreState, outer: Call | None = None
    ) -> Call:
        record, number, method, arguments, started = native
        key = (record, number)
        known = self._seen.get(key) or self._ended.get(key, (None,))[0]
        if known is not None:
            return known
        return (self._methods[method], state, _positional(*arguments), started, outer)

    def _read_calls(self) -> list[ActiveCall]:
        found: list[ActiveCall] = []
        seen: dict[_CallKey, Call] = {}
        outers: dict[int, Call] = {}
        for thread_id, state, native in self._module.calls():
            record, number, _, _, started = native
            state.timeout = _timeout(state.inner)
            outer = outers.get(thread_id) or self._python_call(thread_id, started)
            call = self._call(native, state, outer)
            seen[record, number] = outers[thread_id] = call
            found.append(ActiveCall(*call, thread_id, call))
        # Threads whose calls end read these tables without the lock. So each table is
        # made anew and then put in the place of the old one, and never changed. What
        # has ended is not kept for long, because it refers to the state of a store.
        now = time.monotonic()
        kept = {key: one for key, one in self._ended.items() if now < one[1] + _KEPT}
        kept |= {key: (one, now) for key, one in self._seen.items() if key not in seen}
        self._ended = dict(list(kept.items())[-_MAX_ENDED:])
        self._seen = seen
        return found

    def _python_call(self, thread_id: int, started: int) -> Call | None:
        """Return the call of the Python base that a native call is inside of."""
        counters = self._recorder.counters.get(thread_id)
        call = None if counters is None else counters.call
        is_outer = call is not None and call is not UNRECORDED and call[3] <= started
        return call if is_outer else None

    def _drain(self) -> None:
        """Record the notable calls of threads that Python does not know."""
        if not self._draining.acquire(blocking=False):
            return
        try:
            for entry in self._module.drain():
                self._record(*entry)
        except Exception as error:
            self._recorder.stop_recording(error)
        finally:
            self._draining.release()

    def _record(
        self,
        thread_id: int,
        identity: StoreIdentity,
        ended: _EndedCall,
        error: BaseException | None,
    ) -> None:
        # The store itself may be gone.
        state = StoreState(None, identity, self._recorder)
        if error is None:
            self._notify(thread_id, state, ended)
            return
        native, now, state.losses_in_a_row, _, _ = ended
        counters = self._counters(thread_id)
        self._recorder.failed(
            counters, self._call(native, state), error, now, explain=False
        )

    def _counters(self, thread_id: int) -> ThreadCounters:
        """Return counters for a call of another thread.

        It is counted by this thread, which alone may write its counts.
        """
        counters = ThreadCounters(thread_id)
        own = self._recorder.counters[threading.get_ident()]
        counters.by_series = own.by_series
        return counters


def _positional(
    keys: Any, count: int, world_size: int | None, timeout_ms: int | None
) -> Arguments:
    """Return the arguments of a call, as the Python base has them; no values."""
    if isinstance(keys, tuple) and len(keys) < count:
        keys = _FirstKeys(keys, count)
    timeout = None if timeout_ms is None else timedelta(milliseconds=timeout_ms)
    given = (keys, world_size, timeout)
    return tuple(value for value in given if value is not None)


def _timeout(inner: Any) -> timedelta:
    # A torch without Store.timeout has none that can be read.
    timeout: timedelta = getattr(inner, "timeout", timedelta())
    return timeout
