"""Tests of local.facts: what is read may be hostile."""

import json
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.common import procfs
from tracedstore.coordination import rank_registry
from tracedstore.local.facts import (
    MAX_ANSWER_BYTES,
    Frame,
    ProcessFacts,
    WrittenFamily,
)

FRAME = Frame(file="train/data.py", line=88, function="load_dataset")
ANSWER = ProcessFacts(
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
        assert ProcessFacts.from_bytes(ANSWER.to_bytes()) == ANSWER

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

        assert ProcessFacts.from_bytes(json.dumps(fields).encode()) is None

    def test_bounds(self) -> None:
        """Long lists are cut, control characters are replaced."""
        fields = json.loads(ANSWER.to_bytes())
        fields["frames"] *= 1000
        fields["stacks"] = {str(n): fields["frames"] for n in range(100)}
        fields["detail"] = "\x1b[31m"

        found = ProcessFacts.from_bytes(json.dumps(fields).encode()[:])

        assert found is None  # too large as a whole
        fields["stacks"] = {str(n): fields["frames"][:70] for n in range(100)}
        found = ProcessFacts.from_bytes(json.dumps(fields).encode())
        assert found is not None
        assert len(found.frames) == 8
        assert len(found.stacks) == 64
        assert {len(frames) for frames in found.stacks.values()} == {64}
        assert found.detail == "\N{REPLACEMENT CHARACTER}[31m"
        assert len(json.dumps(fields)) < MAX_ANSWER_BYTES

    @given(st.binary(max_size=200))
    def test_any_bytes(self, value: bytes) -> None:
        """Any bytes are an answer or none; nothing raises."""
        ProcessFacts.from_bytes(value)


class TestRegistryEntry:
    """The fields of a registry entry that make its process certain."""

    OLD: ClassVar = {
        "rank": 1,
        "host": "node",
        "pid": 7,
        "world_size": 2,
        "started": 1.0,
    }

    def test_old_entry(self) -> None:
        """An entry without them is read, and its process cannot be identified."""
        info = rank_registry.parse_entry(json.dumps(self.OLD).encode())

        assert info is not None
        assert (info.attempt, info.start_ticks, info.namespace) == (0, None, None)

    def test_own_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank registers its attempt, start time and namespace."""
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
        store = dist.HashStore()
        rank_registry.register(store, 1, 2)

        info = rank_registry.read_ranks(store, [1])[1]

        assert info.attempt == 3
        state = procfs.process_state(info.pid, info.start_ticks, info.namespace)
        assert state == "running"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("attempt", -1),
            ("attempt", "0"),
            ("start_ticks", 2**70),
            ("start_ticks", 1.5),
            ("namespace", "n" * 5000),
            ("namespace", 4),
        ],
    )
    def test_refuses(self, field: str, value: Any) -> None:
        """An entry with a value that is not valid is no entry."""
        written = json.dumps(self.OLD | {field: value}).encode()

        assert rank_registry.parse_entry(written) is None
