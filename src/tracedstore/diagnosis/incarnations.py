"""Earlier processes of a rank in the same store: restarts, and ranks started twice.

torchrun reuses its store for the next attempt, and workers have no prefix per attempt.
So a rank may start among the keys of an earlier attempt. A rank that registers
compares the registration that it finds with itself.
"""

import json
import os
import time
from dataclasses import dataclass
from typing import Any, Final

from tracedstore import names
from tracedstore.coordination import ranges, rank_registry, validation
from tracedstore.coordination.arrivals import read_key
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.core import procfs
from tracedstore.core.identity import ProcessIdentity, restart_count
from tracedstore.core.telemetry import TELEMETRY
from tracedstore.diagnosis.verdict import printable_text

_STALE: Final = "tracedstore/STALE"
_DUPLICATES: Final = "tracedstore/DUPLICATES"
_MAX_DUPLICATES_BYTES = 64 * 1024
_MAX_PID = 2**32
_REMEDY: Final = (
    "torch may read values of the earlier attempt: set"
    " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, or use a new store, port or"
    " file"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """Two processes that registered as the same rank in one attempt.

    Attributes:
        rank: The rank.
        hosts: The hosts of both.
        pids: The process ids of both.
    """

    rank: int
    hosts: tuple[str, str]
    pids: tuple[int, int]

    def __str__(self) -> str:
        first, second = (
            f"pid {pid} on {host}"
            for pid, host in zip(self.pids, self.hosts, strict=True)
        )
        return f"rank {self.rank} was started twice: {first}, and {second}"


def check_earlier(store: Any, rank: int) -> None:
    """Report an earlier process that registered as this rank, before it registers."""
    found = rank_registry.read_ranks(store, [rank]).get(rank)
    identity = ProcessIdentity.from_environment(os.environ)
    if found is None or (found.pid, found.host) == (os.getpid(), identity.host):
        return
    attempt = restart_count(os.environ)
    same_attempt = found.attempt == attempt and found.run_id == identity.run_id
    state = procfs.process_state(found.pid, found.start_ticks, found.namespace)
    if same_attempt and state != "gone":
        _record_duplicate(store, found, identity.host)
        return
    # Every rank of the attempt finds one; the first of them reports it.
    if store.add(f"{_STALE}/{attempt}/{identity.run_id}", 1) == 1:
        age = max(0.0, time.time() - found.started)
        report_stale(
            f"the store holds keys of an earlier process of rank {rank}: pid"
            f" {found.pid} on {found.host}, attempt {found.attempt}, registered"
            f" {age:.0f} s ago; this is attempt {attempt}",
            found=found,
        )


def check_replaced(store: Any, rank: int) -> None:
    """Record another process that has registered as this rank since this one did.

    Two processes that start at the same time do not find each other in
    `check_earlier`.
    """
    found = rank_registry.read_ranks(store, [rank]).get(rank)
    identity = ProcessIdentity.from_environment(os.environ)
    if found is None or (found.pid, found.host) == (os.getpid(), identity.host):
        return
    state = procfs.process_state(found.pid, found.start_ticks, found.namespace)
    if found.attempt == restart_count(os.environ) and state != "gone":
        _record_duplicate(store, found, identity.host)


def read_duplicates(store: Any) -> list[Duplicate]:
    """Read the ranks that were started twice; invalid entries are omitted."""
    if not store.check([_DUPLICATES]):
        return []
    lines = read_key(store, _DUPLICATES)[:_MAX_DUPLICATES_BYTES].splitlines()
    duplicates = map(_parse, lines)
    return [duplicate for duplicate in duplicates if duplicate is not None]


def _record_duplicate(store: Any, found: RankInfo, host: str) -> None:
    entry = {
        "rank": found.rank,
        "hosts": [found.host, host],
        "pids": [found.pid, os.getpid()],
    }
    line = json.dumps(entry) + "\n"
    if store.has_extended_api():
        store.append(_DUPLICATES, line)
    else:
        store.set(_DUPLICATES, line)


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
        previous_pid=None if found is None else found.pid,
        previous_host="" if found is None else found.host,
        previous_started=None if found is None else found.started,
        remedy=remedy,
    )


def _parse(line: bytes) -> Duplicate | None:
    try:
        entry = validation.load_json(line, _MAX_DUPLICATES_BYTES)
        (first_host, second_host), (first, second) = entry["hosts"], entry["pids"]
        return Duplicate(
            rank=validation.integer(entry["rank"], ranges.MAX_RANKS),
            hosts=(printable_text(first_host), printable_text(second_host)),
            pids=(
                validation.integer(first, _MAX_PID),
                validation.integer(second, _MAX_PID),
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
