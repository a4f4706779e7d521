"""Earlier processes of a rank in the same store: restarts, ranks started twice, jobs.

torchrun reuses its store for the next attempt, and workers have no prefix per attempt.
Nor has a job a prefix of its own. So a rank may start among the keys of an earlier
attempt or of another job. A rank that registers compares the registration that it finds
with itself, and records both processes.

torch writes its own keys a few times when a process group is created. A stamp next to
them has the attempt, so that a value of an earlier one is not taken for one of this.
"""

import hashlib
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from tracedstore import names
from tracedstore.common import codec, procfs, ranges
from tracedstore.common.causes import REMEDIES
from tracedstore.common.codec import (
    Pid,
    Printable,
    Rank,
    Seconds,
    Small,
    printable_text,
)
from tracedstore.common.election import is_elected, take_position
from tracedstore.common.identity import ProcessIdentity, number, restart_count
from tracedstore.common.text import clock_time
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.coordination.store_access import read_existing
from tracedstore.diagnosis.judgement.verdict import (
    MAX_AWAITED,
    AwaitedRank,
    Verdict,
)
from tracedstore.diagnosis.observe.torch_keys import shown_group
from tracedstore.recording.telemetry import TELEMETRY

_STALE: Final = "tracedstore/STALE"
# The number of replacements so far. Each is under this, a slash, and its number modulo
# the maximum: the latest ones are kept.
_REPLACED: Final = "tracedstore/REPLACED"
_MAX_REPLACED: Final = 64
_MAX_ENTRY_BYTES = 128 * 1024
_MAX_HOSTS_SHOWN = 8
# A verdict admits 1024 characters in a sentence.
_MAX_TEXT = 480
_REMEDY: Final = (
    "torch may read values of the earlier attempt: set"
    " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use a new store, port or"
    " file"
)
SHARED_REMEDY: Final = (
    "give each job a store of its own: another port or --rdzv-endpoint, or a key prefix"
)
# The key of a rank is this, the name of the group, and the rank.
_STAMPS: Final = "tracedstore/STAMPS"
_MAX_STAMP_BYTES = 4096
_MAX_MEMBERS_READ = 1024
# Stamps of one look at groups.
MAX_STAMPS_READ: Final = 256
# Characters of folded ranks in a stamp, and of the digest of more.
_MAX_MEMBERS_TEXT, _DIGEST_LENGTH = 256, 12
# The default group, which a program creates before all others.
_DEFAULT: Final = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A registration that replaced the one of another process.

    Attributes:
        earlier: The process that registered first.
        later: The process that registered as the same rank.
        ended: The earlier process had ended by then.
    """

    earlier: RankInfo
    later: RankInfo
    ended: bool

    @property
    def is_duplicate(self) -> bool:
        """Whether one launch started both processes."""
        return not self.ended and _launch(self.earlier) == _launch(self.later)

    @property
    def shares_store(self) -> bool:
        """Whether two jobs run in the store: neither process is known to have ended."""
        return (
            self.earlier.run_id != self.later.run_id
            and not self.ended
            and not has_ended(self.earlier)
            and not has_ended(self.later)
        )

    def __str__(self) -> str:
        first, second = map(_process_text, (self.earlier, self.later))
        return f"rank {self.later.rank} was started twice: {first}, and {second}"

    def to_bytes(self) -> bytes:
        """Encode the replacement for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(cls, value: bytes) -> "Replacement | None":
        """Decode a replacement; None if the value is malformed or too large."""
        found = codec.decode(cls, value, _MAX_ENTRY_BYTES)
        if found is None or found.earlier.rank != found.later.rank:
            return None
        valid = rank_registry.is_valid(found.earlier) and rank_registry.is_valid(
            found.later
        )
        return found if valid else None


def has_ended(info: RankInfo) -> bool:
    """Return whether a registered process has ended, as far as this host knows."""
    state = procfs.process_state(info.pid, info.start_ticks, info.namespace)
    return state == "gone"


def check_earlier(store: Any, rank: int, world_size: int) -> None:
    """Report an earlier process that registered as this rank, before it registers."""
    found = _find_other(store, rank)
    if found is None:
        return
    own = rank_registry.own_entry(rank, world_size)
    replacement = Replacement(earlier=found, later=own, ended=has_ended(found))
    _record(store, replacement)
    if replacement.is_duplicate:
        return
    # Every rank of the attempt finds one; the first of them reports it.
    counter = f"{_STALE}/{own.attempt}/{own.run_id}"
    if is_elected(take_position(store, counter), reporters=1):
        _report_replacement(replacement)


