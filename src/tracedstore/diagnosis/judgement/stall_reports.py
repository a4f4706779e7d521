"""Reports stalls: the only way out of `job.stalled`.

Many processes find the same stall. One of them reports it:

- Where they share a store that responds, they count themselves in it, and the first one
  reports (`common.election.take_position`, under `LOOKERS`).
- Where they do not, because the store cannot be reached, one process of each host
  reports: the one that has a claim. A claim is a lock on one byte of a file in the
  private directory of this user, where no other user can take it. The kernel releases
  it when the process ends, however it ends.

A thread that waits has one reporter as well. While it is in a Store call, that is the
diagnosis of this store; while a store's constructor runs, or a process group is created
without a Store call in flight, it is the one of `connection`.
"""

import errno
import fcntl
import hashlib
import os
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tracedstore import names
from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import number, shorten
from tracedstore.diagnosis.judgement.verdict import Verdict, worst_first
from tracedstore.local import sockets
from tracedstore.recording.cold_metrics import Labels
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY

# The key of the latest verdict, for the other ranks and for ``tracedstore status``.
VERDICT: Final = "tracedstore/VERDICT"
# Counts the processes that look for a verdict, under the name of what they look at.
LOOKERS: Final = "tracedstore/DIAGNOSING"

_MAX_RANKS_NAMED = 64
# A page on a telephone names so many ranks; of more it has the hosts, with counts.
_MAX_RANKS_ON_PAGE: Final = 3
_MAX_HOSTS_ON_PAGE: Final = 5
# Characters of a label.
_MAX_PHASE: Final = 80
_MAX_TEXT: Final = 400
_FILE: Final = "claims"
# struct flock: type, whence, start, length and pid.
_LOCK: Final = struct.Struct("@hhqqi4x")
# Bytes of a digest that are an offset. Offsets have 63 bits.
_OFFSET_BYTES: Final = 7
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)


class Claim:
    """A claim of this process, until it is closed or freed, or the process ends.

    Args:
        descriptor: The open file that is locked.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor of the open file; -1 if it is closed."""
        return self._descriptor

    # Bound as a default, because module globals may be None at interpreter shutdown.
    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Give the claim up. A forked child that closes its copy releases nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    __del__ = close


# The claims that this process keeps, by what is reported.
_kept: dict[str, Claim] = {}


def claim(what: str) -> Claim | None:
    """Claim a report for this process; None if another one of this host has it.

    A process that cannot find out, because there is no private directory or it has no
    locks, has the claim: two reports are better than none. A forked child must close
    its copy.
    """
    try:
        return _lock(what)
    except OSError as error:
        if error.errno in _TAKEN:
            return None
        return Claim(-1)


def _lock(what: str) -> Claim:
    with sockets.create_directory() as directory:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        held = Claim(os.open(_FILE, flags, 0o600, dir_fd=directory))
    try:
        # Hosts may share the directory.
        named = f"{sockets.namespace_digest()}/{what}"
        digest = hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()
        offset = int.from_bytes(digest[:_OFFSET_BYTES])
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        # Of the open file: two claims of one process exclude each other, too.
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, lock)
    except OSError:
        held.close()
        raise
    return held


def has_claim(what: str) -> bool:
    """Return whether this process has claimed it before."""
    return what in _kept


def keep_claim(what: str) -> bool:
    """Return whether this process reports something for its host, from now on."""
    if what not in _kept and (claimed := claim(what)) is not None:
        _kept[what] = claimed
    return what in _kept


def release_claim(what: str) -> None:
    """Let another process of this host report it."""
    claimed = _kept.pop(what, None)
    if claimed is not None:
        claimed.close()


def reset() -> None:
    """Drop the claims, as a forked child must: the parent has them."""
    while _kept:
        # Nothing is released: the parent's file stays open.
        _kept.popitem()[1].close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledJob:
    """A stalled job, as of the last report.

    Attributes:
        cause: Why it is stalled.
        awaited_count: Number of ranks that it waits for, 0 if they are unknown.
        awaited: Host and cause of each of the first 64 of them.
        started: When the longest wait began, in seconds since the epoch.
        verdict: What the waiting ranks execute, whom they wait for, and what to do, for
            people.
    """

    cause: str
    awaited_count: int
    awaited: Mapping[int, tuple[str, str]]
    started: float = 0.0
    verdict: tuple[str, str, str] = ("", "", "")

    @property
    def group(self) -> tuple[str, ...]:
        """A process exports one stall at a time."""
        return ("job",)

    def gauges(self) -> Iterator[tuple[names.Metric, Labels, float]]:
        """Return the values of the gauges."""
        yield names.JOB_AWAITED, (self.cause,), self.awaited_count
        for rank, (host, cause) in list(self.awaited.items())[:_MAX_RANKS_NAMED]:
            yield names.JOB_RANK_AWAITED, (str(rank), host, cause), 1
        yield names.JOB_STALLED_START, (self.cause, *self.verdict), self.started


def page_text(verdict: Verdict) -> str:
    """Describe the awaited ranks for a page: as short for a thousand as for one.

    It has no duration, because each text is a label of a series.
    """
    if not verdict.awaited_ranks:
        return verdict.describe_awaited()
    noun = "agent" if verdict.agents else "rank"
    awaited = [replace(one, idle_since=None) for one in worst_first(verdict.awaited)]
    if len(verdict.awaited_ranks) <= _MAX_RANKS_ON_PAGE:
        return "; ".join(one.describe(0, noun) for one in awaited)
    hosts = Counter(one.host for one in awaited if one.host).most_common()
    parts = [ranks_text(verdict.awaited_ranks, noun)]
    parts[0] += f" ({number(len(verdict.awaited_ranks))})"
    if hosts:
        shown = [f"{host}: {count}" for host, count in hosts[:_MAX_HOSTS_ON_PAGE]]
        more = len(hosts) - len(shown)
        parts.append(", ".join(shown) + (f", ... and {more} more" if more else ""))
    ((activity, count),) = Counter(one.activity(0) for one in awaited).most_common(1)
    if activity:
        most = "" if count == len(awaited) else "most of them "
        parts.append(f"{most}{activity}")
    return "; ".join(parts)


def report(
    wait: object, verdict: Verdict, store_url: str, *, emit: bool = True
) -> None:
    """Emit `job.stalled` and set the gauges.

    Args:
        wait: The wait that the verdict is about; `resumed` gets the same.
        verdict: The verdict.
        store_url: The address of the store, as ``--store`` takes it; "" without one.
        emit: False to set the gauges alone.
    """
    stalled = StalledJob(
        cause=verdict.cause,
        awaited_count=len(verdict.awaited_ranks),
        awaited={one.rank: (one.host, one.cause) for one in verdict.awaited},
        started=round(time.time() - verdict.waited_seconds),
        verdict=(
            shorten(verdict.phase, _MAX_PHASE),
            shorten(page_text(verdict), _MAX_TEXT),
            shorten(verdict.remedy, _MAX_TEXT),
        ),
    )
    RECORDER.cold.begin(wait, stalled)
    if emit:
        fields = verdict.event_fields()
        TELEMETRY.emit(names.JOB_STALLED, store_url=store_url, **fields)


def resumed(wait: object, verdict: Verdict) -> None:
    """Emit `job.resumed` and clear the gauges, if the stall was reported."""
    if RECORDER.cold.end(wait):
        TELEMETRY.emit(names.JOB_RESUMED, **verdict.event_fields())


def failed(wait: object) -> None:
    """Clear the gauges of a wait that ended with an exception."""
    RECORDER.cold.end(wait)
