"""The time of day jumps back an hour while ranks wait at a barrier."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import tracedstore
from integration.harness import in_background, wait_until
from support.events import Events, check
from support.stores import client_of, tcp
from tracedstore.core.clock import Clock

HOUR = 3600.0
SetBack = Callable[[], None]


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, SetBack]:
    """A clock of the recording that jumps together with `time`, and how to make it."""
    now, now_ns = time.time, time.time_ns
    offset = 0.0

    def set_back() -> None:
        nonlocal offset
        offset -= HOUR

    def wall() -> int:
        return now_ns() + int(offset * 1e9)

    monkeypatch.setattr(time, "time", lambda: now() + offset)
    monkeypatch.setattr(time, "time_ns", wall)
    return Clock(ticks=time.perf_counter_ns, wall=wall), set_back


def spent(registry: CollectorRegistry, result: str) -> float | None:
    """Seconds in barriers that ended so."""
    return registry.get_sample_value(
        "tracedstore_barrier_duration_seconds_sum", {"barrier": "b", "result": result}
    )


class TestClockSetBack:
    """Nothing takes less than no time, and nothing takes an hour."""

    def test_timeout(
        self,
        jumping: tuple[Clock, SetBack],
        registry: CollectorRegistry,
        events: Events,
        tmp_path: Path,
    ) -> None:
        """The timeout comes when it would have, and is told as what it was."""
        clock, set_back = jumping
        tracedstore.configure(registry=registry, clock=clock, log_format="json")
        server: Any = tcp(tmp_path)

        with client_of(server) as other:
            began = time.monotonic()
            visits = [
                in_background(
                    lambda store=store, rank=rank: tracedstore.barrier(  # type: ignore[misc]
                        tracedstore.wrap(store), 3, "b", 1.0, rank=rank, warn_after=0.5
                    )
                )
                for rank, store in ((0, server.clone()), (2, other))
            ]
            wait_until(lambda: server.add("b/num_members", 0) == 2)
            set_back()
            errors = [visit.exception(20) for visit in visits]
            took = time.monotonic() - began

        assert 1 <= took < 15
        for error in errors:
            assert isinstance(error, tracedstore.BarrierTimeout)
            assert error.missing_ranks == (1,)
            assert 1 <= error.waited <= took
        told = [event for event in events() if event["event"].startswith("barrier.")]
        assert {event["event"] for event in told} == {
            "barrier.waiting",
            "barrier.timeout",
        }
        for event in told:
            check(event)
            assert 0.5 <= event["waited_seconds"] <= took
        assert 2 <= (spent(registry, "timeout") or 0) <= 2 * took

    def test_completed(
        self,
        jumping: tuple[Clock, SetBack],
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """Those that arrived an hour later, by their own account, met all the same."""
        clock, set_back = jumping
        told = structlog.testing.LogCapture()
        structlog.configure(processors=[told])
        tracedstore.configure(
            registry=registry, clock=clock, tracer_provider=provider, spans="all"
        )
        store = tracedstore.wrap(dist.HashStore())

        began = time.monotonic()
        first = in_background(lambda: tracedstore.barrier(store, 2, "b", 20, rank=0))
        wait_until(lambda: store.add("b/num_members", 0) == 1)
        set_back()
        tracedstore.barrier(store, 2, "b", 20, rank=1)
        first.result(20)
        took = time.monotonic() - began

        completed = [e for e in told.entries if e["event"] == "barrier.completed"]
        assert sorted(event["rank"] for event in completed) == [0, 1]
        for event in completed:
            assert 0 <= event["waited_seconds"] <= took
        assert 0 <= (spent(registry, "completed") or -1) <= 2 * took
        finished = spans.get_finished_spans()
        assert finished
        for span in finished:
            assert span.start_time is not None
            assert span.end_time is not None
            assert 0 <= span.end_time - span.start_time <= took * 1e9