def check_replaced(store: Any, rank: int, world_size: int) -> None:
    """Record another process that has registered as this rank since this one did.

    Two processes that start at the same time do not find each other in
    `check_earlier`.
    """
    found = _find_other(store, rank)
    if found is None:
        return
    own = rank_registry.own_entry(rank, world_size)
    replacement = Replacement(earlier=own, later=found, ended=False)
    if not has_ended(found) and (replacement.is_duplicate or replacement.shares_store):
        _record(store, replacement)


def read_replacements(store: Any) -> list[Replacement]:
    """Read the latest replacements; invalid ones are omitted."""
    if not store.check([_REPLACED]):
        return []
    keys = [f"{_REPLACED}/{slot}" for slot in range(_MAX_REPLACED)]
    found = map(Replacement.from_bytes, read_existing(store, keys))
    return [replacement for replacement in found if replacement is not None]


def duplicates_in(replacements: Iterable[Replacement]) -> list[str]:
    """Describe the ranks that were started twice."""
    return sorted({str(one) for one in replacements if one.is_duplicate})


def jobs_in(replacements: Iterable[Replacement], run_id: str | None) -> list[str]:
    """Describe the jobs that share the store with a run; [] if it has the store alone.

    Args:
        replacements: What `read_replacements` returned.
        run_id: The run in question.
    """
    shared = [
        one
        for one in replacements
        if one.shares_store and run_id in (one.earlier.run_id, one.later.run_id)
    ]
    processes = [info for one in shared for info in (one.earlier, one.later)]
    return _describe_launches(processes, set(), attempts=False)


def launches_in(replacements: Sequence[Replacement]) -> list[str]:
    """Describe the processes of all replacements, by run, attempt and end."""
    ended = {_identity(one.earlier) for one in replacements if one.ended}
    processes = [info for one in replacements for info in (one.earlier, one.later)]
    return _describe_launches(processes, ended, attempts=True)


def shared_store(verdict: Verdict, jobs: Sequence[str]) -> Verdict:
    """Return a verdict that blames two jobs in one store, and no rank.

    They overwrite each other's keys and records, so that a rank named by these may be
    the other job's.

    Args:
        verdict: A verdict that was found without regard to that.
        jobs: What `jobs_in` returned.
    """
    return replace(
        verdict,
        cause="too_many",
        awaited=(),
        awaited_ranks=(),
        known=f"{len(jobs)} jobs share this store",
        evidence=tuple(jobs),
        remedy=SHARED_REMEDY,
    )


def report_stale(
    message: str, *, found: RankInfo | None = None, remedy: str = _REMEDY
) -> None:
    """Emit `store.stale_keys`.

    Args:
        message: What was found.
        found: The earlier process, if it is known.
        remedy: What to do.
    """
    TELEMETRY.emit(
        names.STORE_STALE,
        message=message,
        attempt=restart_count(os.environ),
        previous_attempt=None if found is None else found.attempt,
        previous_run_id=None if found is None else found.run_id,
        previous_pid=None if found is None else found.pid,
        previous_host="" if found is None else found.host,
        previous_started=None if found is None else found.started,
        remedy=remedy,
    )


def _find_other(store: Any, rank: int) -> RankInfo | None:
    """Return the registration of a rank, unless it is the one of this process."""
    found = rank_registry.read_ranks(store, [rank]).get(rank)
    if found is None or (found.pid, found.host) == (
        os.getpid(),
        ProcessIdentity().host,
    ):
        return None
    return found


def _record(store: Any, replacement: Replacement) -> None:
    slot = store.add(_REPLACED, 1) % _MAX_REPLACED
    store.set(f"{_REPLACED}/{slot}", replacement.to_bytes())


def _report_replacement(replacement: Replacement) -> None:
    found, own = replacement.earlier, replacement.later
    age = max(0.0, time.time() - found.started)
    if found.run_id == own.run_id:
        report_stale(
            f"the store holds keys of an earlier process of rank {own.rank}:"
            f" {_process_text(found)}, attempt {found.attempt}, registered"
            f" {age:.0f} s ago; this is attempt {own.attempt}",
            found=found,
        )
        return
    running = ", which runs: two jobs share this store"
    report_stale(
        f"the store holds keys of rank {own.rank} of {_run_text(found)}:"
        f" {_process_text(found)}, registered {age:.0f} s ago"
        f"{running if replacement.shares_store else ''}; this is {_run_text(own)}",
        found=found,
        remedy=SHARED_REMEDY,
    )


def _launch(info: RankInfo) -> tuple[str | None, int]:
    return info.run_id, info.attempt


def _identity(info: RankInfo) -> tuple[str, int, int | None]:
    return info.host, info.pid, info.start_ticks


