"""Who arrived at a barrier and who is missing: keys, arrival, and what others read.

The first four keys are torch's (``torch/distributed/elastic/utils/store.py``), so that
traced ranks and plain torch ranks complete one barrier together. Only tracedstore
reads the other keys.

A rank records its arrival in the ledger, if the store has ``append``, and otherwise in
a key of its own. Who arrived is read in as few round trips as the store allows, the
best way first: one read of the ledger; one listing of all keys, on an EtcdStore; else
``check`` on halved ranges of ranks, about m·log2(N) round trips for m missing ranks of
N. There is never one wait per rank: that takes one timeout per missing rank, and
reports a present rank as missing when the store is slow.

A rank that has read the arrivals publishes its `MissingReport` under the barrier's
`missing_report` key, for the other ranks and for ``tracedstore status``.
"""

import struct
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

from tracedstore import names
from tracedstore.common import codec, ranges, validation
from tracedstore.common.codec import LATER, Kind, Printable, UpTo, WorldSize
from tracedstore.coordination.store_access import etcd_keys, find_absent, read_key
from tracedstore.naming import decoders
from tracedstore.recording.cold_metrics import Labels
from tracedstore.recording.recorder import RECORDER

# A report that names 98,304 missing ranks has 5 MB.
_MAX_REPORT_BYTES = 8 * 1024 * 1024
# Ranks may arrive more than once.
_MAX_COUNT = 2 * ranges.MAX_RANKS
# Ranks whose activity is part of the text; all are in the fields.
_MAX_FINDINGS_IN_TEXT = 4
# Missing ranks that have a gauge.
_MAX_RANKS_NAMED = 64
# Checks for repeated ranks, one each: only after a restart, without a ledger.
_MAX_REPEAT_CHECKS = 256
# Reads of a barrier at which ranks arrive meanwhile.
_MAX_READS = 4
_MAX_LAST_ARRIVAL_BYTES = 4096
_MAX_RANK = 2**32

_NUM_MEMBERS = "/num_members"


@dataclass(frozen=True, slots=True)
class BarrierKeys:
    """The store keys of one barrier.

    Attributes:
        prefix: The ``key_prefix`` that the caller passed to the barrier.
    """

    prefix: str

    @property
    def num_members(self) -> str:
        """The number of arrivals; each rank adds 1."""
        return f"{self.prefix}{_NUM_MEMBERS}"

    @staticmethod
    def prefix_of(key: str) -> str | None:
        """Return the prefix of a barrier's `num_members` key; None for other keys."""
        return key.removesuffix(_NUM_MEMBERS) if key.endswith(_NUM_MEMBERS) else None

    @property
    def last_member(self) -> str:
        """Set by the last rank to arrive: the barrier is complete."""
        return f"{self.prefix}/last_member"

    def trace(self, rank: int) -> str:
        """Set by a rank that arrived; plain torch ranks set it after their timeout."""
        return f"{self.prefix}{rank}/TRACE"

    @property
    def tracing_gate(self) -> str:
        """Set by torch's rank 0 after it has collected the missing ranks."""
        return f"{self.prefix}/TRACING_GATE"

    @property
    def ledger(self) -> str:
        """The ledger: one entry per arrival, in the order of arrival."""
        return f"{self.prefix}/ARRIVALS"

    @property
    def repeat_count(self) -> str:
        """The number of repeated arrivals, on stores without a ledger."""
        return f"{self.prefix}/REPEATS"

    def repeated(self, rank: int) -> str:
        """Set by a rank that arrives again, on stores without a ledger."""
        return f"{self.prefix}{rank}/AGAIN"

    @property
    def confirmations(self) -> str:
        """A second ledger: ranks that were counted, written after their timeout."""
        return f"{self.prefix}/COUNTED"

    def counted(self, rank: int) -> str:
        """Set after its timeout by a rank that was counted, without a ledger."""
        return f"{self.prefix}{rank}/COUNTED"

    @property
    def missing_report(self) -> str:
        """The latest `MissingReport`."""
        return f"{self.prefix}/MISSING"


