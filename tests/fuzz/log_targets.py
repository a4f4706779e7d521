"""Targets for logs and span files, to which any program may have written."""

import gzip
import io
import json
import zlib
from typing import Any

from hypothesis import strategies as st

from fuzz.target import Inputs, Target, changed_bytes
from support.hostile_json import JSON
from support.log_events import (
    completed_event,
    event,
    missing_event,
    span_from_event,
)
from tracedstore import names
from tracedstore.tools.report import log_reader as reader
from tracedstore.tools.report.analysis import analyse
from tracedstore.tools.report.log_reader import (
    event_from_span,
    events_from_resource_spans,
    parse_bare_event,
)
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.page import page

_Object = dict[str, Any]


def _read(data: bytes) -> tuple[LoggedEvents, reader.ReadStats]:
    records, stats = LoggedEvents(), reader.ReadStats()
    reader._read_file(io.BytesIO(data), records.add, stats)
    assert sum(records.event_counts.values()) == stats.events + stats.spans
    return records, stats


def _log(data: bytes) -> None:
    _read(data)
    parse_bare_event(data)


def _gzip_log(data: bytes) -> None:
    # The exceptions that reader.read_events expects of a damaged file.
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
        reader._read_file(
            io.BufferedReader(unpacked), LoggedEvents().add, reader.ReadStats()
        )


def _report(data: bytes) -> None:
    """Read a log as ``tracedstore report`` does, and make its page."""
    records, stats = _read(data)
    if records.event_counts:
        text = page(analyse(records), stats)
        text.encode("utf-8", "replace")
        assert "<script>alert" not in text


def _span(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(value, dict):
        found = [event_from_span(value)]
        if "scopeSpans" in value:
            found += events_from_resource_spans(value)
        for one in found:
            if one is not None:
                LoggedEvents().add(one)


_EVENTS: list[_Object] = [
    completed_event(0, 1.0, 0.5),
    completed_event(1, 1.1, 0.6),
    missing_event(0, 9.0, 1, 3),
    missing_event(2, 9.0, 3, name=names.BARRIER_WAITING),
    *(
        event(
            name,
            2.0,
            rank=1,
            operation="get",
            store="tcp",
            key_family="k/*",
            key="<script>alert(1)</script>",
            duration_seconds=1.0,
            waited_seconds=1.0,
            losses_in_a_row=3,
            error_type="timeout",
            error="no",
            endpoint="h:1",
            run_id="job",
            cause="timeout",
            message="2 of 3 joined",
            joined_count=2,
            min_nodes=3,
            observer="spans",
            barrier="b/0",
        )
        for name in names.EVENT_NAMES
    ),
]
_SPANS = [span_from_event(completed_event(0, 1.0, 0.5))]


def _attribute(name: str, value: object) -> _Object:
    kind = "intValue" if isinstance(value, int) else "stringValue"
    return {"key": name, "value": {kind: str(value)}}


_RESOURCE_SPANS: _Object = {
    "resource": {"attributes": [_attribute("host.name", "node0")]},
    "scopeSpans": [
        {
            "spans": [
                {
                    "name": "barrier b/*",
                    "startTimeUnixNano": "1794000000000000000",
                    "endTimeUnixNano": "1794000001000000000",
                    "status": {"message": ""},
                    "attributes": [
                        _attribute(name, value)
                        for name, value in _SPANS[0]["attributes"].items()
                    ],
                }
            ]
        }
    ],
}


_VALUES = JSON | st.sampled_from(
    [10**400, -1, 1e300, "2026-11-16T09:00:00Z", "0001-01-01T00:00:00+23:59"]
)


def _change_any(value: Any, path: list[int], new: Any) -> Any:
    """Replace the part of a JSON value that a path of positions leads to."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = _change_any(value[key], path[1:], new)
    return copy


_PATHS = st.lists(st.integers(0, 30), min_size=1, max_size=7)
_OBJECTS = st.one_of(
    st.sampled_from(_EVENTS), st.sampled_from(_SPANS), st.just(_RESOURCE_SPANS)
)
_CHANGED: st.SearchStrategy[_Object] = _OBJECTS | st.builds(
    _change_any, _OBJECTS, _PATHS, _VALUES
)


def _nested_line(levels: int, outer: int = 0, field: str = "name") -> bytes:
    """Return a span with a field that is nested almost to the recursion limit."""
    text = json.dumps(_SPANS[0] | {field: "@"}).encode()
    nested = text.replace(b'"@"', b"[" * levels + b"]" * levels)
    return b'{"a":' * outer + nested + b"}" * outer


def _wrapped(line: bytes, wrapping: int) -> bytes:
    text = line.decode("utf-8", "replace")
    return (
        line,
        b"[rank0]: " + line + b" " + line,
        json.dumps({"log": text + "\n", "stream": "stderr"}).encode(),
        b"2026-11-16T09:00:00.000000000Z stderr F " + line,
        b"2026-11-16T09:00:00.000000000Z stdout P " + line,
        json.dumps({"body": {"stringValue": text}}).encode(),
        json.dumps({"a": json.dumps({"b": text})}).encode(),
        b"{\n    " + line[1:-1] + b"\n}",
    )[wrapping]


_NESTED: Inputs = st.builds(
    _nested_line,
    st.integers(880, 990),
    st.integers(0, 14),
    st.sampled_from(["name", "status", "end_time"]),
)
_LINES: Inputs = (
    st.builds(
        _wrapped, _CHANGED.map(lambda one: json.dumps(one).encode()), st.integers(0, 7)
    )
    | st.sampled_from([b"{" * 4000, b"x"])
    | _NESTED
)
_LOGS: Inputs = st.lists(_LINES, max_size=5).map(b"\n".join)

TARGETS = (
    Target(name="log", run=_log, inputs=changed_bytes(_LOGS)),
    Target(
        name="gzip_log",
        run=_gzip_log,
        inputs=changed_bytes(_LOGS.map(lambda text: gzip.compress(text, mtime=0))),
        # As read_events; gzip.BadGzipFile is an OSError.
        allowed=(OSError, EOFError, zlib.error),
        share=0.5,
    ),
    Target(
        name="span",
        run=_span,
        inputs=changed_bytes(
            _CHANGED.map(lambda one: json.dumps(one).encode()) | _NESTED
        ),
    ),
    Target(name="report", run=_report, inputs=changed_bytes(_LOGS), share=0.05),
)
