"""Events in lines that other software has wrapped, and spans of collectors."""

import gzip
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from support.log_events import (
    EVENT_LINE,
    Event,
    completed_event,
    read_file,
    span_from_event,
)
from support.otlp import otlp
from tracedstore import names
from tracedstore.tools.report.analysis import analyse
from tracedstore.tools.report.log_reader import ContainerLogUnwrapper, ReadStats
from tracedstore.tools.report.logged_events import LoggedEvents

EVENT: Event = json.loads(EVENT_LINE)
TEXT = EVENT_LINE.decode()


def docker(text: str, stream: str = "stderr") -> str:
    """Return the lines of Docker's json-file driver, which splits after 16 KiB."""
    size = 16 << 10
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    parts[-1] += "\n"
    return "".join(
        json.dumps(
            {"log": part, "stream": stream, "time": "2026-11-16T09:00:01.000000001Z"},
            separators=(",", ":"),
        )
        + "\n"
        for part in parts
    )


def cri(text: str, size: int = 1 << 20) -> str:
    """Return the lines of the kubelet (CRI), which splits long lines."""
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    tags = ["P"] * (len(parts) - 1) + ["F"]
    time = "2026-11-16T09:00:01.000000001+01:00"
    return "".join(
        f"{time} stderr {tag} {part}\n" for tag, part in zip(tags, parts, strict=True)
    )


def loki(text: str) -> str:
    """Return the line of ``logcli -o jsonl``."""
    labels = {"app": "train", "pod": 'train-"0"'}
    return json.dumps({"labels": labels, "line": text, "timestamp": "2026"}) + "\n"


def journal(text: str) -> str:
    """Return the line of ``journalctl -o json``."""
    return json.dumps({"__CURSOR": "s=1", "MESSAGE": text, "_PID": "7"}) + "\n"


def collector(text: str) -> str:
    """Return the log export of an OpenTelemetry collector."""
    record = {"timeUnixNano": "1", "body": {"stringValue": text}}
    scopes = [{"scope": {}, "logRecords": [record]}]
    return json.dumps({"resourceLogs": [{"scopeLogs": scopes}]}) + "\n"


WRAPPERS: dict[str, Callable[[str], str]] = {
    "docker": docker,
    "docker, to a terminal": lambda text: docker(text + "\r"),
    "CRI": cri,
    "CRI, with more tags": lambda text: cri(text).replace(" F ", " F:x "),
    "kubectl logs --prefix": lambda text: f"[pod/train-0/worker] {text}\n",
    "kubectl logs --timestamps": lambda text: f"2026-11-16T09:00:01Z {text}\n",
    "torchrun": lambda text: f"[default3]:{text}\n",
    "torchrun with a role": lambda text: f"[trainer3]:{text}\n",
    "srun --label": lambda text: f"12: {text}\n",
    "logcli -o jsonl": loki,
    "logcli": lambda text: f'2026-11-16T09:00:01Z {{app="train"}} {text}\n',
    "journald": journal,
    "a collector": collector,
    "torchrun in docker": lambda text: docker(f"[default3]:{text}"),
    "docker in Loki": lambda text: loki(docker(text)),
    "CRI in Loki": lambda text: loki(cri(text)),
    "an object": lambda text: f'{{"jsonPayload": {text}, "severity": "ERROR"}}\n',
}


def read(path: Path, content: str | bytes) -> tuple[list[Event], ReadStats]:
    """Read a log file with some content."""
    file = path / "some.log"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_file(file)


@pytest.mark.parametrize("field", ["start_time", "end_time"])
def test_huge_span_time(field: str, tmp_path: Path) -> None:
    """A time beyond the range of a float is no span, and does not raise."""
    span = span_from_event(completed_event(0, 1.0, 0.5)) | {field: 10**400}

    events, stats = read(tmp_path, json.dumps(span) + "\n")

    assert (events, stats.spans) == ([], 0)


