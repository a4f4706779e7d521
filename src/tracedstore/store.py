"""TracedStore and wrap(): a Store that behaves like the one it wraps, and is traced."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

from torch.distributed import Store

from tracedstore import names
from tracedstore.core.counters import Probe
from tracedstore.core.identity import bottom_of, identify, is_prefix_store
from tracedstore.core.recorder import RECORDER
from tracedstore.core.store_proxy import StoreProxy
from tracedstore.export.setup import ensure_configured

# torch's C++ holds only the C++ half of a Python store. When the last Python reference
# is dropped, the Python methods go with it, and the next call from C++ fails an
# INTERNAL ASSERT; init_process_group(store=wrap(...)) is all it takes. So every wrapper
# is kept here until it is closed. Keyed by identity: pybind objects are hashable, but
# an inner store might define __eq__.
_kept_alive: dict[int, "TracedStore"] = {}


def wrap(store: Store) -> "TracedStore":
    """Wrap any Store, so that its calls show in metrics, spans and events.

    The result is a Store that torch accepts everywhere. It behaves like the bare one:
    same results, exceptions, timeouts and blocking. Wrapping a TracedStore returns it
    unchanged.

    It stays alive until `TracedStore.close`: torch's C++ may still use it after the
    last Python reference is dropped.

    Args:
        store: The store: TCPStore, FileStore, HashStore, PrefixStore, EtcdStore or any
            other subclass of ``torch.distributed.Store``.

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
    ensure_configured()
    return TracedStore(store)


@final
class TracedStore(StoreProxy):
    """A Store whose calls are recorded; created by `wrap`.

    Every other attribute is the wrapped store's.
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
            if is_prefix_store(bottom):
                RECORDER.failures.add_missing(
                    names.RECORDING,
                    "PrefixStore.underlying_store",
                    "the server of a store below a PrefixStore is unknown",
                )
        _kept_alive[id(self)] = self

    if TYPE_CHECKING or hasattr(Store, "clone"):

        def clone(self, *args: Any, **kwargs: Any) -> "TracedStore":
            """Clone the wrapped store; the clone is traced and kept alive as well.

            torch's C++ clones stores (``split_group``) and keeps no Python reference,
            so a clone is released when its original is closed.
            """
            inner = self._traced.inner
            cloned = super().clone(*args, **kwargs)
            # HashStore's clone is the store itself.
            if cloned is inner:
                return self
            clone = TracedStore(cloned)
            self._traced.clones.add(clone)
            return clone

    def close(self) -> None:
        """Release the store and its clones: they are no longer kept alive.

        From now on they live as long as Python code refers to them, like any store. Do
        not close a store that a process group still uses.
        """
        _kept_alive.pop(id(self), None)
        for clone in list(self._traced.clones):
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
        return sorted({*super().__dir__(), *dir(self._traced.inner)})

    def __repr__(self) -> str:
        return f"TracedStore({self._traced.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "cannot pickle a TracedStore: a store is a live connection; create and"
            " wrap one in each process instead"
        )


def _probe(store: Store) -> Probe | None:
    """Return the probe of an EtcdStore; None, without importing etcd, for others."""
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
    from tracedstore.etcd.counting_client import count_requests_of  # noqa: PLC0415 - see above

    return count_requests_of(store)
