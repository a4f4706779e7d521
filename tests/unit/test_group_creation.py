"""The creation of a process group, seen by the diagnosis."""

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from tracedstore.diagnosis.connection.group_creation import GroupCreation


def test_reading_is_not_recorded(registry: CollectorRegistry) -> None:
    """The metrics have the calls of the job, not those of the diagnosis."""
    tracedstore.configure(registry=registry, log_format="off")
    store = tracedstore.wrap(HashStore())
    creation = GroupCreation(store=store, name="0", size=2, rank=0)

    creation.stamp()
    creation.look_and_report()

    counts = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "tracedstore_operation_duration_seconds_count"
    ]
    assert not any(counts)


def test_keys_of_an_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that read them waits for the one that wrote them."""
    store = HashStore()
    GroupCreation(store=store, name="0", size=2, rank=0).stamp()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    creation = GroupCreation(store=store, name="0", size=2, rank=1)
    creation.stamp()

    creation.look_and_report()

    assert creation.verdict is not None
    assert (creation.verdict.cause, creation.verdict.awaited_ranks) == ("stale", (0,))
    assert creation.verdict.waiting_ranks == (1,)
