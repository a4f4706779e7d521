"""The page of ``tracedstore report``, from real barriers and in a browser."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tracedstore
from integration.children.fleet import connect
from integration.conftest import StartChild
from integration.fleets import Fleet, FleetBarrier
from integration.harness import in_threads, results, wait_until
from support.otlp import otlp
from support.pages import Page, browse, console_messages
from support.tools import ROOT
from tracedstore.common.text import duration
from tracedstore.tools.cli.main import main

ARTEFACTS = ROOT / "test-results"


def large_logs(folder: Path, ranks: int, barriers: int) -> list[list[float]]:
    """Write the logs of the benchmark; return the waits of all ranks per barrier."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    report.write_logs(folder, ranks, barriers, late_rank=5, missing_rank=8)
    return [report.waits(ranks, number, 5) for number in range(barriers - 1)]


class TestBrowser:
    """The page in Chromium."""

    def test_page(self, tmp_path: Path) -> None:
        """The console stays empty, and the page has the numbers of the input."""
        waits = large_logs(tmp_path, 16, 40)
        truncated = json.dumps({"event": "barrier.timeout", "rank": 3})[:-9]
        slow = {
            "timestamp": "2026-11-16T09:03:00Z",
            "event": "store.operation.slow",
            "rank": 2,
            "host": "node0",
            "operation": "get",
            "store": "tcp_store",
            "key": "<script>document.title='owned'</script>",
            "key_family": "<b>*",
            "duration_seconds": 31.5,
            "suppressed_count": 3,
        }
        contended = {
            **slow,
            "event": "store.cas.contended",
            "operation": "compare_set",
            "losses_in_a_row": 12,
        }
        (tmp_path / "more.log").write_text(
            f"{truncated}\n{json.dumps(slow)}\n{json.dumps(contended)}\n"
        )
        output = tmp_path / "report.html"
        assert main(["report", str(tmp_path), "--output", str(output)]) == 0
        ARTEFACTS.mkdir(exist_ok=True)
        picture = ARTEFACTS / "report.png"
        picture.unlink(missing_ok=True)

        dom = browse(output, "--dump-dom")
        screenshot = browse(
            output, f"--screenshot={picture}", "--window-size=1200,2600"
        )

        assert console_messages(dom) + console_messages(screenshot) == []
        assert picture.read_bytes()[:4] == b"\x89PNG"
        assert picture.stat().st_size > 50_000
        shown = Page(dom.stdout)
        assert shown.texts["n-ranks"] == "16 of 16"
        assert (shown.texts["n-completed"], shown.texts["n-timeouts"]) == ("39", "1")
        headline = "Rank 8 on node1 never arrived at barrier checkpoint/39"
        assert shown.texts["headline"] == headline
        assert f"<title>{headline} - tracedstore report</title>" in dom.stdout
        assert "script" not in shown.tags
        # A dot for each arrival: one rank is missing at the last of 40 barriers.
        assert dom.stdout.count("<circle") == 39 * 16 + 15
        assert dom.stdout.count('class="cross"') == 1
        missing, late = shown.rows("t-stragglers")
        assert (missing["rank"], missing["missing at"]) == ("8", "1")
        cost = sum(sorted(waited)[7] / 2 + sorted(waited)[8] / 2 for waited in waits)
        assert (late["rank"], late["last at"], late["barriers"]) == ("5", "39", "39")
        assert late["cost"] == duration(cost)
        (report,) = shown.rows("t-opinions")
        assert (report["reported by"], report["ranks"]) == ("ranks 0-7,9-15", "15")
        (call,) = shown.rows("t-calls")
        assert (call["key family"], call["calls"]) == ("<b>*", "4")
        (lost,) = shown.rows("t-cas")
        assert lost["most losses in a row"] == "12"
        assert {row["lines"]: row["count"] for row in shown.rows("t-read")} == {
            "all": str(16 * 40 - 1 + 16 + 3),
            "events": str(16 * 40 - 1 + 2),
            "barrier spans": "0",
            "unrelated": "16",
            "truncated or interleaved": "1",
            "events and spans with invalid fields": "0",
            "too long": "0",
        }

    def test_console_messages_are_found(self, tmp_path: Path) -> None:
        """Messages and errors of a page's scripts are in the browser's output."""
        bad = tmp_path / "bad.html"
        bad.write_text("<script>console.error('no'); nothing()</script>")

        messages = console_messages(browse(bad, "--dump-dom"))

        assert len(messages) == 2, messages


