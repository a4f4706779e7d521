"""The spans of barriers: one trace for all ranks, which are threads of one process."""

import itertools
import socket
import string
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry

import tracedstore
from integration.harness import wait_until
from support.events import Events
from tracedstore import names
from tracedstore.common.keys import MAX_FAMILIES, OTHER_FAMILIES
from tracedstore.coordination.barrier import BarrierCall
from tracedstore.coordination.protocol import LastArrival
from tracedstore.diagnosis.judgement.missing_ranks import find_causes
from tracedstore.export import setup
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY, SpanIds
from tracedstore.testing import FakeClock, FlakyStore

PREFIX = "tracedstore.barrier."


@pytest.fixture
def traced(
    registry: CollectorRegistry, provider: TracerProvider
) -> tracedstore.TracedStore:
    """Return a traced store that emits to the test's registry and provider."""
    tracedstore.configure(registry=registry, tracer_provider=provider, spans="all")
    return tracedstore.wrap(dist.HashStore())


def barrier(store: Any, rank: int, world_size: int = 2, **options: Any) -> None:
    """Call a barrier with the timeouts of these tests."""
    options = {"barrier_timeout": 20.0, "trace_timeout": 0.2} | options
    tracedstore.barrier(store, world_size, "step/7", rank=rank, **options)


