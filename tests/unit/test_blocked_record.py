"""The records of blocked calls in a store."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from torch.distributed import HashStore

from support.hostile_json import values
from tracedstore.common import ranges
from tracedstore.diagnosis.observe import blocked_record
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    blocked_key,
    publish_blocked,
    read_blocked,
    withdraw_blocked,
)
from tracedstore.local.facts import WrittenFamily

RECORD = BlockedRecord(
    rank=2,
    host="node2",
    pid=812,
    attempt=1,
    operation="wait",
    keys=("epoch/3/go",),
    phase="key epoch/3/go",
    awaits=(0, 1, 3),
    members=(0, 1, 2, 3),
    wrote=(WrittenFamily(family="epoch/*/go", last_key="epoch/2/go"),),
    started=1000.5,
)
FIELDS = json.loads(RECORD.to_bytes())


def test_round_trip() -> None:
    """All fields survive; unknown writers and members stay unknown."""
    assert BlockedRecord.from_bytes(RECORD.to_bytes()) == RECORD
    unknown = BlockedRecord(
        rank=0, host="h", pid=1, operation="get", keys=(), phase="get", started=0
    )
    assert BlockedRecord.from_bytes(unknown.to_bytes()) == unknown
    failed = replace(RECORD, failed=1012.5)
    assert BlockedRecord.from_bytes(failed.to_bytes()) == failed


def test_ranks_are_folded() -> None:
    """Ten thousand awaited ranks are a few bytes."""
    assert FIELDS["awaits"] == "0-1,3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("rank", value) for value in (-1, 10**6, True, "0", None)),
        *(("host", value) for value in ("", 3, None, "x" * 2000)),
        *(("pid", value) for value in (-1, 2**32, "1")),
        *(("keys", value) for value in (None, 7, [""], [3], {"a": 1})),
        *(("awaits", value) for value in ("5-1", "1-9999999999", 7, "x", ["1"])),
        *(("wrote", value) for value in (None, 3, [None], [{"family": "a"}])),
        *(("started", value) for value in (None, -1, "1", 1e300)),
        *(("failed", value) for value in (False, True, -1, "1", 1e300)),
    ],
)
def test_invalid_field_invalidates_the_record(field: str, value: Any) -> None:
    """No half of a record is used."""
    hostile = json.dumps(FIELDS | {field: value}).encode()
    assert BlockedRecord.from_bytes(hostile) is None


@given(values(FIELDS))
def test_hostile_value(value: bytes) -> None:
    """It raises nothing; what is accepted has no control characters."""
    record = BlockedRecord.from_bytes(value)
    if record is not None:
        assert BlockedRecord.from_bytes(record.to_bytes()) == record
        assert "".join((record.phase, record.host, *record.keys)).isprintable()


def test_control_characters_are_replaced() -> None:
    """The text reaches terminals."""
    hostile = json.dumps(FIELDS | {"phase": "key \x1b[2J"}).encode()
    record = BlockedRecord.from_bytes(hostile)
    assert record is not None
    assert "\x1b" not in record.phase


def test_publish_read_withdraw() -> None:
    """A withdrawn record is not read, and a rank may publish again."""
    store = HashStore()
    assert read_blocked(store, 4) == {}
    publish_blocked(store, RECORD, first=True)
    assert read_blocked(store, 4) == {2: RECORD}
    withdraw_blocked(store, 2)
    assert read_blocked(store, 4) == {}
    publish_blocked(store, RECORD, first=False)
    assert read_blocked(store, 4) == {2: RECORD}


def test_ranks_beyond_the_world_are_not_read() -> None:
    """A larger world used the store before."""
    store = HashStore()
    publish_blocked(store, RECORD, first=True)
    assert read_blocked(store, 2) == {}


def test_hostile_values_do_not_hide_the_others() -> None:
    """Neither a bad list of ranks nor a bad record."""
    store: Any = HashStore()
    store.append("tracedstore/BLOCKED_RANKS", "x -1 99999999999 1 ")
    store.set(blocked_key(1), "\x00{")
    publish_blocked(store, RECORD, first=True)
    assert read_blocked(store, 4) == {2: RECORD}


def test_long_ledger_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is longer than the job's is not parsed; the records are found."""
    store: Any = HashStore()
    publish_blocked(store, RECORD, first=True)
    store.append("tracedstore/BLOCKED_RANKS", "3 " * 1_000_000)
    parsed = []

    class Pattern:
        def fullmatch(self, text: bytes) -> bool:
            parsed.append(text)
            return True

    monkeypatch.setattr(blocked_record, "_RANK", Pattern())

    assert read_blocked(store, 4) == {2: RECORD}
    assert parsed == []


@pytest.mark.parametrize("field", ["awaits", "members"])
def test_ranks_that_the_job_does_not_have(field: str) -> None:
    """A record with one is none, and is not expanded."""
    store: Any = HashStore()
    publish_blocked(store, RECORD, first=True)
    store.set(blocked_key(2), json.dumps(FIELDS | {field: "0-999999"}))
    ranges.unfold_shared.cache_clear()

    assert read_blocked(store, 4) == {}
    assert ranges.unfold_shared.cache_info().currsize <= 1
