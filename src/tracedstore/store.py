"""TracedStore and wrap(): a Store that behaves like the one it wraps, and is traced."""

import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final
from weakref import ref

from torch.distributed import Store

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.common.identity import bottom_of, identify, is_prefix_store
from tracedstore.common.signal_safety import off_main_thread
from tracedstore.export.setup import ensure_configured
from tracedstore.native.calls import NativeRecording
from tracedstore.native.load import NativeUnavailable, load
from tracedstore.recording.counters import Probe
from tracedstore.recording.recorder import RECORDER, SYSTEM_CLOCK
from tracedstore.recording.store_proxy import StoreProxy

# The module of torch's C++ stores; that of PrefixStore is another one.
_CPP_STORES = "torch._C._distributed_c10d"
_StoreType: Any = type(Store)

# torch's C++ holds only the C++ half of a Python store. When the last Python reference
# is dropped, the Python methods go with it, and the next call from C++ fails an
# INTERNAL ASSERT; init_process_group(store=wrap(...)) is all it takes. So every wrapper
# of the Python base is kept here until it is closed. A native store has no methods in
# Python, and is not kept. Keyed by identity: pybind objects are hashable, but an inner
# store might define __eq__.
_kept_alive: dict[int, "TracedStore"] = {}


def wrap(store: Store) -> "TracedStore":
    """Wrap any Store, so that its calls show in metrics, spans and events.

    The result is a Store that torch accepts everywhere. It behaves like the bare one:
    same results, exceptions, timeouts and blocking. Wrapping a TracedStore returns it
    unchanged.

    It may be passed to torch's C++ and dropped in Python. On the native base it is
    freed when neither refers to it any more, like the bare store. On the Python base it
    stays alive until `TracedStore.close`.

    Args:
        store: The store: TCPStore, FileStore, HashStore, PrefixStore, EtcdStore,
            EtcdV3Store or any other subclass of ``torch.distributed.Store``.

    Raises:
        TypeError: The argument is no Store.
        ConfigurationError: This is the first use, and a ``TRACEDSTORE_*`` variable
            has a value that cannot be used.
    """
    if isinstance(store, TracedStore):
        return store
    if not isinstance(store, Store):
        raise TypeError(
            f"wrap() takes a torch.distributed.Store, not {type(store).__name__};"
            " subclass Store, which torch's own functions require too"
        )
    return off_main_thread(_wrap, store)


def _wrap(store: Store) -> "TracedStore":
    ensure_configured()
    native: TracedStore | None = _wrap_natively(store)
    if native is not None:
        return native
    traced = TracedStore(store)
    _kept_alive[id(traced)] = traced
    return traced


class _TracedStoreType(_StoreType):  # type: ignore[misc] # pybind's own metaclass
    """Makes native stores instances of `TracedStore`, too."""

    def __instancecheck__(self, instance: object) -> bool:
        return super().__instancecheck__(instance) or is_native(instance)


@final
class TracedStore(StoreProxy, metaclass=_TracedStoreType):
    """A Store whose calls are recorded; created by `wrap`.

    Every other attribute is the wrapped store's. Stores of the native base have a class
    of the same name, whose instances are instances of this one.
    """

    def __init__(self, store: Store) -> None:
        bottom = bottom_of(store)
        if isinstance(bottom, TracedStore):
            # PrefixStores over a traced store: only one of the two records a call.
            below = bottom._traced  # noqa: SLF001 - of the same class
            super().__init__(store, below.identity, RECORDER)
            self._traced.below, self._traced.probe = below, below.probe
        else:
            super().__init__(store, identify(bottom), RECORDER)
            self._traced.probe = _probe(bottom)
            if self._traced.probe is not None:
                RECORDER.series.probed.add(self._traced.identity.kind)
            if is_prefix_store(bottom):
                RECORDER.failures.add_missing(
                    names.RECORDING,
                    "PrefixStore.underlying_store",
                    "the server of a store below a PrefixStore is unknown",
                )

    if TYPE_CHECKING or hasattr(Store, "clone"):

        def clone(self, *args: Any, **kwargs: Any) -> "TracedStore":
            """Clone the wrapped store; the clone is traced and kept alive as well.

            torch's C++ clones stores (``split_group``) and keeps no Python reference,
            so a clone lives as long as its original, until that is closed.
            """
            inner = self._traced.inner
            cloned = super().clone(*args, **kwargs)
            # HashStore's clone is the store itself.
            if cloned is inner:
                return self
            clone = TracedStore(cloned)
            clone._traced.original = ref(self._traced)
            self._traced.clones[id(clone)] = clone
            return clone

    def close(self) -> None:
        """Release the store and its clones: they are no longer kept alive.

        From now on they live as long as Python code refers to them. Do not close a
        store that a process group still uses. A store of the native base is not kept
        alive, so there is nothing to release: closing one has no effect.
        """
        state = self._traced
        release(self)
        original = state.original()
        if original is not None:
            original.clones.pop(id(self), None)
        for clone in list(state.clones.values()):
            clone.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        # Only called for what this class does not have: host, port, path, client, ...
        if name == "_traced":  # before __init__ has set it
            raise AttributeError(name)
        return getattr(self._traced.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._traced.inner, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._traced.inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._traced.inner)})

    def __repr__(self) -> str:
        return f"TracedStore({self._traced.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cannot pickle a TracedStore: a store is a live connection; create and"
            " wrap one in each process instead"
        )


