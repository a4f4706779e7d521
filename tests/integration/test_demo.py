"""``tracedstore demo``: its text, compared with the files that it writes."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.harness import wait_until
from support.events import check
from support.terminal import without_styles
from tracedstore import names
from tracedstore.common.identity import host_name
from tracedstore.tools.cli.main import main
from tracedstore.tools.demo.store_servers import fetch

# Seconds for a demo with 8 ranks, while two others run on a busy machine.
_DEMO_TIMEOUT = 240.0
pytestmark = pytest.mark.processes

# What changes the output on a terminal.
_ENVIRONMENT = ("NO_COLOR", "LINES", "COLUMNS")


def _take_terminal() -> None:
    """Make standard input the controlling terminal; for a session leader."""
    fcntl.ioctl(0, termios.TIOCSCTTY)


class Run:
    """One run of the demo."""

    def __init__(self, folder: Path, *options: str, terminal: bool = False) -> None:
        self.folder = folder
        self.pids: list[int] = []
        self._began = time.monotonic()
        ours, theirs = pty.openpty() if terminal else os.pipe()
        self._keyboard = ours
        if terminal:
            termios.tcsetwinsize(theirs, (40, 80))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tracedstore.tools.cli.main",
                "demo",
                f"--output={folder}",
                *options,
            ],
            env={
                **{k: v for k, v in os.environ.items() if k not in _ENVIRONMENT},
                "TERM": "xterm",
                # Settings of the user, which the demo ignores.
                "TRACEDSTORE_DISABLED": "true",
                "OTEL_TRACES_SAMPLER": "always_off",
            },
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            # Textual draws on standard error.
            stderr=theirs if "--top" in options else subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,  # noqa: PLW1509 - one system call
        )
        os.close(theirs)
        self._written = b""
        self._reader = threading.Thread(target=self._read, args=(ours,), daemon=True)
        self._reader.start()

    def _read(self, source: int) -> None:
        with open(source, "rb", buffering=0) as file:
            try:
                while new := file.read(65536):
                    self._written += new
            except OSError:  # the other end of the terminal is closed
                return

    @property
    def output(self) -> str:
        """The output so far."""
        return self._written.decode().replace("\r\n", "\n")

    def send(self, number: int) -> None:
        """Send a signal to the process group, as a terminal does."""
        os.killpg(self._process.pid, number)

    def press(self, key: bytes) -> None:
        """Press a key on the terminal."""
        os.write(self._keyboard, key)

    def children(self) -> list[int]:
        """Return its living child processes."""
        pid = self._process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def kill(self) -> None:
        """Kill the process alone, with SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float = _DEMO_TIMEOUT) -> tuple[int, str]:
        """Wait for its end; return the exit code and standard error."""
        code = self._process.wait(max(1.0, self._began + timeout - time.monotonic()))
        self._reader.join(60)
        errors = self._process.stderr
        return code, errors.read().decode() if errors is not None else ""

    def close(self) -> None:
        """Kill it if it runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(240)
        if self._process.stderr is not None:
            self._process.stderr.close()

    def events(self) -> list[dict[str, Any]]:
        """Return all events of the ranks."""
        return [
            json.loads(line)
            for log in self.folder.glob("logs/rank-*.jsonl")
            for line in log.read_text().splitlines()
            if line.startswith("{")
        ]

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank, from its own log."""
        serving = [e for e in self.events() if e["event"] == names.TELEMETRY_SERVING]
        return {event["rank"]: event["pid"] for event in serving}

    def summary(self) -> dict[str, Any]:
        """Return the summary."""
        text = (self.folder / "summary.json").read_text()
        summary: dict[str, Any] = json.loads(text)
        return summary


