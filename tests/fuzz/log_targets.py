"""Targets for logs and span files, to which any program may have written."""

import gzip
import io
import json
import zlib
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from fuzz.target import Inputs, Target, changed_bytes
from support.flight_entries import dump_of, entry, frames
from support.hostile_json import JSON
from support.log_events import (
    completed_event,
    event,
    missing_event,
    span_from_event,
)
from tracedstore import names
from tracedstore.tools.report import flight_dumps
from tracedstore.tools.report import log_reader as reader
from tracedstore.tools.report.analysis import analyse
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.log_reader import (
    event_from_span,
    events_from_resource_spans,
    parse_bare_event,
)
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.output_reader import OutputReader
from tracedstore.tools.report.page import page

_Object = dict[str, Any]


def _output_reader(output: JobOutput) -> OutputReader:
    return OutputReader(output, "logs/attempt_0/1/stderr.log", 0, 1.79e9)


def _read(data: bytes) -> tuple[LoggedEvents, reader.ReadStats]:
    records, stats = LoggedEvents(), reader.ReadStats()
    output = _output_reader(JobOutput())
    reader._read_file(io.BytesIO(data), records.add, stats, output)
    assert sum(records.event_counts.values()) == stats.events + stats.spans
    return records, stats


def _log(data: bytes) -> None:
    _read(data)
    parse_bare_event(data)


def _gzip_log(data: bytes) -> None:
    # The exceptions that reader.read_events expects of a damaged file.
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
        reader._read_file(
            io.BufferedReader(unpacked),
            LoggedEvents().add,
            reader.ReadStats(),
            _output_reader(JobOutput()),
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

_PRINTED = (
    b"[rank1]: Traceback (most recent call last):",
    b'[default1]:[rank1]:   File "/job/<script>alert(1)</script>.py", line 3, in load',
    b'  File "x.py", line 3 in <module>',
    b"[rank1]: KeyError: '<script>alert(1)</script>'",
    b"RuntimeError: [/gloo/x.cc:5] Connection closed by peer [127.0.0.1]:1",
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
    b"E1119 04:54:57.131 7 api.py:1] failed (exitcode: -9) local_rank: 1 (pid: 7) of x",
    b"W1119 04:54:57 7 api.py:1] Sending process 7 closing signal SIGTERM",
    b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    b"Failures:",
    b"Root Cause (first observed failure):",
    b"  time      : 2026-11-19_04:54:57",
    b"  host      : <script>alert(1)</script>",
    b"  rank      : 1 (local_rank: 1)",
    b"  exitcode  : -9 (pid: 7)  (SIGKILL)",
    b"  traceback : Traceback (most recent call last):",
    (
        b"[E321 02:07:08.4 P.cpp:6] [Rank 1] Watchdog caught collective operation"
        b" timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, T(ms)=6) ran for 7"
        b" milliseconds"
    ),
    b"[Thu Nov 19 09:11:58 2026] Out of memory: Killed process 7 (python)",
    b"oom-kill:constraint=X,task=python,pid=7,uid=0",
    b"NVRM: Xid (PCI:0000:3b:00): 79, pid=7",
    b"run.sh: line 3: 77 Killed",
    b"Fatal Python error: Segmentation fault",
    b"Current thread 0x00007f02 (most recent call first):",
    b'Thread 77 (active): "MainThread"',
    b"    load (data.py:88)",
    (
        b'{"rank": 3, "timestamp": "1795064261", "a": "Traceback (most recent call'
        b' last):\\n  File \\"x\\", line 1\\nE: x"}'
    ),
)
_OUTPUT: Inputs = st.lists(
    st.integers(0, len(_PRINTED) - 1).map(_PRINTED.__getitem__) | _LINES, max_size=30
).map(b"\n".join)


def _job_output(data: bytes) -> None:
    """Read what a job printed, and make its page if there is something of a job."""
    records, output, stats = LoggedEvents(), JobOutput(), reader.ReadStats()
    reader._read_file(io.BytesIO(data), records.add, stats, _output_reader(output))
    if output.of_job:
        text = page(analyse(records, output), stats)
        assert "<script>alert" not in text


_SCRIPT = "<script>alert(1)</script>"
_FIELDS: st.SearchStrategy[_Object] = st.fixed_dictionaries(
    {},
    optional={
        "profiling_name": st.sampled_from(
            ["nccl:broadcast", "nccl:recv 0<-7", "gloo:coalesced", _SCRIPT]
        ),
        "process_group": st.sampled_from([["1", "tp"], ["", ""], [_SCRIPT, "x"]]),
        "is_p2p": st.booleans(),
        "retired": st.booleans(),
        "pg_id": st.integers(-1, 2),
        "time_created_ns": st.sampled_from([0, -1, 2**62, 1795062327377632469]),
        "timeout_ms": st.sampled_from([0, -5, 2**62]),
        "frames": st.sampled_from([frames(3), [], None, [{"filename": _SCRIPT}]]),
        "input_sizes": JSON,
    },
)
_RANKS_OF_GROUP = st.lists(st.integers(0, 9), max_size=4)
_DUMPS: Inputs = st.builds(
    lambda fields, ranks: dump_of(
        [entry(number, **one) for number, one in enumerate(fields)],
        {"0": ranks, "1": ranks[1:]},
    ),
    st.lists(_FIELDS, min_size=1, max_size=6),
    _RANKS_OF_GROUP,
)
# A dump that others are compared with.
_OTHER_DUMP = flight_dumps.read_dump(
    "trace_1", dump_of([entry(3, retired=False)]), 1795062330.0
)


def _flight_dump(data: bytes) -> None:
    """Read a dump as ``tracedstore report`` does, and make its page."""
    output = JobOutput()
    output.add_dump(_OTHER_DUMP)
    with suppress(ValueError):  # no dump: the file is reported as not read
        output.add_dump(flight_dumps.read_dump("trace_0", data, 1795062330.0))
    text = page(analyse(LoggedEvents(), output), reader.ReadStats())
    text.encode("utf-8", "replace")
    assert "<script>alert" not in text


TARGETS = (
    Target(
        name="flight_dump", run=_flight_dump, inputs=changed_bytes(_DUMPS), share=0.2
    ),
    Target(
        name="job_output", run=_job_output, inputs=changed_bytes(_OUTPUT), share=0.2
    ),
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
