"""Accumulates log events as counts and columns; the events themselves are not kept.

A million barrier calls are eight arrays. Store calls are counted per key family, and
one failure is kept per process.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from tracedstore import names
from tracedstore.common.ranges import fold
from tracedstore.naming.decoders import default_name
from tracedstore.tools.report import event_fields as values
from tracedstore.tools.report.event_fields import NO_RANK
from tracedstore.tools.report.record_types import (
    COMPLETED,
    FAILED,
    NO_DETAIL,
    NO_DETAIL_INDEX,
    TIMEOUT,
    WAITING,
    BarrierCallColumns,
    BarrierId,
    CallStats,
    EventDetail,
    FirstFailure,
    LoggedProcess,
)
from tracedstore.tools.report.stall_merging import StallReport

_OUTCOMES: Final = {
    names.BARRIER_COMPLETED: COMPLETED,
    names.BARRIER_WAITING: WAITING,
    names.BARRIER_TIMEOUT: TIMEOUT,
    names.BARRIER_FAILED: FAILED,
}
# A process has at most 64 key families, and a job has few kinds of processes.
_MAX_FAMILIES = 10_000
_OTHER_FAMILIES = "(others)"
# A few ranks report a stall, each time the wait has doubled.
_MAX_STALL_REPORTS = 10_000
# Seconds after which a completed barrier is logged, at most.
_MAX_LATE = 60.0

# Event name, key family, operation, store.
CallKey = tuple[str, str, str, str]


class Records:
    """What the events of all ranks contain.

    Attributes:
        barrier_calls: All barrier calls.
        barrier_ids: All barriers, with their position in ``world_sizes``.
        world_sizes: Number of ranks of each barrier.
        details: Distinct details of barrier events.
        store_calls: Statistics of slow, stalled, failed and contended calls.
        first_failures: The first failure of each process.
        rendezvous: Number of events by name, job, cause and message.
        stale_keys: Number of events by barrier.
        stall_reports: Reports of a stalled job, and of its end.
        unread_stall_reports: Number of such reports beyond the limit.
        stale_stores: Number of events by message.
        disabled_observers: Number of events by observer and error.
        event_counts: Number of events by name.
        hosts: Host of each rank, as logged by the rank.
        last_events: Time and name of the last event of each rank.
        first_time: Time of the first event, in seconds since 1970.
        last_time: Time of the last event.
    """

    def __init__(self) -> None:
        self.barrier_calls = BarrierCallColumns()
        self.barrier_ids: dict[tuple[str, str], int] = {}
        self.world_sizes: list[int] = []
        self.details: list[EventDetail] = [NO_DETAIL]
        self.store_calls: dict[CallKey, CallStats] = {}
        self.first_failures: dict[LoggedProcess, FirstFailure] = {}
        self.rendezvous: Counter[tuple[str, str, str, str]] = Counter()
        self.stale_keys: Counter[BarrierId] = Counter()
        self.stall_reports: list[StallReport] = []
        self.unread_stall_reports = 0
        self.stale_stores: Counter[str] = Counter()
        self.disabled_observers: Counter[tuple[str, str]] = Counter()
        self.event_counts: Counter[str] = Counter()
        self.hosts: dict[int, str] = {}
        self.last_events: dict[int, tuple[float, str]] = {}
        self.first_time = float("inf")
        self.last_time = 0.0
        self._detail_indexes: dict[tuple[str, tuple[int, ...]], int] = {}
        self._missing_names: dict[int, str] = {}
        self._max_world_size = 0
        self._handlers: dict[str, Callable[[Mapping[str, Any], float, int], None]] = {
            **dict.fromkeys(_OUTCOMES, self._add_barrier_call),
            names.BARRIER_STALE_KEY: self._add_stale_key,
            names.OPERATION_SLOW: self._add_store_call,
            names.OPERATION_FAILED: self._add_store_call,
            names.OPERATION_STALLED: self._add_store_call,
            names.CAS_CONTENDED: self._add_store_call,
            names.RENDEZVOUS_CONFLICT: self._add_store_call,
            names.RENDEZVOUS_WAITING: self._add_rendezvous_warning,
            names.RENDEZVOUS_TIMEOUT: self._add_rendezvous_failure,
            names.RENDEZVOUS_FAILED: self._add_rendezvous_failure,
            names.JOB_STALLED: self._add_stall,
            names.JOB_RESUMED: self._add_stall,
            names.STORE_STALE: self._add_stale_store,
            names.TELEMETRY_DISABLED: self._add_disabled_observer,
        }

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add an event. An invalid one changes nothing and returns False."""
        try:
            time = values.timestamp(event["timestamp"])
            rank = values.rank(event)
            host = values.text(event, "host")
            if handler := self._handlers.get(event["event"]):
                handler(event, time, rank)
        except values.INVALID:
            return False
        self.event_counts[event["event"]] += 1
        self.first_time = min(self.first_time, time)
        self.last_time = max(self.last_time, time)
        if rank != NO_RANK:
            size = event.get("world_size")
            if isinstance(size, int):
                self._max_world_size = max(self._max_world_size, size)
            if host:
                self.hosts[rank] = host
            last = self.last_events.get(rank)
            if last is None or last[0] <= time:
                self.last_events[rank] = time, event["event"]
        return True

    def host(self, rank: int) -> str:
        """Return the host that the rank logged, else the one others named, else ""."""
        return self.hosts.get(rank) or self._missing_names.get(rank, "")

    def missing_name(self, rank: int) -> str:
        """Return the name that reports of missing ranks use, else the host, else "".

        The reporting rank may have a decoder that knows more than the host.
        """
        return self._missing_names.get(rank) or self.hosts.get(rank, "")

    @property
    def world_size(self) -> int:
        """Number of ranks of the largest barrier, else the largest logged size."""
        return max(self.world_sizes, default=self._max_world_size)

    def _add_barrier_call(
        self, event: Mapping[str, Any], time: float, rank: int
    ) -> None:
        outcome = _OUTCOMES[event["event"]]
        run_id, prefix = values.text(event, "run_id"), values.text(event, "barrier")
        waited = values.duration(event, "waited_seconds")
        last_rank = values.rank(event, "last_rank")
        world_size = values.count(event, "world_size")
        pid = values.count(event, "pid")
        detail = NO_DETAIL_INDEX
        if outcome != COMPLETED:
            detail = self._detail_index(event, outcome)
        # A plain tuple is an equal key, and cheaper to create than a BarrierId.
        barrier = self.barrier_ids.get((run_id, prefix))
        if barrier is None:
            barrier = len(self.barrier_ids)
            self.barrier_ids[BarrierId(run_id, prefix)] = barrier
            self.world_sizes.append(world_size)
        calls = self.barrier_calls
        calls.barrier.append(barrier)
        calls.rank.append(rank)
        if outcome == COMPLETED and "completed_at" in event:
            completed_at = values.duration(event, "completed_at")
            if 0 < time - completed_at < _MAX_LATE:
                time = completed_at
        calls.end.append(time)
        calls.waited.append(waited)
        calls.outcome.append(outcome)
        calls.last_rank.append(last_rank)
        calls.detail.append(detail)
        calls.pid.append(pid)
        if outcome in {TIMEOUT, FAILED}:
            self._add_failure(event, time, prefix, self.details[detail].text)

    def _detail_index(self, event: Mapping[str, Any], outcome: int) -> int:
        if outcome == FAILED:
            key: tuple[str, tuple[int, ...]] = _error(event), ()
        else:
            missing = values.ranks(event, "missing_ranks")
            key = values.text(event, "missing"), missing
        index = self._detail_indexes.get(key)
        if index is None:
            index = self._detail_indexes[key] = len(self.details)
            self.details.append(EventDetail(key[0], fold(key[1])))
            missing_names = event.get("missing_names", ())
            for missing_rank, name in zip(key[1], missing_names, strict=False):
                if isinstance(name, str) and name != default_name(missing_rank):
                    self._missing_names[missing_rank] = name
        return index

    def _add_store_call(self, event: Mapping[str, Any], time: float, rank: int) -> None:
        name = event["event"]
        call_key: CallKey = (
            name,
            values.text(event, "key_family"),
            values.text(event, "operation"),
            values.text(event, "store"),
        )
        if name in {names.CAS_CONTENDED, names.RENDEZVOUS_CONFLICT}:
            size = float(values.count(event, "losses_in_a_row"))
        elif name == names.OPERATION_STALLED:
            size = values.duration(event, "waited_seconds")
        else:
            size = values.duration(event, "duration_seconds")
        suppressed_count = values.count(event, "suppressed_count")
        error_type = values.text(event, "error_type")
        key = values.text(event, "key")
        error = values.text(event, "error")
        if name == names.OPERATION_FAILED:
            # First, because it validates more fields of the event.
            subject = f"{call_key[2]} {key}"
            self._add_failure(event, time, subject, f"{error_type}: {error}")
        if call_key not in self.store_calls and len(self.store_calls) >= _MAX_FAMILIES:
            call_key = name, _OTHER_FAMILIES, "", ""
        stats = self.store_calls.setdefault(call_key, CallStats())
        stats.logged += 1
        stats.suppressed_count += suppressed_count
        stats.ranks.add(rank)
        if error_type:
            stats.errors[error_type] += 1
        if size > stats.maximum:
            stats.maximum, stats.maximum_key = size, key

    def _add_rendezvous_failure(
        self, event: Mapping[str, Any], time: float, _rank: int
    ) -> None:
        message = values.text(event, "message")
        cause = values.text(event, "cause")
        endpoint = values.text(event, "endpoint")
        run_id = values.text(event, "run_id")
        self._add_failure(event, time, f"rendezvous at {endpoint}", message)
        self._count_rendezvous(event["event"], run_id, cause, message)

    def _add_rendezvous_warning(
        self, event: Mapping[str, Any], _time: float, _rank: int
    ) -> None:
        # Not the text of the event: its times make every text different.
        joined, required = values.count(event, "joined_count"), event.get("min_nodes")
        message = f"{joined} of at least {required} nodes had joined"
        run_id = values.text(event, "run_id")
        self._count_rendezvous(event["event"], run_id, "waiting", message)

    def _count_rendezvous(
        self, name: str, run_id: str, cause: str, message: str
    ) -> None:
        if len(self.rendezvous) < _MAX_FAMILIES:
            self.rendezvous[name, run_id, cause, message] += 1

    def _add_stale_key(
        self, event: Mapping[str, Any], _time: float, _rank: int
    ) -> None:
        run_id, prefix = values.text(event, "run_id"), values.text(event, "barrier")
        self.stale_keys[BarrierId(run_id, prefix)] += 1

    def _add_stall(self, event: Mapping[str, Any], time: float, rank: int) -> None:
        report = StallReport(
            time=time,
            run_id=values.text(event, "run_id"),
            rank=rank,
            resumed=event["event"] == names.JOB_RESUMED,
            phase=values.text(event, "phase"),
            cause=values.text(event, "cause"),
            awaited=values.text(event, "awaited"),
            awaited_ranks=fold(values.ranks(event, "awaited_ranks")),
            waiting_ranks=values.text(event, "waiting_ranks"),
            key=values.text(event, "key"),
            waited=values.duration(event, "waited_seconds"),
            evidence=values.texts(event, "evidence"),
            remedy=values.text(event, "remedy"),
        )
        if len(self.stall_reports) < _MAX_STALL_REPORTS:
            self.stall_reports.append(report)
        else:
            self.unread_stall_reports += 1

    def _add_stale_store(
        self, event: Mapping[str, Any], _time: float, _rank: int
    ) -> None:
        message = values.text(event, "message")
        if message in self.stale_stores or len(self.stale_stores) < _MAX_FAMILIES:
            self.stale_stores[message] += 1

    def _add_disabled_observer(
        self, event: Mapping[str, Any], _time: float, _rank: int
    ) -> None:
        self.disabled_observers[values.text(event, "observer"), _error(event)] += 1

    def _add_failure(
        self, event: Mapping[str, Any], time: float, subject: str, error: str
    ) -> None:
        process = LoggedProcess(
            values.text(event, "run_id"),
            values.rank(event),
            values.text(event, "host"),
            values.count(event, "pid"),
        )
        # Spans have no pid, so events of one rank are taken as one process, also after
        # a restart.
        if process.rank != NO_RANK:
            process = process._replace(host="", pid=0)
        first = self.first_failures.get(process)
        if first is None or time < first.time:
            self.first_failures[process] = FirstFailure(
                time, event["event"], subject, error
            )


def _error(event: Mapping[str, Any]) -> str:
    return f"{values.text(event, 'error_type')}: {values.text(event, 'error')}"