class TestRealBarriers:
    """Logs and spans of real barriers."""

    @pytest.mark.parametrize("source", ["logs", "spans", "otlp", "both"])
    def test_report(
        self, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Logs and spans yield the same page, and both together count once."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RANK", "0")
        Path("logs").mkdir()
        text = (ROOT / "docs/report.md").read_text("utf-8")
        job: dict[str, Any] = {}
        # Configures structlog and spans with the code of the documentation.
        exec("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), job)
        collected = InMemorySpanExporter()
        job["provider"].add_span_processor(SimpleSpanProcessor(collected))
        store = tracedstore.wrap(dist.HashStore())
        # Neither rank may be late at the barrier that the third one misses.
        same_time = threading.Barrier(2)

        def rank(number: int) -> str:
            tracedstore.barrier(store, 3, "step/1", 20, rank=number)
            if number == 1:
                return "missing"
            same_time.wait(60)
            try:
                tracedstore.barrier(store, 3, "step/2", 2, rank=number)
            except tracedstore.BarrierTimeout:
                return "timeout"
            return "completed"

        outcomes = results(in_threads(3, rank))
        job["log"].close()
        job["traces"].close()
        assert outcomes == ["timeout", "missing", "timeout"]
        spans = collected.get_finished_spans()
        Path("logs/otlp.jsonl").write_text(json.dumps(otlp(spans)) + "\n")
        output = tmp_path / "report.html"
        arguments = {
            "logs": ["logs/rank0.log"],
            "spans": ["logs/rank0.spans"],
            "otlp": ["logs/otlp.jsonl"],
            "both": ["logs", "--traces", "logs/rank0.spans"],
        }[source]

        assert main(["report", *arguments, "--output", str(output)]) == 0

        shown = Page(output.read_text("utf-8"))
        assert shown.texts["n-ranks"] == "3 of 3"
        assert (shown.texts["n-completed"], shown.texts["n-timeouts"]) == ("1", "1")
        (report,) = shown.rows("t-opinions")
        assert (report["reported by"], report["ranks"]) == ("ranks 0,2", "2")
        assert "missing 1 of 3" in report["report"]
        stragglers = shown.rows("t-stragglers")
        # Any rank may arrive last at the first barrier.
        assert (stragglers[0]["rank"], stragglers[0]["missing at"]) == ("1", "1")
        assert sum(int(row["last at"]) for row in stragglers) == 1
        if source == "otlp":
            spans_page = tmp_path / "spans.html"
            main(["report", "logs/rank0.spans", "--output", str(spans_page)])
            as_spans = Page(spans_page.read_text("utf-8"))
            del shown.tables["t-read"], as_spans.tables["t-read"]
            assert shown.tables == as_spans.tables


@pytest.mark.processes
class TestKilled:
    """Jobs that ended before a timeout."""

    @pytest.mark.parametrize("killed", ["server", "ranks"])
    def test_report(self, tmp_path: Path, start_child: StartChild, killed: str) -> None:
        """The missing ranks are known from the warnings of the waiting ranks."""
        server = start_child("tcp_server")
        port = str(server.next_report()["port"])
        child = start_child("fleet", "tcp", port)
        meeting = FleetBarrier(Fleet(child, connect("tcp", port)), "tcp")
        meeting.start(0, 1, world_size=3, timeout=60, warn_after=0.2)
        wait_until(lambda: len(meeting.events("barrier.waiting")) > 1)

        if killed == "server":
            server.kill()
            meeting.results(0, 1)
        else:
            child.kill()

        log, output = tmp_path / "ranks.log", tmp_path / "report.html"
        log.write_text(child.errors())
        assert main(["report", str(log), "--output", str(output)]) == 0
        html = output.read_text("utf-8")
        shown = Page(html)
        reports = " ".join(row["report"] for row in shown.rows("t-opinions"))
        assert "missing 1 of 3: " in reports
        assert "when last checked, at " in html
        assert [row["rank"] for row in shown.rows("t-stragglers")] == ["2"]
        if killed == "server":
            assert (shown.texts["n-failed"], shown.texts["n-open"]) == ("1", "0")
            assert "DistNetworkError: " in reports
            assert "Then the store failed" in html
        else:
            assert (shown.texts["n-failed"], shown.texts["n-open"]) == ("0", "1")
            assert "No end is logged" in html


class TestSize:
    """A large job; benchmarks/report.py measures a larger one."""

    def test_memory(self, tmp_path: Path) -> None:
        """60,000 arrivals need less than 60 MB of memory and 1 MB of page."""
        large_logs(tmp_path, 300, 200)
        output = tmp_path / "report.html"
        script = (
            "import re, sys; from tracedstore.tools.cli.main import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            # ru_maxrss is at least that of the parent process.
            "status = open('/proc/self/status').read()\n"
            "print(re.search(r'VmHWM:\\s+([0-9]+)', status)[1])\n"
        )

        done = subprocess.run(
            [
                *(sys.executable, "-W", "ignore", "-c", script),
                *("report", str(tmp_path), "--output", str(output)),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )

        _, summary, read, peak = done.stdout.splitlines()
        assert "300 ranks, 200 barriers, 1 incident" in summary
        assert "60,299 lines read: 59,999 events" in read
        # In kB; the logs have 23 MB.
        assert int(peak) < 60_000
        assert output.stat().st_size < 1_000_000
