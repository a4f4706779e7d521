"""The spans of barriers: one trace over all ranks, in one process for once."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry

import tracedstore
from support.events import Events
from tracedstore.coordination import barrier as barrier_module
from tracedstore.testing import FakeClock, FlakyStore

PREFIX = "tracedstore.barrier."


@pytest.fixture
def traced(
    registry: CollectorRegistry, provider: TracerProvider
) -> tracedstore.TracedStore:
    """A traced store, whose telemetry goes to the fixtures of the test."""
    tracedstore.configure(registry=registry, tracer_provider=provider, spans="all")
    return tracedstore.wrap(dist.HashStore())


def barrier(store: Any, rank: int, world_size: int = 2, **options: Any) -> None:
    """Visit a barrier, or miss somebody and say nothing."""
    options = {"barrier_timeout": 20.0, "trace_timeout": 0.2} | options
    tracedstore.barrier(store, world_size, "step/7", rank=rank, **options)


def of_barriers(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of barriers, in the order of their ranks."""
    found = [
        one for one in spans.get_finished_spans() if one.name.startswith("barrier")
    ]
    return sorted(
        found, key=lambda one: int(str((one.attributes or {})["tracedstore.rank"]))
    )


def meet(store: Any, world_size: int) -> None:
    """Let all ranks meet at once."""
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(lambda rank: barrier(store, rank, world_size), range(world_size)))


