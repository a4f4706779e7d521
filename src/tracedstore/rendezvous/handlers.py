"""The rendezvous handler that torchrun's agent talks to, with names and times."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, final
from weakref import ref

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from tracedstore import names
from tracedstore.coordination import barrier_patch, membership
from tracedstore.coordination.barrier import WATCH
from tracedstore.coordination.watch import Waiting
from tracedstore.core.recorder import RECORDER
from tracedstore.rendezvous.agent_keys import explainer
from tracedstore.rendezvous.backend import TracedRendezvousBackend
from tracedstore.rendezvous.state import Node
from tracedstore.rendezvous.telemetry import JoinAttempt, tell, tell_waiting
from tracedstore.store import TracedStore, wrap

T = TypeVar("T")
# Does something that the rendezvous can do without; None where that fails.
_guarded = partial(RECORDER.failures.guarded, names.RENDEZVOUS)
CreateBackend = Callable[[RendezvousParameters], tuple[RendezvousBackend, Store]]


def create(
    params: RendezvousParameters, create_backend: CreateBackend, default_port: int
) -> RendezvousHandler:
    """Make the traced handler of a backend that torch creates.

    Parameters, their defaults, and the errors for bad ones are torch's, because it
    is torch that reads them. Where our own settings are wrong, that is told and the
    handler is torch's: a job does not fail of it.
    """
    try:
        RECORDER.set_up()
    except Exception as error:
        RECORDER.failures.add(names.RENDEZVOUS, error)
        backend, store = create_backend(params)
        plain: RendezvousHandler = create_handler(store, backend, params)
        # torch wants to hear the name that it asked for.
        vars(plain)["get_backend"] = lambda: params.backend
        return plain
    where = _where(params, default_port)
    started = time.perf_counter_ns()
    try:
        backend, store = create_backend(params)
    except RendezvousError as error:
        attempt = JoinAttempt(
            backend=params.backend.removeprefix("traced-"),
            run_id=params.run_id,
            endpoint=params.endpoint,
            during="create_backend",
            waited_seconds=(time.perf_counter_ns() - started) / 1e9,
            min_nodes=params.min_nodes,
            max_nodes=params.max_nodes,
            where=where,
        )
        if RECORDER.on:
            _guarded(tell, error, attempt)
        raise
    traced = TracedRendezvousBackend(backend)
    handler = create_handler(store, traced, params)
    # For whoever wants it earlier than the default; torch lets anything in here.
    told = {}
    with suppress(TypeError, ValueError):
        told["warn_after"] = float(params.get("warn_after"))
    return TracedRendezvousHandler(
        handler,
        traced,
        name=params.backend,
        endpoint=params.endpoint,
        where=where,
        **told,
    )


@final
class TracedRendezvousHandler(RendezvousHandler):
    """Does what another rendezvous handler does, and tells.

    A rendezvous that fails is told of once, with who came and why; the store it gives
    is traced; and the agent's exit barrier, which comes to torch's barrier without a
    rank, gets the names of the agents that are missing.

    Args:
        handler: The other one, made with ``backend``.
        backend: The traced backend it was made with.
        name: What ``get_backend`` is to say; by default what the other one says.
        endpoint: Where the nodes meet, for people.
        where: Host and port of that, where it has them.
        warn_after: Seconds after which a node that waits for others says so; 0 for
            never.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        backend: TracedRendezvousBackend,
        *,
        name: str | None = None,
        endpoint: str = "",
        where: tuple[str, int] | None = None,
        warn_after: float = 30.0,
    ) -> None:
        self._warn_after = warn_after
        self._inner: Any = handler
        self._traced_backend = backend
        self._plugin_name = name
        self._endpoint = endpoint or backend.identity.server
        self._where = where
        self._failure_told = False
        self._traced_store: TracedStore | None = None
        if RECORDER.on:
            _guarded(barrier_patch.replace)
        _guarded(_trace_store_of, handler, backend)

    def get_backend(self) -> str:
        """Give the name by which torchrun was told to use this."""
        return self._plugin_name or str(self._inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers may use the agent's store."""
        return bool(self._inner.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round."""
        self._failure_told = False
        self._traced_backend.attendance.reset()
        started = time.perf_counter_ns()
        watched = Waiting(lambda: self._waits(started), self._warn_after)
        if self._warn_after > 0:
            _guarded(WATCH.add, watched)
        try:
            info: RendezvousInfo = self._inner.next_rendezvous()
        except Exception as error:
            self._failed("next_rendezvous", error, started)
            raise
        finally:
            WATCH.remove(watched)
        self._ended("completed", started)
        joined: RendezvousInfo | None = _guarded(self._joined, info)
        return info if joined is None else joined

    def is_closed(self) -> bool:
        """Tell whether nobody can join any more."""
        return bool(self._watched("is_closed", self._inner.is_closed))

    def set_closed(self) -> None:
        """Let nobody join any more."""
        self._watched("set_closed", self._inner.set_closed)

    def num_nodes_waiting(self) -> int:
        """Count the nodes on the wait list."""
        found: int = self._watched("num_nodes_waiting", self._inner.num_nodes_waiting)
        return found

    def get_run_id(self) -> str:
        """Give the run id."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """End the rendezvous."""
        return bool(self._watched("shutdown", self._inner.shutdown))

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # before __init__ is through
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _watched(self, during: str, call: Callable[[], T]) -> T:
        started = time.perf_counter_ns()
        try:
            return call()
        except Exception as error:
            self._failed(during, error, started)
            raise

    # What follows only tells, and may not fail the rendezvous.

    def _joined(self, info: RendezvousInfo) -> RendezvousInfo:
        store = _traced(info.store, self._traced_backend)
        before, self._traced_store = self._traced_store, store
        if before is not None and before is not store:
            before.close()
        place = membership.Membership(
            info.rank, info.world_size, _names(self._traced_backend)
        )
        membership.record(store, place)
        if store is info.store:
            return info
        return RendezvousInfo(
            store,
            info.rank,
            info.world_size,
            info.bootstrap_store_info,  # type: ignore[arg-type]  # torch's is Optional when read
        )

    def _failed(self, during: str, error: Exception, started: int) -> None:
        if during == "next_rendezvous":
            timed_out = isinstance(error, RendezvousTimeoutError)
            self._ended("timeout" if timed_out else "failed", started)
        # What failed once fails again in every call after it.
        if (
            not RECORDER.on
            or self._failure_told
            or isinstance(error, RendezvousGracefulExitError)
        ):
            return
        self._failure_told = True
        _guarded(tell, error, self._attempt(during, started))

    def _waits(self, started: int) -> None:
        if RECORDER.on:
            tell_waiting(self._attempt("next_rendezvous", started))

    def _attempt(self, during: str, started: int) -> JoinAttempt:
        settings = getattr(self._inner, "settings", None)
        return JoinAttempt(
            backend=self._traced_backend.name,
            run_id=self.get_run_id(),
            endpoint=self._endpoint,
            during=during,
            waited_seconds=(time.perf_counter_ns() - started) / 1e9,
            min_nodes=getattr(settings, "min_nodes", None),
            max_nodes=getattr(settings, "max_nodes", None),
            where=self._where,
            own=_own_node(self._inner),
            attendance=self._traced_backend.attendance,
        )

    def _ended(self, result: Any, started: int) -> None:
        if RECORDER.on:
            RECORDER.rendezvous.ended(
                self._traced_backend.name, result, time.perf_counter_ns() - started
            )


def _trace_store_of(handler: Any, backend: TracedRendezvousBackend) -> None:
    """Let a handler of torch's have the traced store itself.

    The agents' first words to each other go through the store before next_rendezvous
    gives it to anybody. No reference to the handler is kept: it stops its heartbeats
    when the last one goes.
    """
    get_store = getattr(type(handler), "_get_store", None)
    if get_store is None:
        return
    weak_handler = ref(handler)

    def get_traced_store() -> Store:
        store: Store = get_store(weak_handler())
        traced = _guarded(_traced, store, backend)
        return store if traced is None else traced

    handler._get_store = get_traced_store  # noqa: SLF001 - there is no other way


def _traced(store: Store, backend: TracedRendezvousBackend) -> TracedStore:
    # Around the PrefixStore: what stands below one has no queues and no listing.
    traced = wrap(store)
    last = backend.attendance.last
    world_size = 0 if last is None else len(last.participants)
    traced._traced.explain = explainer(  # noqa: SLF001 - the store is ours
        traced, world_size, _names(backend)
    )
    return traced


def _names(backend: TracedRendezvousBackend) -> Callable[[int], str]:
    """Name the agents of the round that was just completed."""
    last = backend.attendance.last
    nodes = {} if last is None else {r: str(n) for n, r in last.participants.items()}
    return lambda rank: nodes.get(rank) or f"agent {rank}"


def _own_node(handler: Any) -> Node | None:
    found: Any = getattr(handler, "_this_node", None)
    with suppress(AttributeError, TypeError, ValueError):
        return Node(str(found.addr), int(found.pid), int(found.local_id))
    return None


def _where(params: RendezvousParameters, port: int) -> tuple[str, int] | None:
    """Give host and port of an endpoint, where it is one and not a path."""
    if str(params.get("store_type", "tcp")).strip().lower() == "file":
        return None
    with suppress(ValueError):  # torch will say so
        return parse_rendezvous_endpoint(params.endpoint, default_port=port)
    return None