def barrier_spans(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the spans of barriers, sorted by rank."""
    assert setup._deferred.flush(60)
    matches = [
        span for span in spans.get_finished_spans() if span.name.startswith("barrier")
    ]
    return sorted(
        matches, key=lambda span: int(str((span.attributes or {})["tracedstore.rank"]))
    )


def run_barrier(store: Any, world_size: int) -> None:
    """Call the barrier from all ranks at once."""
    with ThreadPoolExecutor(world_size) as pool:
        list(pool.map(lambda rank: barrier(store, rank, world_size), range(world_size)))


def test_families_of_their_own(
    registry: CollectorRegistry,
    provider: TracerProvider,
    spans: InMemorySpanExporter,
    events: Events,
) -> None:
    """A barrier keeps its name in a program with very many different keys."""
    tracedstore.configure(
        registry=registry, tracer_provider=provider, spans="all", log_format="json"
    )
    store = tracedstore.wrap(dist.HashStore())
    letters = string.ascii_letters
    for key in itertools.islice(itertools.product(letters, letters), MAX_FAMILIES + 1):
        store.set("".join(key), "value")

    with pytest.raises(tracedstore.BarrierTimeout):
        barrier(store, 0, barrier_timeout=0.1)

    (span,) = barrier_spans(spans)
    labels = {"barrier": "step/*", "result": "timeout"}
    count = registry.get_sample_value(f"{names.BARRIER_DURATION.name}_count", labels)
    families = {one["barrier_family"] for one in events() if "barrier_family" in one}
    assert (span.name, count, families) == ("barrier step/*", 1, {"step/*"})
    assert RECORDER.families.of("another") == OTHER_FAMILIES


class TestOneTrace:
    """All ranks of a barrier share one trace, in whatever order they arrive."""

    @pytest.mark.parametrize("world_size", [1, 2, 8])
    def test_ranks_arrive_at_once(
        self, traced: Any, spans: InMemorySpanExporter, world_size: int
    ) -> None:
        """The trace has one root."""
        run_barrier(traced, world_size)

        by_rank = barrier_spans(spans)
        assert len(by_rank) == world_size
        assert len({span.context.trace_id for span in by_rank}) == 1
        roots = [span for span in by_rank if span.parent is None]
        assert len(roots) == 1
        parents = {span.parent.span_id for span in by_rank if span.parent}
        assert parents <= {roots[0].context.span_id}

    def test_tracer_that_is_not_of_the_sdk(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """Its ids are known when the span has started, so that is done first."""
        tracedstore.configure(
            registry=registry, tracer_provider=_OtherProvider(provider)
        )
        run_barrier(tracedstore.wrap(dist.HashStore()), 3)

        by_rank = barrier_spans(spans)
        assert len(by_rank) == 3
        (root,) = [span for span in by_rank if span.parent is None]
        parents = {span.parent.span_id for span in by_rank if span.parent}
        assert parents == {root.context.span_id}

    def test_warning_of_the_last_rank(
        self, traced: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The watcher makes its span while ids are reserved; the others join it."""
        call = BarrierCall(traced, 1, "step/7", 20, 0, None, 0, find_causes, 0)
        reserve = TELEMETRY.reserve_span

        def warn_and_reserve() -> SpanIds | None:
            call.span.begin()
            return reserve()

        monkeypatch.setattr(TELEMETRY, "reserve_span", warn_and_reserve)
        call.run()

        (span,) = barrier_spans(spans)
        shared = LastArrival.from_bytes(traced.get("step/7/last_member")).traceparent
        assert f"{span.context.span_id:016x}" in shared

    @pytest.mark.parametrize("warned", [False, True])
    def test_prepared_ids(
        self,
        traced: Any,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
        warned: bool,
    ) -> None:
        """Ids of the second barrier are known before it, for the watcher too."""
        run_barrier(traced, 1)
        barrier_spans(spans)
        spans.clear()
        monkeypatch.setattr(TELEMETRY, "reserve_span", None)
        call = BarrierCall(traced, 1, "step/8", 20, 0, None, 0, find_causes, 0)
        if warned:
            call.span.begin()
        call.run()

        (span,) = barrier_spans(spans)
        assert span.parent is None
        shared = LastArrival.from_bytes(traced.get("step/8/last_member")).traceparent
        assert f"{span.context.trace_id:032x}-{span.context.span_id:016x}" in shared

    def test_prepared_ids_are_not_for_a_trace(
        self, traced: Any, spans: InMemorySpanExporter, provider: TracerProvider
    ) -> None:
        """A last rank that is in a trace passes on that trace."""
        run_barrier(traced, 1)
        barrier_spans(spans)
        spans.clear()
        with provider.get_tracer("test").start_as_current_span("step") as step:
            tracedstore.barrier(traced, 1, "step/8", rank=0)

        (span,) = barrier_spans(spans)
        assert span.parent is not None
        assert span.parent.span_id == step.get_span_context().span_id
        shared = LastArrival.from_bytes(traced.get("step/8/last_member")).traceparent
        assert f"{span.context.trace_id:032x}-{span.context.span_id:016x}" in shared

    def test_ranks_time_out_at_once(
        self, traced: Any, spans: InMemorySpanExporter
    ) -> None:
        """They agree on one root, whichever reports first."""

        def time_out(rank: int) -> None:
            with pytest.raises(tracedstore.BarrierTimeout):
                barrier(traced, rank, 5, barrier_timeout=0.3)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(time_out, range(4)))

        by_rank = barrier_spans(spans)
        assert len(by_rank) == 4
        (root,) = [span for span in by_rank if span.parent is None]
        parents = {span.parent.span_id for span in by_rank if span.parent}
        assert parents == {root.context.span_id}

    def test_store_calls_of_barrier_have_no_spans(
        self, traced: Any, spans: InMemorySpanExporter
    ) -> None:
        """Spans of these calls would start new traces; other calls have spans."""
        run_barrier(traced, 2)
        traced.set("k", "v")

        assert len(barrier_spans(spans)) == 2
        others = {span.name for span in spans.get_finished_spans()} - {"barrier step/*"}
        assert others == {"set k"}