_LEDGER_SUFFIXES = (BarrierKeys("").ledger, BarrierKeys("").confirmations)


def is_ledger_key(key: str) -> bool:
    """Return whether a key is the ledger of a barrier; ledgers may be large."""
    return key.endswith(_LEDGER_SUFFIXES)


def last_arrival(rank: int | None) -> str:
    """Return the value of the `last_member` key, which the last rank to arrive writes.

    It is what json.dumps returns, in a fifth of the time; store.cpp does the same.
    """
    return f'{{"rank": {"null" if rank is None else rank}}}'


def last_rank(value: bytes) -> int | None:
    """Return the rank in the value of the `last_member` key.

    None if the rank did not know its own, and if another program wrote the value, such
    as torch's barrier.
    """
    try:
        rank = validation.load_json(value, _MAX_LAST_ARRIVAL_BYTES)["rank"]
        return None if rank is None else validation.integer(rank, _MAX_RANK)
    except (ValueError, TypeError, KeyError):
        return None


# One ledger entry: the rank and its time of arrival, in seconds since the epoch.
_ARRIVAL = struct.Struct(">Id")


def encode_arrival(rank: int, time: float) -> bytes:
    """Encode the ledger entry of a rank; store.cpp does the same.

    Args:
        rank: The rank that arrived.
        time: When it arrived, in seconds since the epoch.
    """
    return _ARRIVAL.pack(rank, time)


def is_complete(entries: bytes, world_size: int) -> bool:
    """Return whether a ledger has each rank once, and nothing else.

    Quicker than `Ledger`, and what the last rank reads in almost every barrier.
    """
    size = _ARRIVAL.size
    if len(entries) != size * world_size:
        return False
    return len({entries[at : at + 4] for at in range(0, len(entries), size)}) == (
        world_size
    )


