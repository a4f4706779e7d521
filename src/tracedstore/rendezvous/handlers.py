"""The rendezvous handler that torchrun's agent calls, with telemetry."""

import functools
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, final
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
    DynamicRendezvousHandler,
    RendezvousBackend,
    create_handler,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from tracedstore import elastic, names
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.common.threads import start_bounded_thread
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import BarrierKeys, read_arrivals
from tracedstore.coordination.store_access import side_connection
from tracedstore.diagnosis.ask.responder import AGENT_RESPONDER
from tracedstore.diagnosis.connection.addresses import (
    describe_comparison,
    describe_own,
)
from tracedstore.export import node_metrics
from tracedstore.export.setup import ensure_configured, try_to_configure
from tracedstore.local.facts import ProcessFacts
from tracedstore.local.sockets import LOCAL_SOCKET
from tracedstore.recording.cold_metrics import Result
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER, Watch
from tracedstore.rendezvous.backend import TracedRendezvousBackend
from tracedstore.rendezvous.plugins import create_untraced
from tracedstore.rendezvous.rendezvous_telemetry import (
    JoinAttempt,
    emit_failure,
    emit_silence,
    emit_waiting,
)
from tracedstore.rendezvous.server_checks import (
    check_master_address,
    report_other_runs,
)
from tracedstore.rendezvous.state import DEFAULT_INTERVAL, Attendance, Node
from tracedstore.store import TracedStore, wrap

T = TypeVar("T")
_AGENT_MODULE: Final = "torch.distributed.elastic.agent.server.local_elastic_agent"
_START_WORKERS: Final = "_start_workers"
# The prefix of the keys of the agents' exit barrier.
_EXIT_BARRIER: Final = "torchelastic/agent/terminal_state"
# Seconds: how long a node waits before it reports, and torch for the c10d store.
_WARN_AFTER, _READ_TIMEOUT = 30.0, 60.0
# Runs an optional step of a rendezvous; on failure counts it and returns None.
_guarded = partial(RECORDER.failures.guarded, names.RENDEZVOUS)
CreateBackend = Callable[[RendezvousParameters], tuple[RendezvousBackend, Store]]


def create(
    params: RendezvousParameters, create_backend: CreateBackend, default_port: int
) -> RendezvousHandler:
    """Return the traced handler of a backend that torch creates.

    torch reads the parameters and raises for bad ones. Where a setting of this package
    cannot be used, the failure is reported and the handler is torch's own: the job does
    not fail.
    """
    if not _guarded(_is_configured):
        untraced: RendezvousHandler = create_untraced(params, create_backend)
        return untraced
    where = _host_and_port(params, default_port)
    # From --rdzv-conf, where torch admits any parameter.
    warn_after = _seconds_of(params, "warn_after", _default_warn_after())
    attempt = partial(_connecting_attempt, params, where, RECORDER.ticks())
    watch = Watch(
        names.RENDEZVOUS,
        lambda: emit_waiting(attempt()) if RECORDER.on else None,
        # Before torch gives up.
        min(warn_after, _seconds_of(params, "read_timeout", _READ_TIMEOUT) / 2),
    )
    if warn_after > 0:
        _guarded(WATCHER.add, watch)
    try:
        backend, store = create_backend(params)
    except RendezvousError as error:
        if RECORDER.on:
            _guarded(_report_unconnected, error, attempt)
        raise
    finally:
        WATCHER.remove(watch)
    traced = TracedRendezvousBackend(backend)
    handler = create_handler(store, traced, params)
    return TracedRendezvousHandler(
        handler,
        traced,
        name=params.backend,
        endpoint=params.endpoint,
        where=where,
        warn_after=warn_after,
    )


def _default_warn_after() -> float:
    """Return `stall_after`, which is about waits in a rendezvous too."""
    stall_after = RECORDER.overdue_ns / 1e9
    return stall_after if math.isfinite(stall_after) else _WARN_AFTER


def _is_configured() -> bool:
    ensure_configured()
    return True


def _report_unconnected(
    error: RendezvousError, attempt: Callable[[], JoinAttempt]
) -> None:
    emit_failure(error, attempt())