class TestOneTrace:
    """However they come."""

    @pytest.mark.parametrize("world_size", [1, 2, 8])
    def test_all_at_once(
        self, traced: Any, spans: InMemorySpanExporter, world_size: int
    ) -> None:
        """One trace and one root, though the last may not see what the first left."""
        meet(traced, world_size)

        found = of_barriers(spans)
        assert len(found) == world_size
        assert len({one.context.trace_id for one in found}) == 1
        roots = [one for one in found if one.parent is None]
        assert len(roots) == 1
        parents = {one.parent.span_id for one in found if one.parent}
        assert parents <= {roots[0].context.span_id}

    def test_the_last_does_not_see_the_first(
        self,
        traced: Any,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Then all belong to the last one, the first one too."""
        arrived = threading.Event()
        monkeypatch.setattr(
            barrier_module, "publish_traceparent", lambda *_: arrived.set()
        )
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(barrier, traced, 0)
            assert arrived.wait(10)
            barrier(traced, 1)
            first.result(10)

        of_first, of_last = of_barriers(spans)
        assert of_last.parent is None
        assert of_first.parent is not None
        assert of_first.parent.span_id == of_last.context.span_id

    def test_calls_of_a_barrier_have_no_spans_of_their_own(
        self, traced: Any, spans: InMemorySpanExporter
    ) -> None:
        """They would be in traces of their own; other calls have theirs."""
        meet(traced, 2)
        traced.set("k", "v")

        assert [one.name for one in spans.get_finished_spans()][2:] == ["set k"]


class TestWhatIsInIt:
    """Attributes, times and status."""

    def test_completed(self, traced: Any, spans: InMemorySpanExporter) -> None:
        """Who, which, how, and who was last."""
        barrier(traced, 0, 1)

        (span,) = of_barriers(spans)
        assert span.name == "barrier step/*"
        attributes = dict(span.attributes or {})
        assert attributes.pop(PREFIX + "arrival_seconds")
        assert attributes == {
            PREFIX + "prefix": "step/7",
            PREFIX + "result": "completed",
            PREFIX + "arrival_order": 1,
            PREFIX + "last_rank": 0,
            "tracedstore.rank": 0,
            "tracedstore.world_size": 1,
            "host.name": socket.gethostname(),
        }
        assert span.status.is_ok or span.status.status_code.name == "UNSET"

    def test_timeout(
        self, traced: Any, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """An error, with those that are missing; as long as the wait was."""
        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            barrier(traced, 1, 100, barrier_timeout=0.2)

        (span,) = of_barriers(spans)
        attributes = span.attributes or {}
        assert attributes["error.type"] == "timeout"
        assert attributes[PREFIX + "missing_count"] == 99
        assert attributes[PREFIX + "missing_ranks"] == (0, *range(2, 65))
        assert attributes[PREFIX + "missing"] == "missing 99 of 100: ranks 0,2-99"
        assert attributes[PREFIX + "arrived_count"] == 1
        assert span.status.description
        assert span.status.description in str(raised.value)
        assert span.start_time is not None
        assert span.end_time is not None
        assert 0.2 <= (span.end_time - span.start_time) / 1e9 <= raised.value.waited + 5
        (event,) = [one for one in events() if one["event"] == "barrier.timeout"]
        assert event["span_id"] == f"{span.context.span_id:016x}"

    def test_failed(self, traced: Any, spans: InMemorySpanExporter) -> None:
        """The store's own error, by its name."""
        store = FlakyStore()
        store.fail("add", OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            barrier(store, 0)

        (span,) = of_barriers(spans)
        attributes = span.attributes or {}
        assert attributes["error.type"] == "OSError"
        assert attributes[PREFIX + "result"] == "failed"
        assert PREFIX + "arrival_order" not in attributes

    def test_a_warning_has_the_ids(
        self, traced: Any, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """Of the span that comes out at the end."""
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(barrier, traced, 0, warn_after=0.01)
            warned: list[dict[str, Any]] = []
            while not warned:
                warned = [e for e in events() if e["event"] == "barrier.waiting"]
            barrier(traced, 1)
            first.result(10)

        of_first, _ = of_barriers(spans)
        assert warned[0]["span_id"] == f"{of_first.context.span_id:016x}"
        assert warned[0]["trace_id"] == f"{of_first.context.trace_id:032x}"


class TestNoSpans:
    """Where nobody takes them, the barrier is the same."""

    def test_switched_off(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """With TRACEDSTORE_SPANS=off."""
        tracedstore.configure(registry=registry, tracer_provider=provider, spans="off")
        meet(dist.HashStore(), 2)

        assert not spans.get_finished_spans()

    def test_not_sampled(
        self, registry: CollectorRegistry, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """The first one's sampler decides, and events name no trace."""
        provider = TracerProvider(sampler=ALWAYS_OFF)
        tracedstore.configure(registry=registry, tracer_provider=provider)
        with pytest.raises(tracedstore.BarrierTimeout):
            barrier(dist.HashStore(), 0, barrier_timeout=0.1)

        (event,) = [one for one in events() if one["event"] == "barrier.timeout"]
        assert "trace_id" not in event

    def test_an_exporter_that_hangs(self, registry: CollectorRegistry) -> None:
        """Costs a second, not the job."""
        close_connection = threading.Event()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_Hanging(close_connection)))
        tracedstore.configure(registry=registry, tracer_provider=provider)
        started = time.monotonic()
        with pytest.raises(tracedstore.BarrierTimeout):
            barrier(dist.HashStore(), 0, barrier_timeout=0.1)
        took = time.monotonic() - started
        close_connection.set()
        provider.shutdown()

        assert took < 10  # the exporter would take 30


class _Hanging(SpanExporter):
    def __init__(self, close_connection: threading.Event) -> None:
        self._let_go = close_connection

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        self._let_go.wait(30)

    def shutdown(self) -> None:
        pass


def test_a_clock_that_jumps_back(
    registry: CollectorRegistry, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    """A span ends after it began, whatever the time of day does."""
    clock = FakeClock()
    tracedstore.configure(
        registry=registry, tracer_provider=provider, clock=clock.clock
    )
    store = tracedstore.wrap(dist.HashStore())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(barrier, store, 0)
        store.wait(["step/7/num_members"])
        clock.set_back(3600)
        barrier(store, 1)
        first.result(10)

    for span in of_barriers(spans):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time >= span.start_time