@pytest.mark.parametrize("outer", [0, 8, 14])
def test_span_nested_to_the_recursion_limit(outer: int, tmp_path: Path) -> None:
    """A span whose name is nested as deeply as JSON can be does not raise."""
    text = json.dumps(span_from_event(completed_event(0, 1.0, 0.5)) | {"name": "@"})
    limit = sys.getrecursionlimit()
    lines = [
        '{"a":' * outer + text.replace('"@"', "[" * n + "]" * n) + "}" * outer
        for n in range(limit - 200, limit)
    ]

    _, stats = read(tmp_path, "\n".join(lines))

    assert stats.lines == len(lines)
    assert stats.spans == 0


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
class TestWrappers:
    """The formats that logs have in practice."""

    def test_events(self, wrapper: Callable[[str], str], tmp_path: Path) -> None:
        """Events are read, and all other lines are counted as unrelated."""
        other = json.dumps({"event": "epoch.done", "loss": 0.5})
        text = "".join(map(wrapper, ["loss 0.5", TEXT, other, TEXT]))

        for content in (text.encode(), gzip.compress(text.encode())):
            events, stats = read(tmp_path, content)

            assert events == [EVENT, EVENT]
            assert (stats.lines, stats.events) == (4, 2)
            assert (stats.truncated, stats.skipped) == (0, 2)

    def test_truncated_event(
        self, wrapper: Callable[[str], str], tmp_path: Path
    ) -> None:
        """A truncated event in a complete wrapper counts as truncated."""
        events, stats = read(tmp_path, wrapper(TEXT[:-9]))

        assert (events, stats.lines, stats.truncated) == ([], 1, 1)

    def test_truncated_wrapper(
        self, wrapper: Callable[[str], str], tmp_path: Path
    ) -> None:
        """A file that ends at any position has an event or a skipped line."""
        content = wrapper(TEXT)

        for length in range(1, len(content) - 1):
            events, stats = read(tmp_path, content[:length])

            assert stats.lines == 1
            assert len(events) + stats.skipped >= 1


