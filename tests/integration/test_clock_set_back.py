"""The wall clock is set back an hour while ranks wait at a barrier."""

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
from tracedstore.export import setup
from tracedstore.recording.recorder import Clock

HOUR = 3600.0
SetBack = Callable[[], None]


@pytest.fixture
def clock_and_set_back(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, SetBack]:
    """Return a clock, and a function that sets it and the `time` module back."""
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


def barrier_seconds(registry: CollectorRegistry, result: str) -> float | None:
    """Return the total seconds of barriers with this result."""
    return registry.get_sample_value(
        "tracedstore_barrier_duration_seconds_sum", {"barrier": "b", "result": result}
    )


class TestClockSetBack:
    """Durations are neither negative nor an hour too long."""

    def test_timeout(
        self,
        clock_and_set_back: tuple[Clock, SetBack],
        registry: CollectorRegistry,
        events: Events,
        tmp_path: Path,
    ) -> None:
        """The barrier times out when it is due and reports the right duration."""
        clock, set_back = clock_and_set_back
        tracedstore.configure(registry=registry, clock=clock, log_format="json")
        server: Any = tcp(tmp_path)

        with client_of(server) as other:
            started = time.monotonic()
            calls = [
                in_background(
                    lambda store=store, rank=rank: tracedstore.barrier(  # type: ignore[misc]
                        tracedstore.wrap(store), 3, "b", 1.0, rank=rank, warn_after=0.5
                    )
                )
                for rank, store in ((0, server.clone()), (2, other))
            ]
            wait_until(lambda: server.add("b/num_members", 0) == 2)
            set_back()
            errors = [call.exception(60) for call in calls]
            elapsed = time.monotonic() - started

        assert elapsed >= 1
        for error in errors:
            assert isinstance(error, tracedstore.BarrierTimeout)
            assert error.missing_ranks == (1,)
            assert 1 <= error.waited <= elapsed
        emitted = [event for event in events() if event["event"].startswith("barrier.")]
        assert {event["event"] for event in emitted} == {
            "barrier.waiting",
            "barrier.timeout",
        }
        for event in emitted:
            check(event)
            assert 0.5 <= event["waited_seconds"] <= elapsed
        assert 2 <= (barrier_seconds(registry, "timeout") or 0) <= 2 * elapsed

    def test_completed(
        self,
        clock_and_set_back: tuple[Clock, SetBack],
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """The barrier completes though arrival times differ by an hour."""
        clock, set_back = clock_and_set_back
        log = structlog.testing.LogCapture()
        structlog.configure(processors=[log])
        tracedstore.configure(
            registry=registry, clock=clock, tracer_provider=provider, spans="all"
        )
        store = tracedstore.wrap(dist.HashStore())

        started = time.monotonic()
        first = in_background(lambda: tracedstore.barrier(store, 2, "b", 20, rank=0))
        wait_until(lambda: store.add("b/num_members", 0) == 1)
        set_back()
        tracedstore.barrier(store, 2, "b", 20, rank=1)
        first.result(60)
        elapsed = time.monotonic() - started
        assert setup._deferred.flush(60)
        assert setup._event_writer.flush(60)

        completed = [e for e in log.entries if e["event"] == "barrier.completed"]
        assert sorted(event["rank"] for event in completed) == [0, 1]
        for event in completed:
            assert 0 <= event["waited_seconds"] <= elapsed
        assert 0 <= (barrier_seconds(registry, "completed") or -1) <= 2 * elapsed
        finished = spans.get_finished_spans()
        assert finished
        for span in finished:
            assert span.start_time is not None
            assert span.end_time is not None
            assert 0 <= span.end_time - span.start_time <= elapsed * 1e9
