"""Facts about a process: their encoding, and how this process collects its own."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from torch.distributed.elastic.utils import store as elastic_store

import tracedstore
from integration.harness import wait_until
from tracedstore.common import procfs
from tracedstore.common.identity import set_group_identity
from tracedstore.coordination import rank_registry
from tracedstore.local import facts
from tracedstore.local.facts import (
    MAX_ANSWER_BYTES,
    Frame,
    KeyWriters,
    LastCall,
    ProcessFacts,
    WrittenFamily,
    place_of,
)
from tracedstore.recording.recorder import RECORDER

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


class TestPlace:
    """The line of the program that a process is in, below torch and others."""

    PLACE = r"unit/test_facts.py:\d+ TestPlace.test_[a-z_]+"

    def test_torch(self) -> None:
        """What of torch it calls is named."""
        found = []

        class Watching(dist.HashStore):
            def multi_get(self, keys: list[str]) -> list[bytes]:
                caller = inspect.currentframe()
                found.append(place_of(caller and caller.f_back))
                return list(super().multi_get(keys))

        elastic_store.synchronize(Watching(), b"", 0, 1, "all/")

        assert re.fullmatch(f"{self.PLACE}, in torch: synchronize", found[0])

    def test_standard_library(self) -> None:
        """Not the line of contextlib."""
        found = []

        @contextmanager
        def looking() -> Iterator[None]:
            inner = inspect.currentframe()
            assert inner is not None
            assert str(inner.f_back).startswith("<frame")
            found.append(place_of(inner.f_back))
            yield

        with looking():
            pass

        assert re.fullmatch(self.PLACE, found[0])

    def test_no_program(self) -> None:
        """A thread that has no other line has its innermost one."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(int).result()
            (thread,) = pool._threads
            place = wait_until(
                lambda: place_of(sys._current_frames().get(thread.ident or 0))
            )

        assert place.startswith("futures/thread.py:")


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


def test_own_folders() -> None:
    """Frames of the whole package are recognised, and the demo's are the job's."""
    package = Path(tracedstore.__file__).parent

    assert Path(facts._PACKAGE) == package
    assert Path(facts._DEMO) == package / "tools/demo"
    assert Path(facts._DEMO).is_dir()


OPERATION: Any = None  # it is not read


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class TestLastCall:
    """The seconds since the last Store call."""

    def test_without_call(self) -> None:
        """A process that made no call has no last one."""
        assert LastCall(RECORDER, Time()).idle_seconds() is None

    def test_observed(self) -> None:
        """An observed call is exact, also in the first sample."""
        time = Time()
        last = LastCall(RECORDER, time)
        tracedstore.wrap(dist.HashStore()).set("k", "v")
        last.observe(OPERATION)
        time.now += 612

        assert last.idle_seconds() == 612
        time.now += 8
        assert last.idle_seconds() == 620

    def test_first_sample_without_observation(self) -> None:
        """Calls before the first sample ended at an unknown time."""
        time = Time()
        last = LastCall(RECORDER, time)
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        assert last.idle_seconds() is None
        time.now += 5
        assert last.idle_seconds() == 5

    def test_sampled(self) -> None:
        """Without an observation the time of the sample counts, a lower bound."""
        time = Time()
        last = LastCall(RECORDER, time)
        store = tracedstore.wrap(dist.HashStore())
        store.set("k", "v")
        last.observe(OPERATION)
        last.sample()
        time.now += 10
        store.set("k", "v")
        time.now += 1
        last.sample()
        time.now += 30

        assert last.idle_seconds() == 30

    def test_reset(self) -> None:
        """A forked child starts without a call."""
        last = LastCall(RECORDER, Time())
        tracedstore.wrap(dist.HashStore()).set("k", "v")
        last.observe(OPERATION)
        RECORDER.reset()
        last.reset()

        assert last.idle_seconds() is None


@pytest.fixture
def writers(provider: TracerProvider) -> KeyWriters:
    """Key writers that observe every call of this process."""
    writers = KeyWriters()
    tracedstore.configure(spans="all", observers=[writers], tracer_provider=provider)
    return writers


class TestKeyWriters:
    """What is learned from writes."""

    def test_family(self, writers: KeyWriters) -> None:
        """The last key and the number of writes of a family."""
        store = tracedstore.wrap(dist.HashStore())
        store.set("epoch/1/go", "")
        store.set("epoch/2/go", "")

        assert writers.wrote("epoch/*/go") == WrittenFamily(
            family="epoch/*/go", last_key="epoch/2/go", writes=2
        )
        assert writers.wrote("other/*") is None

    def test_rank_in_key(self, writers: KeyWriters) -> None:
        """A number that always equalled the rank is found; others are not."""
        set_group_identity(3, 8)
        store = tracedstore.wrap(dist.HashStore())
        for step in (3, 4):
            store.add(f"step/{step}/rank/3", 1)
        store.add("always/5", 1)

        written = writers.wrote("step/*/rank/*")

        assert written is not None
        assert written.rank_positions == (1,)
        assert writers.wrote("always/*").rank_positions == ()  # type: ignore[union-attr]  # it is there

    def test_reads_and_lost_writes(self, writers: KeyWriters) -> None:
        """Reads, failed calls and lost compare-and-sets are no writes."""
        bare = dist.HashStore()
        bare.set("k/1", "v")
        store = tracedstore.wrap(bare)
        store.get("k/1")
        store.check(["k/1"])
        store.compare_set("k/1", "other", "new")

        assert writers.wrote("k/*") is None
        store.compare_set("k/1", "v", "new")
        assert writers.wrote("k/*") is not None

    def test_other_writes(self, writers: KeyWriters) -> None:
        """Appends, multi_set and queues are writes."""
        store = tracedstore.wrap(dist.HashStore())
        store.append("a/1", "x")
        store.multi_set(["b/1", "c/1"], ["x", "y"])
        store.queue_push("q/1", "x")

        for family in ("a/*", "b/*", "c/*", "q/*"):
            assert writers.wrote(family) is not None, family

    def test_own_keys_are_not_learned(self, writers: KeyWriters) -> None:
        """Keys of this package are not the job's."""
        tracedstore.wrap(dist.HashStore()).set("tracedstore/RANKS/1", "")

        assert writers.wrote("tracedstore/RANKS/*") is None

    def test_bounded(self, writers: KeyWriters) -> None:
        """The first 64 families are remembered."""
        store = tracedstore.wrap(dist.HashStore())
        for letter in range(100):
            store.set("f" * (letter + 1), "")

        known = [writers.wrote("f" * (letter + 1)) for letter in range(100)]
        assert sum(written is not None for written in known) == 64
