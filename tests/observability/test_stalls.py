"""A stalled call: its gauges while it lasts, its span and exemplar when it ends."""

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from torch.distributed import DistStoreError, HashStore

import tracedstore
from integration.harness import in_background, wait_until
from support.waits import all_wait_as_ranks
from tracedstore import names
from tracedstore.common.causes import REMEDIES


@pytest.fixture(autouse=True)
def rank_0_of_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of 100; the other ones were never started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "100")
    all_wait_as_ranks(monkeypatch)


def families(registry: CollectorRegistry) -> Iterator[Metric]:
    """Return what Prometheus scrapes."""
    return iter(text_string_to_metric_families(openmetrics(registry).decode()))


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a gauge by its labels, without those of the process."""
    return {
        tuple(
            sample.labels[label]
            for label in ("awaited", "awaited_rank", "cause", "phase", "remedy")
            if label in sample.labels
        ): sample.value
        for family in families(registry)
        for sample in family.samples
        if sample.name == name
    }


def test_signals_of_a_stall(
    registry: CollectorRegistry, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    """At most 64 ranks have a gauge. Span and exemplar belong to the waiting call."""
    tracedstore.configure(
        registry=registry, tracer_provider=provider, log_format="off", stall_after=0.4
    )
    store = tracedstore.wrap(HashStore())
    keys = [f"ready/{rank}" for rank in range(100)]
    waiting = in_background(lambda: store.wait(keys, timedelta(seconds=4)))

    count = wait_until(lambda: values(registry, names.JOB_AWAITED.name))
    awaited = values(registry, names.JOB_RANK_AWAITED.name)
    verdict = values(registry, names.JOB_STALLED_START.name)
    error = waiting.exception(60)
    ended = wait_until(lambda: not values(registry, names.JOB_AWAITED.name))

    # Its own key does not exist either, but the rank is blocked.
    assert count == {("not_started",): 99}
    assert awaited == {(str(rank), "not_started"): 1 for rank in range(1, 65)}
    ((labels, started),) = verdict.items()
    assert labels == (
        "ranks 1-99 (99); never registered in this store",
        "not_started",
        "key ready/0",
        REMEDIES["not_started"],
    )
    assert 0 <= time.time() - started < 60
    assert ended
    assert not values(registry, names.JOB_RANK_AWAITED.name)
    assert isinstance(error, DistStoreError)
    (span,) = [one for one in spans.get_finished_spans() if one.name.startswith("wait")]
    (event,) = span.events
    assert event.name == names.JOB_STALLED
    assert event.attributes is not None
    assert event.attributes["cause"] == "not_started"
    assert event.attributes["awaited_ranks"] == tuple(range(1, 100))
    assert event.attributes["phase"] == "key ready/0"
    assert str(event.attributes["awaited"]).startswith("rank 1: never registered")
    traces = {
        sample.exemplar.labels["trace_id"]
        for family in families(registry)
        for sample in family.samples
        if sample.exemplar and sample.labels.get("operation") == "wait"
    }
    assert traces == {f"{span.context.trace_id:032x}"}
