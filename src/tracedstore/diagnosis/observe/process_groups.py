"""The process groups that this process creates: their members, and who created them.

Keys of a group contain group ranks. The caller of `members` translates them to global
ranks. A group is recorded before torch creates it, so that its members are known while
its creation blocks.

torch writes its own keys a few times when a group is created. A stamp next to them has
the attempt, so that a value of an earlier attempt is not taken for one of this.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tracedstore.common import codec
from tracedstore.common.causes import REMEDIES
from tracedstore.common.codec import Pid, Printable, Rank, Seconds, Small
from tracedstore.common.identity import ProcessIdentity, restart_count
from tracedstore.coordination.store_access import read_existing
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict

# The latest groups are kept: a job creates a few dozen, each with a new name.
MAX_GROUPS: Final = 1024

_members: dict[str, tuple[int, ...]] = {}
_lock = threading.RLock()


def record_members(name: str, global_ranks: Sequence[int], world_size: int) -> None:
    """Record the members of a group.

    Args:
        name: The name that torch has for the group.
        global_ranks: The global rank of each group rank; empty for the default group,
            which has all ranks.
        world_size: The number of members.

    A later group with the same name replaces the earlier one: torch reuses names after
    ``destroy_process_group``.
    """
    ranks = tuple(global_ranks) or tuple(range(world_size))
    if not ranks:
        return  # MPI assigns the ranks later
    with _lock:
        _members.pop(name, None)
        _members[name] = ranks
        if len(_members) > MAX_GROUPS:
            del _members[next(iter(_members))]


def members(name: str) -> tuple[int, ...] | None:
    """Return the global rank of each group rank; None if the group is unknown."""
    return _members.get(name)


def reset() -> None:
    """Forget all groups, as a forked child must."""
    global _lock  # noqa: PLW0603 - another thread of the parent may hold it
    _lock = threading.RLock()
    _members.clear()


# The key of a rank is this, the name of the group, and the rank.
_STAMPS: Final = "tracedstore/STAMPS"
_MAX_STAMP_BYTES = 4096
_MAX_MEMBERS_READ = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """A rank that creates a group.

    Attributes:
        rank: The rank.
        attempt: The attempt of torchrun that it belongs to.
        host: Its host.
        pid: Its process id.
        time: When it began, in seconds since the epoch.
    """

    rank: Rank
    attempt: Small
    host: Printable
    pid: Pid
    time: Seconds

    @classmethod
    def from_bytes(cls, value: bytes) -> "Stamp | None":
        """Decode a stamp; None if the value is malformed or too large."""
        return codec.decode(cls, value, _MAX_STAMP_BYTES)


def write_stamp(store: Any, group: str, rank: int) -> None:
    """Stamp the keys that a rank is about to write for a group."""
    stamp = Stamp(
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
                doing=f"its keys are of attempt {stamp.attempt}, written"
                f" {max(0.0, time.time() - stamp.time):.0f} s ago",
            )
            for stamp in stale
        ),
        awaited_ranks=tuple(stamp.rank for stamp in stale),
        evidence=(f"this is attempt {attempt}",),
        remedy=REMEDIES["stale"],
        time=time.time(),
    )


def phase_of(group: str) -> str:
    """Return what a rank that creates a group executes."""
    default = group in ("0", "default_pg")
    return "init_process_group" if default else f"new_group {group}"