@final
class TracedRendezvousHandler(RendezvousHandler):
    """Forwards to another rendezvous handler, and emits telemetry.

    A rendezvous that fails emits one event, with the nodes that joined and the cause.
    The store that it returns is traced. The agent's exit barrier, which calls torch's
    barrier without a rank, gets the names of missing agents.

    Args:
        handler: The other handler, created with ``backend``.
        backend: Its traced backend.
        name: What ``get_backend`` returns; by default what the other handler returns.
        endpoint: The endpoint of the rendezvous.
        where: Host and port of the endpoint, where it has them.
        warn_after: Seconds after which a node that waits for others emits
            `rendezvous.waiting`; 0 for never.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        backend: TracedRendezvousBackend,
        *,
        name: str | None = None,
        endpoint: str = "",
        where: tuple[str, int] | None = None,
        warn_after: float = _WARN_AFTER,
    ) -> None:
        self._warn_after = warn_after
        self._inner: Any = handler
        self._traced_backend = backend
        self._plugin_name = name
        self._endpoint = endpoint or backend.identity.server
        self._where = where
        self._failure_reported = False
        # That other jobs use the server, "" before they were looked for.
        self._sharing: str | None = None
        # The nodes of this round that were silent, and those of them that have not
        # finished.
        self._examined: set[Node] = set()
        self._silent: set[Node] = set()
        self._traced_store: TracedStore | None = None
        if RECORDER.on:
            _guarded(elastic.replace_torch_barrier)
            _guarded(replace_start_of_workers)
        _guarded(_trace_store_of, handler, backend)

    def get_backend(self) -> str:
        """Return the name of the backend, as given to torchrun."""
        return self._plugin_name or str(self._inner.get_backend())

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers may use the agent's store."""
        return bool(self._inner.use_agent_store)

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round."""
        self._failure_reported = False
        self._examined.clear()
        self._silent.clear()
        self._traced_backend.attendance.reset()
        started = RECORDER.ticks()
        watch = Watch(
            names.RENDEZVOUS, lambda: self._report_waiting(started), self._warn_after
        )
        if self._warn_after > 0:
            _guarded(WATCHER.add, watch)
        try:
            info: RendezvousInfo = self._inner.next_rendezvous()
        except Exception as error:
            # What a signal handler raises is no failure of the rendezvous.
            if not raised_by_handler(error):
                _guarded(self._failed, "next_rendezvous", error, started)
            raise
        finally:
            WATCHER.remove(watch)
        _guarded(self._ended, "completed", started)
        if self._sharing is None and RECORDER.on:
            self._sharing = ""
            # It reads the store, and the workers must not wait for that.
            look = partial(_guarded, self._look_for_other_runs, info.rank == 0)
            _guarded(start_bounded_thread, look)
        if RECORDER.on:
            last = self._traced_backend.attendance.last
            check = partial(_guarded, check_master_address, info, last)
            _guarded(start_bounded_thread, check)
        joined: RendezvousInfo | None = _guarded(self._joined, info)
        return info if joined is None else joined

    def is_closed(self) -> bool:
        """Return whether the rendezvous is closed."""
        return bool(self._call("is_closed", self._inner.is_closed))

    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._call("set_closed", self._inner.set_closed)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes on the wait list."""
        started = RECORDER.ticks()
        count: int = self._call("num_nodes_waiting", self._inner.num_nodes_waiting)
        # The agent calls this once an interval, as long as its workers run.
        if RECORDER.on:
            _guarded(self._report_silence, started)
        return count

    def get_run_id(self) -> str:
        """Return the run id."""
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        """Shut the rendezvous down."""
        return bool(self._call("shutdown", self._inner.shutdown))

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # before __init__ has set it
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _call(self, during: str, call: Callable[[], T]) -> T:
        started = RECORDER.ticks()
        try:
            return call()
        except Exception as error:
            if not raised_by_handler(error):
                _guarded(self._failed, during, error, started)
            raise

    # The rest is optional and must not fail the rendezvous.

    def _joined(self, info: RendezvousInfo) -> RendezvousInfo:
        store = _traced(info.store)
        attendance, own = self._traced_backend.attendance, _own_node(self._inner)
        # Without a reference to torch's handler; see `_trace_store_of`.
        LOCAL_SOCKET.silent_agents = partial(
            _silent_agents, attendance, own, self._silent_after, self._silent
        )
        before, self._traced_store = self._traced_store, store
        if before is not None and before is not store:
            before.close()
        _record_agent(store, info.rank, info.world_size, self._traced_backend)
        if store is info.store:
            return info
        return RendezvousInfo(
            store,
            info.rank,
            info.world_size,
            info.bootstrap_store_info,  # type: ignore[arg-type]  # torch's is Optional when read
        )

    def _look_for_other_runs(self, is_first: bool) -> None:
        """Report other jobs that use the server of this rendezvous."""
        runs = self._traced_backend.find_other_runs(is_first=is_first)
        self._sharing = report_other_runs(runs, self._endpoint, self.get_run_id())

    def _failed(self, during: str, error: Exception, started: int) -> None:
        # A scheduler or a person ends the job: no failure, whatever was lost before.
        # By name: only torchrun imports the module of that class.
        if type(error).__name__ == "SignalException":
            return
        if during == "next_rendezvous":
            timed_out = isinstance(error, RendezvousTimeoutError)
            self._ended("timeout" if timed_out else "failed", started)
        # A rendezvous that failed fails again in every later call.
        if (
            not RECORDER.on
            or self._failure_reported
            or isinstance(error, RendezvousGracefulExitError)
        ):
            return
        self._failure_reported = True
        emit_failure(error, self._attempt(during, started))

    def _report_waiting(self, started: int) -> None:
        if RECORDER.on:
            emit_waiting(self._attempt("next_rendezvous", started))

    def _report_silence(self, started: int) -> None:
        """Report the nodes of this round that are silent, each of them once."""
        attendance, own = self._traced_backend.attendance, _own_node(self._inner)
        found = attendance.silent_ranks(own, self._silent_after, time.time())
        silent = {node: rank for rank, (node, _) in found.items()}
        if not silent.keys() <= self._examined:
            self._examined.update(silent)
            # It reads the store, and the agent must not wait for that.
            examine = partial(_guarded, self._examine_silence, silent, own, started)
            start_bounded_thread(examine)

    def _examine_silence(
        self, silent: Mapping[Node, int], own: Node | None, started: int
    ) -> None:
        """Report those of the silent nodes that are not in the exit barrier.

        An agent that waits there sends no heartbeats: the wait has the one connection.
        """
        finished = _finished_agents(self._traced_store)
        active = {node for node, rank in silent.items() if rank not in finished}
        self._silent.update(active)
        attendance = self._traced_backend.attendance
        reported = attendance.silent(own, self._silent_after, time.time())
        reported = [node for node in reported if node in self._silent]
        if active.intersection(reported) and self._warn_after > 0:
            emit_silence(self._attempt("num_nodes_waiting", started), reported)

    @property
    def _silent_after(self) -> float:
        """The seconds without a heartbeat after which a node counts as silent.

        One heartbeat later torch removes it from the state. Infinite if there are none.
        """
        settings = getattr(self._inner, "settings", None)
        attempts = getattr(settings, "keep_alive_max_attempt", None)
        if not isinstance(attempts, int):
            return math.inf
        return max(1, attempts - 1) * _heartbeat_interval(settings)

    def _attempt(self, during: str, started: int) -> JoinAttempt:
        settings = getattr(self._inner, "settings", None)
        if settings is None and isinstance(self._inner, DynamicRendezvousHandler):
            RECORDER.failures.add_missing(
                names.RENDEZVOUS,
                "DynamicRendezvousHandler.settings",
                "events of a rendezvous do not have the numbers of nodes",
            )
        return JoinAttempt(
            backend=self._traced_backend.name,
            run_id=self.get_run_id(),
            endpoint=self._endpoint,
            during=during,
            waited_seconds=(RECORDER.ticks() - started) / 1e9,
            min_nodes=getattr(settings, "min_nodes", None),
            max_nodes=getattr(settings, "max_nodes", None),
            where=self._where,
            own=_own_node(self._inner),
            attendance=self._traced_backend.attendance,
            lacks_server=getattr(self._inner, "_shared_tcp_store_server", "") is None,
            hint=self._sharing or "",
            written_seconds_ago=self._traced_backend.written_seconds_ago,
            heartbeat_interval=_heartbeat_interval(settings),
        )

    def _ended(self, result: Result, started: int) -> None:
        if RECORDER.on:
            labels = self._traced_backend.name, result
            duration = RECORDER.ticks() - started
            RECORDER.cold.record((names.RENDEZVOUS_DURATION, labels, duration))


