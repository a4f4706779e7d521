"""Processes that push metrics and events to a collector by OTLP."""

import json
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed import HashStore

import tracedstore
from support.etcd import free_port
from support.fork_server import start_python
from support.otel_metrics import Distribution, Stream, exposed
from support.otlp_receiver import (
    OTLPReceiver,
    attributes_of,
    points_of,
    resources_of,
    spans_of,
)
from tracedstore import names
from tracedstore.recording.recorder import RECORDER

pytestmark = pytest.mark.processes

# Makes calls each time a line comes, and writes the Prometheus exposition at the end.
JOB = """
import sys
from datetime import timedelta
import torch.distributed as dist, tracedstore
from prometheus_client import generate_latest
store = tracedstore.wrap(dist.HashStore())
for line in sys.stdin:
    for number in range(int(line)):
        store.set(f"key/{number}", "value")
        store.get(f"key/{number}")
        tracedstore.barrier(store, 1, f"barrier/{number}", 5)
    try:
        store.wait(["never"], timedelta(milliseconds=1))
    except dist.DistStoreError:
        pass
text = generate_latest().decode()
print("\\n".join(one for one in text.splitlines() if "tracedstore" in one))
"""

FORKING = """
import os
import torch.distributed as dist, tracedstore
store = tracedstore.wrap(dist.HashStore())
for _ in range(3):
    store.add("counter", 1)
child = os.fork()
if child == 0:
    for _ in range(5):
        store.add("counter", 1)
    tracedstore.shutdown()
    os._exit(0)
os.waitpid(child, 0)
"""

# The collector is down, or does not respond. Spans, metrics and log records are left.
ENDING = """
from datetime import timedelta
import torch.distributed as dist, tracedstore
tracedstore.configure(tracing=True, spans="all")
store = tracedstore.wrap(dist.HashStore())
store.set("key", "value")
try:
    store.wait(["never"], timedelta(milliseconds=1))
except dist.DistStoreError:
    pass
print("at the end", flush=True)
"""

# 20 barriers that complete, and one for which a rank is late.
RANK_JOB = """
import os, time
from datetime import timedelta
import torch.distributed as dist, tracedstore
rank = int(os.environ["RANK"])
store = dist.TCPStore(
    "127.0.0.1", int(os.environ["PORT"]), 3, rank == 0, timedelta(seconds=200)
)
store = tracedstore.wrap(store)
for number in range(20):
    tracedstore.barrier(store, 3, f"checkpoint/{number}", 200, rank=rank)
if rank == 2:
    store.wait(["late/0", "late/1"])
try:
    tracedstore.barrier(store, 3, "missing/0", 0.5 if rank < 2 else 200, rank=rank)
except tracedstore.BarrierTimeout:
    store.set(f"late/{rank}", "")
store.set(f"end/{rank}", "")
store.wait([f"end/{one}" for one in range(3)])
tracedstore.shutdown()
if rank == 0:
    store.wait(["ended/1", "ended/2"])
else:
    store.set(f"ended/{rank}", "")
print("done")
"""

# Makes calls each time a line comes.
SPANS_JOB = """
import sys
import torch.distributed as dist, tracedstore
from prometheus_client import generate_latest
store = tracedstore.wrap(dist.HashStore())
for line in sys.stdin:
    for number in range(int(line)):
        store.set("key", "value")
from opentelemetry import trace
trace.get_tracer_provider().force_flush()
text = generate_latest().decode()
print("\\n".join(one for one in text.splitlines() if "tracedstore" in one))
"""

# The application exports its spans itself.
OF_APPLICATION = """
import torch.distributed as dist, tracedstore
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
store = tracedstore.wrap(dist.HashStore())
store.set("key", "value")
tracedstore.shutdown()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
trace.get_tracer("theirs").start_span("step").end()
"""

