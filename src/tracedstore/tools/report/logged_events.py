"""What the events of a log have: counts and columns. The events are not kept.

A million barrier calls are eight arrays. Store calls are counted per key family, and
one failure is kept per process.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from tracedstore import names
from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS, fold
from tracedstore.naming.decoders import default_name

# Outcomes of a barrier call, from the event that reports it. WAITING is a warning: the
# call had not ended yet.
COMPLETED, WAITING, TIMEOUT, FAILED = range(4)
# Every exception that reading a field of an event raises.
INVALID: Final = (KeyError, TypeError, ValueError, OverflowError)
NO_RANK: Final = -1

_MAX_TEXT_LENGTH = 512
_MAX_TEXTS = 16
# Seconds since 1970: September 2001 and October 2096.
_MIN_TIMESTAMP, _MAX_TIMESTAMP = 1.0e9, 4.0e9

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


class BarrierId(NamedTuple):
    """The key prefix of a barrier, and the job that uses it."""

    run_id: str
    prefix: str


class EventDetail(NamedTuple):
    """Details of an event about a barrier call that did not complete.

    Attributes:
        text: The text on missing ranks, or the error.
        missing: The missing ranks, as folded ranges.
    """

    text: str
    missing: str

    @property
    def claim(self) -> str:
        """What two reports must have in common to agree.

        The text also says what the missing ranks do, which changes between two looks.
        """
        return self.missing or self.text


# Position of NO_DETAIL in LoggedEvents.details.
NO_DETAIL_INDEX: Final = 0
NO_DETAIL: Final = EventDetail("", "")


class LoggedProcess(NamedTuple):
    """The process that logged an event, or printed something.

    Attributes:
        run_id: Its job, "" if not known.
        rank: Its rank, or NO_RANK.
        host: Its host, "" if not known.
        pid: Its pid, 0 if not known.
        source: The file or pod whose lines it printed, if its rank is not known.
    """

    run_id: str
    rank: int
    host: str
    pid: int
    source: str = ""


class FirstFailure(NamedTuple):
    """The first failure of a process.

    Attributes:
        time: Seconds since 1970, by the clock of its host.
        event: Name of the event.
        subject: The barrier, the call or the rendezvous that failed.
        error: Error type and message.
    """

    time: float
    event: str
    subject: str
    error: str


@dataclass(slots=True)
class CallStats:
    """Statistics of the store calls of one kind.

    Attributes:
        logged: Number of events.
        suppressed_count: Number of calls that these events report as not logged.
        maximum: The longest duration in seconds, or the most losses in a row.
        maximum_key: The key of that call.
        ranks: Ranks that logged such calls.
        errors: Error types, with their counts.
    """

    logged: int = 0
    suppressed_count: int = 0
    maximum: float = -1.0
    maximum_key: str = ""
    ranks: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Minimum number of calls."""
        return self.logged + self.suppressed_count


class LoggedBarrierCall(NamedTuple):
    """One rank's barrier call.

    Attributes:
        rank: The calling rank, or NO_RANK.
        end: When the event was logged, in seconds since 1970.
        waited: Seconds from the arrival of the rank until then.
        outcome: COMPLETED, WAITING, TIMEOUT or FAILED.
        last_rank: The rank that arrived last, or NO_RANK.
        detail: Position of the details in LoggedEvents.details.
        pid: The calling process; 0 if not known.
        warning_detail: Position of the details of its last warning, where the call has
            another outcome than WAITING.
        warning_time: When that warning was logged.
    """

    rank: int
    end: float
    waited: float
    outcome: int
    last_rank: int
    detail: int
    pid: int
    warning_detail: int = NO_DETAIL_INDEX
    warning_time: float = 0.0

    @property
    def arrival(self) -> float:
        """When the rank arrived, by the clock of its host."""
        return self.end - self.waited

    @property
    def last_warning(self) -> tuple[int, float]:
        """Details and time of the last warning."""
        if self.outcome == WAITING:
            return self.detail, self.end
        return self.warning_detail, self.warning_time


class BarrierCallColumns:
    """All logged barrier calls, one array for each field but those of warnings.

    Attributes:
        barrier: Position of the barrier of each call in LoggedEvents.barrier_ids.
    """

    def __init__(self) -> None:
        self.barrier = array("l")
        self.rank = array("l")
        self.end = array("d")
        self.waited = array("d")
        self.outcome = array("b")
        self.last_rank = array("l")
        self.detail = array("l")
        self.pid = array("l")

    def __len__(self) -> int:
        return len(self.barrier)

    def call(self, row: int) -> LoggedBarrierCall:
        """Return one of the calls."""
        return LoggedBarrierCall(
            self.rank[row],
            self.end[row],
            self.waited[row],
            self.outcome[row],
            self.last_rank[row],
            self.detail[row],
            self.pid[row],
        )