def _silent_agents(
    attendance: Attendance, own: Node | None, seconds: float, silent: Collection[Node]
) -> list[ProcessFacts]:
    """Return the agents of this round that send no heartbeats, and should."""
    found = attendance.silent_ranks(own, seconds, time.time())
    return [
        ProcessFacts(rank=rank, host=node.addr, pid=node.pid, idle_seconds=age)
        for rank, (node, age) in found.items()
        if node in silent
    ]


def _finished_agents(store: TracedStore | None) -> Collection[int]:
    """Return the agents in the exit barrier; all, if one came there without a rank."""
    member = None if store is None else rank_registry.agent_in(store)
    if store is None or member is None:
        return ()
    keys = BarrierKeys(_EXIT_BARRIER)
    with RECORDER.unrecorded(), side_connection(store) as connection:
        report = read_arrivals(connection, keys, member.world_size)
    everyone = range(member.world_size)
    if report.unidentified_count:
        return everyone
    return set(everyone).difference(report.unseen_ranks)


def _trace_store_of(handler: Any, backend: TracedRendezvousBackend) -> None:
    """Let torch's handler use the traced store itself.

    The agents' first exchange goes through the store before next_rendezvous returns it.
    The handler is referred to weakly: it stops its heartbeats when it is deleted.
    """
    get_store = getattr(type(handler), "_get_store", None)
    if get_store is None:
        if isinstance(handler, DynamicRendezvousHandler):
            RECORDER.failures.add_missing(
                names.RENDEZVOUS,
                "DynamicRendezvousHandler._get_store",
                "the first exchange of the agents is not traced",
            )
        return
    weak_handler = ref(handler)

    def get_traced_store() -> Store:
        store: Store = get_store(weak_handler())
        traced: Store | None = _guarded(_traced, store)
        if traced is None:
            return store
        # The agents wait for each other in this store before the handler returns it.
        _guarded(_record_own_rank, traced, weak_handler(), backend)
        return traced

    handler._get_store = get_traced_store  # noqa: SLF001 - torch has no public hook


