"""Tests of diagnosis.process_answer: what is read may be hostile."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.diagnosis.process_answer import (
    MAX_ANSWER_BYTES,
    Frame,
    ProcessAnswer,
    WrittenFamily,
)

FRAME = Frame(file="train/data.py", line=88, function="load_dataset")
ANSWER = ProcessAnswer(
    rank=2,
    host="node4",
    pid=812,
    state="running",
    registered=False,
    idle_seconds=612.5,
    operation="wait epoch/3/go",
    frames=(FRAME,),
    wrote=(WrittenFamily(family="e/*", last_key="e/2", rank_positions=(0,)),),
    stacks={"MainThread": (FRAME,)},
    detail="x",
    source="itself",
)


class TestProcessAnswer:
    """Encoding and decoding."""

    def test_round_trip(self) -> None:
        """An answer is decoded as it was encoded."""
        assert ProcessAnswer.from_bytes(ANSWER.to_bytes()) == ANSWER

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("rank", -1),
            ("rank", "2"),
            ("rank", True),
            ("rank", 10**7),
            ("host", None),
            ("host", "h" * 5000),
            ("pid", 2**40),
            ("state", "dead"),
            ("state", ["running"]),
            ("idle_seconds", -1),
            ("idle_seconds", 1e300),
            ("frames", "text"),
            ("frames", [{"file": "a"}]),
            ("frames", [{"file": "a", "line": "1", "function": "f"}]),
            ("wrote", {}),
            ("wrote", [{"family": "", "last_key": "", "writes": 1}]),
            ("stacks", []),
            ("stacks", {"MainThread": None}),
        ],
    )
    def test_refuses(self, field: str, value: Any) -> None:
        """An answer with a value that is not valid is no answer."""
        fields = json.loads(ANSWER.to_bytes()) | {field: value}

        assert ProcessAnswer.from_bytes(json.dumps(fields).encode()) is None

    def test_bounds(self) -> None:
        """Long lists are cut, control characters are replaced."""
        fields = json.loads(ANSWER.to_bytes())
        fields["frames"] *= 1000
        fields["stacks"] = {str(n): fields["frames"] for n in range(100)}
        fields["detail"] = "\x1b[31m"

        found = ProcessAnswer.from_bytes(json.dumps(fields).encode()[:])

        assert found is None  # too large as a whole
        fields["stacks"] = {str(n): fields["frames"][:70] for n in range(100)}
        found = ProcessAnswer.from_bytes(json.dumps(fields).encode())
        assert found is not None
        assert len(found.frames) == 8
        assert len(found.stacks) == 64
        assert {len(frames) for frames in found.stacks.values()} == {64}
        assert found.detail == "\N{REPLACEMENT CHARACTER}[31m"
        assert len(json.dumps(fields)) < MAX_ANSWER_BYTES

    @given(st.binary(max_size=200))
    def test_any_bytes(self, value: bytes) -> None:
        """Any bytes are an answer or none; nothing raises."""
        ProcessAnswer.from_bytes(value)