class Ledger:
    """The arrivals at a barrier, as read from its ledger key.

    An incomplete entry at the end is ignored.

    Attributes:
        entries: The value of the key.
    """

    __slots__ = ("entries",)

    def __init__(self, entries: bytes = b"") -> None:
        self.entries = entries

    def ranks(self) -> Sequence[int]:
        """Return the ranks in the order of arrival, once per arrival.

        The entries are converted all at once: one at a time takes many times as long,
        which counts with 16,384 entries while all ranks wait.
        """
        words = array("I", self._whole())
        if sys.byteorder == "little":
            words.byteswap()
        return words[:: _ARRIVAL.size // words.itemsize]

    def times(self) -> list[float]:
        """Return the times of arrival in the same order, each by the rank's clock."""
        return [time for _, time in _ARRIVAL.iter_unpack(self._whole())]

    def _whole(self) -> bytes:
        """Return the entries without an incomplete one."""
        return self.entries[: len(self.entries) - len(self.entries) % _ARRIVAL.size]


def record_arrival(store: Any, keys: BarrierKeys, rank: int) -> bool:
    """Record the arrival of a rank; return whether that went into the ledger."""
    if store.has_extended_api():
        # A TCPStore sends no reply to an append.
        store.append(keys.ledger, encode_arrival(rank, time.time()))
        return True
    # torch only checks whether the TRACE key exists, so it can be a counter.
    if store.add(keys.trace(rank), 1) > 1:
        store.add(keys.repeat_count, 1)
        store.set(keys.repeated(rank), "")
    return False


def confirm_arrival(store: Any, keys: BarrierKeys, rank: int) -> None:
    """Record that a rank was counted; at its timeout, when others read the arrivals."""
    if store.has_extended_api():
        store.append(keys.confirmations, encode_arrival(rank, time.time()))
    else:
        store.set(keys.counted(rank), "")


class Meeting:
    """What a rank does at a barrier: it arrives, and waits or completes the barrier.

    Each of these steps is several calls of the store. On the native base store.cpp has
    a class with the same methods and attributes: in a barrier the caches are cold, and
    Python code takes longer than the calls. This one is for every other store, and for
    arguments that C++ does not take. Both leave what came of it in their attributes;
    `barrier.BarrierCall` decides on the steps.

    Args:
        prefix: Prefix of the barrier's keys.
        rank: The rank of this process, where it is known.
        world_size: Number of ranks.
        timeout: Seconds to wait.
        observed: A span or an event is made of the call, which needs the last rank.

    Attributes:
        order: The position of the arrival, from 1; 0 before it.
        arrived: When the store had counted this rank, in ticks.
        in_ledger: The arrival is in the ledger. That it is not fails no barrier.
        is_last: This rank arrived last, and has completed the barrier.
        last: What the last rank wrote; None if it was not or cannot be read.
        entries: As the last rank: the ledger, if it has not each rank once; empty if
            this rank is not in it.
    """

    def __init__(
        self,
        prefix: str,
        rank: int | None,
        world_size: int,
        timeout: float,
        *,
        observed: bool,
    ) -> None:
        self._keys = BarrierKeys(prefix)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout)
        self._observed = observed
        self.order = self.arrived = 0
        self.in_ledger = self.is_last = False
        self.last: bytes | None = None
        self.entries: bytes | None = None

    def arrive(self, store: Any) -> None:
        """Record the arrival of the rank, if it is known, and count it."""
        self.in_ledger = self._rank is not None and bool(
            RECORDER.failures.guarded_call(
                names.BARRIERS, record_arrival, store, self._keys, self._rank
            )
        )
        order = store.add(self._keys.num_members, 1)
        self.arrived = RECORDER.ticks()
        self.order = order

    def wait(self, store: Any) -> None:
        """Wait for the last rank, and read what it wrote if the call is observed."""
        store.wait([self._keys.last_member], self._timeout)
        if self._observed:
            self.last = self._read(store, self._keys.last_member)

    def complete(self, store: Any) -> None:
        """Complete the barrier as its last rank, and make a round trip.

        A TCPStore does not acknowledge a set. If this process serves the store and ends
        now, the others get a network error instead of their wake-up. After one round
        trip the server has answered their waits. torch's barrier does the same. Here
        that reads the ledger, if this rank is in it.
        """
        value = last_arrival(self._rank)
        store.set(self._keys.last_member, value)
        if self.in_ledger:
            entries = self._read(store, self._keys.ledger)
            if entries is not None and not is_complete(entries, self._world_size):
                self.entries = entries
        else:
            store.check([self._keys.last_member])
            self.entries = b""
        self.is_last, self.last = True, value.encode()

    def _read(self, store: Any, key: str) -> bytes | None:
        value: bytes | None = RECORDER.failures.guarded_call(
            names.BARRIERS, read_key, store, key
        )
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledBarrier:
    """A barrier that waits, as of the last report.

    Attributes:
        family: The key family of its prefix.
        arrived: Number of ranks that arrived.
        missing: The ranks that did not, each with the name of its host.
        possible: Number of ranks that may be missing, where some arrived without a
            name.
        causes: Why missing ranks did not arrive, where that is known.
    """

    family: str
    arrived: int
    missing: Mapping[int, str]
    possible: int
    causes: Mapping[int, str] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, ...]:
        """Stalled barriers of one family share their labels: one is exported."""
        return "barrier", self.family

    def gauges(self) -> Iterator[tuple[names.Metric, Labels, float]]:
        """Return the values of the gauges."""
        yield names.BARRIER_ARRIVED, (self.family,), self.arrived
        yield names.BARRIER_MISSING, (self.family,), len(self.missing) + self.possible
        for rank, host in list(self.missing.items())[:_MAX_RANKS_NAMED]:
            labels = self.family, str(rank), host, self.causes.get(rank, "")
            yield names.BARRIER_RANK_MISSING, labels, 1


