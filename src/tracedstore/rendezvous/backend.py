"""A rendezvous backend that records the calls of the handler above it."""

import time
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, final

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
)

from tracedstore import names
from tracedstore.common.identity import (
    StoreIdentity,
    bottom_of,
    identify,
    is_from_torch,
)
from tracedstore.coordination.store_access import (
    bare_store,
    is_one_connection,
    side_connection,
)
from tracedstore.export.setup import ensure_configured
from tracedstore.recording.cold_metrics import Write
from tracedstore.recording.counters import StoreState
from tracedstore.recording.operation import Arguments, Method, size_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.store_proxy import forwarder
from tracedstore.rendezvous.server_checks import OtherRun, find_other_runs
from tracedstore.rendezvous.state import Attendance, RendezvousState, parse_state

_MAX_NODES_SHOWN = 64
# Seconds for the read of a key in etcd.
_ETCD_TIMEOUT = 2
# Runs an optional step; on failure counts it and returns None.
_guarded = partial(RECORDER.failures.guarded, names.RENDEZVOUS)


def _state_of(result: Any) -> Any:
    """Return the state in a result of get_state or set_state, None if it has none."""
    return result[0] if isinstance(result, tuple) and result else None


def _attributes(_args: Arguments, result: Any) -> Mapping[str, Any]:
    state = _state_of(result)
    parsed = parse_state(state) if isinstance(state, bytes) else None
    if parsed is None:
        return {}
    now = time.time()
    nodes = sorted(parsed.heartbeats)[:_MAX_NODES_SHOWN]
    return {
        names.RENDEZVOUS_STATE_PARTICIPANTS: len(parsed.participants),
        names.RENDEZVOUS_STATE_WAIT_LIST: len(parsed.wait_list),
        names.RENDEZVOUS_STATE_ROUND: parsed.round,
        names.RENDEZVOUS_STATE_COMPLETE: parsed.complete,
        names.RENDEZVOUS_NODES: [str(node) for node in nodes],
        names.RENDEZVOUS_SILENT_SECONDS: [
            parsed.silent_seconds(node, now) or 0.0 for node in nodes
        ],
    }


def _accepted(_args: Arguments, result: Any) -> bool:
    # The result is None if the write was refused and there is no state to return.
    return isinstance(result, tuple) and bool(result[-1])


# These have no keys. The state is a value, and values are never recorded.
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
    repeats="caller",
    contended=names.RENDEZVOUS_CONFLICT,
    attributes=_attributes,
)


