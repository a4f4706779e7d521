"""Tests of local.facts.KeyWriters, through real calls."""

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider

import tracedstore
from tracedstore.common.identity import set_group_identity
from tracedstore.local.facts import KeyWriters, WrittenFamily


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