class TestContent:
    """Attributes, times and status of a barrier's span."""

    def test_completed(self, traced: Any, spans: InMemorySpanExporter) -> None:
        """The span has the rank, the barrier, the result and the last rank."""
        barrier(traced, 0, 1)

        (span,) = barrier_spans(spans)
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
        """The span is an error, lists the missing ranks and covers the wait."""
        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            barrier(traced, 1, 100, barrier_timeout=0.2)

        (span,) = barrier_spans(spans)
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
        (event,) = [e for e in events() if e["event"] == "barrier.timeout"]
        assert event["span_id"] == f"{span.context.span_id:016x}"

    def test_failed(self, traced: Any, spans: InMemorySpanExporter) -> None:
        """error.type is the class of the store's exception."""
        store = FlakyStore()
        store.fail("add", OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            barrier(store, 0)

        (span,) = barrier_spans(spans)
        attributes = span.attributes or {}
        assert attributes["error.type"] == "OSError"
        assert attributes[PREFIX + "result"] == "failed"
        assert PREFIX + "arrival_order" not in attributes

    def test_warning_has_span_ids(
        self, traced: Any, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """barrier.waiting has the ids of the span that is exported at the end."""
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(barrier, traced, 0, warn_after=0.01)
            warnings: list[dict[str, Any]] = []
            while not warnings:
                warnings = [e for e in events() if e["event"] == "barrier.waiting"]
            barrier(traced, 1)
            first.result(60)

        first_span, last_span = barrier_spans(spans)
        (link,) = first_span.links
        assert link.context.span_id == last_span.context.span_id
        assert warnings[0]["span_id"] == f"{first_span.context.span_id:016x}"
        assert warnings[0]["trace_id"] == f"{first_span.context.trace_id:032x}"


class TestNoSpans:
    """The barrier works the same where no spans are exported."""

    def test_switched_off(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """spans="off" exports no spans."""
        tracedstore.configure(registry=registry, tracer_provider=provider, spans="off")
        run_barrier(dist.HashStore(), 2)

        assert not spans.get_finished_spans()

    def test_not_sampled(
        self, registry: CollectorRegistry, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """The first rank's sampler decides; events have no trace id."""
        provider = TracerProvider(sampler=ALWAYS_OFF)
        tracedstore.configure(registry=registry, tracer_provider=provider)
        with pytest.raises(tracedstore.BarrierTimeout):
            barrier(dist.HashStore(), 0, barrier_timeout=0.1)

        (event,) = [e for e in events() if e["event"] == "barrier.timeout"]
        assert "trace_id" not in event

    def test_exporter_hangs(self, registry: CollectorRegistry) -> None:
        """A hanging exporter delays the barrier by a second and does not block it."""
        release = threading.Event()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_HangingExporter(release)))
        tracedstore.configure(registry=registry, tracer_provider=provider)
        with pytest.raises(tracedstore.BarrierTimeout):
            barrier(dist.HashStore(), 0, barrier_timeout=0.1)
        release.set()  # the exporter would hang until then
        provider.shutdown()


class _OtherProvider(trace.TracerProvider):
    """A provider whose tracers have nothing but the API's methods."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def get_tracer(self, *args: Any, **options: Any) -> trace.Tracer:
        return _OtherTracer(self._provider.get_tracer(*args, **options))


class _OtherTracer(trace.NoOpTracer):
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def start_span(self, *args: Any, **options: Any) -> trace.Span:
        return self._tracer.start_span(*args, **options)


class _HangingExporter(SpanExporter):
    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        self._release.wait()

    def shutdown(self) -> None:
        pass


def test_wall_clock_set_back(
    registry: CollectorRegistry, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    """A span ends after its start, even if the wall clock is set back meanwhile."""
    clock = FakeClock()
    tracedstore.configure(
        registry=registry, tracer_provider=provider, clock=clock.clock
    )
    store = tracedstore.wrap(dist.HashStore())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(barrier, store, 0)
        wait_until(lambda: store.check(["step/7/num_members"]))
        clock.set_back(3600)
        barrier(store, 1)
        first.result(60)

    for span in barrier_spans(spans):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.end_time >= span.start_time
