"""Reads the file of a FileStore: what an earlier run left, and who wrote last.

The file is read directly. Opening it as a FileStore would count as one more user of it.
"""

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracedstore.common import procfs, ranges
from tracedstore.common.identity import host_name
from tracedstore.common.text import plural
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.connection.connection_attempt import PHASE
from tracedstore.diagnosis.judgement.verdict import Verdict

_MAX_BYTES = 4 * 1024 * 1024
# FileStore's own counter of users, the only key without a slash in front.
_REFCOUNT = b"refcount/"
_MAX_RANKS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """What the file of a FileStore holds.

    Attributes:
        path: The file.
        key_count: Number of keys.
        ranks: The ranks that registered, by their latest entry.
        uid: Its owner.
        written: When it was last written, in seconds since the epoch.
    """

    path: str
    key_count: int
    ranks: dict[int, RankInfo]
    uid: int
    written: float

    def describe(self) -> str:
        """Return ``/tmp/x holds 9 keys, last written at ... by uid 0``."""
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.written))
        owner = "" if self.uid == os.getuid() else f", and belongs to uid {self.uid}"
        return (
            f"{self.path} holds {plural(self.key_count, 'key')}, was last written at"
            f" {written}{owner}"
        )


def read_file(path: str) -> FileContent | None:
    """Read the file of a FileStore; None if there is none or it cannot be read."""
    try:
        # A FIFO or a device would block.
        status = os.stat(path)  # noqa: PTH116 - needs no Path
        if not stat.S_ISREG(status.st_mode):
            return None
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES)
    except OSError:
        return None
    values = dict(_entries(content))
    values.pop(_REFCOUNT, None)
    prefix = f"/{rank_registry.REGISTRY}/".encode()
    entries = (
        rank_registry.parse_entry(value)
        for key, value in values.items()
        if key.startswith(prefix)
    )
    return FileContent(
        path=path,
        key_count=len(values),
        ranks={info.rank: info for info in entries if info is not None},
        uid=status.st_uid,
        written=status.st_mtime,
    )


def _entries(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the appended keys and values; ends at the first that is not complete."""
    position = 0

    def take() -> bytes | None:
        nonlocal position
        size = int.from_bytes(content[position : position + 4], "little")
        begin, position = position + 4, position + 4 + size
        return content[begin:position] if position <= len(content) else None

    while position + 4 <= len(content):
        key, value = take(), take()
        if key is None or value is None:
            return
        yield key, value


def check_earlier_run(path: str, rank: int | None) -> Verdict | None:
    """Check whether an earlier run left its keys in the file.

    Before this rank opens it.

    It did if no process that registered is alive, or if this rank has registered and
    that process is not alive. A process of another host counts as alive, unless it
    has the rank of this one.
    """
    content = read_file(path)
    if content is None or content.key_count == 0:
        return None
    own = content.ranks.get(-1 if rank is None else rank)
    if own is not None and own.pid == os.getpid() and _is_here(own):
        return None  # this process used the file before
    ended = [info for info in content.ranks.values() if _has_ended(info)]
    alive = len(content.ranks) - len(ended)
    if (alive and (own is None or not _has_ended(own))) or (
        not content.ranks and content.written >= (procfs.start_time("self") or 0.0) - 1
    ):
        # Other ranks of this job, which may be untraced.
        return None
    evidence = [
        f"rank {info.rank} of it was pid {info.pid} on {info.host}, which has ended"
        for info in ended[:_MAX_RANKS_SHOWN]
    ]
    if not content.ranks:
        evidence = ["none of its keys is of a traced rank, and this job has just begun"]
    return Verdict(
        phase=PHASE,
        cause="stale",
        known=f"{content.describe()}: an earlier run left them",
        waiting_ranks=() if rank is None else (rank,),
        evidence=tuple(evidence),
        remedy="delete the file before the job starts, or use a new path for each run",
        time=time.time(),
    )


def describe_wait(path: str, world_size: int) -> str:
    """Describe the file to a rank that waited: torch's error names neither."""
    content = read_file(path)
    if content is None:
        return f"the file of the store, {path}, does not exist or cannot be read"
    absent = sorted(set(range(world_size)).difference(content.ranks))
    text = content.describe()
    if content.ranks and absent:
        text += f"; {ranges.ranks_text(absent)} not registered in it"
    return text


def _is_here(info: RankInfo) -> bool:
    return info.host == host_name()


def _has_ended(info: RankInfo) -> bool:
    """Return whether the process of an entry has ended, as far as this host knows."""
    if not _is_here(info):
        return False
    # A later process may have the process id by now.
    started = procfs.start_time(info.pid) or 0.0
    return procfs.is_absent(info.pid) or started > info.started + 1
