"""What is kept of the events: counts and columns, not the events.

A million arrivals are a few arrays; calls are counted by key family, failures are kept
one a process.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tracedstore import names
from tracedstore.coordination.decoders import default_name
from tracedstore.coordination.ranges import fold
from tracedstore.report import values
from tracedstore.report.values import NOBODY

COMPLETED, WAITING, TIMEOUT, FAILED = range(4)
NOTHING: Final = 0
_KINDS: Final = {
    names.BARRIER_COMPLETED: COMPLETED,
    names.BARRIER_WAITING: WAITING,
    names.BARRIER_TIMEOUT: TIMEOUT,
    names.BARRIER_FAILED: FAILED,
}
# Families that are told apart: 64 a process, and jobs have few kinds of processes.
_MOST_FAMILIES = 10_000
_OTHERS = "(others)"


class BarrierRecord(NamedTuple):
    """A key prefix in one job."""

    run_id: str
    prefix: str


class Said(NamedTuple):
    """What a rank said of a barrier that it did not get through.

    Attributes:
        text: For people.
        missing: The ranks that it named, folded.
    """

    text: str
    missing: str


UNSAID: Final = Said("", "")


class Process(NamedTuple):
    """Who wrote a line."""

    run_id: str
    rank: int
    host: str
    pid: int


class Failure(NamedTuple):
    """The first thing that failed in a process."""

    when: float
    event: str
    what: str
    error: str


@dataclass(slots=True)
class Calls:
    """Calls of one kind that were told of.

    Attributes:
        told: Lines.
        suppressed_count: What these say was not told.
        longest: Seconds, or losses in a row.
        key: That call's key.
        ranks: Who told.
        errors: Their error types.
    """

    told: int = 0
    suppressed_count: int = 0
    longest: float = -1.0
    key: str = ""
    ranks: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """How many calls there were at least."""
        return self.told + self.suppressed_count


class Visits:
    """Every visit of a barrier by a rank that was told of, in columns."""

    def __init__(self) -> None:
        self.barrier = array("l")
        self.rank = array("l")
        self.end = array("d")
        self.waited = array("d")
        self.kind = array("b")
        self.last = array("l")
        self.said = array("l")
        self.pid = array("l")

    def __len__(self) -> int:
        return len(self.barrier)


class Facts:
    """What many ranks said."""

    def __init__(self) -> None:
        self.visits = Visits()
        self.barriers: dict[tuple[str, str], int] = {}
        self.world_sizes: list[int] = []
        self.said: list[Said] = [UNSAID]
        self.calls: dict[tuple[str, str, str, str], Calls] = {}
        self.first_failures: dict[Process, Failure] = {}
        self.rendezvous: Counter[tuple[str, str, str, str]] = Counter()
        self.stale: Counter[BarrierRecord] = Counter()
        self.disabled: Counter[tuple[str, str]] = Counter()
        self.events: Counter[str] = Counter()
        self.hosts: dict[int, str] = {}
        self.heard: dict[int, tuple[float, str]] = {}
        self.first = float("inf")
        self.last = 0.0
        self._said: dict[tuple[str, tuple[int, ...]], int] = {}
        self._named: dict[int, str] = {}
        self._world_size = 0
        self._add: dict[str, Callable[[Mapping[str, Any], float, int], None]] = {
            **dict.fromkeys(_KINDS, self._visit),
            names.BARRIER_STALE_KEY: self._stale,
            names.OPERATION_SLOW: self._call,
            names.OPERATION_FAILED: self._call,
            names.OPERATION_STALLED: self._call,
            names.CAS_CONTENDED: self._call,
            names.RENDEZVOUS_CONFLICT: self._call,
            names.RENDEZVOUS_WAITING: self._rendezvous_waits,
            names.RENDEZVOUS_TIMEOUT: self._rendezvous,
            names.RENDEZVOUS_FAILED: self._rendezvous,
            names.TELEMETRY_DISABLED: self._disabled,
        }

    def add(self, event: Mapping[str, Any]) -> bool:
        """Take an event in; False, and nothing of it, if it is not fit."""
        try:
            when = values.moment(event["timestamp"])
            rank = values.rank(event)
            host = values.text(event, "host")
            if take := self._add.get(event["event"]):
                take(event, when, rank)
        except values.UNFIT:
            return False
        self.events[event["event"]] += 1
        self.first = min(self.first, when)
        self.last = max(self.last, when)
        if rank != NOBODY:
            size = event.get("world_size")
            if isinstance(size, int):
                self._world_size = max(self._world_size, size)
            if host:
                self.hosts[rank] = host
            heard = self.heard.get(rank)
            if heard is None or heard[0] <= when:
                self.heard[rank] = when, event["event"]
        return True

    def host(self, rank: int) -> str:
        """Name a rank's host: as itself has it, else as others do, else ""."""
        return self.hosts.get(rank) or self._named.get(rank, "")

    def name(self, rank: int) -> str:
        """Name a rank as those that missed it do: their decoder may know better."""
        return self._named.get(rank) or self.hosts.get(rank, "")

    @property
    def world_size(self) -> int:
        """How many ranks the job had, by the largest barrier or what ranks said."""
        return max(self.world_sizes, default=self._world_size)

    def _visit(self, event: Mapping[str, Any], when: float, rank: int) -> None:
        kind = _KINDS[event["event"]]
        run_id, prefix = values.text(event, "run_id"), values.text(event, "barrier")
        waited = values.seconds(event, "waited_seconds")
        last = values.rank(event, "last_rank")
        world_size = values.count(event, "world_size")
        pid = values.count(event, "pid")
        said = NOTHING if kind == COMPLETED else self._interned(event, kind)
        # A plain tuple finds it, and is made in no time.
        place = self.barriers.get((run_id, prefix))
        if place is None:
            place = self.barriers[BarrierRecord(run_id, prefix)] = len(self.barriers)
            self.world_sizes.append(world_size)
        visits = self.visits
        visits.barrier.append(place)
        visits.rank.append(rank)
        visits.end.append(when)
        visits.waited.append(waited)
        visits.kind.append(kind)
        visits.last.append(last)
        visits.said.append(said)
        visits.pid.append(pid)
        if kind in {TIMEOUT, FAILED}:
            self._failure(event, when, prefix, self.said[said].text)

    def _interned(self, event: Mapping[str, Any], kind: int) -> int:
        if kind == FAILED:
            error = f"{values.text(event, 'error_type')}: {values.text(event, 'error')}"
            key: tuple[str, tuple[int, ...]] = error, ()
        else:
            missing = values.ranks(event, "missing_ranks")
            key = values.text(event, "missing"), missing
        found = self._said.get(key)
        if found is None:
            found = self._said[key] = len(self.said)
            self.said.append(Said(key[0], fold(key[1])))
            given = event.get("missing_names", ())
            for missing_rank, name in zip(key[1], given, strict=False):
                if isinstance(name, str) and name != default_name(missing_rank):
                    self._named[missing_rank] = name
        return found

    def _call(self, event: Mapping[str, Any], when: float, rank: int) -> None:
        kind = event["event"]
        key = (
            kind,
            values.text(event, "key_family"),
            values.text(event, "operation"),
            values.text(event, "store"),
        )
        if kind in {names.CAS_CONTENDED, names.RENDEZVOUS_CONFLICT}:
            size = float(values.count(event, "losses_in_a_row"))
        else:
            stalled = kind == names.OPERATION_STALLED
            size = values.seconds(
                event, "waited_seconds" if stalled else "duration_seconds"
            )
        suppressed_count = values.count(event, "suppressed_count")
        error_type = values.text(event, "error_type")
        shown = values.text(event, "key")
        error = values.text(event, "error")
        if key not in self.calls and len(self.calls) >= _MOST_FAMILIES:
            key = kind, _OTHERS, "", ""
        calls = self.calls.setdefault(key, Calls())
        calls.told += 1
        calls.suppressed_count += suppressed_count
        calls.ranks.add(rank)
        if error_type:
            calls.errors[error_type] += 1
        if size > calls.longest:
            calls.longest, calls.key = size, shown
        if kind == names.OPERATION_FAILED:
            what = f"{key[2]} {shown}"
            self._failure(event, when, what, f"{error_type}: {error}")

    def _rendezvous(self, event: Mapping[str, Any], when: float, _rank: int) -> None:
        said = values.text(event, "message")
        cause = values.text(event, "cause")
        endpoint = values.text(event, "endpoint")
        run_id = values.text(event, "run_id")
        self._failure(event, when, f"rendezvous at {endpoint}", said)
        self._tell_rendezvous(event["event"], run_id, cause, said)

    def _rendezvous_waits(
        self, event: Mapping[str, Any], _when: float, _rank: int
    ) -> None:
        # Without its times, which differ in every one of them.
        joined, wanted = values.count(event, "joined_count"), event.get("min_nodes")
        said = f"{joined} of at least {wanted} nodes had joined"
        self._tell_rendezvous(
            event["event"], values.text(event, "run_id"), "waiting", said
        )

    def _tell_rendezvous(self, *told: str) -> None:
        kind, run_id, cause, said = told
        if len(self.rendezvous) < _MOST_FAMILIES:
            self.rendezvous[kind, run_id, cause, said] += 1

    def _stale(self, event: Mapping[str, Any], _when: float, _rank: int) -> None:
        self.stale[
            BarrierRecord(values.text(event, "run_id"), values.text(event, "barrier"))
        ] += 1

    def _disabled(self, event: Mapping[str, Any], _when: float, _rank: int) -> None:
        error = f"{values.text(event, 'error_type')}: {values.text(event, 'error')}"
        self.disabled[values.text(event, "observer"), error] += 1

    def _failure(
        self, event: Mapping[str, Any], when: float, what: str, error: str
    ) -> None:
        process = Process(
            values.text(event, "run_id"),
            values.rank(event),
            values.text(event, "host"),
            values.count(event, "pid"),
        )
        # A span has no pid; a rank's is the same process's, or the one after it.
        if process.rank != NOBODY:
            process = process._replace(host="", pid=0)
        first = self.first_failures.get(process)
        if first is None or when < first.when:
            failure = Failure(when, event["event"], what, error)
            self.first_failures[process] = failure
