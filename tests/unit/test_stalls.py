"""Verdicts and blocked ranks, read from the contents of a store."""

from dataclasses import replace
from typing import Any

import pytest

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, blocked_key
from tracedstore.tools.attach import stall_records as stalls
from tracedstore.tools.attach.stall_records import (
    StallRecord,
    StoredStalls,
    is_stall_key,
)
from tracedstore.tools.attach.store_snapshot import StoreSnapshot

RECORD = BlockedRecord(
    rank=3,
    host="a",
    pid=7,
    operation="get",
    keys=("k",),
    phase="new_group 1",
    awaits=(2,),
    started=100.0,
)
VERDICT_AT_130 = Verdict(
    phase="new_group 1", cause="busy", waiting_ranks=(0, 3), time=130.0
)


def read(values: dict[str, bytes], *infos: RankInfo) -> StoredStalls:
    """Read the stalls of a store with these values."""
    registered = {"": {info.rank: info for info in infos}}
    return StoredStalls(StoreSnapshot(values, values), registered)


def info(**fields: Any) -> RankInfo:
    """Return the registration of the process that is blocked in `RECORD`."""
    known: dict[str, Any] = {
        "rank": 3,
        "host": "a",
        "pid": 7,
        "world_size": 4,
        "started": 50.0,
    }
    return RankInfo(**known | fields)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("tracedstore/VERDICT", True),
        ("job/0/tracedstore/VERDICT", True),
        ("my-tracedstore/VERDICT", False),
        ("tracedstore/VERDICT/x", False),
        ("tracedstore/BLOCKED/0", True),
        ("job/0/tracedstore/BLOCKED/12", True),
        ("mytracedstore/BLOCKED/12", False),
        ("tracedstore/BLOCKED/", False),
        ("tracedstore/BLOCKED/-1", False),
        ("tracedstore/BLOCKED/\u0663", False),
        (f"tracedstore/BLOCKED/{'1' * 5000}", False),
    ],
)
def test_keys(key: str, expected: bool) -> None:
    """Verdicts and records are found under any prefix."""
    assert is_stall_key(key) is expected


def test_restart() -> None:
    """Prefixes that differ in numbers are one job; the latest attempt counts."""
    later = replace(RECORD, attempt=1, started=90.0, phase="init_process_group")
    values = {
        f"attempt_0/{blocked_key(3)}": RECORD.to_bytes(),
        f"attempt_1/{blocked_key(3)}": later.to_bytes(),
        f"attempt_1/{VERDICT}": VERDICT_AT_130.to_bytes(),
        f"attempt_0/{VERDICT}": replace(VERDICT_AT_130, time=140.0).to_bytes(),
    }

    (stall,) = read(values).stalls

    assert stall.prefix == "attempt_*/"
    assert [one.phase for one in stall.blocked] == ["init_process_group"]
    assert stall.verdict is not None
    assert stall.verdict.time == 140.0


@pytest.mark.parametrize(
    ("registration", "shown"),
    [
        (info(), True),
        (info(pid=8, started=101.0), False),
        (info(host="b", started=101.0), False),
        (info(pid=8, started=99.0), True),
        (info(rank=2, pid=8, started=101.0), True),
    ],
    ids=["same", "replaced", "other host", "registered before", "other rank"],
)
def test_replaced_process(registration: RankInfo, shown: bool) -> None:
    """A record is left out if another process has registered as its rank since."""
    found = read({blocked_key(3): RECORD.to_bytes()}, registration)

    assert bool(found.stalls) is shown
    assert found.invalid_count == 0


@pytest.mark.parametrize(
    ("now", "started", "fresh"),
    [
        (180.0, None, True),
        (191.0, None, False),
        # The clock of the rank that diagnosed is ahead.
        (100.0, None, True),
        (60.0, None, False),
        (5000.0, 100.0, True),
        (5000.0, 135.0, True),
        (5000.0, 200.0, False),
    ],
)
def test_fresh(now: float, started: float | None, fresh: bool) -> None:
    """A verdict is fresh for a minute, and while its ranks are in the same call."""
    values = {VERDICT: VERDICT_AT_130.to_bytes()}
    if started is not None:
        values[blocked_key(3)] = replace(RECORD, started=started).to_bytes()

    (stall,) = read(values).stalls

    assert (stall.fresh_verdict(now) is not None) is fresh
    assert stall.still_waiting() is (fresh and started is not None)


def test_rank_that_the_verdict_does_not_cover() -> None:
    """A blocked rank of another wait does not keep a verdict fresh."""
    other = replace(RECORD, rank=1)
    values = {VERDICT: VERDICT_AT_130.to_bytes(), blocked_key(1): other.to_bytes()}

    (stall,) = read(values).stalls

    assert stall.fresh_verdict(5000.0) is None


def test_nothing() -> None:
    """Empty values are calls that have ended, and not invalid."""
    found = read({VERDICT: b"", blocked_key(3): b""})

    assert (found.stalls, found.invalid_count) == ((), 0)
    assert StallRecord(prefix="").fresh_verdict(0.0) is None


def test_failed_call() -> None:
    """Its rank is not blocked any more, and the record is not invalid."""
    found = read({blocked_key(3): replace(RECORD, failed=120.0).to_bytes()})

    assert (found.stalls, found.invalid_count) == ((), 0)


def test_awaited_ranks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are read first; a set that many ranks share counts once."""
    monkeypatch.setattr(stalls, "_MAX_AWAITED", 10)
    shared = {
        blocked_key(rank): replace(RECORD, rank=rank, awaits=(5, 6, 7)).to_bytes()
        for rank in range(50)
    }
    distinct = {
        f"x/{blocked_key(rank)}": replace(
            RECORD, rank=rank, awaits=(rank, 500, 501)
        ).to_bytes()
        for rank in range(50)
    }

    assert len(read(shared).stalls[0].blocked) == 50
    found = read(distinct | {f"x/{VERDICT}": VERDICT_AT_130.to_bytes()})

    (stall,) = found.stalls
    assert stall.verdict == VERDICT_AT_130
    assert (len(stall.blocked), found.unread_count) == (3, 47)
