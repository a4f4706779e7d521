"""A rendezvous backend that tells what is done with it."""

import time
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
)

from tracedstore import names
from tracedstore.core.counters import StoreState
from tracedstore.core.identity import StoreIdentity, bottom_of, identify
from tracedstore.core.operation import Arguments, Method, size_of
from tracedstore.core.recorder import RECORDER
from tracedstore.core.rendezvous_stats import RendezvousView, Write
from tracedstore.core.store_proxy import forwarder
from tracedstore.export.setup import ensure_configured
from tracedstore.rendezvous.state import Attendance, RendezvousState, read

_MOST_NODES_SHOWN = 64


def _state_of(result: Any) -> Any:
    """Take the state out of what get_state and set_state give, if it is there."""
    return result[0] if isinstance(result, tuple) and result else None


def _attributes(_args: Arguments, result: Any) -> Mapping[str, Any]:
    state = _state_of(result)
    snapshot = read(state) if isinstance(state, bytes) else None
    if snapshot is None:
        return {}
    now = time.time()
    nodes = sorted(snapshot.heartbeats)[:_MOST_NODES_SHOWN]
    return {
        names.RENDEZVOUS_STATE_PARTICIPANTS: len(snapshot.participants),
        names.RENDEZVOUS_STATE_WAIT_LIST: len(snapshot.wait_list),
        names.RENDEZVOUS_STATE_ROUND: snapshot.round,
        names.RENDEZVOUS_STATE_COMPLETE: snapshot.complete,
        names.RENDEZVOUS_NODES: [str(node) for node in nodes],
        names.RENDEZVOUS_SILENT_SECONDS: [
            snapshot.silent(node, now) or 0.0 for node in nodes
        ],
    }


def _accepted(_args: Arguments, result: Any) -> bool:
    # Nothing is given where the write was refused and there is no state to show.
    return isinstance(result, tuple) and bool(result[-1])


# The state is an argument here, and values are never recorded: so these have no keys.
_GET_STATE = Method(
    name="get_state",
    index=0,
    parameters=(),
    keys="none",
    size=lambda _args, result: size_of(_state_of(result)),
    attributes=_attributes,
)
_SET_STATE = Method(
    name="set_state",
    index=1,
    parameters=("state", "token"),
    keys="none",
    size=lambda args, _result: size_of(args[0]) if args else 0,
    swapped=_accepted,
    contended=names.RENDEZVOUS_CONFLICT,
    attributes=_attributes,
)


@final
class TracedRendezvousBackend(RendezvousBackend):
    """Does what another rendezvous backend does, and tells.

    Results and exceptions are the other one's, and so is every other attribute.
    ``get_state`` and ``set_state`` are recorded like the calls of a store.

    Args:
        backend: Any ``RendezvousBackend``, torch's C10dRendezvousBackend and
            EtcdRendezvousBackend in particular. One that is traced is not traced
            twice.

    Raises:
        TypeError: It is no RendezvousBackend.
        ConfigurationError: This is the first use, and a ``TRACEDSTORE_*`` variable
            has a value that cannot be used.
    """

    _traced: StoreState

    def __init__(self, backend: RendezvousBackend) -> None:
        if isinstance(backend, TracedRendezvousBackend):
            backend = backend._traced.inner  # noqa: SLF001 - of the same class
        if not isinstance(backend, RendezvousBackend):
            raise TypeError(
                "TracedRendezvousBackend() takes a RendezvousBackend, not"
                f" {type(backend).__name__}"
            )
        ensure_configured()
        state = StoreState(backend, _identify(backend), RECORDER)
        state.series = tuple(
            RECORDER.series.of(state.identity.kind, method)
            for method in (_GET_STATE, _SET_STATE)
        )
        RECORDER.rendezvous.open(backend.name)
        self._traced = state
        self._attendance = Attendance()

    @property
    def name(self) -> str:
        """The other backend's name."""
        return str(self._traced.inner.name)

    @property
    def identity(self) -> StoreIdentity:
        """Where the state is kept."""
        return self._traced.identity

    @property
    def attendance(self) -> Attendance:
        """Who was seen in the state."""
        return self._attendance

    def get_state(self) -> tuple[bytes, Token] | None:
        """Get the state, as the other backend does."""
        found: tuple[bytes, Token] | None = self._get_state()
        self._saw(found)
        return found

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Set the state, as the other backend does."""
        try:
            found: tuple[bytes, Token, bool] | None = self._set_state(state, token)
        except BaseException:
            if RECORDER.on:
                RECORDER.rendezvous.record_write(self.name, "failed")
            raise
        if RECORDER.on:
            result: Write = "accepted" if _accepted((), found) else "conflict"
            RECORDER.rendezvous.record_write(self.name, result)
        self._saw(found)
        return found

    _get_state = forwarder(_GET_STATE, attrgetter("get_state"))
    _set_state = forwarder(_SET_STATE, attrgetter("set_state"))

    def _saw(self, found: Any) -> None:
        """Take note of a state that came back."""
        if not RECORDER.on:
            return
        try:
            state = _state_of(found)
            snapshot = read(state) if isinstance(state, bytes) else None
            if snapshot is not None:
                self._attendance.saw(snapshot)
                RECORDER.rendezvous.record_view(self.name, _view(snapshot, len(state)))
        except Exception as error:
            RECORDER.failures.add(names.RENDEZVOUS, error)

    def __getattr__(self, name: str) -> Any:
        if name == "_traced":  # before __init__ is through
            raise AttributeError(name)
        return getattr(self._traced.inner, name)

    def __repr__(self) -> str:
        return f"TracedRendezvousBackend({self._traced.inner!r})"


def _view(snapshot: RendezvousState, size: int) -> RendezvousView:
    return RendezvousView(
        participants=len(snapshot.participants),
        wait_list=len(snapshot.wait_list),
        round=snapshot.round,
        complete=snapshot.complete,
        size=size,
        oldest_heartbeat=min(snapshot.heartbeats.values(), default=None),
    )


def _identify(backend: RendezvousBackend) -> StoreIdentity:
    """Tell where a backend keeps the state, of those we know.

    The kind is its own: what its calls cost is another matter than what the calls
    of a store cost that lives in the same place.
    """
    store = getattr(backend, "_store", None)
    client = getattr(backend, "_client", None)
    within = identify(bottom_of(store)) if isinstance(store, Store) else None
    address = getattr(client, "host", "") if within is None else within.address
    port = getattr(client, "port", None) if within is None else within.port
    key = getattr(backend, "_key", "")
    kind = f"rendezvous_{backend.name}".replace("-", "_").lower()
    return StoreIdentity(
        kind=kind,
        system=(within.system if within else "etcd" if client else f"pytorch.{kind}"),
        address=address if isinstance(address, str) else "",
        port=port if isinstance(port, int) else None,
        namespace=key if isinstance(key, str) else "",
    )