class Finding(NamedTuple):
    """Why a rank does not arrive.

    Attributes:
        cause: One of `common.causes.CAUSES`.
        doing: What its process does instead, for people; "" if that is unknown.
        evidence: How this is known, for people.
    """

    cause: str
    doing: str
    evidence: str = ""


def _unfold(value: Any, _ranks: int) -> tuple[int, ...]:
    # Of a world of any size: that of this job is what the reader takes it for.
    return ranges.unfold_all_below(validation.any_text(value), ranges.MAX_RANKS)


def _rank(value: str, _ranks: int) -> int:
    return validation.digits(value.encode("utf-8", "replace"), ranges.MAX_RANKS)


def _finding(value: Any, _ranks: int) -> Finding:
    if type(value) is not list or len(value) != len(Finding._fields):
        raise ValueError("not a finding")
    cause, doing, evidence = value
    return Finding(
        codec.printable_text(cause), codec.words(doing), codec.words(evidence)
    )


_Count = Annotated[int, codec.below(_MAX_COUNT)]
_AllRanks = Annotated[tuple[int, ...], Kind(_unfold, ranges.fold)]
_RankKey = Annotated[int, Kind(_rank, str)]
_Finding = Annotated[Finding, Kind(_finding, list)]


# Finds out why ranks of a store do not arrive; omits ranks it knows nothing about.
Examine = Callable[[Any, Sequence[int], int], Mapping[int, Finding]]


