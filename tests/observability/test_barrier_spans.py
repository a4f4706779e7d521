"""The spans of barriers: one trace for all ranks, which are threads of one process."""

import gc
import itertools
import socket
import string
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch.distributed as dist
from opentelemetry import trace
from opentelemetry.sdk.trace import (
    ConcurrentMultiSpanProcessor,
    ReadableSpan,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

import tracedstore
from integration.harness import wait_until
from support.events import Events
from tracedstore import names
from tracedstore.common.keys import MAX_FAMILIES, OTHER_FAMILIES
from tracedstore.coordination.barrier import JOB_COUNT_KEY, JOB_KEY, BarrierCall
from tracedstore.diagnosis.judgement.inquiry import find_causes
from tracedstore.export import setup
from tracedstore.export.tracer_provider import LateSpans
from tracedstore.recording.recorder import RECORDER
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


def all_barrier_spans(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the spans of barriers: those of ranks, and their shared parents."""
    assert setup._deferred.flush(60)
    return [
        span for span in spans.get_finished_spans() if span.name.startswith("barrier")
    ]


def roots(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the parents that the spans of ranks share."""
    found = all_barrier_spans(spans)
    return [span for span in found if names.RANK not in (span.attributes or {})]


def barrier_spans(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """Return the spans of the ranks in barriers, sorted by rank."""
    matches = [
        span
        for span in all_barrier_spans(spans)
        if names.RANK in (span.attributes or {})
    ]
    return sorted(
        matches, key=lambda span: int(str((span.attributes or {})[names.RANK]))
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


def assert_one_parent(by_rank: Sequence[ReadableSpan]) -> None:
    """Assert that spans are in one trace, below a parent that is none of them."""
    parents = {
        None if span.parent is None else (span.parent.trace_id, span.parent.span_id)
        for span in by_rank
    }
    assert len({span.context.trace_id for span in by_rank}) == 1
    assert len(parents) == 1
    assert None not in parents
    assert not any(span.links for span in by_rank)


def assert_root(root: ReadableSpan, by_rank: Sequence[ReadableSpan]) -> None:
    """Assert that a span is the parent of these, and begins with the first one."""
    assert root.parent is None
    (first,) = [
        span
        for span in by_rank
        if (span.attributes or {})[names.BARRIER_ARRIVAL_ORDER] == 1
    ]
    for span in by_rank:
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (
            root.context.trace_id,
            root.context.span_id,
        )
    assert (root.start_time, root.end_time) == (first.start_time, first.end_time)


def _interrupt(*_arguments: Any) -> None:
    raise KeyboardInterrupt


def in_run(monkeypatch: pytest.MonkeyPatch, run_id: str, attempt: int = 0) -> None:
    """Make this a process of a run that torchrun started."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


class TestDerivedIds:
    """Which barriers share a trace, and whether it is sampled."""

    def trace_of(self, store: Any, spans: InMemorySpanExporter, prefix: str) -> int:
        """Return the trace id of a barrier of one rank."""
        spans.clear()
        tracedstore.barrier(store, 1, prefix, rank=0)
        (span,) = barrier_spans(spans)
        return int(span.context.trace_id)

    def test_run_id(
        self, traced: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Run id, attempt and prefix say which trace; no call of the store does."""
        in_run(monkeypatch, "run-17")
        first = self.trace_of(traced, spans, "a")
        other_store = tracedstore.wrap(dist.HashStore())
        assert self.trace_of(other_store, spans, "a") == first
        others = [self.trace_of(other_store, spans, "b")]
        in_run(monkeypatch, "run-17", 1)
        others.append(self.trace_of(tracedstore.wrap(dist.HashStore()), spans, "a"))
        in_run(monkeypatch, "run-18")
        others.append(self.trace_of(tracedstore.wrap(dist.HashStore()), spans, "a"))

        assert len({first, *others}) == 4
        assert not traced.check([JOB_KEY])

    @pytest.mark.parametrize("run_id", ["", "none"])
    def test_no_run_id(
        self,
        traced: Any,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
        run_id: str,
    ) -> None:
        """Jobs that nobody named have traces of their own: one for each store."""
        in_run(monkeypatch, run_id)
        jobs = [dist.HashStore(), dist.HashStore()]
        found = [
            self.trace_of(tracedstore.wrap(job), spans, prefix)
            for job in jobs
            for prefix in "ab"
        ]
        # Another rank, which has its own store object.
        again = self.trace_of(
            tracedstore.wrap(dist.PrefixStore("", jobs[0])), spans, "c"
        )

        assert len({*found, again}) == 5
        assert jobs[0].check([JOB_KEY])

    @pytest.mark.parametrize("value", [b"", b"\xff" * 1000, b"x"])
    def test_hostile_job(
        self, traced: Any, spans: InMemorySpanExporter, value: bytes
    ) -> None:
        """What another client wrote as the job is hashed like any other."""
        traced.set(JOB_KEY, value)
        run_barrier(traced, 2)

        assert_one_parent(barrier_spans(spans))

    def test_store_without_compare_and_set(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        tmp_path: Path,
    ) -> None:
        """The first rank that counts itself says what the job is."""
        tracedstore.configure(registry=registry, tracer_provider=provider)
        stores = [dist.FileStore(str(tmp_path / "store"), 8) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda rank: barrier(stores[rank], rank, 4), range(4)))

        assert_one_parent(barrier_spans(spans))

    def test_first_rank_died(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        tmp_path: Path,
    ) -> None:
        """If it died before it said so, a rank waits once, and has its own traces."""
        tracedstore.configure(registry=registry, tracer_provider=provider)
        store = dist.FileStore(str(tmp_path / "store"), 8)
        store.add(JOB_COUNT_KEY, 1)
        for prefix in "ab":
            tracedstore.barrier(store, 1, prefix, rank=0)

        assert [span.parent for span in barrier_spans(spans)] == [None, None]
        assert RECORDER.failures.counts()[names.BARRIERS] == 1

    @pytest.mark.parametrize("follows_parent", [True, False])
    def test_sampled_together(
        self,
        registry: CollectorRegistry,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
        follows_parent: bool,
    ) -> None:
        """Of every barrier all spans are sampled, or none; and about the ratio."""
        in_run(monkeypatch, "run-17")
        ratio: Any = TraceIdRatioBased(0.5)
        provider = TracerProvider(
            sampler=ParentBased(ratio) if follows_parent else ratio,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(SimpleSpanProcessor(spans))
        tracedstore.configure(registry=registry, tracer_provider=provider)
        store = tracedstore.wrap(dist.HashStore())
        with ThreadPoolExecutor(2) as pool:
            for number in range(40):
                calls = [
                    pool.submit(tracedstore.barrier, store, 2, f"b/{number}", rank=rank)
                    for rank in range(2)
                ]
                for call in calls:
                    call.result(240)

        counts = Counter(span.context.trace_id for span in all_barrier_spans(spans))
        assert set(counts.values()) == {3}
        assert 5 < len(counts) < 35


class TestFlush:
    """Spans of completed barriers are made late, but before a flush."""

    @pytest.mark.parametrize("concurrent", [True, False])
    def test_force_flush(self, registry: CollectorRegistry, concurrent: bool) -> None:
        """They are exported by a flush of the application's provider."""
        exported = InMemorySpanExporter()
        several = ConcurrentMultiSpanProcessor() if concurrent else None
        provider = TracerProvider(shutdown_on_exit=False, active_span_processor=several)
        provider.add_span_processor(
            BatchSpanProcessor(exported, schedule_delay_millis=600_000)
        )
        tracedstore.configure(registry=registry, tracer_provider=provider)
        barrier(tracedstore.wrap(dist.HashStore()), 0, 1)
        provider.force_flush()
        found = exported.get_finished_spans()

        assert "barrier step/*" in [span.name for span in found]
        provider.shutdown()

    def test_nothing_is_replaced(
        self, registry: CollectorRegistry, provider: TracerProvider
    ) -> None:
        """The application's objects have what they had, and one processor more."""
        before = dict(vars(provider))
        tracer = provider.get_tracer("test")
        generator, sampler = tracer.id_generator, tracer.sampler  # type: ignore[attr-defined]
        for _ in range(2):
            tracedstore.configure(registry=registry, tracer_provider=provider)
            run_barrier(tracedstore.wrap(dist.HashStore()), 1)
        added = provider._active_span_processor._span_processors[1:]

        assert vars(provider) == before
        assert [type(processor) for processor in added] == [LateSpans]
        assert provider.id_generator is generator
        own = provider.get_tracer(names.SCOPE)
        assert (own.id_generator, own.sampler) == (generator, sampler)  # type: ignore[attr-defined]

    def test_provider_is_not_kept(self, registry: CollectorRegistry) -> None:
        """A provider that the application drops is freed."""
        provider = TracerProvider(shutdown_on_exit=False)
        tracedstore.configure(registry=registry, tracer_provider=provider)
        run_barrier(tracedstore.wrap(dist.HashStore()), 1)
        tracedstore.shutdown()
        alive = ref(provider)
        del provider
        gc.collect()

        assert alive() is None


class TestOneTrace:
    """All ranks of a barrier share one trace, in whatever order they arrive."""

    @pytest.mark.parametrize("world_size", [1, 2, 8])
    def test_ranks_arrive_at_once(
        self, traced: Any, spans: InMemorySpanExporter, world_size: int
    ) -> None:
        """All spans have one parent."""
        run_barrier(traced, world_size)

        by_rank = barrier_spans(spans)
        assert len(by_rank) == world_size
        assert_one_parent(by_rank)
        (root,) = roots(spans)
        assert_root(root, by_rank)
        attributes = root.attributes or {}
        assert attributes[PREFIX + "result"] == "completed"
        assert attributes[names.BARRIER_LAST_RANK] in range(world_size)
        assert root.status.is_ok or root.status.status_code is StatusCode.UNSET

    def test_tracer_that_is_not_of_the_sdk(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """It is given the parent like any other, which nothing can make there."""
        tracedstore.configure(
            registry=registry, tracer_provider=_OtherProvider(provider)
        )
        run_barrier(tracedstore.wrap(dist.HashStore()), 3)

        by_rank = barrier_spans(spans)
        assert len(by_rank) == 3
        assert_one_parent(by_rank)

    def test_caller_in_a_trace(
        self, traced: Any, spans: InMemorySpanExporter, provider: TracerProvider
    ) -> None:
        """It has a span there too; each links to the other trace."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(barrier, traced, 0)
            with provider.get_tracer("test").start_as_current_span("step") as step:
                barrier(traced, 1)
            other.result(240)

        of_caller = step.get_span_context()
        by_rank = [
            span
            for span in barrier_spans(spans)
            if span.context.trace_id != of_caller.trace_id
        ]
        (root,) = roots(spans)
        assert_root(root, by_rank)
        assert [(span.attributes or {})[names.RANK] for span in by_rank] == [0, 1]
        links = [[link.context for link in span.links] for span in by_rank]
        assert links == [[], [of_caller]]
        (inside,) = [span for span in barrier_spans(spans) if span not in by_rank]
        assert inside.parent == of_caller
        assert (inside.start_time, inside.end_time, dict(inside.attributes or {})) == (
            by_rank[1].start_time,
            by_rank[1].end_time,
            dict(by_rank[1].attributes or {}),
        )
        (link,) = inside.links
        assert (link.context.trace_id, link.context.span_id) == (
            root.context.trace_id,
            root.context.span_id,
        )

    def test_ranks_time_out_at_once(
        self, traced: Any, spans: InMemorySpanExporter
    ) -> None:
        """They have one parent, whichever reports first."""

        def time_out(rank: int) -> None:
            with pytest.raises(tracedstore.BarrierTimeout):
                barrier(traced, rank, 5, barrier_timeout=0.3)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(time_out, range(4)))

        by_rank = barrier_spans(spans)
        assert len(by_rank) == 4
        assert_one_parent(by_rank)
        (root,) = roots(spans)
        assert_root(root, by_rank)
        attributes = root.attributes or {}
        assert attributes[PREFIX + "result"] == "timeout"
        assert attributes[names.BARRIER_MISSING_RANKS] == (4,)
        assert root.status.status_code is StatusCode.ERROR

    def test_late_rank(
        self, traced: Any, spans: InMemorySpanExporter, events: Events
    ) -> None:
        """A rank that warned, one that timed out and the late one are in one trace."""

        def time_out(rank: int) -> None:
            with pytest.raises(tracedstore.BarrierTimeout):
                barrier(traced, rank, 3, barrier_timeout=0.2)

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(barrier, traced, 0, 3, warn_after=0.01)
            wait_until(lambda: [e for e in events() if e["event"] == "barrier.waiting"])
            pool.submit(time_out, 1).result(240)
            barrier(traced, 2, 3)
            first.result(240)

        by_rank = barrier_spans(spans)
        assert len(by_rank) == 3
        assert_one_parent(by_rank)

    def test_interrupted_rank(
        self, traced: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A call that is interrupted has its span in the trace too."""
        call = BarrierCall(traced, 2, "step/7", 20, 0, None, 0, find_causes, 0)
        monkeypatch.setattr(call, "_introduce", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.run()

        (span,) = barrier_spans(spans)
        assert (span.attributes or {})[PREFIX + "result"] == "failed"

    def test_store_calls_of_barrier_have_no_spans(
        self, traced: Any, spans: InMemorySpanExporter
    ) -> None:
        """Spans of these calls would start new traces; other calls have spans."""
        run_barrier(traced, 2)
        traced.set("k", "v")

        assert len(all_barrier_spans(spans)) == 3
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

        by_rank = barrier_spans(spans)
        assert_one_parent(by_rank)
        first_span, _ = by_rank
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
        """Events have no trace id."""
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