def release(store: TracedStore) -> None:
    """Keep a store alive no longer; its clones live as long as it does."""
    _kept_alive.pop(id(store), None)


# The class of native stores has these functions, too: when its Python half is freed and
# C++ returns the store again, it is of that very class and of no subclass.
_SHARED = (
    "__delattr__",
    "__dir__",
    "__doc__",
    "__enter__",
    "__exit__",
    "__getattr__",
    "__module__",
    "__qualname__",
    "__reduce_ex__",
    "__repr__",
    "__setattr__",
    "close",
)


def is_native(store: object) -> bool:
    """Return whether a store is a traced one of the native base."""
    native = RECORDER.native
    return isinstance(native, NativeRecording) and type(store) is native.store_class


def _wrap_natively(store: Store) -> Any:
    """Return a native TracedStore; None if the Python base has to be used.

    Raises:
        ConfigurationError: The settings require the native base, and it cannot be used.
    """
    bottom = bottom_of(store)
    if is_native(bottom):
        # Whatever the settings are now: two bases would both record a call.
        return _native().wrap(store, bottom._traced.identity)  # type: ignore[attr-defined] # noqa: SLF001
    # A Python class is called through Python anyway, and another clock is Python's.
    if (
        RECORDER.core == "python"
        or RECORDER.clock is not SYSTEM_CLOCK
        or type(bottom).__module__ != _CPP_STORES
    ):
        return None
    try:
        return _native().wrap(store, identify(bottom))
    except NativeUnavailable as error:
        if RECORDER.core == "auto":
            return None
        raise ConfigurationError(f"core is 'native', but {error}") from error


class _Loading:
    """The loading of the native base in one process.

    Attributes:
        lock: Held while it is loaded. Reentrant, because a ``__del__`` that garbage
            collection runs may wrap a store in the thread that loads.
        begun: The thread with the lock loads.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begun = False


# By pid: another thread of the parent may have held the lock of a forked child.
_loading: dict[int, _Loading] = {}


def _native() -> NativeRecording:
    """Return the native base; load it at the first use.

    Raises:
        NativeUnavailable: It cannot be loaded, or this thread is just loading it.
    """
    if isinstance(RECORDER.native, NativeRecording):
        return RECORDER.native
    # One step: threads that come at once get the same object.
    loading = _loading.setdefault(os.getpid(), _Loading())
    with loading.lock:
        # Another thread may have loaded it meanwhile.
        if isinstance(RECORDER.native, NativeRecording):
            return RECORDER.native
        if loading.begun:
            # In such a ``__del__``. C++ has one recording, so there is no second one.
            raise NativeUnavailable("it is being loaded by this thread")
        loading.begun = True
        try:
            return _load_native()
        finally:
            loading.begun = False


def _load_native() -> NativeRecording:
    recording = NativeRecording(load(), RECORDER)
    for name in _SHARED:
        value = getattr(TracedStore, name)
        setattr(recording.store_class, name, value)
    # Before other threads find it, and record by these rules.
    recording.take_rules()
    RECORDER.record_natively(recording)
    return recording


def _probe(store: Store) -> Probe | None:
    """Return the probe of a store in etcd; None, without importing etcd, for others."""
    v3 = sys.modules.get("tracedstore.etcd.etcd_v3_store")
    if v3 is not None and isinstance(store, v3.EtcdV3Store):
        probe: Probe = store.probe
        return probe
    module = sys.modules.get("torch.distributed.elastic.rendezvous.etcd_store")
    if module is None or not isinstance(store, module.EtcdStore):
        return None
    if not hasattr(store, "client"):
        RECORDER.failures.add_missing(
            names.RECORDING,
            "EtcdStore.client",
            "the requests inside a call of an EtcdStore are not counted",
        )
        return None
    from tracedstore.etcd.request_counts import count_requests_of  # noqa: PLC0415 - see above

    return count_requests_of(store)