def _traced(store: Store) -> TracedStore:
    # Around the PrefixStore: a store below one has no queues and no list_keys.
    return wrap(store)


def _record_agent(
    store: TracedStore, rank: int, world_size: int, backend: TracedRendezvousBackend
) -> None:
    """Record the rank of this agent, and the agents of the last completed round."""
    last = backend.attendance.last
    nodes = {} if last is None else {r: n for n, r in last.participants.items()}
    names = {rank: str(node) for rank, node in nodes.items()}
    member = rank_registry.Member(
        rank=rank,
        world_size=world_size,
        host_of=lambda rank: names.get(rank) or f"agent {rank}",
        agents={rank: (node.addr, node.pid) for rank, node in nodes.items()},
    )
    rank_registry.record_agent(store, member)


def _record_own_rank(
    store: TracedStore, handler: Any, backend: TracedRendezvousBackend
) -> None:
    """Record the rank that the last round assigned to this node."""
    last, own = backend.attendance.last, _own_node(handler)
    if last is not None and own is not None and own in last.participants:
        size = len(last.participants)
        _record_agent(store, last.participants[own], size, backend)


def _heartbeat_interval(settings: Any) -> float:
    interval: Any = getattr(settings, "keep_alive_interval", None)
    is_known = isinstance(interval, timedelta)
    return interval.total_seconds() if is_known else DEFAULT_INTERVAL