# The application has a MeterProvider of its own.
WITH_PROVIDER = """
import torch.distributed as dist, tracedstore
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
metrics.get_meter("theirs").create_counter("steps").add(5)
store = tracedstore.wrap(dist.HashStore())
store.set("key", "value")
tracedstore.shutdown()
(collected,) = reader.get_metrics_data().resource_metrics
print(*(one.scope.name for one in collected.scope_metrics))
"""


@pytest.fixture
def receiver() -> Iterator[OTLPReceiver]:
    """A collector."""
    receiver = OTLPReceiver()
    yield receiver
    receiver.close()


def start(script: str, endpoint: str = "", **environ: str) -> Any:
    """Start a script that pushes to an endpoint."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "TRACEDSTORE_METRICS_EXPORTER": "otlp",
        "TRACEDSTORE_EVENTS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        **environ,
    }
    return start_python("-c", script, env=environ, stdin=PIPE)


def tell(child: subprocess.Popen[str], calls: int) -> None:
    """Let the job make calls."""
    assert child.stdin is not None
    child.stdin.write(f"{calls}\n")
    child.stdin.flush()


class Received:
    """What came, with deltas added up."""

    def __init__(self, receiver: OTLPReceiver) -> None:
        self.numbers: dict[Stream, float] = {}
        self.histograms: dict[Stream, Distribution] = {}
        for request in receiver.metrics:
            for stream, data, point in points_of(request):
                delta = getattr(data, "aggregation_temporality", 2) == 1
                if not hasattr(point, "bucket_counts"):
                    kind = point.WhichOneof("value")
                    before = self.numbers.get(stream, 0) if delta else 0
                    self.numbers[stream] = before + getattr(point, kind)
                    continue
                assert not point.HasField("min")
                if not delta:
                    self.histograms.pop(stream, None)
                total = self.histograms.setdefault(stream, Distribution())
                total.add(point.explicit_bounds, point.bucket_counts, point.sum)


class TestMetrics:
    """TRACEDSTORE_METRICS_EXPORTER=otlp."""

    @pytest.mark.parametrize("temporality", ["cumulative", "delta"])
    def test_same_as_prometheus(self, receiver: OTLPReceiver, temporality: str) -> None:
        """Several exports, one of which is refused, have what Prometheus would have."""
        child = start(
            JOB,
            receiver.url,
            OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE=temporality,
            OTEL_METRIC_EXPORT_INTERVAL="100",
            OTEL_SERVICE_NAME="training",
            RANK="3",
            WORLD_SIZE="8",
            TRACEDSTORE_RUN_ID="job-7",
        )
        for calls in (2, 3):
            tell(child, calls)
            exports = len(receiver.metrics)
            receiver.wait_until(lambda: len(receiver.metrics) > exports + 1)  # noqa: B023
        receiver.refusing = True
        tell(child, 4)
        refused = receiver.refused
        receiver.wait_until(lambda: receiver.refused > refused + 1)
        receiver.refusing = False
        accepted = len(receiver.metrics)
        receiver.wait_until(lambda: len(receiver.metrics) > accepted + 1)
        output, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        received = Received(receiver)
        numbers, histograms = exposed(text_string_to_metric_families(output + "\n"))
        # The last exports come after the exposition, and before what they count.
        counted = [one for one in numbers if one[0] == names.EXPORTS.otel]
        assert len(counted) == 4  # of metrics and logs, ok and failed
        for stream in counted:
            assert received.numbers.pop(stream) >= numbers.pop(stream)
        assert _told(errors, "metrics") == [names.EXPORT_FAILED, names.EXPORT_RESUMED]
        assert received.numbers == numbers
        assert set(received.histograms) == set(histograms)
        for stream, histogram in histograms.items():
            assert received.histograms[stream].agrees(histogram), stream
        kinds = {
            (name, data.aggregation_temporality)
            for request in receiver.metrics
            for (name, _), data, _ in points_of(request)
            if name in (names.OPERATION_DURATION.otel, names.VALUE_BYTES.otel)
        }
        expected = {"delta": 1, "cumulative": 2}[temporality]
        assert kinds == {
            (names.OPERATION_DURATION.otel, expected),
            (names.VALUE_BYTES.otel, expected),
        }
        (resource,) = resources_of(receiver.metrics[-1])
        assert resource["service.name"] == "training"
        assert resource["service.instance.id"]
        assert resource["tracedstore.rank"] == 3
        assert resource["tracedstore.world_size"] == 8
        assert resource["tracedstore.run_id"] == "job-7"

    def test_configured_again(
        self, receiver: OTLPReceiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Deltas are not sent twice, configured again or after a shutdown."""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
        store = tracedstore.wrap(HashStore())
        for exporter in ("otlp", "otlp", "prometheus", "otlp"):
            tracedstore.configure(metrics_exporter=exporter)
            store.add("counter", 1)
        tracedstore.shutdown()
        tracedstore.configure(metrics_exporter="otlp")
        store.add("counter", 1)
        tracedstore.shutdown()

        (total,) = [
            histogram.count
            for (name, _), histogram in Received(receiver).histograms.items()
            if name == names.OPERATION_DURATION.otel
        ]
        assert total == 5
        # When another exporter replaced it, and at each shutdown.
        assert len(receiver.metrics) == 3
        assert not RECORDER.failures.counts()

    def test_fork(self, receiver: OTLPReceiver) -> None:
        """Parent and child each export their own calls, as two instances."""
        child = start(FORKING, receiver.url)
        _, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        counts = {}
        for request in receiver.metrics:
            (resource,) = resources_of(request)
            for (name, _), _, point in points_of(request):
                if name == names.OPERATION_DURATION.otel:
                    counts[resource["service.instance.id"]] = point.count
        assert sorted(counts.values()) == [3, 5]

    def test_provider_of_application(self, receiver: OTLPReceiver) -> None:
        """It is left alone, and the collector gets the metrics all the same."""
        child = start(WITH_PROVIDER, receiver.url)
        output, errors = child.communicate(timeout=240)

        assert output.split() == ["theirs"], errors
        (request,) = receiver.metrics
        received = {name for (name, _), _, _ in points_of(request)}
        assert names.OPERATION_DURATION.otel in received
        assert "steps" not in received