class StallReport(NamedTuple):
    """One event `job.stalled` or `job.resumed`.

    Attributes:
        time: When it was logged, in seconds since 1970.
        run_id: Run id of the job; "" if not known.
        rank: The reporting rank, or NO_RANK.
        resumed: Whether it is `job.resumed`.
        phase: What the waiting ranks executed.
        cause: Why the awaited ranks did not arrive.
        awaited: The awaited ranks as text.
        awaited_ranks: The awaited ranks, as folded ranges.
        waiting_ranks: The waiting ranks, as folded ranges.
        key: A key that one of them waited for.
        waited: Seconds that the longest of these waits had lasted.
        evidence: How the cause is known.
        remedy: What to do.
    """

    time: float
    run_id: str
    rank: int
    resumed: bool
    phase: str
    cause: str
    awaited: str
    awaited_ranks: str
    waiting_ranks: str
    key: str
    waited: float
    evidence: tuple[str, ...]
    remedy: str

    @property
    def start(self) -> float:
        """When the longest of the waits began."""
        return self.time - self.waited


class LoggedEvents:
    """What the events of all ranks contain.

    Attributes:
        barrier_calls: All barrier calls.
        barrier_ids: All barriers, with their position in ``world_sizes``.
        world_sizes: Number of ranks of each barrier.
        details: Distinct details of barrier events.
        store_calls: Statistics of slow, stalled, failed and contended calls.
        first_failures: The first failure of each process.
        rendezvous: Number of events by name, job, cause and message.
        stall_reports: Reports of a stalled job, and of its end.
        unread_stall_reports: Number of such reports beyond the limit.
        other_events: Number of events by name and subject: a barrier, the message about
            a store, or an observer and its error.
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
        self.stall_reports: list[StallReport] = []
        self.unread_stall_reports = 0
        self.other_events: dict[str, Counter[str]] = {
            name: Counter()
            for name in (
                names.BARRIER_STALE_KEY,
                names.STORE_STALE,
                names.TELEMETRY_DISABLED,
            )
        }
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
            names.OPERATION_SLOW: self._add_store_call,
            names.OPERATION_FAILED: self._add_store_call,
            names.OPERATION_STALLED: self._add_store_call,
            names.CAS_CONTENDED: self._add_store_call,
            names.RENDEZVOUS_CONFLICT: self._add_store_call,
            names.RENDEZVOUS_WAITING: self._add_rendezvous,
            names.RENDEZVOUS_TIMEOUT: self._add_rendezvous,
            names.RENDEZVOUS_FAILED: self._add_rendezvous,
            names.JOB_STALLED: self._add_stall,
            names.JOB_RESUMED: self._add_stall,
            # One more report of a stall that its process has reported before.
            names.JOB_ABORTED: self._add_stall,
            **dict.fromkeys(self.other_events, self._add_other_event),
        }

    def add(self, event: Mapping[str, Any]) -> bool:
        """Add an event. An invalid one changes nothing and returns False."""
        try:
            time = parse_timestamp(event["timestamp"])
            rank = _rank(event)
            host = _text(event, "host")
            if handler := self._handlers.get(event["event"]):
                handler(event, time, rank)
        except INVALID:
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
        run_id, prefix = _text(event, "run_id"), _text(event, "barrier")
        waited = _duration(event, "waited_seconds")
        last_rank = _rank(event, "last_rank")
        world_size = _count(event, "world_size")
        pid = _count(event, "pid")
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
            completed_at = _duration(event, "completed_at")
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
            missing = _ranks(event, "missing_ranks")
            key = _text(event, "missing"), missing
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
            _text(event, "key_family"),
            _text(event, "operation"),
            _text(event, "store"),
        )
        if name in {names.CAS_CONTENDED, names.RENDEZVOUS_CONFLICT}:
            size = float(_count(event, "losses_in_a_row"))
        elif name == names.OPERATION_STALLED:
            size = _duration(event, "waited_seconds")
        else:
            size = _duration(event, "duration_seconds")
        suppressed_count = _count(event, "suppressed_count")
        error_type = _text(event, "error_type")
        key = _text(event, "key")
        error = _text(event, "error")
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

    def _add_rendezvous(
        self, event: Mapping[str, Any], time: float, _rank: int
    ) -> None:
        run_id = _text(event, "run_id")
        if event["event"] == names.RENDEZVOUS_WAITING:
            # Not the text of the event: its times make every text different.
            joined, required = _count(event, "joined_count"), event.get("min_nodes")
            cause = "waiting"
            message = f"{joined} of at least {required} nodes had joined"
        else:
            cause, message = _text(event, "cause"), _text(event, "message")
            subject = f"rendezvous at {_text(event, 'endpoint')}"
            self._add_failure(event, time, subject, message)
        if len(self.rendezvous) < _MAX_FAMILIES:
            self.rendezvous[event["event"], run_id, cause, message] += 1

    def _add_stall(self, event: Mapping[str, Any], time: float, rank: int) -> None:
        report = StallReport(
            time=time,
            run_id=_text(event, "run_id"),
            rank=rank,
            resumed=event["event"] == names.JOB_RESUMED,
            phase=_text(event, "phase"),
            cause=_text(event, "cause"),
            awaited=_text(event, "awaited"),
            awaited_ranks=fold(_ranks(event, "awaited_ranks")),
            waiting_ranks=_text(event, "waiting_ranks"),
            key=_text(event, "key"),
            waited=_duration(event, "waited_seconds"),
            evidence=_texts(event, "evidence"),
            remedy=_text(event, "remedy"),
        )
        if len(self.stall_reports) < _MAX_STALL_REPORTS:
            self.stall_reports.append(report)
        else:
            self.unread_stall_reports += 1

    def _add_other_event(
        self, event: Mapping[str, Any], _time: float, _rank: int
    ) -> None:
        name = event["event"]
        if name == names.BARRIER_STALE_KEY:
            subject = _text(event, "barrier")
        elif name == names.STORE_STALE:
            subject = _text(event, "message")
        else:
            subject = f"{_text(event, 'observer')} {_error(event)}"
        counts = self.other_events[name]
        if subject in counts or len(counts) < _MAX_FAMILIES:
            counts[subject] += 1

    def _add_failure(
        self, event: Mapping[str, Any], time: float, subject: str, error: str
    ) -> None:
        process = LoggedProcess(
            _text(event, "run_id"),
            _rank(event),
            _text(event, "host"),
            _count(event, "pid"),
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
    return f"{_text(event, 'error_type')}: {_text(event, 'error')}"


def parse_timestamp(value: object) -> float:
    """Return seconds since 1970 from such a number or from an ISO 8601 text.

    A text without a time zone is read as UTC.
    """
    if isinstance(value, str):
        parsed = datetime.fromisoformat(value)
        if parsed.tzinfo is None:
            parsed = parsed.replace(tzinfo=UTC)
        seconds = parsed.timestamp()
    else:
        seconds = _number(value)
    if not _MIN_TIMESTAMP < seconds < _MAX_TIMESTAMP:
        raise ValueError("timestamp out of range")
    return seconds


def _duration(event: Mapping[str, Any], name: str) -> float:
    """Return a duration in seconds. The field is required."""
    return _number(event[name])


def _count(event: Mapping[str, Any], name: str) -> int:
    """Return a count, 0 if the field is absent."""
    value = event.get(name)
    return 0 if value is None else int(_number(value))


def _text(event: Mapping[str, Any], name: str) -> str:
    """Return the first 512 characters of a text, "" if the field is absent."""
    value = event.get(name, "")
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a string")
    return value[:_MAX_TEXT_LENGTH]


def _texts(event: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the first 16 texts of a list, empty if the field is absent."""
    items = event.get(name, [])
    if not isinstance(items, list):
        raise TypeError(f"{name} is not a list")
    return tuple(_text({name: item}, name) for item in items[:_MAX_TEXTS])


def _rank(event: Mapping[str, Any], name: str = "rank") -> int:
    """Return a rank, NO_RANK if the field is absent."""
    value = event.get(name)
    return NO_RANK if value is None else validation.integer(value, MAX_RANKS)


def _ranks(event: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a list of ranks, empty if the field is absent."""
    return tuple(validation.integer(one, MAX_RANKS) for one in event.get(name, ()))


def _number(value: object) -> float:
    number = validation.seconds(value)
    if number >= _MAX_TIMESTAMP:
        raise ValueError("number out of range")
    return number