def _process_text(info: RankInfo) -> str:
    return f"pid {info.pid} on {printable_text(info.host)}"


def _run_text(info: RankInfo) -> str:
    return "a run without id" if info.run_id is None else f"run {info.run_id!r}"


def _describe_launches(
    processes: Iterable[RankInfo],
    ended: set[tuple[str, int, int | None]],
    *,
    attempts: bool,
) -> list[str]:
    """Return one text for each launch: ``run 'a': ranks 0-1, pids 7-8 on node1``."""
    launches: dict[str, dict[str, list[RankInfo]]] = {}
    for info in sorted(processes, key=lambda info: info.started):
        gone = _identity(info) in ended or has_ended(info)
        words = [_run_text(info)] if info.run_id is not None or not attempts else []
        words += [f"attempt {info.attempt}"] if attempts else []
        launch = f"{', '.join(words)}{' (ended)' if gone else ''}"
        hosts = launches.setdefault(launch, {})
        hosts.setdefault(printable_text(info.host), []).append(info)
    texts = []
    for launch, hosts in launches.items():
        places = [
            f"{ranges.ranks_text(info.rank for info in infos)},"
            f" {ranges.ranks_text((info.pid for info in infos), 'pid')} on {host}"
            for host, infos in list(hosts.items())[:_MAX_HOSTS_SHOWN]
        ]
        more = len(hosts) - _MAX_HOSTS_SHOWN
        places += [f"and {more} more hosts"] if more > 0 else []
        texts.append(f"{launch}: {'; '.join(places)}"[:_MAX_TEXT])
    return texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A rank that creates a group.

    Attributes:
        rank: The rank.
        attempt: The attempt of torchrun that it belongs to.
        host: Its host.
        pid: Its process id.
        time: When it began, in seconds since the epoch.
        members: The ranks of the group, folded; a digest of them if that is long. Ranks
            that create groups in different orders have different ones for a name.
    """

    rank: Rank
    attempt: Small
    host: Printable
    pid: Pid
    time: Seconds
    members: Printable

    @classmethod
    def from_bytes(cls, value: bytes) -> "Stamp | None":
        """Decode a stamp; None if the value is malformed or too large."""
        return codec.decode(cls, value, _MAX_STAMP_BYTES)


def write_stamp(store: Any, group: str, rank: int, members: Sequence[int]) -> None:
    """Stamp the keys that a rank is about to write for a group."""
    text = ranges.fold(members)
    if len(text) > _MAX_MEMBERS_TEXT:
        digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]
        text = f"{text[:_MAX_MEMBERS_TEXT]}... ({len(members)} ranks, {digest})"
    stamp = Stamp(
        members=text,
        rank=rank,
        attempt=restart_count(os.environ),
        host=ProcessIdentity().host,
        pid=os.getpid(),
        time=time.time(),
    )
    store.set(f"{_STAMPS}/{group}/{rank}", codec.encode(stamp))


def find_stale(store: Any, group: str, members: Sequence[int]) -> Verdict | None:
    """Return a verdict if members of a group have stamps of an earlier attempt only."""
    attempt = restart_count(os.environ)
    keys = [f"{_STAMPS}/{group}/{rank}" for rank in members[:_MAX_MEMBERS_READ]]
    values = read_existing(store, keys)
    stamps = list(map(Stamp.from_bytes, values))
    # Any client can write a stamp of another rank under the key of a member.
    of_members = frozenset(members)
    stale = [
        stamp
        for stamp in stamps
        if stamp is not None and stamp.attempt < attempt and stamp.rank in of_members
    ]
    if not stale:
        return None
    return Verdict(
        phase=phase_of(group),
        cause="stale",
        awaited=tuple(
            AwaitedRank(
                rank=stamp.rank,
                host=stamp.host,
                pid=stamp.pid,
                cause="stale",
                doing=f"its keys are of attempt {stamp.attempt}, written at"
                f" {clock_time(stamp.time)} UTC",
            )
            for stamp in stale
        ),
        awaited_ranks=tuple(stamp.rank for stamp in stale),
        evidence=(f"this is attempt {attempt}",),
        remedy=REMEDIES["stale"],
        time=time.time(),
    )


# By the members that ranks created a group with, what they have written about that.
_Opinions = Mapping[str, Sequence[Stamp]]


def find_diverged(
    store: Any, groups: Sequence[str], ranks: Collection[int], waiting: Iterable[int]
) -> Verdict | None:
    """Return a verdict if ranks create a group of one name with different members.

    torch's names of groups are numbers: the second group that a rank creates is "2",
    whatever its members are. A rank without which all others agree is named. Of two
    that disagree, either may be the odd one, unless earlier groups show which.

    Args:
        store: The store.
        groups: The names of groups that are created now.
        ranks: Ranks that may have created them.
        waiting: The ranks that wait.
    """
    disputed = _find_disputed(store, groups, ranks)
    if not disputed:
        return None
    odd = _find_odd(disputed)
    if not odd:
        earlier = _earlier_groups(groups, MAX_STAMPS_READ // len(ranks))
        everything = disputed | _find_disputed(store, earlier, ranks)
        if odd := _find_odd(everything):
            disputed = everything
    # The one in which most ranks contradict an odd one.
    group, opinions = max(
        disputed.items(),
        key=lambda item: (
            any(one.rank in odd for same in item[1].values() for one in same),
            max(map(len, item[1].values())),
        ),
    )
    stamps = [one for same in opinions.values() for one in same]
    named = sorted(
        (one for one in stamps if one.rank in odd), key=lambda one: one.rank
    )[:MAX_AWAITED]
    others = {
        members: rest
        for members, same in opinions.items()
        if (rest := [one.rank for one in same if one.rank not in odd])
    }
    awaited_ranks = tuple(stamp.rank for stamp in named)
    return Verdict(
        phase=phase_of(group),
        cause="diverged",
        awaited=tuple(
            AwaitedRank(
                rank=stamp.rank,
                host=stamp.host,
                pid=stamp.pid,
                cause="diverged",
                doing=f"created group {group} with ranks {stamp.members}",
            )
            for stamp in named
        ),
        awaited_ranks=awaited_ranks,
        known="" if odd else f"its ranks created group {group} with different members",
        waiting_ranks=tuple(sorted(set(waiting).difference(awaited_ranks))),
        evidence=tuple(
            f"{ranges.ranks_text(same)} created it with ranks {members}"
            for members, same in list(others.items())[:_MAX_HOSTS_SHOWN]
        ),
        remedy=REMEDIES["diverged"],
        time=time.time(),
    )


def _earlier_groups(groups: Collection[str], limit: int) -> list[str]:
    """Return the names of groups that ranks created before these, the latest first."""
    latest = max((int(name) for name in groups if number(name) is not None), default=0)
    earlier = (str(count) for count in range(latest, 0, -1))
    return list(islice((name for name in earlier if name not in groups), limit))


def _find_odd(disputed: Mapping[str, _Opinions]) -> set[int]:
    """Return the ranks without which all others agree; none if that is not certain."""
    ranks_of = [
        [{one.rank for one in same} for same in opinions.values()]
        for opinions in disputed.values()
    ]
    everyone = {rank for opinions in ranks_of for same in opinions for rank in same}
    sufficient = [rank for rank in everyone if _agree_without({rank}, ranks_of)]
    if sufficient:
        return set(sufficient) if len(sufficient) == 1 else set()
    few = {
        rank
        for opinions in ranks_of
        for same in opinions
        if 2 * len(same) < max(map(len, opinions))
        for rank in same
    }
    return few if _agree_without(few, ranks_of) else set()


def _agree_without(ranks: set[int], disputed: Iterable[Iterable[set[int]]]) -> bool:
    return all(
        sum(not same <= ranks for same in opinions) <= 1 for opinions in disputed
    )


def _find_disputed(
    store: Any, groups: Iterable[str], ranks: Iterable[int]
) -> dict[str, _Opinions]:
    """Return the groups of this attempt that ranks created with different members.

    Those of a default group before this one do not count: torch counts from the
    beginning after ``destroy_process_group``.
    """
    members = sorted(ranks)[:_MAX_MEMBERS_READ]
    begun = _read_current_stamps(store, _DEFAULT, members)
    disputed: dict[str, _Opinions] = {}
    for group in groups:
        opinions: dict[str, list[Stamp]] = {}
        for rank, stamp in sorted(_read_current_stamps(store, group, members).items()):
            if rank not in begun or begun[rank].time <= stamp.time:
                opinions.setdefault(stamp.members, []).append(stamp)
        if len(opinions) > 1:
            disputed[group] = opinions
    return disputed


def _read_current_stamps(
    store: Any, group: str, ranks: Iterable[int]
) -> dict[int, Stamp]:
    keys = [f"{_STAMPS}/{group}/{rank}" for rank in ranks]
    attempt = restart_count(os.environ)
    stamps = map(Stamp.from_bytes, read_existing(store, keys))
    return {
        stamp.rank: stamp
        for stamp in stamps
        if stamp is not None and stamp.attempt == attempt
    }


def phase_of(group: str) -> str:
    """Return what a rank that creates a group executes."""
    default = group in ("0", "default_pg")
    return "init_process_group" if default else f"new_group {shown_group(group)}"