def samples(page: Path, metric: names.Metric, suffix: str = "") -> list[Any]:
    """Return the samples of one metric in a saved scrape."""
    return [
        sample
        for family in text_string_to_metric_families(page.read_text())
        for sample in family.samples
        if sample.name == metric.name + suffix
    ]


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Start three demos at the same time, because each takes half a minute."""
    folder = tmp_path_factory.mktemp("demo")
    started = {
        "plain": Run(folder / "plain"),
        "top": Run(folder / "top", "--store=file", "--ranks=4", "--top", terminal=True),
        "served": Run(
            folder / "served", "--store=etcd", "--ranks=5", "--json", "--serve"
        ),
    }
    yield started
    for run in started.values():
        run.close()


@pytest.fixture
def plain(runs: dict[str, Run]) -> Run:
    """Wait for the demo without a terminal."""
    code, errors = runs["plain"].wait()
    assert (code, errors) == (0, "")
    return runs["plain"]


@pytest.fixture(scope="module")
def on_top(runs: dict[str, Run]) -> Run:
    """Press q on the screen of top, once the last scenario has ended."""
    run = runs["top"]
    wait_until(lambda: "the demo has ended" in run.output, timeout=_DEMO_TIMEOUT)
    run.pids = [*run.ranks().values(), *run.children()]
    run.press(b"q")
    assert run.wait() == (0, "")
    return run


class TestPlain:
    """The demo without a terminal."""

    def test_lines(self, plain: Run) -> None:
        """Plain lines of 80 columns have all scenarios, and further commands."""
        lines = plain.output.splitlines()

        assert "\x1b" not in plain.output
        for line in lines:
            # A path is never broken, so that it can be copied.
            assert len(line) <= 80 or str(plain.folder) in line
        headings = re.findall(r"^Scenario (\d) of 6: (.*)", plain.output, re.MULTILINE)
        assert [number for number, _ in headings] == [*"123456"]
        assert f"real processes on {host_name()}, " in " ".join(lines)
        assert lines.index("Next, with DIR for that folder") > lines.index(
            f"Files in {plain.folder}"
        )

    def test_missing_ranks(self, plain: Run) -> None:
        """Log, exception, metric and trace of every survivor name the killed ranks."""
        killed = plain.summary()["killed"]
        survivors = sorted(set(range(8)) - set(killed))
        events = [e for e in plain.events() if e.get("barrier") == "checkpoint/1"]
        logged = {e["rank"]: e for e in events if e["event"] == names.BARRIER_TIMEOUT}
        raised = {
            error["rank"]: error
            for error in map(
                json.loads,
                [path.read_text() for path in plain.folder.glob("errors/*.json")],
            )
        }
        traced = {
            span["attributes"][names.RANK]: span
            for path in plain.folder.glob("traces/*.jsonl")
            for span in map(json.loads, path.read_text().splitlines())
            if span["attributes"].get(names.BARRIER_PREFIX) == "checkpoint/1"
            and names.BARRIER_ROOT not in span["attributes"]
        }
        measured = [
            [
                sample.labels["missing_rank"]
                for sample in samples(page, names.BARRIER_RANK_MISSING)
                if sample.labels["barrier"] == "checkpoint/*"
            ]
            for page in plain.folder.glob("metrics/waiting/*.prom")
        ]

        assert len(killed) == 2
        assert 0 in killed
        assert sorted(logged) == sorted(raised) == sorted(traced) == survivors
        for rank in survivors:
            missing = traced[rank]["attributes"][names.BARRIER_MISSING_RANKS]
            assert logged[rank]["missing_ranks"] == missing == killed
            assert raised[rank]["missing_ranks"] == killed
            assert raised[rank]["missing_names"] == [host_name()] * 2
        assert len({span["context"]["trace_id"] for span in traced.values()}) == 1
        named = [sorted(map(int, ranks)) for ranks in measured if ranks]
        # The first two ranks to arrive read the arrivals.
        assert named in ([killed], [killed] * 2)
        assert plain.summary()["missing"]["agree"]
        assert f"name ranks {killed[0]},{killed[1]}: correct\n" in plain.output

    def test_early_warning(self, plain: Run) -> None:
        """A warning names the hosts seconds before the first rank times out."""
        events = [e for e in plain.events() if e.get("barrier") == "checkpoint/1"]
        warned = [e for e in events if e["event"] == names.BARRIER_WAITING]
        timed_out = [e for e in events if e["event"] == names.BARRIER_TIMEOUT]
        first = min(event["waited_seconds"] for event in warned)

        assert first < min(event["waited_seconds"] for event in timed_out) - 3
        assert plain.summary()["missing"]["warned_after_seconds"] == pytest.approx(
            first, abs=0.001
        )
        warning = plain.output.index("s into checkpoint/1")
        assert warning < plain.output.index("times out after")
        assert warned[-1]["missing"] in " ".join(plain.output[warning:].split())

    def test_numbers(self, plain: Run) -> None:
        """Calls, lost compare-and-sets and last arrivals are those of the metrics."""
        pages = {rank: plain.folder / f"metrics/rank-{rank}.prom" for rank in range(8)}
        calls, lost, last = 0.0, 0.0, Counter[str]()
        for rank, page in pages.items():
            calls += sum(
                sample.value
                for metric in names.CALL_DURATIONS
                for sample in samples(page, metric, "_count")
            )
            lost += sum(
                sample.value
                for sample in samples(page, names.CAS_ATTEMPTS)
                if sample.labels["result"] == names.LOST
            )
            last[str(rank)] += int(
                sum(s.value for s in samples(page, names.BARRIER_LAST_ARRIVALS))
            )
        summary = plain.summary()

        assert (summary["calls"], summary["cas_lost"]) == (calls, lost)
        assert lost > 100
        assert summary["last_arrivals"] == dict(+last)
        # One barrier to join, 12 healthy steps, 3 with a straggler, 1 after new_group.
        assert last.total() == 17
        assert f"  calls          {int(calls):,}, failed: 6 timeout\n" in plain.output
        assert f"{int(lost):,} lost to another writer\n" in plain.output

    def test_straggler(self, plain: Run) -> None:
        """The late rank is named with its delay, and before in the warnings."""
        late = plain.summary()["straggler"]
        warned = [
            event["missing_ranks"]
            for event in plain.events()
            if event["event"] == names.BARRIER_WAITING
            and event["barrier"] in ("step/13", "step/14", "step/15")
        ]

        assert (late["times"], late["of"]) == (3, 3)
        # It sleeps for 1.8 s, and on a busy machine the others are late, too.
        assert late["late_seconds"] > 0
        assert [late["rank"]] in warned
        assert f"rank {late['rank']} on {late['host']} was last" in plain.output

    def test_busy_rank(self, plain: Run) -> None:
        """The busy rank is named with its function, and then the end of the stall."""
        summary = plain.summary()
        busy, finding = summary["busy"], summary["stalled"]
        events = [e for e in plain.events() if e.get("phase") == finding["phase"]]
        reports = [e for e in events if e["event"] == names.JOB_STALLED]
        resumed = [e for e in events if e["event"] == names.JOB_RESUMED]
        output = " ".join(plain.output.split())

        assert finding["phase"] == "new_group 2"
        for event in (*reports, *resumed):
            assert (event["awaited_ranks"], event["cause"]) == ([busy], "busy")
            assert event["awaited"].startswith(f"rank {busy} on {event['host']} (pid ")
            assert re.search(
                r": alive, .*, in demo/rank\.py:\d+ load_dataset$", event["awaited"]
            )
        # A rank reports again when its wait has doubled.
        reporters = sorted({event["rank"] for event in reports})
        assert busy not in reporters
        assert sorted(event["rank"] for event in resumed) == reporters
        assert finding["reported_by"] == reporters
        assert finding["ranks"] == [busy]
        printed = [
            f"job.stalled: {finding['awaited']}",
            "reports job.resumed",
            f"names rank {busy}, busy: correct; all ranks went on",
        ]
        positions = [output.find(text) for text in printed]
        assert -1 not in positions
        assert positions == sorted(positions)

    def test_skipped_collective(self, plain: Run) -> None:
        """The rank that left out a collective is named, with what it called instead."""
        summary = plain.summary()
        skipping, finding = summary["skipping"], summary["skipped"]
        reports = [
            event
            for event in plain.events()
            if event["event"] == names.JOB_STALLED
            and event.get("collective") == "all_reduce"
        ]

        assert finding["phase"] == "all_reduce 7 of group 1 (training)"
        assert finding["ranks"] == [skipping]
        assert finding["agree"]
        for event in reports:
            assert (event["awaited_ranks"], event["cause"]) == ([skipping], "mismatch")
            assert re.fullmatch(
                rf"rank {skipping} on \S+ \(pid \d+\): skipped all_reduce 7 "
                r"\[10\] Float: called barrier 7 at demo/rank\.py:\d+ _Rank\.train",
                event["awaited"],
            )
        output = " ".join(plain.output.split())
        assert f"names rank {skipping}, mismatch: correct" in output

    def test_slowest_waits(self, plain: Run) -> None:
        """The timeout and the wait in new_group are among them."""
        waits = {wait["what"]: wait for wait in plain.summary()["slowest_waits"]}
        timeout = waits["barrier checkpoint/1"]
        (group,) = (wait for what, wait in waits.items() if what.startswith("wait "))

        assert len(waits) == 3
        assert (timeout["result"], group["result"]) == ("timeout", "")
        assert timeout["seconds"] > 6
        assert group["seconds"] > 2

    def test_files(self, plain: Run) -> None:
        """The listed files exist, and the events match their schema."""
        listed = re.findall(
            r"^  (\S+/rank-\*\.\w+|\w+\.json) ", plain.output, re.MULTILINE
        )

        assert len(listed) == 6
        for pattern in listed:
            assert list(plain.folder.glob(pattern)), pattern
        for event in plain.events():
            check(event)

    def test_no_process_is_left(self, plain: Run) -> None:
        """All ranks have ended."""
        pids = plain.ranks()

        assert sorted(pids) == list(range(8))
        assert not any(map(alive, pids.values()))


class TestTop:
    """The demo on the screen of top, with another store."""

    def test_screen(self, on_top: Run) -> None:
        """The screen has the scenarios from the first on, and the culprits."""
        screen, _, lines = on_top.output.rpartition("\x1b[?1049l")
        summary = on_top.summary()

        for number, title in enumerate(("healthy steps", "a skipped collective"), 1):
            assert f"Scenario {number} of 6: {title}" in without_styles(screen)
        assert summary["missing"]["ranks"] == summary["killed"]
        assert summary["stalled"]["ranks"] == [summary["busy"]]
        # The headline of the last scenario, and the killed ranks in the fleet.
        assert f"missing 2 of 4: {os.uname().nodename} (ranks" in screen
        for rank in summary["killed"]:
            assert re.search(rf"X +{rank} ", without_styles(screen))
        # The lines are printed when the screen is gone, and nothing is left of it.
        assert re.findall("^Scenario .*", lines, re.MULTILINE) == [
            "Scenario 1 of 6: healthy steps",
            "Scenario 2 of 6: a skipped collective",
            "Scenario 3 of 6: contention",
            "Scenario 4 of 6: a straggler",
            "Scenario 5 of 6: a busy rank",
            "Scenario 6 of 6: two ranks die",
        ]
        assert "Summary of " in lines

    def test_no_process_is_left(self, on_top: Run) -> None:
        """Ranks, demo and reader have ended."""
        assert len(on_top.pids) == 4 + 2
        assert not any(map(alive, on_top.pids))


class TestServe:
    """The demo with --serve and --json."""

    def test_until_ctrl_c(
        self, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Only JSON is printed, Prometheus finds the survivors, and Ctrl-C ends it."""
        run = runs["served"]
        wait_until(lambda: run.output.endswith("}\n"), timeout=_DEMO_TIMEOUT)
        summary = json.loads(run.output)
        survivors = summary["missing"]["survivors"]
        targets = json.loads(fetch(summary["serving"]["sd"], 10))
        answering = [
            target["labels"]["rank"]
            for target in targets
            if int(target["labels"]["rank"]) in survivors
            and fetch(f"http://{target['targets'][0]}/metrics", 10)
        ]
        pids = run.ranks()
        code = main(["sd", "--store", summary["serving"]["store"]])
        run.send(signal.SIGINT)

        assert summary == run.summary()
        assert (code, json.loads(capsys.readouterr().out)) == (0, targets)
        assert len(targets) == 5
        assert answering == [str(rank) for rank in survivors]
        assert run.wait() == (0, "")
        assert not any(map(alive, pids.values()))
        assert summary["cas_lost"] > 0
        assert summary["stalled"]["ranks"] == [summary["busy"]]