def _own_node(handler: Any) -> Node | None:
    found: Any = getattr(handler, "_this_node", None)
    with suppress(AttributeError, TypeError, ValueError):
        return Node(str(found.addr), int(found.pid), int(found.local_id))
    if isinstance(handler, DynamicRendezvousHandler):
        RECORDER.failures.add_missing(
            names.RENDEZVOUS,
            "DynamicRendezvousHandler._this_node",
            "events of a rendezvous do not name their own node",
        )
    return None


def _host_hint(params: RendezvousParameters, where: tuple[str, int] | None) -> str:
    """Return why this agent does not serve the endpoint; "" if it should.

    The c10d store is served by the agent whose machine has the name or an address of
    the endpoint. If no agent has, all of them wait for one that does not exist.
    """
    is_c10d = params.backend.removeprefix("traced-") == "c10d"
    if not is_c10d or where is None:
        return ""
    # Private to torch, and only the hint needs it.
    from torch.distributed.elastic.rendezvous.utils import (  # noqa: PLC0415
        _matches_machine_hostname,
    )

    host = where[0]
    if params.get_as_bool("is_host", _matches_machine_hostname(host)):
        return ""
    chosen = "is_host is false in --rdzv-conf"
    if params.get("is_host") is None:
        chosen = describe_comparison(host)
    return (
        f"this agent does not serve the endpoint, because {chosen} ({describe_own()});"
        " if it should, pass --rdzv-conf is_host=1, or use the name of this machine as"
        " the endpoint"
    )


def _host_and_port(params: RendezvousParameters, port: int) -> tuple[str, int] | None:
    """Return host and port of an endpoint; None for a path."""
    if str(params.get("store_type", "tcp")).strip().lower() == "file":
        return None
    with suppress(ValueError):  # torch raises for it
        return parse_rendezvous_endpoint(params.endpoint, default_port=port)
    return None


def _seconds_of(params: RendezvousParameters, name: str, default: float) -> float:
    """Return a parameter in seconds."""
    with suppress(TypeError, ValueError):
        return float(params.get(name))
    return default


def _connecting_attempt(
    params: RendezvousParameters, where: tuple[str, int] | None, started: int
) -> JoinAttempt:
    """Return the attempt of an agent that has no backend yet."""
    waited = (RECORDER.ticks() - started) / 1e9
    hint = _guarded(_host_hint, params, where)
    return JoinAttempt(
        backend=params.backend.removeprefix("traced-"),
        run_id=params.run_id,
        endpoint=params.endpoint,
        during="create_backend",
        waited_seconds=waited,
        min_nodes=params.min_nodes,
        max_nodes=params.max_nodes,
        where=where,
        hint=hint or "",
    )


# The class, torch's own method, and the one that replaces it.
_replaced: tuple[Any, Any, Any] | None = None


def replace_start_of_workers() -> None:
    """Let agents of this process answer for the workers that they start.

    They also serve the metrics of these workers (`export.node_metrics`). A torch
    without the method is not patched: then the agents do neither.
    """
    global _replaced  # noqa: PLW0603 - torch is patched once per process
    # Not imported: a process that has not imported it is no agent of torchrun.
    module = sys.modules.get(_AGENT_MODULE)
    agent = getattr(module, "LocalElasticAgent", None)
    original = vars(agent).get(_START_WORKERS) if agent is not None else None
    if original is None or _replaced is not None:
        return

    @functools.wraps(original)
    def start_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        on = try_to_configure(names.DIAGNOSIS)
        with node_metrics.announced() if on else nullcontext():
            started = original(self, *args, **kwargs)
        if on:
            processes = getattr(self, "_pcontext", None)
            RECORDER.failures.guarded(
                names.DIAGNOSIS, AGENT_RESPONDER.started, processes
            )
        return started

    setattr(agent, _START_WORKERS, start_workers)
    _replaced = agent, original, start_workers


def restore_start_of_workers() -> None:
    """Restore torch's own method."""
    global _replaced  # noqa: PLW0603 - torch is patched once per process
    if _replaced is None:
        return
    agent, original, ours = _replaced
    # Another library may have patched it since.
    if vars(agent).get(_START_WORKERS) is ours:
        setattr(agent, _START_WORKERS, original)
    _replaced = None
