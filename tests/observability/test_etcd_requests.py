"""The requests of EtcdV3Store in metrics and spans, and the context sent to etcd."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import DistStoreError, Store

import tracedstore
from support.etcd import EtcdServer, free_port
from support.stores import SHORT
from tracedstore import names
from tracedstore.etcd import EtcdV3Store

pytestmark = pytest.mark.etcd


@pytest.fixture
def store(
    registry: CollectorRegistry,
    provider: TracerProvider,
    etcd_v3_store: Callable[[Path], Store],
    tmp_path: Path,
) -> Any:
    """A traced store with a span for every call."""
    tracedstore.configure(
        registry=registry, tracer_provider=provider, spans="all", log_format="off"
    )
    return tracedstore.wrap(etcd_v3_store(tmp_path))


def count(registry: CollectorRegistry, metric: names.Metric, **labels: str) -> float:
    """Return the value of a counter."""
    return registry.get_sample_value(metric.name, labels) or 0


def test_requests_are_counted(store: Any, registry: CollectorRegistry) -> None:
    """Every request counts, by method and result, with its bytes."""
    store.set("k", b"x" * 1000)
    store.get("k")
    store.add("n", 1)
    store.append("k", "y")

    for method, requests in (("txn", 2), ("range", 1), ("put", 1)):
        found = count(registry, names.ETCD_REQUESTS_MADE, method=method, result="ok")
        assert found == requests
    for direction in ("sent", "received"):
        assert count(registry, names.ETCD_BYTES, direction=direction) > 1000
    retries = names.ETCD_RECOVERIES_MADE.name, {"kind": "retry"}
    assert registry.get_sample_value(*retries) is None


def test_failover_is_counted(
    registry: CollectorRegistry, etcd_server: EtcdServer, store: Any
) -> None:
    """A member that is down is left, and the request repeated."""
    down = f"127.0.0.1:{free_port()}"
    while not count(registry, names.ETCD_RECOVERIES_MADE, kind="failover"):
        EtcdV3Store([down, etcd_server.address], "failover").check(["k"])

    assert count(registry, names.ETCD_RECOVERIES_MADE, kind="retry") == 1
    refused = {"method": "range", "result": "failed"}
    assert count(registry, names.ETCD_REQUESTS_MADE, **refused) == 1


def test_span_has_requests(store: Any, spans: InMemorySpanExporter) -> None:
    """The span of a call has its requests as events."""
    store.set_timeout(SHORT)
    with pytest.raises(DistStoreError):
        store.get("never")

    (span,) = spans.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "timeout"
    assert span.attributes[names.ETCD_REQUESTS] == 2
    assert span.attributes[names.ETCD_WATCH_TIMEOUTS] == 1
    assert span.attributes[names.ETCD_RECOVERIES] == 0
    events = [event for event in span.events if event.name == names.ETCD_REQUEST]
    attributes = [dict(event.attributes or {}) for event in events]
    assert [each["db.operation.name"] for each in attributes] == ["range", "watch"]
    assert {each["server.address"] for each in attributes} == {
        f"{store.host}:{store.port}"
    }
    waited: Any = attributes[1][names.ETCD_REQUEST_SECONDS]
    assert 0 < waited <= 10


def test_contended_add_is_counted(store: Any, registry: CollectorRegistry) -> None:
    """The compare-and-sets inside an add() of another number than 1 are counted."""
    store.add("n", 5)
    labels = {"store": "etcd_v3_store", "operation": "add", "result": names.WON}

    assert count(registry, names.CAS_ATTEMPTS, **labels) == 1


@pytest.fixture
def relay(etcd_server: EtcdServer) -> Iterator[tuple[int, list[bytes]]]:
    """A port that passes one connection on to etcd, and what was sent through it."""
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", etcd_server.port))
        with client, server:
            seen.append(client.recv(65_536))
            server.sendall(seen[0])
            client.sendall(server.recv(65_536))

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    yield listener.getsockname()[1], seen
    thread.join(60)
    listener.close()


def test_context_is_sent(
    provider: TracerProvider, relay: tuple[int, list[bytes]]
) -> None:
    """A request has the trace context of its caller, in the form that etcd reads."""
    port, seen = relay
    tracer = provider.get_tracer("test")

    with tracer.start_as_current_span("caller") as span:
        EtcdV3Store(f"127.0.0.1:{port}", "context").check(["k"])

    context = span.get_span_context()
    expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-"
    assert f"Grpc-Metadata-traceparent: {expected}".encode() in seen[0]
