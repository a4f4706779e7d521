"""The verdict on a hung job, as bytes and as text."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from support.hostile_json import values
from tracedstore.common.causes import CAUSES, REMEDIES, worst
from tracedstore.diagnosis.judgement.stall_reports import page_text
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict

VERDICT = Verdict(
    phase="new_group 1",
    cause="busy",
    awaited=(
        AwaitedRank(
            rank=2, host="node4", pid=812, cause="busy", doing="alive, in data.py:88 f"
        ),
        AwaitedRank(rank=5, cause="unknown"),
    ),
    awaited_ranks=(2, 5),
    waiting_ranks=(0, 1, 3, 4),
    key="1//cpu//0/2",
    waited_seconds=31.25,
    evidence=("each awaited rank writes a key that does not exist",),
    remedy=REMEDIES["busy"],
    time=1000.0,
)
FIELDS = json.loads(VERDICT.to_bytes())


def test_round_trip() -> None:
    """All fields survive."""
    assert Verdict.from_bytes(VERDICT.to_bytes()) == VERDICT
    bare = Verdict(phase="connect", cause="unknown", agents=True)
    assert Verdict.from_bytes(bare.to_bytes()) == bare


def test_text() -> None:
    """One line with the ranks, the cause, the evidence and the remedy."""
    assert VERDICT.describe() == (
        "waiting in new_group 1 for rank 2 on node4 (pid 812): alive, in data.py:88 f;"
        " rank 5 [busy (rank 2), unknown (rank 5): each awaited rank writes a key that"
        " does not exist]; " + REMEDIES["busy"]
    )


def test_text_without_names() -> None:
    """What is known is in their stead."""
    verdict = Verdict(phase="key go", cause="unknown", known="one of ranks 2-3")
    assert verdict.describe() == "waiting in key go: one of ranks 2-3"


def test_many_ranks_are_folded() -> None:
    """Eight are described, the others counted in ranges."""
    awaited = tuple(AwaitedRank(rank=rank) for rank in range(64))
    verdict = Verdict(
        phase="connect",
        cause="not_started",
        awaited=awaited,
        awaited_ranks=tuple(range(10_000)),
    )
    assert verdict.describe_awaited().endswith("rank 7; and ranks 8-9999")
    one_more = replace(verdict, awaited=awaited[:9], awaited_ranks=tuple(range(9)))
    assert one_more.describe_awaited().endswith("rank 7; and rank 8")


def test_page_text() -> None:
    """It is as short for ten thousand ranks as for one, and has no duration."""
    one = AwaitedRank(
        rank=2,
        host="node4",
        pid=812,
        cause="busy",
        doing="alive",
        idle_since=100.0,
        place="data.py:88 load_dataset",
    )
    many = tuple(
        replace(one, rank=rank, host=f"node{rank // 8:03d}", pid=rank)
        for rank in range(64)
    )
    few = Verdict(phase="new_group 1", cause="busy", awaited=(one,), awaited_ranks=(2,))
    all_but_one = replace(few, awaited=many, awaited_ranks=tuple(range(10_000)))

    assert page_text(few) == (
        "rank 2 on node4 (pid 812): alive, in data.py:88 load_dataset"
    )
    assert page_text(all_but_one) == (
        "ranks 0-9999 (10,000); node000: 8, node001: 8, node002: 8, node003: 8,"
        " node004: 8, ... and 3 more; alive, in data.py:88 load_dataset"
    )
    assert page_text(Verdict(phase="key a", cause="unknown", known="nothing")) == (
        "nothing"
    )


def test_event_fields_are_json() -> None:
    """Lists and folded ranges, no tuples of objects."""
    fields = VERDICT.event_fields()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["awaited_ranks"] == [2, 5]
    assert (fields["waiting_ranks"], fields["waiting_count"]) == ("0-1,3-4", 4)


def test_every_cause_has_a_remedy() -> None:
    """And the order of the causes decides which one a verdict has."""
    assert REMEDIES.keys() == set(CAUSES)
    assert worst(["busy", "not_started"]) == "not_started"
    assert worst([]) == "unknown"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("cause", value) for value in ("", "evil", None, 3, ["busy"], {"busy": 1})),
        *(("phase", value) for value in ("", None, 7)),
        *(("awaited", value) for value in (None, 3, [None], [{"rank": 1}])),
        *(("awaited_ranks", value) for value in ("0-99999999", [1], "1-x", 7)),
        *(("waited_seconds", value) for value in (-1, None, "1", 1e300)),
        *(("time", value) for value in (None, "now")),
        *(("evidence", value) for value in (None, 7, [3])),
    ],
)
def test_invalid_field_invalidates_the_verdict(field: str, value: Any) -> None:
    """A verdict of another program names no rank."""
    hostile = json.dumps(FIELDS | {field: value}).encode()
    assert Verdict.from_bytes(hostile) is None


@given(values(FIELDS))
def test_hostile_value(value: bytes) -> None:
    """It raises nothing; what is accepted has no control characters."""
    verdict = Verdict.from_bytes(value)
    if verdict is not None:
        assert verdict.describe().isprintable()
        assert json.dumps(verdict.event_fields())


@pytest.mark.parametrize("field", ["phase", "known", "key", "remedy"])
def test_control_characters_are_replaced(field: str) -> None:
    """The text reaches terminals and exceptions."""
    hostile = json.dumps(FIELDS | {field: "a\x1b[2J\n", "awaited_ranks": ""}).encode()
    verdict = Verdict.from_bytes(hostile)
    assert verdict is not None
    assert verdict.describe().isprintable()
    assert verdict.key.isprintable()


def test_too_large_a_verdict_is_refused() -> None:
    """Before it is parsed."""
    assert Verdict.from_bytes(json.dumps(FIELDS).encode() + b" " * (1 << 20)) is None
