"""What this host has about the ranks of a job that run on it.

A person who watches a job is often on one of its nodes. Then /proc has the CPU time and
the memory of its ranks, and whether they are stopped or gone, and their sockets tell
what they do: nothing is written to the store for that.
"""

import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tracedstore.common import procfs
from tracedstore.common.text import printable
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import ITSELF, LocalIdentity, ProcessFacts
from tracedstore.local.host_ranks import Replies, known_ranks, ranks_of_host
from tracedstore.local.sockets import ask_processes, local_processes

# Seconds for all processes of this host to answer.
_TIMEOUT = 1.0
# Bytes at the end of a log that are read for its last line, and its characters shown.
_MAX_TAIL, _MAX_LINE = 4096, 200


def of_this_host(infos: Iterable[RankInfo]) -> list[RankInfo]:
    """Return the ranks that registered from the pid namespace of this process."""
    own = procfs.own_namespace()
    return [info for info in infos if own is not None and info.namespace == own]


def ask_local(
    infos: Mapping[int, RankInfo], world_size: int
) -> dict[int, ProcessFacts]:
    """Ask the ranks of a job that run on this host; the others are omitted.

    A rank that has not registered yet is found by its environment.

    Args:
        infos: The ranks that have registered.
        world_size: The number of ranks.
    """
    here = of_this_host(infos.values())
    if not here:
        return {}
    pids = {info.pid for info in here}
    if len(infos) < world_size:
        # One that has not registered may be any process.
        replies: Replies = local_processes(_TIMEOUT)
    else:
        replies = ask_processes(pids, "status", _TIMEOUT)
    job = _identity(pids, replies)
    if job is None:
        return {}
    ranks = {info.rank for info in here} | {
        rank for rank in ranks_of_host(replies, job) if rank < world_size
    }
    found = known_ranks(replies, infos, ranks, job, _TIMEOUT)
    # That a process runs says nothing. Those of another user do not answer this one.
    return {
        rank: facts
        for rank, facts in found.items()
        if facts.source == ITSELF or facts.state != "running"
    }


def _identity(here: Iterable[int], replies: Replies) -> LocalIdentity | None:
    """Return what identifies the job of these processes."""
    for pid in here:
        reply = replies.get(pid)
        found = LocalIdentity.of_process(pid) if reply is None else reply.identity
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process of this host uses.

    Attributes:
        cpu: The CPU time since the last reading, as a share of one core; None at the
            first reading.
        memory: Its resident memory, in bytes.
        log: The last line of the file that it logs to; "" if that is no file, or one
            that several ranks write.
    """

    cpu: float | None
    memory: int
    log: str


class UsageMeter:
    """Reads what the ranks of this host use, at each reading of the job."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[float, int]] = {}

    def read(self, infos: Iterable[RankInfo]) -> dict[tuple[str, int], Usage]:
        """Return the use of each process that runs, by its host and pid."""
        found: dict[tuple[str, int], procfs.Stat] = {}
        for info in of_this_host(infos):
            now = procfs.read_stat(info.pid)
            if now is not None and now.start_ticks == info.start_ticks:
                found[info.host, info.pid] = now
        logs = _logs([pid for _, pid in found])
        used = {
            (host, pid): Usage(
                cpu=self._share(pid, now),
                memory=now.memory_bytes,
                log=logs.get(pid, ""),
            )
            for (host, pid), now in found.items()
        }
        moment = time.monotonic()
        self._before = {
            (pid, now.start_ticks): (moment, now.cpu_ticks)
            for (_, pid), now in found.items()
        }
        return used

    def _share(self, pid: int, now: procfs.Stat) -> float | None:
        before = self._before.get((pid, now.start_ticks))
        if before is None:
            return None
        seconds = max(1e-3, time.monotonic() - before[0])
        return (now.cpu_ticks - before[1]) / os.sysconf("SC_CLK_TCK") / seconds


def _logs(pids: Iterable[int]) -> dict[int, str]:
    """Return the last line of the log of each process that has one of its own."""
    files: dict[int, tuple[str, tuple[int, int]]] = {}
    for pid in pids:
        # What it logs is on standard error, mostly, and prints are on standard output.
        for descriptor in (2, 1):
            path = f"/proc/{pid}/fd/{descriptor}"
            try:
                kind = os.stat(path)  # noqa: PTH116 - of the open file, not its path
            except OSError:
                continue
            if stat.S_ISREG(kind.st_mode) and kind.st_size:
                files[pid] = path, (kind.st_dev, kind.st_ino)
                break
    writers = Counter(file for _, file in files.values())
    return {
        pid: line
        for pid, (path, file) in files.items()
        if writers[file] == 1 and (line := _last_line(path))
    }


def _last_line(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_TAIL))
            tail = file.read(_MAX_TAIL)
    except OSError:
        return ""
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    return printable(lines[-1].strip())[:_MAX_LINE] if lines else ""
