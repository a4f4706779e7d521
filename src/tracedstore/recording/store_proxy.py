"""The recording seam: a Store that forwards every call and records it.

This base is pure Python, on torch's Store trampoline. It records into plain integers
(`counters`, through `recorder`). The native base (`native`) is the same in C++.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.distributed import Store

from tracedstore import names
from tracedstore.common.errors import TIMEOUT
from tracedstore.common.identity import StoreIdentity
from tracedstore.recording.counters import (
    BOUNDS,
    BUCKETS,
    BYTES,
    NANOSECONDS,
    StoreState,
)
from tracedstore.recording.operation import METHODS, Method
from tracedstore.recording.recorder import Recorder

# The C++ half of every wrapper has its own timeout, which a PrefixStore above it and
# torch's C++ set without a call into Python. This reads that timeout. In a torch whose
# timeout cannot be read, this returns the one that was last passed on.
_HAS_TIMEOUT = isinstance(vars(Store).get("timeout"), property)
_own_timeout: Callable[["StoreProxy"], timedelta] = (
    vars(Store)["timeout"].fget if _HAS_TIMEOUT else attrgetter("_traced.timeout")
)

# Seconds from the exit hook of this package to the end of Python, mostly.
_MAX_HOLD = 0.5

# Methods of the store object itself, which do not go to a server or a file.
_NO_OPERATIONS = ("has_extended_api", "set_timeout")


def methods_of(store_class: type[Store]) -> dict[str, Method]:
    """Return the operations of a Store class by name, with their indexes.

    A torch older than the table has fewer of them. A newer one may have more, which
    are forwarded and timed as well, but without keys.
    """
    found = [
        name
        for name in dir(store_class)
        if not name.startswith("_")
        and name not in _NO_OPERATIONS
        and callable(getattr(store_class, name))
    ]
    known = [method for method in METHODS if method.name in found]
    unknown = [
        Method(name=name, parameters=(), keys="none")
        for name in found
        if name not in {method.name for method in METHODS}
    ]
    return {
        method.name: replace(method, index=index)
        for index, method in enumerate(known + unknown)
    }


class StoreProxy(Store):
    """A Store that forwards every method to another one and records the call.

    Results, exceptions, blocking and timeouts are the inner store's. No lock is held
    while the inner store works.
    """

    # The only attribute of the wrapper itself; see StoreState.
    _traced: StoreState

    def __init__(
        self, inner: Store, identity: StoreIdentity, recorder: Recorder
    ) -> None:
        super().__init__()
        state = StoreState(inner, identity, recorder)
        state.wrapper = ref(self)
        create_series(state)
        object.__setattr__(self, "_traced", state)
        if _HAS_TIMEOUT:
            _take_timeout(self, state.inner.timeout)
        else:
            recorder.failures.add_missing(
                names.RECORDING,
                "Store.timeout",
                "a traced store does not forward a timeout that torch's C++ sets",
            )

    # Arguments go to the inner store unchanged, and its errors for bad ones come back.

    def set_timeout(self, *args: Any, **kwargs: Any) -> None:
        """Set the inner store's timeout, and the one that torch's C++ reads."""
        self._traced.inner.set_timeout(*args, **kwargs)
        if _HAS_TIMEOUT:
            _take_timeout(self, self._traced.inner.timeout)
        else:
            Store.set_timeout(self, *args, **kwargs)

    if TYPE_CHECKING or _HAS_TIMEOUT:

        @property
        def timeout(self) -> timedelta:
            """The inner store's timeout."""
            _pass_on_timeout(self)
            timeout: timedelta = self._traced.inner.timeout
            return timeout

    def has_extended_api(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether the inner store has append, multi_get and multi_set."""
        extended: bool = self._traced.inner.has_extended_api(*args, **kwargs)
        return extended

    if TYPE_CHECKING:
        # Forwarded like the others (below); torch's stubs lack these.
        def append(self, key: str, value: str | bytes, /) -> None: ...
        def multi_set(
            self, keys: list[str], values: Sequence[str | bytes], /
        ) -> None: ...
        def barrier(
            self, key: str, world_size: int, timeout: timedelta | None = None
        ) -> None: ...
        def clone(self, *args: Any, **kwargs: Any) -> Store: ...


def create_series(state: StoreState) -> None:
    """Create the label sets of a new wrapper."""
    kind, series = state.identity.kind, state.recorder.series
    # Creating a label set exports it, as zero until the first call.
    state.series = tuple(series.of(kind, method) for method in RECORDED.values())
    for method in RECORDED.values():
        if method.blocks:
            series.of(kind, method, TIMEOUT)


def _take_timeout(store: StoreProxy, timeout: timedelta) -> None:
    """Copy the inner store's timeout to where torch's C++ reads it."""
    Store.set_timeout(store, timeout)
    # Read back: C++ keeps whole milliseconds.
    store._traced.timeout = _own_timeout(store)  # noqa: SLF001 - a function of the class, kept off its surface


def _pass_on_timeout(store: StoreProxy) -> None:
    """Copy the timeout that torch's C++ set on the wrapper to the inner store."""
    state = store._traced  # noqa: SLF001 - as in _take_timeout
    timeout = _own_timeout(store)
    if timeout != state.timeout:
        state.timeout = timeout
        state.inner.set_timeout(timeout)


def forwarder(  # noqa: C901, PLR0915 - the fast path in one piece: a call costs more than a branch
    method: Method, bind: Callable[[Any], Callable[..., Any]]
) -> Any:
    """Return the method that forwards a call and records it.

    Args:
        method: The Store method.
        bind: Returns the bound method of an inner store. It runs on every call, so
            that a method which the inner store lacks fails as it does there.

    The class that gets the method keeps its `StoreState` in ``_traced``. Only a method
    that blocks requires a StoreProxy.
    """
    index, size, swapped = method.index, method.size, method.swapped
    # A clone inherits the timeout, and a blocking call ends by it.
    needs_timeout = method.blocks or method.name == "clone"

    def forward(self: StoreProxy, *args: Any, **kwargs: Any) -> Any:  # noqa: C901
        state = self._traced
        if needs_timeout and _own_timeout(self) != state.timeout:
            _pass_on_timeout(self)
        inner = bind(state.inner)
        recorder = state.recorder
        if not recorder.on:
            if recorder.ending:
                _hold_at_exit()
            return inner(*args, **kwargs)
        try:
            counters = recorder.counters[get_ident()]
            outer = counters.call
            # A traced store above, with a PrefixStore between, records the call.
            recorded = outer is not None and outer[1].stands_on(state)
            probe = state.probe
            if probe is not None and not recorded:
                probe.start()
            named = method.positional(args, kwargs) if kwargs else args
            started = recorder.ticks()
        except Exception as error:
            recorder.stop_recording(error)
            return inner(*args, **kwargs)
        if recorded:
            return inner(*args, **kwargs)
        call = (method, state, named, started, outer)
        # From here on the call is in flight, and must not stay so: an interrupt may
        # be raised between any two lines.
        try:
            counters.call = call
            result = inner(*args, **kwargs)
        except BaseException as error:
            counters.call = outer
            recorder.failed(counters, call, error)
            raise
        counters.call = outer
        try:
            now = recorder.ticks()
            duration = now - started
            counts = counters.by_series[state.series[index]]
            counts[BUCKETS + bisect_left(BOUNDS, duration)] += 1
            counts[NANOSECONDS] += duration
            if size is not None:
                counts[BYTES] += size(named, result)
            contended = swapped is not None and recorder.count_swap(
                state, counts, won=swapped(named, result)
            )
            # A cheap necessary condition; `returned` decides.
            if (
                now >= recorder.budget.opens_at
                or duration >= recorder.slow_ns
                or contended
                or probe is not None
            ):
                recorder.returned(counters, call, now, counts, result)
            elif recorder.budget.counting:
                counters.over_budget += 1
        except Exception as error:
            recorder.stop_recording(error)
        return result

    forward.__name__ = method.name
    forward.__qualname__ = f"{StoreProxy.__name__}.{method.name}"
    forward.__doc__ = f"Forward ``{method.name}`` to the inner store and record it."
    return forward


def _hold_at_exit() -> None:
    """Hold a daemon thread that begins a call while the process ends.

    A thread that returns from C++ while CPython before 3.14 finalizes makes that abort.
    Here it is ended by Python, or goes on: exit hooks that run later may wait for it.
    """
    # Not current_thread(), which registers a thread of torch's C++ with Python.
    own = get_ident()
    if any(one.daemon for one in threading.enumerate() if one.ident == own):
        time.sleep(_MAX_HOLD)


def _own_property(name: str) -> property:
    return property(lambda self: getattr(self._traced.inner, name))


# Every operation of this torch's Store, with its index.
RECORDED = methods_of(Store)

for _method in RECORDED.values():
    setattr(StoreProxy, _method.name, forwarder(_method, attrgetter(_method.name)))
# torch's C++ calls these two by its own spelling. Binding through the base class
# reaches the inner store as C++ would.
for _spelling, _name in (("deleteKey", "delete_key"), ("getNumKeys", "num_keys")):
    if _name in RECORDED:
        _bind = partial(partial, getattr(Store, _name))
        setattr(StoreProxy, _spelling, forwarder(RECORDED[_name], _bind))
# Properties of a newer torch's Store are the inner store's too.
for _name, _attribute in vars(Store).items():
    if isinstance(_attribute, property) and _name != "timeout":
        setattr(StoreProxy, _name, _own_property(_name))