def _told(errors: str, signal: str) -> list[str]:
    """Return the events about the exports of a signal; the SDK has logged nothing."""
    assert "opentelemetry" not in errors
    assert "Traceback" not in errors
    lines = [json.loads(line) for line in errors.splitlines()]
    return [line["event"] for line in lines if line.get("signal") == signal]


class TestSpans:
    """TRACEDSTORE_TRACING."""

    def test_one_trace_of_each_barrier(self, receiver: OTLPReceiver) -> None:
        """It has each rank, also the last and one that was missing, and a root."""
        port = free_port()
        ranks = [
            start(
                RANK_JOB,
                receiver.url,
                TRACEDSTORE_TRACING="1",
                TRACEDSTORE_METRICS_EXPORTER="prometheus",
                TRACEDSTORE_EVENTS_EXPORTER="log",
                TRACEDSTORE_RUN_ID="run-17",
                RANK=str(rank),
                WORLD_SIZE="3",
                PORT=str(port),
            )
            for rank in range(3)
        ]
        for rank in ranks:
            output, errors = rank.communicate(timeout=240)
            assert output == "done\n", errors

        found = [
            (resource, attributes_of(span.attributes), span)
            for request in receiver.traces
            for resource, span in spans_of(request)
            if span.name.startswith("barrier")
        ]
        by_trace: dict[bytes, list[Any]] = {}
        for one in found:
            by_trace.setdefault(one[2].trace_id, []).append(one)
        results: Counter[str] = Counter()
        for of_trace in by_trace.values():
            (root,) = [one for one in of_trace if not one[2].parent_span_id]
            of_ranks = [one for one in of_trace if one is not root]
            assert sorted(one[1][names.RANK] for one in of_ranks) == [0, 1, 2]
            instances = {one[0]["service.instance.id"] for one in of_ranks}
            assert len(instances) == 3
            assert {one[2].parent_span_id for one in of_ranks} == {root[2].span_id}
            prefixes = {one[1][names.BARRIER_PREFIX] for one in of_trace}
            assert len(prefixes) == 1
            results[root[1][names.BARRIER_RESULT]] += 1
        assert results == {"completed": 20, "timeout": 1}

    def test_collector_is_down(self, receiver: OTLPReceiver) -> None:
        """Exports and spans that are lost are counted, and told in two lines."""
        child = start(
            SPANS_JOB,
            receiver.url,
            TRACEDSTORE_TRACING="1",
            TRACEDSTORE_SPANS="all",
            TRACEDSTORE_METRICS_EXPORTER="prometheus",
            TRACEDSTORE_EVENTS_EXPORTER="log",
            OTEL_BSP_SCHEDULE_DELAY="50",
        )
        receiver.refusing = True
        for refused in range(1, 4):
            tell(child, 5)
            receiver.wait_until(lambda: receiver.refused >= refused)  # noqa: B023
        receiver.refusing = False
        tell(child, 5)
        receiver.wait_until(lambda: bool(receiver.traces))
        output, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        assert _told(errors, "spans") == [names.EXPORT_FAILED, names.EXPORT_RESUMED]
        counts = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(output + "\n")
            for sample in family.samples
        }
        received = sum(len(list(spans_of(one))) for one in receiver.traces)
        assert counts[names.EXPORTS.name, "failed", "spans"] == receiver.refused
        assert counts[names.EXPORTS.name, "ok", "spans"] == len(receiver.traces)
        assert counts[names.EXPORT_DROPPED.name, "spans"] == 20 - received

    def test_application_exporter(self, receiver: OTLPReceiver) -> None:
        """What the exporter of an application logs is left alone."""
        receiver.refusing = True
        child = start(OF_APPLICATION, receiver.url, TRACEDSTORE_EVENTS_EXPORTER="log")
        _, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        assert "Failed to export" in errors
        assert names.EXPORT_FAILED in errors  # of the metrics of this package


