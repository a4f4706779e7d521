"""An OTLP receiver: a real HTTP server that decodes what it gets."""

import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from support.otel_metrics import without_target

# A metric, and its attributes.
Stream = tuple[str, frozenset[tuple[str, Any]]]

_SERVICES: Mapping[str, tuple[Any, Any]] = {
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse),
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
}


class OTLPReceiver:
    """Receives OTLP over HTTP.

    Attributes:
        metrics: The requests with metrics, in the order in which they came.
        logs: The same for log records.
        traces: The same for spans.
        refusing: Respond 503.
    """

    def __init__(self) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.refusing = False
        self.refused = 0
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path not in _SERVICES:
                    self.send_error(404)
                    return
                request, response = _SERVICES[self.path]
                accepted = receiver._take(self.path, request.FromString(body))
                content = response().SerializeToString()
                self.send_response(200 if accepted else 400)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_args: Any) -> None:
                """Write nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait_until(self, condition: Callable[[], bool], timeout: float = 240) -> None:
        """Wait until what was received fulfils a condition."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), "nothing more came"

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)

    def _take(self, path: str, request: Any) -> bool:
        with self._changed:
            if self.refusing:
                self.refused += 1
            elif path == "/v1/metrics":
                self.metrics.append(request)
            elif path == "/v1/traces":
                self.traces.append(request)
            else:
                self.logs.append(request)
            self._changed.notify_all()
            return not self.refusing


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Return OTLP's attributes as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


def resources_of(request: Any) -> list[dict[str, Any]]:
    """Return the attributes of the resources of a request."""
    found = getattr(request, "resource_metrics", None) or request.resource_logs
    return [attributes_of(one.resource.attributes) for one in found]


def points_of(
    request: ExportMetricsServiceRequest,
) -> Iterator[tuple[Stream, Any, Any]]:
    """Return the data points of a request: stream, data, point."""
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            assert scope.scope.name == "tracedstore"
            for metric in scope.metrics:
                data = getattr(metric, metric.WhichOneof("data"))
                for point in data.data_points:
                    attributes = without_target(attributes_of(point.attributes))
                    yield (metric.name, attributes), data, point


def spans_of(
    request: ExportTraceServiceRequest,
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Return the spans of a request, each with the attributes of its resource."""
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield attributes_of(resource.resource.attributes), span
