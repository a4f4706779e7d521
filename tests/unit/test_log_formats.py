"""Events as they come out of what carries logs, and spans out of collectors."""

import gzip
import json
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

from support.log_events import LINE, Event, completed, gathered
from support.otlp import otlp
from tracedstore import names
from tracedstore.report.analysis import analysed
from tracedstore.report.log_formats import Runtime
from tracedstore.report.reader import ReadStats
from tracedstore.report.records import Facts

EVENT: Event = json.loads(LINE)
TEXT = LINE.decode()


def docker(text: str, stream: str = "stderr") -> str:
    """A line as Docker's json-file driver has it: in parts of 16 KiB."""
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
    """A line as the kubelet has it, in parts."""
    parts = [text[begin : begin + size] for begin in range(0, len(text), size)]
    tags = ["P"] * (len(parts) - 1) + ["F"]
    when = "2026-11-16T09:00:01.000000001+01:00"
    return "".join(
        f"{when} stderr {tag} {part}\n" for tag, part in zip(tags, parts, strict=True)
    )


def loki(text: str) -> str:
    """A line as ``logcli -o jsonl`` has it."""
    labels = {"app": "train", "pod": 'train-"0"'}
    return json.dumps({"labels": labels, "line": text, "timestamp": "2026"}) + "\n"


def journal(text: str) -> str:
    """A line as ``journalctl -o json`` has it."""
    return json.dumps({"__CURSOR": "s=1", "MESSAGE": text, "_PID": "7"}) + "\n"


def collector(text: str) -> str:
    """A line as an OpenTelemetry collector exports it."""
    record = {"timeUnixNano": "1", "body": {"stringValue": text}}
    scopes = [{"scope": {}, "logRecords": [record]}]
    return json.dumps({"resourceLogs": [{"scopeLogs": scopes}]}) + "\n"


