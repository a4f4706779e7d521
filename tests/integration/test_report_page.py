"""The page of ``tracedstore report``, of real barriers and in a real browser."""

import json
import re
import subprocess
import sys
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
from support.pages import Page, browse, console
from support.tools import ROOT
from tracedstore.cli.main import main

ARTEFACTS = ROOT / "test-results"


def large_logs(folder: Path, ranks: int, barriers: int) -> list[list[float]]:
    """Write logs as the benchmark does; give who waited how long at which barrier."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import report

    report.write_logs(folder, ranks, barriers, late=5, missing=8)
    return [report.waits(ranks, number, 5) for number in range(barriers - 1)]


class TestBrowser:
    """A reader opens it."""

    def test_page(self, tmp_path: Path) -> None:
        """No word in the console, and every number is the input's."""
        waits = large_logs(tmp_path, 16, 40)
        torn = json.dumps({"event": "barrier.timeout", "rank": 3})[:-9]
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
            f"{torn}\n{json.dumps(slow)}\n{json.dumps(contended)}\n"
        )
        output = tmp_path / "report.html"
        assert main(["report", str(tmp_path), "--output", str(output)]) == 0
        ARTEFACTS.mkdir(exist_ok=True)
        picture = ARTEFACTS / "report.png"
        picture.unlink(missing_ok=True)

        seen = browse(output, "--dump-dom")
        drawn = browse(output, f"--screenshot={picture}", "--window-size=1200,2600")

        assert console(seen) + console(drawn) == []
        assert picture.read_bytes()[:4] == b"\x89PNG"
        assert picture.stat().st_size > 50_000
        shown = Page(seen.stdout)
        assert shown.texts["n-ranks"] == "16 of 16"
        assert (shown.texts["n-completed"], shown.texts["n-timeouts"]) == ("39", "1")
        headline = "Rank 8 on node1 never came to checkpoint/39"
        assert shown.texts["headline"] == headline
        assert f"<title>{headline} - tracedstore report</title>" in seen.stdout
        assert "script" not in shown.tags
        # Every arrival is a dot: 39 barriers with all, one with all but one.
        assert seen.stdout.count("<circle") == 39 * 16 + 15
        assert seen.stdout.count('class="cross"') == 1
        never, late = shown.rows("t-stragglers")
        assert (never["rank"], never["missing at"]) == ("8", "1")
        cost = sum(sorted(waited)[7] / 2 + sorted(waited)[8] / 2 for waited in waits)
        assert (late["rank"], late["last at"], late["of"]) == ("5", "39", "39")
        assert late["cost"] == f"{cost:.3g} s"
        (said,) = shown.rows("t-opinions")
        assert (said["by"], said["ranks"]) == ("ranks 0-7,9-15", "15")
        (call,) = shown.rows("t-calls")
        assert (call["key family"], call["calls"]) == ("<b>*", "4")
        (lost,) = shown.rows("t-cas")
        assert lost["most in a row"] == "12"
        assert {row["lines"]: row["how many"] for row in shown.rows("t-read")} == {
            "all": str(16 * 40 - 1 + 16 + 3),
            "events": str(16 * 40 - 1 + 2),
            "spans of barriers": "0",
            "of others": "16",
            "cut off, or mixed with others": "1",
            "events with fields that do not fit": "0",
            "too long": "0",
        }

    def test_console_would_be_seen(self, tmp_path: Path) -> None:
        """A page that asks for something, or complains, is told of."""
        bad = tmp_path / "bad.html"
        bad.write_text("<script>console.error('no'); nothing()</script>")

        said = console(browse(bad, "--dump-dom"))

        assert len(said) == 2, said


