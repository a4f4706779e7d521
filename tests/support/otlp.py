"""Encodes spans as OTLP JSON."""

import base64
from collections.abc import Sequence
from typing import Any

# The stubs would be one more package for this one import.
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan


def otlp(spans: Sequence[ReadableSpan], *, hexadecimal: bool = True) -> dict[str, Any]:
    """Encode spans.

    Args:
        spans: The spans.
        hexadecimal: Write ids in hexadecimal and enumerations as numbers, as the
            OpenTelemetry Collector does; otherwise as protobuf's JSON mapping does.
    """
    record: dict[str, Any] = MessageToDict(encode_spans(spans))
    for resource in record["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"] if hexadecimal else ():
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
                span["kind"] = 1
                if span["status"]:
                    span["status"]["code"] = 2
    return record