@dataclass(frozen=True, kw_only=True)
class MissingReport:
    """The ranks that arrived at a barrier and those that did not.

    A report is valid until the number of arrivals changes.

    Attributes:
        world_size: The number of ranks that the barrier is for.
        arrived_count: Number of arrivals counted.
        unseen_ranks: Ranks without a recorded arrival, in order. They are missing, or
            among the unidentified arrivals.
        unidentified_count: Arrivals without a rank.
        duplicate_ranks: Ranks that arrived more than once.
        uncounted_ranks: Unseen ranks that recorded an arrival but were not counted:
            they stopped while arriving.
        names: The names of the unseen ranks.
        findings: Why unseen ranks did not arrive, where it is known.
    """

    world_size: WorldSize
    arrived_count: _Count
    unseen_ranks: _AllRanks
    unidentified_count: _Count
    duplicate_ranks: _AllRanks
    uncounted_ranks: _AllRanks = ()
    names: Annotated[Mapping[_RankKey, Printable], UpTo(ranges.MAX_RANKS)]
    findings: Annotated[Mapping[_RankKey, _Finding], UpTo(ranges.MAX_RANKS), LATER] = (
        field(default_factory=dict)
    )

    @classmethod
    def unknown(cls, world_size: int) -> "MissingReport":
        """Make the report for a barrier whose arrivals could not be read."""
        return cls(
            world_size=world_size,
            arrived_count=0,
            unseen_ranks=tuple(range(world_size)),
            unidentified_count=world_size,
            duplicate_ranks=(),
            names={},
        )

    def with_names(self, decoder: decoders.Decoder) -> "MissingReport":
        """Return the report with the names that a decoder returns."""
        names = {rank: decoders.name_of(decoder, rank) for rank in self.unseen_ranks}
        return replace(self, names=names)

    def with_findings(self, findings: Mapping[int, Finding]) -> "MissingReport":
        """Return the report with why its ranks did not arrive."""
        return replace(self, findings=findings)

    @property
    def missing_causes(self) -> tuple[str, ...]:
        """The causes of the missing ranks, in the same order; "" where unknown."""
        return tuple(self._finding(rank).cause for rank in self.missing_ranks)

    @property
    def missing_doing(self) -> tuple[str, ...]:
        """What the missing ranks do instead, in the same order; "" where unknown."""
        return tuple(self._finding(rank).doing for rank in self.missing_ranks)

    @property
    def missing_evidence(self) -> tuple[str, ...]:
        """How that is known, in the same order; "" where nothing is."""
        return tuple(self._finding(rank).evidence for rank in self.missing_ranks)

    def _finding(self, rank: int) -> Finding:
        return self.findings.get(rank) or Finding("", "")

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that are certainly missing; none if there are unidentified arrivals."""
        return () if self.unidentified_count else self.unseen_ranks

    @property
    def possibly_missing_ranks(self) -> tuple[int, ...]:
        """The unseen ranks, if there are unidentified arrivals."""
        return self.unseen_ranks if self.unidentified_count else ()

    @property
    def missing_count(self) -> int:
        """The number of missing ranks, identified or not."""
        return max(0, len(self.unseen_ranks) - self.unidentified_count)

    @property
    def arrived_ranks(self) -> tuple[int, ...]:
        """Ranks with a recorded arrival."""
        # From the gaps between the unseen ranks, which are few.
        arrived: list[int] = []
        after = 0
        for rank in self.unseen_ranks:
            arrived += range(after, rank)
            after = rank + 1
        return (*arrived, *range(after, self.world_size))

    @property
    def missing_names(self) -> tuple[str, ...]:
        """The names of the missing ranks, in the same order."""
        return tuple(self._name(rank) for rank in self.missing_ranks)

    def _name(self, rank: int) -> str:
        return self.names.get(rank) or decoders.default_name(rank)

    def describe(self) -> str:
        """Describe the report in one line, for the operator."""
        parts = []
        if self.missing_ranks:
            parts.append(
                decoders.describe_missing(
                    self.missing_ranks, self.world_size, self._name
                )
            )
            found = [rank for rank in self.missing_ranks if self._finding(rank).doing]
            parts += [
                f"rank {rank}: {self._finding(rank).doing}"
                for rank in found[:_MAX_FINDINGS_IN_TEXT]
            ]
        elif self.arrived_count == 0:
            parts.append("the missing ranks could not be determined")
        elif self.possibly_missing_ranks:
            parts.append(
                f"{self.missing_count} of ranks"
                f" {ranges.fold(self.possibly_missing_ranks)} missing,"
                f" {self.unidentified_count} arrivals unidentified"
            )
        if self.uncounted_ranks:
            parts.append(
                f"{ranges.ranks_text(self.uncounted_ranks)} stopped while arriving:"
                " recorded, but not counted"
            )
        if self.duplicate_ranks:
            parts.append(
                f"{ranges.ranks_text(self.duplicate_ranks)} arrived more than once:"
                " the key prefix was used before"
            )
        return "; ".join(parts) or "all ranks have arrived"

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of `barrier.waiting` and `barrier.timeout` events."""
        return {
            "missing": self.describe(),
            "arrived_count": self.arrived_count,
            "missing_ranks": list(self.missing_ranks),
            "missing_names": list(self.missing_names),
            "missing_causes": list(self.missing_causes),
            "missing_doing": list(self.missing_doing),
            "missing_evidence": list(self.missing_evidence),
            "possibly_missing_ranks": list(self.possibly_missing_ranks),
            "unidentified_count": self.unidentified_count,
        }

    def to_bytes(self) -> bytes:
        """Encode the report for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(cls, value: bytes, world_size: int) -> "MissingReport | None":
        """Decode a report; None if the value is malformed or too large."""
        return codec.decode(cls, value, _MAX_REPORT_BYTES, world_size)


def read_arrivals(
    store: Any, keys: BarrierKeys, world_size: int, *, reads: int = _MAX_READS
) -> MissingReport:
    """Read which ranks arrived, without names. Does not block and changes nothing.

    A rank records its arrival before it is counted. One that dies between the two is
    recorded, and the barrier waits for it. So the two are compared: if more arrivals
    are recorded than counted, only ranks that confirmed theirs are certain.

    Args:
        store: The store to read from.
        keys: The keys of the barrier.
        world_size: The number of ranks.
        reads: How often to read, if ranks are counted meanwhile.
    """
    # The count is read before the ledger: a rank that arrives between the two reads is
    # identified and not counted, instead of counted and reported missing.
    count: int = store.add(keys.num_members, 0)
    ledger = read_ledger(store, keys)
    recorded = ledger.ranks()
    unseen = set(range(world_size)).difference(recorded)
    repeats = len(recorded) - (world_size - len(unseen))
    arrivals = Counter(recorded) if repeats > 0 else Counter[int]()
    duplicates = [rank for rank, times in arrivals.items() if times > 1]
    if count > len(recorded):
        # Some arrivals are not in the ledger: plain torch ranks, or there is none.
        unseen -= _with_key(store, keys.trace, sorted(unseen))
    if not ledger.entries and store.check([keys.repeat_count]):
        repeats += int(store.get(keys.repeat_count))
        seen = [rank for rank in range(world_size) if rank not in unseen]
        duplicates += [
            rank
            for rank in seen[:_MAX_REPEAT_CHECKS]
            if store.check([keys.repeated(rank)])
        ]
    surplus = world_size - len(unseen) + repeats - count
    if surplus >= 0 and reads > 1 and store.add(keys.num_members, 0) != count:
        # Ranks were counted since. The new count is not comparable with the old
        # ledger: it may include a rank that was recorded after it was read. Nor is the
        # old one: a rank that was recorded and not yet counted stands for a plain torch
        # rank that was.
        return read_arrivals(store, keys, world_size, reads=reads - 1)
    uncounted: set[int] = set()
    if surplus > 0:
        seen_ranks = sorted(set(range(world_size)) - unseen)
        uncounted = set(seen_ranks) - _confirmed(store, keys, seen_ranks)
        unseen |= uncounted
    unidentified = max(0, count - (world_size - len(unseen)) - repeats)
    return MissingReport(
        world_size=world_size,
        arrived_count=count,
        unseen_ranks=tuple(sorted(unseen)),
        duplicate_ranks=tuple(sorted(duplicates)),
        unidentified_count=unidentified,
        uncounted_ranks=() if unidentified else tuple(sorted(uncounted)),
        names={},
    )


def read_ledger(store: Any, keys: BarrierKeys, *, exists: bool = False) -> Ledger:
    """Read the ledger of a barrier; it is empty if there is none.

    Args:
        store: The store to read from.
        keys: The keys of the barrier.
        exists: Skip the check: the caller has written to the ledger.
    """
    exists = exists or store.check([keys.ledger])
    return Ledger(read_key(store, keys.ledger)) if exists else Ledger()


def has_duplicates(store: Any, keys: BarrierKeys, ledger: Ledger) -> bool:
    """Return whether a rank arrived more than once, in at most one round trip."""
    if ledger.entries:
        ranks = ledger.ranks()
        return len(set(ranks)) < len(ranks)
    return bool(store.check([keys.repeat_count]))


def _confirmed(store: Any, keys: BarrierKeys, ranks: Sequence[int]) -> set[int]:
    """Return the ranks that confirmed that they were counted."""
    if store.check([keys.confirmations]):
        return set(Ledger(read_key(store, keys.confirmations)).ranks())
    if store.has_extended_api():
        return set()
    return _with_key(store, keys.counted, ranks)


def _with_key(
    store: Any, key_of: Callable[[int], str], ranks: Sequence[int]
) -> set[int]:
    """Return the ranks whose key exists."""
    existing = etcd_keys(store)
    if existing is not None:
        return {rank for rank in ranks if key_of(rank) in existing}

    def all_exist(some: Sequence[int]) -> bool:
        return bool(store.check([key_of(rank) for rank in some]))

    absent = find_absent(all_exist, ranks)
    return set(ranks).difference(absent)