class TestRealBarriers:
    """Logs and spans as real barriers write them."""

    @pytest.mark.parametrize("given", ["logs", "spans", "otlp", "both"])
    def test_report(
        self, tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Either says the same, and both together do not say it twice."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RANK", "0")
        Path("logs").mkdir()
        text = (ROOT / "docs/report.md").read_text("utf-8")
        job: dict[str, Any] = {}
        # As the documentation has it.
        exec("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), job)
        collected = InMemorySpanExporter()
        job["provider"].add_span_processor(SimpleSpanProcessor(collected))
        store = tracedstore.wrap(dist.HashStore())

        def rank(number: int) -> str:
            tracedstore.barrier(store, 3, "step/1", 20, rank=number)
            if number == 1:
                return "away"
            try:
                tracedstore.barrier(store, 3, "step/2", 0.5, rank=number)
            except tracedstore.BarrierTimeout:
                return "timeout"
            return "completed"

        ended = results(in_threads(3, rank))
        job["log"].close()
        job["traces"].close()
        assert ended == ["timeout", "away", "timeout"]
        spans = collected.get_finished_spans()
        Path("logs/otlp.jsonl").write_text(json.dumps(otlp(spans)) + "\n")
        output = tmp_path / "report.html"
        arguments = {
            "logs": ["logs/rank0.log"],
            "spans": ["logs/rank0.spans"],
            "otlp": ["logs/otlp.jsonl"],
            "both": ["logs", "--traces", "logs/rank0.spans"],
        }[given]

        assert main(["report", *arguments, "--output", str(output)]) == 0

        shown = Page(output.read_text("utf-8"))
        assert shown.texts["n-ranks"] == "3 of 3"
        assert (shown.texts["n-completed"], shown.texts["n-timeouts"]) == ("1", "1")
        (said,) = shown.rows("t-opinions")
        assert (said["by"], said["ranks"]) == ("ranks 0,2", "2")
        assert "missing 1 of 3" in said["said"]
        late = shown.rows("t-stragglers")
        # Who came last to the first barrier, chance decides.
        assert (late[0]["rank"], late[0]["missing at"]) == ("1", "1")
        assert sum(int(row["last at"]) for row in late) == 1
        if given == "otlp":
            spans_page = tmp_path / "spans.html"
            main(["report", "logs/rank0.spans", "--output", str(spans_page)])
            as_spans = Page(spans_page.read_text("utf-8"))
            del shown.tables["t-read"], as_spans.tables["t-read"]
            assert shown.tables == as_spans.tables


@pytest.mark.processes
class TestKilled:
    """Nobody got as far as a timeout."""

    @pytest.mark.parametrize("killed", ["server", "ranks"])
    def test_report(self, tmp_path: Path, start_child: StartChild, killed: str) -> None:
        """Who was missing is known from what the ranks said while they waited."""
        server = start_child("tcp_server")
        where = str(server.next_report()["port"])
        child = start_child("fleet", "tcp", where)
        meeting = FleetBarrier(Fleet(child, connect("tcp", where)), "tcp")
        meeting.start(0, 1, world_size=3, timeout=50.0, warn_after=0.2)
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
        said = " ".join(row["said"] for row in shown.rows("t-opinions"))
        assert "missing 1 of 3: " in said
        assert "when last heard, at " in html
        assert [row["rank"] for row in shown.rows("t-stragglers")] == ["2"]
        if killed == "server":
            assert (shown.texts["n-failed"], shown.texts["n-open"]) == ("1", "0")
            assert "DistNetworkError: " in said
            assert "Then the store failed" in html
        else:
            assert (shown.texts["n-failed"], shown.texts["n-open"]) == ("0", "1")
            assert "No end was seen" in html


class TestSize:
    """Large jobs; benchmarks/report.py has the full size."""

    def test_memory(self, tmp_path: Path) -> None:
        """60,000 arrivals take no memory to speak of, and a small page."""
        large_logs(tmp_path, 300, 200)
        output = tmp_path / "report.html"
        script = (
            "import re, sys; from tracedstore.cli.main import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            # ru_maxrss would begin at what the parent had.
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
            timeout=50,
            check=True,
        )

        summary, read, peak = done.stdout.splitlines()
        assert "300 ranks, 200 barriers, 1 incident" in summary
        assert "60,299 lines read: 59,999 events" in read
        # In kB, for 23 MB of logs.
        assert int(peak) < 60_000
        assert output.stat().st_size < 1_000_000