CARRIERS: dict[str, Callable[[str], str]] = {
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


def read(path: Path, written: str | bytes) -> tuple[list[Event], ReadStats]:
    """Read a file that has this in it."""
    file = path / "some.log"
    file.write_bytes(written if isinstance(written, bytes) else written.encode())
    return gathered(file)


@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
class TestCarriers:
    """Each way that a line comes in practice."""

    def test_event(self, carrier: Callable[[str], str], tmp_path: Path) -> None:
        """It is read, and all others are counted as those of others."""
        other = json.dumps({"event": "epoch.done", "loss": 0.5})
        written = "".join(map(carrier, ["loss 0.5", TEXT, other, TEXT]))

        for content in (written.encode(), gzip.compress(written.encode())):
            found, stats = read(tmp_path, content)

            assert found == [EVENT, EVENT]
            assert (stats.lines, stats.events) == (4, 2)
            assert (stats.broken, stats.skipped) == (0, 2)

    def test_cut_off(self, carrier: Callable[[str], str], tmp_path: Path) -> None:
        """A rank that was killed left half a line, which was carried well."""
        found, stats = read(tmp_path, carrier(TEXT[:-9]))

        assert (found, stats.lines, stats.broken) == ([], 1, 1)

    def test_carrier_cut_off(
        self, carrier: Callable[[str], str], tmp_path: Path
    ) -> None:
        """Wherever the file ends, what is there is read or counted."""
        written = carrier(TEXT)

        for length in range(1, len(written) - 1):
            found, stats = read(tmp_path, written[:length])

            assert stats.lines == 1
            assert len(found) + stats.skipped >= 1


class TestParts:
    """Long lines, which runtimes cut."""

    LONG = json.dumps(completed(0, 1.0, 0.5) | {"missing": "node, " * 9000})

    @pytest.mark.parametrize("carrier", [docker, lambda text: cri(text, 16 << 10)])
    def test_joined(self, carrier: Callable[[str], str], tmp_path: Path) -> None:
        """A line is one again, and one whose end did not come is cut off."""
        written = carrier(self.LONG) + carrier(TEXT)
        parts = written.splitlines(keepends=True)
        assert len(parts) > 4

        found, stats = read(tmp_path, written)

        assert found == [json.loads(self.LONG), EVENT]
        assert (stats.lines, stats.skipped) == (2, 0)
        found, stats = read(tmp_path, "".join(parts[:2]))
        assert (found, stats.lines, stats.broken) == ([], 1, 1)

    def test_two_streams(self, tmp_path: Path) -> None:
        """Standard output may write between two parts of standard error."""
        one = docker(self.LONG).splitlines(keepends=True)
        other = docker(self.LONG, "stdout").splitlines(keepends=True)
        mixed = [part for pair in zip(one, other, strict=True) for part in pair]

        found, stats = read(tmp_path, "".join(mixed))

        assert (len(found), stats.skipped) == (2, 0)

    def test_trimmed(self, tmp_path: Path) -> None:
        """A collector that takes line ends off has not cut short lines in parts."""
        written = docker(TEXT).replace("\\n", "") * 3

        assert len(read(tmp_path, written)[0]) == 3

    def test_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts that never end are not kept in memory."""
        monkeypatch.setattr("tracedstore.report.log_formats.LONGEST_LINE", 1000)

        found, stats = read(tmp_path, cri("x" * 5000, 10) + cri(TEXT, 1000))

        assert (len(found), stats.foreign, stats.lines) == (1, 5, 6)

    def test_many_parts(self) -> None:
        """Any number of small ones takes as long as they are, and no more room."""
        runtime, before = Runtime(), b"2026-11-16T09:00:01.000000001Z stdout "
        tracemalloc.start()
        try:
            for _ in range(100_000):
                assert runtime.line(before + b"P \n") is None
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        started = time.process_time()
        for _ in range(50_000):
            assert runtime.line(before + b"P x\n") is None
        took = time.process_time() - started

        assert held < 100_000
        # It was a minute when each took as long as all before it.
        assert took < 5
        assert runtime.line(before + b"F y\n") == b"x" * 50_000 + b"y\n"

    def test_many_objects(self, tmp_path: Path) -> None:
        """What of a line is not looked at is not passed over in silence."""
        found, stats = read(tmp_path, TEXT * 40)

        assert (len(found), stats.broken) == (16, 1)

    def test_indented_span(self, tmp_path: Path) -> None:
        """ConsoleSpanExporter writes to standard output, in a container as well."""
        spans = made()
        for carrier in (docker, cri):
            written = [carrier(line) for line in spans[0].to_json().splitlines()]

            found, _ = read(tmp_path, "".join(written))

            assert [each["rank"] for each in found] == [0]

    def test_nested(self, tmp_path: Path) -> None:
        """Wrapping without end is foreign, not an endless search."""
        text = TEXT
        for _ in range(3):
            text = json.dumps({"a": text})
        assert len(read(tmp_path, text)[0]) == 1
        deep = '{"a":' * 300 + TEXT + "}" * 300

        found, stats = read(tmp_path, deep)

        assert (found, stats.foreign, stats.broken) == ([], 1, 0)


def made() -> list[ReadableSpan]:
    """Spans as the SDK has them: of three barriers' visits, and of somebody else."""
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
    tracer.start_span("somebody's", attributes={"a": 0.5, "b": [True]}).end()
    return list(exporter.get_finished_spans())


class TestOtlp:
    """Spans as an OpenTelemetry collector has them."""

    @pytest.mark.parametrize("hexadecimal", [True, False])
    def test_same_as_the_sdk(self, hexadecimal: bool, tmp_path: Path) -> None:
        """They say the same as those of ConsoleSpanExporter."""
        spans = made()
        by_sdk = "".join(span.to_json(indent=None) + "\n" for span in spans)
        record = otlp(spans, hexadecimal=hexadecimal)
        # A collector's file exporter, Tempo's two interfaces, and jq's output.
        written = [
            json.dumps(record, separators=(",", ":")),
            json.dumps({"batches": record["resourceSpans"]}),
            json.dumps({"trace": record}),
            json.dumps(record, indent=2),
            # jq's --slurp, and without its indents.
            json.dumps([record], indent=2),
            json.dumps([record]),
        ]

        expected, _ = read(tmp_path, by_sdk)

        assert [each["rank"] for each in expected] == [0, 1, 2]
        assert {(each["host"], each["run_id"]) for each in expected} == {
            ("node3", "job-7")
        }
        for each in written:
            found, stats = read(tmp_path, each + "\n" + TEXT + "\n")
            assert (stats.spans, stats.events, stats.skipped) == (3, 1, 0)
            for one, other in zip(found[:3], expected, strict=True):
                assert one.pop("timestamp") == pytest.approx(1794819602.234567)
                assert one.pop("waited_seconds") == pytest.approx(1.234567)
                assert one.items() <= other.items()

    def test_many(self, tmp_path: Path) -> None:
        """A list has any number, on a line or indented."""
        record = otlp(made())

        for indent in (None, 2):
            written = json.dumps([record] * 50, indent=indent)
            found, stats = read(tmp_path, written)

            assert (len(found), stats.spans, stats.skipped) == (150, 150, 0)

    def test_unfit(self, tmp_path: Path) -> None:
        """Whatever is wrong with one span costs that span."""
        good = json.dumps(otlp(made()))
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
            assert old in good, old
            found, stats = read(tmp_path, good.replace(old, new, 1))

            assert stats.lines == 1
            assert len(found) == stats.spans <= 3, new


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
SPANS = otlp(made())


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A record to which something happened, in some of the wrappings."""
    record: Any = json.loads(json.dumps(draw(st.sampled_from([EVENT, SPANS]))))
    for _ in range(draw(st.integers(0, 2))):
        inside = record
        while True:
            keys = sorted(inside) if isinstance(inside, dict) else range(len(inside))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(inside[key], dict | list) and draw(st.integers(0, 5)):
                inside = inside[key]
                continue
            inside[key] = draw(ANYTHING)
            break
    text = json.dumps(record)
    for carrier in draw(st.lists(st.sampled_from(list(CARRIERS.values())), max_size=2)):
        text = text[: draw(st.none() | st.integers(0, len(text)))]
        text = carrier(text or "x").rstrip("\n")
    return text.encode()


class TestFuzz:
    """Whatever happened to it on its way."""

    @given(records=st.lists(spoiled() | st.binary(max_size=50), max_size=6))
    def test_all_is_counted(
        self, records: list[bytes], tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Nothing is raised, and no line is lost."""
        folder = tmp_path_factory.mktemp("fuzz")

        found, stats = read(folder, b"\n".join(records))

        facts = Facts()
        for event in found:
            facts.add(event)
        assert analysed(facts).facts is facts
        assert len(found) == stats.events + stats.spans
        assert len(found) + stats.skipped >= stats.lines
