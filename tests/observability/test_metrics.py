"""The metrics in the Prometheus and OpenMetrics exposition."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from torch.distributed import HashStore, Store

import tracedstore
from support.stores import KINDS
from tracedstore import names
from tracedstore.coordination.arrivals import StalledBarrier
from tracedstore.diagnosis.judgement.stall_reports import StalledJob
from tracedstore.diagnosis.observe.collectives import Collectives, WatchedGroup
from tracedstore.diagnosis.observe.movement import Movement
from tracedstore.recording.counters import FULL_OPERATION_BOUNDS, FULL_WAIT_BOUNDS
from tracedstore.recording.operation import Method
from tracedstore.recording.recorder import RECORDER
from tracedstore.testing import FakeClock, FlakyStore

# `make setup` installs the programs that tests run here.
TOOLS = Path(__file__).parents[2] / ".tools/bin"


def check_with_promtool(exposition: bytes) -> str:
    """Lint an exposition with promtool, and return its output."""
    promtool = shutil.which("promtool", path=f"{TOOLS}:{os.environ['PATH']}")
    assert promtool is not None, "promtool is missing: run `make setup`"
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=exposition,
        capture_output=True,
        timeout=240,
        check=False,
    )
    return done.stdout.decode() + done.stderr.decode()


RENDEZVOUS_GAUGES = (
    names.RENDEZVOUS_STATE_BYTES,
    names.RENDEZVOUS_PARTICIPANTS,
    names.RENDEZVOUS_WAIT_LIST,
    names.RENDEZVOUS_ROUND,
    names.RENDEZVOUS_COMPLETE,
    names.RENDEZVOUS_OLDEST_HEARTBEAT,
)


# The gauges of a process group are exported as long as what watches it lives.
COLLECTIVES = Collectives(30)
COLLECTIVES.groups["0"] = WatchedGroup(
    name="0", description="default_pg", members=(0, 1), number=7
)
MOVEMENT = Movement(COLLECTIVES, 30)


def make_every_metric(store: Any) -> None:
    """Make what has no series before it happened, then a call of `set`."""
    MOVEMENT.export()
    stalled = StalledBarrier(
        family="barrier", arrived=1, missing={1: "node1"}, possible=0
    )
    RECORDER.cold.begin("a barrier", stalled)
    RECORDER.cold.begin(
        1, StalledJob(cause="busy", awaited_count=1, awaited={1: ("node1", "busy")})
    )
    RECORDER.cold.record(
        (names.BARRIER_DURATION, ("barrier", "completed"), 1),
        (names.BARRIER_LAST_ARRIVALS, ("barrier",), 0),
        (names.RENDEZVOUS_WRITES, ("c10d", "accepted"), None),
        (names.RENDEZVOUS_DURATION, ("c10d", "completed"), None),
        (names.JOB_ABORTS, ("gone",), 1),
        (names.ETCD_REQUESTS_MADE, ("txn", "ok"), 1),
        (names.ETCD_RECOVERIES_MADE, ("retry",), None),
        (names.ETCD_BYTES, ("sent",), 1),
        (names.ETCD_BYTES, ("received",), 1),
        (names.EXPORTS, ("spans", "ok"), 1),
        (names.EXPORT_DROPPED, ("spans",), 0),
        *((gauge, ("c10d",), 1) for gauge in RENDEZVOUS_GAUGES),
    )
    RECORDER.series.of("etcd_store", Method(name="add", repeats="call"))
    RECORDER.series.probed.add("etcd_store")
    store.set("key", "value")


def buckets(
    registry: CollectorRegistry, metric: names.Metric, operation: str
) -> dict[str, float]:
    """Return the cumulative buckets of an operation's successes."""
    return {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"{metric.name}_bucket"
        and sample.labels["operation"] == operation
        and sample.labels["error_type"] == ""
    }


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return all samples by name, without the prefix, and sorted labels' values."""
    return {
        (
            sample.name.removeprefix("tracedstore_"),
            tuple(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


class TestExposition:
    """The text that Prometheus scrapes."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_passes_promtool(
        self, kind: str, registry: CollectorRegistry, tmp_path: Path
    ) -> None:
        """Promtool accepts all names, help texts, types and units."""
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(KINDS[kind](tmp_path))
        store.set("key", "value")
        store.get("key")

        assert check_with_promtool(generate_latest(registry)) == ""

    def test_promtool_can_fail(self) -> None:
        """Promtool rejects a metric without help."""
        assert "no help text" in check_with_promtool(b"# TYPE x counter\nx 1\n")

    def test_every_metric_is_exported(self, registry: CollectorRegistry) -> None:
        """Every metric of names.py is exported with exactly its labels."""
        tracedstore.configure(registry=registry, log_format="off", metrics="full")
        flaky = FlakyStore()
        store = tracedstore.wrap(flaky)
        # The gauge of the oldest call is exported only during a call.
        exported: dict[str, Any] = {}

        def scrape() -> None:
            exported.update({family.name: family for family in registry.collect()})

        flaky.before("set", scrape)
        make_every_metric(store)

        # The endpoint of a node adds it.
        own = [metric for metric in names.METRICS if metric != names.WORKER_UP]
        assert set(exported) == {metric.family for metric in own}
        for metric in own:
            family = exported[metric.family]
            assert (family.type, family.documentation) == (metric.type, metric.help)
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == set(metric.labels), sample

    def test_full_starts_at_zero(self, registry: CollectorRegistry) -> None:
        """With `full`, known label sets are exported with 0."""
        tracedstore.configure(registry=registry, metrics="full")
        tracedstore.wrap(HashStore())
        call = {"store": "hash_store", "operation": "get"}
        expected: list[tuple[str, dict[str, str]]] = [
            ("operation_duration_seconds_count", call | {"error_type": ""}),
            ("wait_duration_seconds_count", call | {"error_type": "timeout"}),
            (
                "cas_attempts_total",
                call | {"operation": "compare_set", "result": "lost"},
            ),
            ("value_bytes_total", call),
            ("operations_in_flight", call),
            ("spans_suppressed_total", {"reason": "budget"}),
            ("telemetry_failures_total", {"observer": "spans"}),
            ("operation_errors_total", {"store": "hash_store"}),
        ]

        for name, labels in expected:
            value = registry.get_sample_value(f"tracedstore_{name}", labels)
            assert value == 0, name

    def test_etcd_retries_start_at_zero(
        self,
        registry: CollectorRegistry,
        etcd_store: Callable[[Path], Store],
        tmp_path: Path,
    ) -> None:
        """EtcdStore.add retries compare-and-set, so its retries are exported as 0."""
        tracedstore.configure(registry=registry)
        tracedstore.wrap(etcd_store(tmp_path)).add("n", 1)

        labels = {"store": "etcd_store", "operation": "add"}
        retries = registry.get_sample_value("tracedstore_cas_retries_total", labels)
        assert retries == 0

    def test_full_histograms(self, registry: CollectorRegistry) -> None:
        """Both count a blocking call in the right bucket, bounds included."""
        clock = FakeClock()
        tracedstore.configure(
            registry=registry, clock=clock.clock, log_format="off", metrics="full"
        )
        flaky = FlakyStore()
        store = tracedstore.wrap(flaky)
        flaky.set("key", "value")
        for seconds in (0.000_005, 0.000_006, 0.25, 9.0, 4000.0):
            flaky.before("get", partial(clock.advance, seconds))
            store.get("key")

        operation = buckets(registry, names.OPERATION_DURATION, "get")
        wait = buckets(registry, names.WAIT_DURATION, "get")
        assert (operation["5e-06"], operation["1e-05"]) == (1, 2)
        assert (operation["0.25"], operation["10.0"], operation["+Inf"]) == (3, 4, 5)
        assert (wait["0.001"], wait["0.25"], wait["10.0"]) == (2, 3, 4)
        assert (wait["3600.0"], wait["+Inf"]) == (4, 5)
        assert len(operation) == len(FULL_OPERATION_BOUNDS) + 1
        assert len(wait) == len(FULL_WAIT_BOUNDS) + 1
        total = registry.get_sample_value(
            "tracedstore_wait_duration_seconds_sum",
            {"store": "flaky_store", "operation": "get", "error_type": ""},
        )
        assert total == pytest.approx(4009.250011)


class TestCompact:
    """The series of `compact`, the default."""

    def test_unused_store(self, registry: CollectorRegistry) -> None:
        """Before the first call there are a zero that an alert needs, and the build."""
        tracedstore.configure(registry=registry, log_format="off")
        tracedstore.wrap(FlakyStore())

        found = samples(registry)
        assert [name for name, _ in found][-1] == "build_info"
        assert dict(list(found.items())[:-1]) == {
            ("operation_errors_total", ("flaky_store",)): 0
        }

    def test_operations_from_the_first_call_on(
        self, registry: CollectorRegistry
    ) -> None:
        """A call is in one histogram: that of waits if it may block."""
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(FlakyStore())
        store.set("key", "value")
        store.get("key")

        counts = [one for one in samples(registry) if one[0].endswith("_count")]
        assert counts == [
            ("operation_duration_seconds_count", ("", "set", "flaky_store")),
            ("wait_duration_seconds_count", ("", "get", "flaky_store")),
        ]

    def test_errors(self, registry: CollectorRegistry) -> None:
        """Errors of a store are one series; an empty queue's answer is none."""
        tracedstore.configure(registry=registry, log_format="off", spans="off")
        flaky = FlakyStore()
        store = tracedstore.wrap(flaky)
        flaky.fail("set", OSError("gone"))
        with pytest.raises(OSError, match="gone"):
            store.set("key", "value")
        with pytest.raises(RuntimeError, match="queue is empty"):
            store.queue_pop("queue", block=False)

        assert samples(registry)["operation_errors_total", ("flaky_store",)] == 1

    def test_histograms(self, registry: CollectorRegistry) -> None:
        """Few bounds, each for a question; calls up to a bound are within it."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock, log_format="off")
        flaky = FlakyStore()
        store = tracedstore.wrap(flaky)
        flaky.set("key", "value")
        for seconds in (0.000_1, 0.000_101, 0.05, 30.0, 4000.0):
            for operation in ("set", "get"):
                flaky.before(operation, partial(clock.advance, seconds))
            store.set("key", "value")
            store.get("key")

        assert buckets(registry, names.OPERATION_DURATION, "set") == {
            "0.0001": 1,
            "0.001": 2,
            "0.01": 2,
            "0.1": 3,
            "+Inf": 5,
        }
        assert buckets(registry, names.WAIT_DURATION, "get") == {
            "0.001": 2,
            "0.1": 3,
            "1.0": 3,
            "10.0": 3,
            "30.0": 4,
            "300.0": 4,
            "+Inf": 5,
        }


class TestExemplars:
    """Exemplars of histogram buckets."""

    def test_openmetrics_has_trace_id(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """The exemplar has the trace_id of an exported span."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, log_format="off"
        )
        tracedstore.wrap(HashStore()).set("key", "value")

        text = openmetrics(registry).decode()
        exemplars = [
            sample.exemplar
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.exemplar
        ]
        (span,) = spans.get_finished_spans()
        assert [exemplar.labels for exemplar in exemplars] == [
            {
                "trace_id": f"{span.context.trace_id:032x}",
                "span_id": f"{span.context.span_id:016x}",
            }
        ]

    def test_plain_text_has_none(
        self, registry: CollectorRegistry, provider: TracerProvider
    ) -> None:
        """The text format, which cannot have exemplars, omits them."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, log_format="off"
        )
        tracedstore.wrap(HashStore()).set("key", "value")

        text = generate_latest(registry)
        assert b"trace_id" not in text
        assert check_with_promtool(text) == ""


class TestBounds:
    """The number of series is limited, whatever the job does."""

    def test_kinds_and_errors(self, registry: CollectorRegistry) -> None:
        """100 store and error classes are exported as 16 of each and `other`."""
        tracedstore.configure(registry=registry, log_format="off", spans="off")
        for number in range(100):
            error = type(f"Error{number}", (Exception,), {})
            flaky = type(f"Store{number}", (FlakyStore,), {})()
            flaky.fail("get", error())
            with pytest.raises(error):
                tracedstore.wrap(flaky).get("key")

        label_sets = [
            sample.labels
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "tracedstore_wait_duration_seconds_count"
        ]
        stores = {labels["store"] for labels in label_sets}
        errors = {labels["error_type"] for labels in label_sets}
        assert len(stores) == 17
        assert "other" in stores
        # `timeout` is always one of the 16.
        assert "other" in errors
        assert len(errors) == 16

    def test_in_flight_of_other_kinds(self, registry: CollectorRegistry) -> None:
        """The in-flight gauge uses `other` for the kinds that histograms do."""
        tracedstore.configure(registry=registry, log_format="off", spans="off")
        for number in range(16):
            tracedstore.wrap(type(f"Store{number}", (FlakyStore,), {})())
        flaky = type("Seventeenth", (FlakyStore,), {})()
        counts: list[float | None] = []
        flaky.before(
            "set",
            lambda: counts.append(
                registry.get_sample_value(
                    "tracedstore_operations_in_flight",
                    {"store": "other", "operation": "set"},
                )
            ),
        )
        tracedstore.wrap(flaky).set("key", "value")

        assert counts == [1]


class TestRegistry:
    """The registry that has the collector."""

    def test_default_registry_at_first_wrap(self) -> None:
        """The first wrap() registers the collector in the default registry."""
        tracedstore.wrap(HashStore()).set("key", "value")

        assert b"tracedstore_build_info" in generate_latest(REGISTRY)
        tracedstore.shutdown()
        assert b"tracedstore_build_info" not in generate_latest(REGISTRY)

    def test_moves(self, registry: CollectorRegistry) -> None:
        """configure() with another registry unregisters from the first."""
        tracedstore.wrap(HashStore())
        tracedstore.configure(registry=registry)

        assert b"tracedstore" not in generate_latest(REGISTRY)
        assert b"tracedstore_build_info" in generate_latest(registry)

    def test_counts_survive_configure(self, registry: CollectorRegistry) -> None:
        """configure() keeps the counts of earlier calls."""
        store = tracedstore.wrap(HashStore())
        store.set("key", "value")
        tracedstore.configure(registry=registry)
        store.set("key", "value")

        count = registry.get_sample_value(
            "tracedstore_operation_duration_seconds_count",
            {"store": "hash_store", "operation": "set", "error_type": ""},
        )
        assert count == 2

    def test_duplicate_metric_name(self) -> None:
        """A name collision in the registry disables metrics and not the job."""

        class Duplicate(Collector):
            def collect(self) -> Iterator[Any]:
                from prometheus_client.core import GaugeMetricFamily

                yield GaugeMetricFamily("tracedstore_build_info", "other", value=1)

        registry = CollectorRegistry(auto_describe=True)
        registry.register(Duplicate())
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(HashStore())

        store.set("key", "value")

        assert store.get("key") == b"value"
        assert RECORDER.failures.counts() == {"metrics": 1}
        assert b"tracedstore_build_info 1.0" in generate_latest(registry)
