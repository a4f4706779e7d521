"""Who created a process group: one stamp for each rank and group.

torch writes its own keys a few times when a group is created. A stamp next to them
has the attempt, so that a value of an earlier attempt is not taken for one of this.
"""

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Final

from tracedstore.common import validation
from tracedstore.common.identity import ProcessIdentity, restart_count
from tracedstore.coordination.arrivals import read_existing
from tracedstore.diagnosis.judgement.verdict import (
    REMEDIES,
    AwaitedRank,
    Verdict,
    printable_text,
)

# The key of a rank is this, the name of the group, and the rank.
_STAMPS: Final = "tracedstore/STAMPS"
_MAX_STAMP_BYTES = 4096
_MAX_MEMBERS_READ = 1024
_MAX_PID = 2**32


def write(store: Any, group: str, rank: int) -> None:
    """Stamp the keys that a rank is about to write for a group."""
    stamp = {
        "rank": rank,
        "attempt": restart_count(os.environ),
        "host": ProcessIdentity().host,
        "pid": os.getpid(),
        "time": time.time(),
    }
    store.set(f"{_STAMPS}/{group}/{rank}", json.dumps(stamp))


def find_stale(store: Any, group: str, members: Sequence[int]) -> Verdict | None:
    """Return a verdict if members of a group have stamps of an earlier attempt only."""
    attempt = restart_count(os.environ)
    keys = [f"{_STAMPS}/{group}/{rank}" for rank in members[:_MAX_MEMBERS_READ]]
    stamps = [stamp for value in read_existing(store, keys) if (stamp := _parse(value))]
    # Any client can write a stamp of another rank under the key of a member.
    of_members = frozenset(members)
    stale = [
        stamp
        for stamp in stamps
        if stamp["attempt"] < attempt and stamp["rank"] in of_members
    ]
    if not stale:
        return None
    return Verdict(
        phase=phase_of(group),
        cause="stale",
        awaited=tuple(
            AwaitedRank(
                rank=stamp["rank"],
                host=stamp["host"],
                pid=stamp["pid"],
                cause="stale",
                doing=f"its keys are of attempt {stamp['attempt']}, written"
                f" {max(0.0, time.time() - stamp['time']):.0f} s ago",
            )
            for stamp in stale
        ),
        awaited_ranks=tuple(stamp["rank"] for stamp in stale),
        evidence=(f"this is attempt {attempt}",),
        remedy=REMEDIES["stale"],
        time=time.time(),
    )


def phase_of(group: str) -> str:
    """Return what a rank that creates a group executes."""
    default = group in ("0", "default_pg")
    return "init_process_group" if default else f"new_group {group}"


def _parse(value: bytes) -> dict[str, Any] | None:
    try:
        stamp = validation.load_json(value, _MAX_STAMP_BYTES)
        return {
            "rank": validation.integer(stamp["rank"], 1_000_000),
            "attempt": validation.integer(stamp["attempt"], 1_000_000),
            "host": printable_text(stamp["host"]),
            "pid": validation.integer(stamp["pid"], _MAX_PID),
            "time": validation.seconds(stamp["time"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