class TestEvents:
    """TRACEDSTORE_EVENTS_EXPORTER=otlp."""

    def test_records(self, receiver: OTLPReceiver) -> None:
        """An event arrives as a log record, with the resource of the process."""
        child = start(JOB, receiver.url, RANK="3", TRACEDSTORE_RUN_ID="job-7")
        _, errors = child.communicate("1\n", timeout=240)

        (request,) = receiver.logs
        ((resource,), (records,)) = (
            resources_of(request),
            [scope.log_records for scope in request.resource_logs[0].scope_logs],
        )
        (record,) = records
        attributes: dict[str, Any] = attributes_of(record.attributes)
        event = json.loads(errors.splitlines()[0])
        assert record.event_name == event["event"] == "store.operation.failed"
        assert resource["tracedstore.rank"] == attributes["rank"] == 3
        assert resource["tracedstore.run_id"] == "job-7"
        assert (attributes["operation"], attributes["key"]) == ("wait", "never")
        assert json.loads(record.body.string_value)["key"] == "never"


class TestExit:
    """The end of a process whose collector does not work."""

    @pytest.mark.parametrize("state", ["refused", "silent"])
    def test_is_bounded(self, state: str) -> None:
        """Spans, metrics and log records have `exit_timeout` in all."""
        with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
            silent = f"http://127.0.0.1:{server.getsockname()[1]}"
            child = start(
                ENDING,
                silent if state == "silent" else "http://127.0.0.1:9",
                # So long would an exit without a bound take.
                OTEL_EXPORTER_OTLP_TIMEOUT="1000",
                TRACEDSTORE_EXIT_TIMEOUT="1",
            )
            output, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        assert output == "at the end\n"