@final
class TracedRendezvousBackend(RendezvousBackend):
    """Wraps another rendezvous backend and records its calls.

    Results, exceptions and all other attributes are the wrapped backend's.
    ``get_state`` and ``set_state`` are recorded like the calls of a store.

    Args:
        backend: Any ``RendezvousBackend``, for example torch's C10dRendezvousBackend or
            EtcdRendezvousBackend. A traced one is unwrapped first.

    Raises:
        TypeError: The argument is not a RendezvousBackend.
        ConfigurationError: This is the first use, and a ``TRACEDSTORE_*`` variable has
            an invalid value.
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
        name = str(backend.name)
        RECORDER.cold.record(
            (names.RENDEZVOUS_WRITES, (name, "accepted"), None),
            (names.RENDEZVOUS_DURATION, (name, "completed"), None),
        )
        self._traced = state
        self._attendance = Attendance()

    @property
    def name(self) -> str:
        """The name of the wrapped backend."""
        return str(self._traced.inner.name)

    @property
    def identity(self) -> StoreIdentity:
        """The server or file that holds the state."""
        return self._traced.identity

    @property
    def attendance(self) -> Attendance:
        """The nodes that were seen in the state."""
        return self._attendance

    def find_other_runs(self, *, is_first: bool) -> list[OtherRun]:
        """Return the other jobs with a rendezvous on the TCPStore server of the state.

        It connects to the server again, because the agent uses its connection.

        Args:
            is_first: Whether this agent records its job for others.
        """
        inner = self._traced.inner
        store, key = getattr(inner, "_store", None), getattr(inner, "_key", None)
        if not (isinstance(store, Store) and isinstance(key, str)):
            return []
        bare = bare_store(store)
        if not is_one_connection(bare):
            return []
        with RECORDER.unrecorded(), side_connection(bare) as connection:
            return find_other_runs(connection, key, is_first=is_first, now=time.time())

    def get_state(self) -> tuple[bytes, Token] | None:
        """Get the state from the wrapped backend."""
        result: tuple[bytes, Token] | None = self._get_state()
        if RECORDER.on:
            _guarded(self._record_state, result)
        return result

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Set the state through the wrapped backend."""
        started = time.time()
        try:
            result: tuple[bytes, Token, bool] | None = self._set_state(state, token)
        except BaseException:
            if RECORDER.on:
                self._count_write("failed")
            raise
        if RECORDER.on:
            _guarded(self._record_write, result, started)
        return result

    _get_state = forwarder(_GET_STATE, attrgetter("get_state"))
    _set_state = forwarder(_SET_STATE, attrgetter("set_state"))

    def written_seconds_ago(self) -> float | None:
        """Return when etcd last wrote the state, None if that is not known.

        torch gives the key a time to live at each write. A TCPStore has no such time.
        """
        inner = self._traced.inner
        if hasattr(inner, "written_seconds_ago"):
            seconds: float | None = inner.written_seconds_ago()
            return seconds
        client, key = getattr(inner, "_client", None), getattr(inner, "_key", None)
        lifetime = getattr(inner, "_ttl", None)
        if client is None or type(lifetime) is not int:
            return None
        left = client.read(key, timeout=_ETCD_TIMEOUT).ttl
        return None if type(left) is not int else float(max(0, lifetime - left))

    def _record_state(self, result: Any, *, wrote: float | None = None) -> None:
        """Record the state that a call returned, and when it began to write it."""
        state = _state_of(result)
        parsed = parse_state(state) if isinstance(state, bytes) else None
        if parsed is not None:
            self._attendance.record(parsed, wrote=wrote)
            self._set_gauges(parsed, len(state))

    def _record_write(self, result: Any, started: float) -> None:
        """Record a write that began at a time and did not fail."""
        accepted = _accepted((), result)
        self._count_write("accepted" if accepted else "conflict")
        self._record_state(result, wrote=started if accepted else None)

    def _count_write(self, result: Write) -> None:
        RECORDER.cold.record((names.RENDEZVOUS_WRITES, (self.name, result), 1))

    def _set_gauges(self, state: RendezvousState, size: int) -> None:
        backend = (self.name,)
        oldest = min(state.heartbeats.values(), default=None)
        RECORDER.cold.record(
            (names.RENDEZVOUS_STATE_BYTES, backend, size),
            (names.RENDEZVOUS_PARTICIPANTS, backend, len(state.participants)),
            (names.RENDEZVOUS_WAIT_LIST, backend, len(state.wait_list)),
            (names.RENDEZVOUS_ROUND, backend, state.round),
            (names.RENDEZVOUS_COMPLETE, backend, int(state.complete)),
            (names.RENDEZVOUS_OLDEST_HEARTBEAT, backend, oldest),
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_traced":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self._traced.inner, name)

    def __repr__(self) -> str:
        return f"TracedRendezvousBackend({self._traced.inner!r})"


def _identify(backend: RendezvousBackend) -> StoreIdentity:
    """Return the identity of the server or file that holds a backend's state.

    Backends have a separate kind, because their calls cost other amounts than the calls
    of a store on the same server.
    """
    store = getattr(backend, "_store", None)
    client = getattr(backend, "_client", getattr(backend, "_transport", None))
    inner = identify(bottom_of(store)) if isinstance(store, Store) else None
    address = getattr(client, "host", "") if inner is None else inner.address
    port = getattr(client, "port", None) if inner is None else inner.port
    key = getattr(backend, "_key", "")
    kind = f"rendezvous_{backend.name}".replace("-", "_").lower()
    return StoreIdentity(
        kind=kind,
        system=(inner.system if inner else "etcd" if client else f"pytorch.{kind}"),
        address=address if isinstance(address, str) else "",
        port=port if isinstance(port, int) else None,
        namespace=key if isinstance(key, str) else "",
        from_torch=is_from_torch(backend),
    )
