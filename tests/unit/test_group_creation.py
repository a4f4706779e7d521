"""The creation of a process group, seen by the diagnosis."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from integration.harness import in_background, wait_until
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


def stale_creations(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[GroupCreation, ...]:
    """Ranks 1 and 2 of attempt 1, which find the stamp of rank 0 of attempt 0."""
    GroupCreation(store=store, name="0", size=3, rank=0).stamp()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    creations = tuple(
        GroupCreation(store=store, name="0", size=3, rank=rank) for rank in (1, 2)
    )
    for creation in creations:
        creation.stamp()
    return creations


def test_one_rank_reports(
    monkeypatch: pytest.MonkeyPatch, events: Callable[[], list[dict[str, Any]]]
) -> None:
    """All ranks find the same; the first one reports it, also when it looks again."""
    tracedstore.configure(log_format="json")
    creations = stale_creations(HashStore(), monkeypatch)

    for creation in (*creations, creations[0]):
        creation.look_and_report()

    stalls = [event for event in events() if event["event"] == "job.stalled"]
    assert [stall["waiting_ranks"] for stall in stalls] == ["1", "1"]
    assert all(creation.verdict is not None for creation in creations)


def test_thread_in_a_store_call_has_another_reporter(
    monkeypatch: pytest.MonkeyPatch, events: Callable[[], list[dict[str, Any]]]
) -> None:
    """The diagnosis of the store reports that call, so the group's does not."""
    tracedstore.configure(log_format="json")
    bare = HashStore()
    store = tracedstore.wrap(bare)
    creation, _ = stale_creations(store, monkeypatch)
    begun = threading.Event()

    def wait() -> None:
        creation.thread_id = threading.get_ident()
        begun.set()
        store.wait(["go"], timedelta(seconds=60))

    waiting = in_background(wait)
    assert begun.wait(60)
    wait_until(tracedstore.in_flight)

    creation.look_and_report()
    meanwhile = events()
    bare.set("go", "")
    waiting.result(60)
    creation.look_and_report()

    assert "job.stalled" not in [event["event"] for event in meanwhile]
    assert "job.stalled" in [event["event"] for event in events()]