class TestParts:
    """Long lines, which container runtimes split."""

    LONG = json.dumps(completed_event(0, 1.0, 0.5) | {"missing": "node, " * 9000})

    @pytest.mark.parametrize("wrapper", [docker, lambda text: cri(text, 16 << 10)])
    def test_parts_are_joined(
        self, wrapper: Callable[[str], str], tmp_path: Path
    ) -> None:
        """Parts are joined; a line without its last part is truncated."""
        content = wrapper(self.LONG) + wrapper(TEXT)
        parts = content.splitlines(keepends=True)
        assert len(parts) > 4

        events, stats = read(tmp_path, content)

        assert events == [json.loads(self.LONG), EVENT]
        assert (stats.lines, stats.skipped) == (2, 0)
        events, stats = read(tmp_path, "".join(parts[:2]))
        assert (events, stats.lines, stats.truncated) == ([], 1, 1)

    def test_two_streams(self, tmp_path: Path) -> None:
        """Parts of standard output and standard error may alternate."""
        stderr = docker(self.LONG).splitlines(keepends=True)
        stdout = docker(self.LONG, "stdout").splitlines(keepends=True)
        mixed = [part for pair in zip(stderr, stdout, strict=True) for part in pair]

        events, stats = read(tmp_path, "".join(mixed))

        assert (len(events), stats.skipped) == (2, 0)

    def test_stripped_line_ends(self, tmp_path: Path) -> None:
        """A short line is complete, even if a collector has stripped its end."""
        content = docker(TEXT).replace("\\n", "") * 3

        assert len(read(tmp_path, content)[0]) == 3

    def test_parts_without_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Parts beyond the limit are not kept in memory."""
        monkeypatch.setattr("tracedstore.tools.report.log_reader.MAX_LINE_BYTES", 1000)

        events, stats = read(tmp_path, cri("x" * 5000, 10) + cri(TEXT, 1000))

        assert (len(events), stats.unrelated, stats.lines) == (1, 5, 6)

    def test_many_parts(self) -> None:
        """Time and memory are linear in the size of the parts."""
        unwrapper = ContainerLogUnwrapper()
        header = b"2026-11-16T09:00:01.000000001Z stdout "
        tracemalloc.start()
        try:
            for _ in range(100_000):
                assert unwrapper.unwrap(header + b"P \n") is None
            memory, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        started = time.process_time()
        for _ in range(50_000):
            assert unwrapper.unwrap(header + b"P x\n") is None
        elapsed = time.process_time() - started

        assert memory < 100_000
        # It took a minute when every part copied all parts before it.
        assert elapsed < 5
        assert unwrapper.unwrap(header + b"F y\n") == b"x" * 50_000 + b"y\n"

    def test_many_objects(self, tmp_path: Path) -> None:
        """A line with more objects than are parsed counts as truncated."""
        events, stats = read(tmp_path, TEXT * 40)

        assert (len(events), stats.truncated) == (16, 1)

    def test_indented_span(self, tmp_path: Path) -> None:
        """An indented span is read from the log of a container."""
        spans = sdk_spans()
        for wrapper in (docker, cri):
            lines = [wrapper(line) for line in spans[0].to_json().splitlines()]

            events, _ = read(tmp_path, "".join(lines))

            assert [each["rank"] for each in events] == [0]

    def test_nested_wrappers(self, tmp_path: Path) -> None:
        """The search ends at a maximum depth; the line then counts as unrelated."""
        text = TEXT
        for _ in range(3):
            text = json.dumps({"a": text})
        assert len(read(tmp_path, text)[0]) == 1
        deep = '{"a":' * 300 + TEXT + "}" * 300

        events, stats = read(tmp_path, deep)

        assert (events, stats.unrelated, stats.truncated) == ([], 1, 0)


def sdk_spans() -> list[ReadableSpan]:
    """Return spans of the SDK: three of barrier calls, and an unrelated one."""
    exporter = InMemorySpanExporter()
    resource = Resource({names.RUN_ID: "job-7", names.HOST_NAME: "node3"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tracedstore")
    start = 1_794_819_601_000_000_000
    for rank, result in enumerate(["completed", "timeout", "failed"]):
        attributes: dict[str, Any] = {
            names.BARRIER_PREFIX: "step/7",
            names.RANK: rank,
            names.WORLD_SIZE: 4,
            names.BARRIER_RESULT: result,
        }
        if result == "completed":
            attributes[names.BARRIER_LAST_RANK] = 2
        if result == "timeout":
            attributes[names.BARRIER_MISSING_RANKS] = [2, 3]
            attributes[names.BARRIER_MISSING_TEXT] = "missing 2 of 4"
        span = tracer.start_span(
            "barrier step/*", attributes=attributes, start_time=start
        )
        if result == "failed":
            span.set_attribute("error.type", "connection")
            span.set_status(StatusCode.ERROR, "it broke")
        span.end(start + 1_234_567_000 + rank)
    tracer.start_span("unrelated", attributes={"a": 0.5, "b": [True]}).end()
    return list(exporter.get_finished_spans())


class TestOtlp:
    """Spans in the JSON of OTLP."""

    @pytest.mark.parametrize("hexadecimal", [True, False])
    def test_same_as_the_sdk(self, hexadecimal: bool, tmp_path: Path) -> None:
        """They yield the same events as the JSON of ConsoleSpanExporter."""
        spans = sdk_spans()
        sdk_json = "".join(span.to_json(indent=None) + "\n" for span in spans)
        record = otlp(spans, hexadecimal=hexadecimal)
        # A collector's file exporter, Tempo's two interfaces, and the output of jq.
        formats = [
            json.dumps(record, separators=(",", ":")),
            json.dumps({"batches": record["resourceSpans"]}),
            json.dumps({"trace": record}),
            json.dumps(record, indent=2),
            # jq --slurp, indented and compact.
            json.dumps([record], indent=2),
            json.dumps([record]),
        ]

        expected, _ = read(tmp_path, sdk_json)

        assert [each["rank"] for each in expected] == [0, 1, 2]
        assert {(each["host"], each["run_id"]) for each in expected} == {
            ("node3", "job-7")
        }
        for content in formats:
            events, stats = read(tmp_path, content + "\n" + TEXT + "\n")
            assert (stats.spans, stats.events, stats.skipped) == (3, 1, 0)
            for event, sdk_event in zip(events[:3], expected, strict=True):
                assert event.pop("timestamp") == pytest.approx(1794819602.234567)
                assert event.pop("waited_seconds") == pytest.approx(1.234567)
                assert event.items() <= sdk_event.items()

    def test_long_list(self, tmp_path: Path) -> None:
        """A list of any length is read, on one line or indented."""
        record = otlp(sdk_spans())

        for indent in (None, 2):
            content = json.dumps([record] * 50, indent=indent)
            events, stats = read(tmp_path, content)

            assert (len(events), stats.spans, stats.skipped) == (150, 150, 0)

    def test_invalid_spans(self, tmp_path: Path) -> None:
        """An invalid span is skipped, and the others are read."""
        valid = json.dumps(otlp(sdk_spans()))
        for old, new in [
            ('"1794819601000000000"', '"soon"'),
            ('"1794819601000000000"', "[]"),
            ('"1794819601000000000"', '"' + "9" * 5000 + '"'),
            ('"1794819601000000000"', '"' + "9" * 400 + '"'),
            ('"name": "barrier step/*"', '"nameless": 1'),
            ('{"intValue": "0"}', '{"intValue": "none"}'),
            ('{"intValue": "0"}', "7"),
            ('{"stringValue": "completed"}', '{"arrayValue": []}'),
            ('"status": {}', '"status": 7'),
            ('"spans": ', '"spams": '),
            ('"scopeSpans": [', '"scopeSpans": [7, [], '),
        ]:
            assert old in valid, old
            events, stats = read(tmp_path, valid.replace(old, new, 1))

            assert stats.lines == 1
            assert len(events) == stats.spans <= 3, new


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
OTLP_SPANS = otlp(sdk_spans())


@st.composite
def damaged_records(draw: st.DrawFn) -> bytes:
    """Draw an event or spans with random values, in up to two wrappers."""
    record: Any = json.loads(json.dumps(draw(st.sampled_from([EVENT, OTLP_SPANS]))))
    for _ in range(draw(st.integers(0, 2))):
        container = record
        while True:
            keys = (
                sorted(container)
                if isinstance(container, dict)
                else range(len(container))
            )
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(container[key], dict | list) and draw(st.integers(0, 5)):
                container = container[key]
                continue
            container[key] = draw(JSON_VALUES)
            break
    text = json.dumps(record)
    for wrapper in draw(st.lists(st.sampled_from(list(WRAPPERS.values())), max_size=2)):
        text = text[: draw(st.none() | st.integers(0, len(text)))]
        text = wrapper(text or "x").rstrip("\n")
    return text.encode()


class TestFuzz:
    """Random damage to wrapped records."""

    @given(records=st.lists(damaged_records() | st.binary(max_size=50), max_size=6))
    def test_all_lines_are_counted(
        self, records: list[bytes], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Reading never raises, and counts every line."""
        folder = tmp_path_factory.mktemp("fuzz")

        events, stats = read(folder, b"\n".join(records))

        accumulated = LoggedEvents()
        for event in events:
            accumulated.add(event)
        assert analyse(accumulated).logged is accumulated
        assert len(events) == stats.events + stats.spans
        assert len(events) + stats.skipped >= stats.lines
