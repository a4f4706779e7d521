"""Processes that push metrics and events to a collector by OTLP."""

import json
import socket
import subprocess
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed import HashStore

import tracedstore
from support.fork_server import start_python
from support.otel_metrics import Distribution, Stream, exposed
from support.otlp_receiver import (
    OTLPReceiver,
    attributes_of,
    points_of,
    resources_of,
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
        output, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        received = Received(receiver)
        numbers, histograms = exposed(text_string_to_metric_families(output + "\n"))
        # A refused export that came between the exposition and the end.
        failures = [one for one in numbers if one[0] == names.TELEMETRY_FAILURES.otel]
        for stream in failures:
            assert received.numbers.pop(stream) >= numbers.pop(stream) >= 1
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