class TestEnd:
    """However the demo ends, it leaves no process."""

    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[Run]:
        """Start a demo, and wait for its first scenario."""
        run = Run(tmp_path / "demo", "--ranks=4", "--store=etcd")
        wait_until(lambda: "Scenario 1 of 6" in run.output)
        yield run
        run.close()

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    )
    def test_interrupted(self, running: Run, number: int, code: int) -> None:
        """SIGINT and SIGTERM of the process group end it, with a shell's exit code."""
        pids = running.ranks()
        running.send(number)

        assert running.wait() == (code, "")
        assert len(pids) == 4
        assert not any(map(alive, pids.values()))

    def test_ctrl_c_on_a_terminal(self, tmp_path: Path) -> None:
        """On a terminal the lines have styles; Ctrl-C in a scenario ends it."""
        run = Run(tmp_path / "demo", "--ranks=4", terminal=True)
        try:
            wait_until(
                lambda: "\x1b[1mScenario 1 of 6: healthy steps\x1b[0m" in run.output,
            )
            pids = run.children()
            run.press(b"\x03")

            assert run.wait() == (130, "")
        finally:
            run.close()
        # Every style is reset, and no mode of the terminal was changed.
        styles = re.findall(r"\x1b\[([\d;]+)m", run.output)
        assert styles.count("0") * 2 == len(styles)
        assert "\x1b[?" not in run.output
        assert len(pids) == 4
        assert not any(map(alive, pids))

    def test_killed(self, tmp_path: Path) -> None:
        """After SIGKILL its processes end with it, etcd too."""
        runs = {
            store: Run(tmp_path / store, "--ranks=4", f"--store={store}")
            for store in ("tcp", "file", "etcd")
        }
        pids: list[int] = []
        try:
            for run in runs.values():
                wait_until(lambda: "Scenario 1 of 6" in run.output)  # noqa: B023
                pids += run.children()
                run.kill()

            assert len(pids) == 4 + 4 + (4 + 1)
            wait_until(lambda: not any(map(alive, pids)))
        finally:
            for run in runs.values():
                run.close()
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)

    def test_rank_ends(self, running: Run) -> None:
        """A rank that ends unexpectedly is reported with its log."""
        pids = running.ranks()
        os.kill(pids[2], signal.SIGKILL)

        code, errors = running.wait()

        assert code == 1
        assert errors == (
            "tracedstore: rank 2 ended unexpectedly during healthy steps; see"
            f" {running.folder}/logs/rank-2.jsonl\n"
        )
        assert not any(map(alive, pids.values()))
