"""``tracedstore demo``: what it shows, held against the files that it wrote."""

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
from tracedstore import names
from tracedstore.cli.main import main
from tracedstore.demo.fetch import fetch

pytestmark = pytest.mark.processes

# What it must not take longer than, with 8 ranks.
_WITHIN = 60.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _take_terminal() -> None:
    """Have the keys of the terminal on standard input; for a session's first."""
    fcntl.ioctl(0, termios.TIOCSCTTY)


class Run:
    """One run of the demo, with what it writes."""

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
                "tracedstore.cli.main",
                "demo",
                f"--output={folder}",
                *options,
            ],
            env={
                **{k: v for k, v in os.environ.items() if k != "NO_COLOR"},
                "TERM": "xterm",
                # Settings of the user's, which the demo is the same without.
                "TRACEDSTORE_DISABLED": "true",
                "OTEL_TRACES_SAMPLER": "always_off",
            },
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,  # noqa: PLW1509 - a call
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
            except OSError:  # a terminal whose other end is closed
                return

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self._written.decode().replace("\r\n", "\n")

    def send(self, number: int) -> None:
        """Send a signal to it and all that it started, as a terminal does."""
        os.killpg(self._process.pid, number)

    def press(self, key: bytes) -> None:
        """Press a key on its terminal."""
        os.write(self._keyboard, key)

    def started(self) -> list[int]:
        """The processes that it has started, and that live."""
        pid = self._process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def kill(self) -> None:
        """End it, and it alone, without warning."""
        self._process.kill()

    def ended(self, within: float = _WITHIN) -> tuple[int, str]:
        """Wait for its end: exit code, and what it said of errors."""
        assert self._process.stderr is not None
        code = self._process.wait(max(1.0, self._began + within - time.monotonic()))
        self._reader.join(5)
        return code, self._process.stderr.read().decode()

    def close(self) -> None:
        """Leave nothing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        assert self._process.stderr is not None
        self._process.stderr.close()

    def events(self) -> list[dict[str, Any]]:
        """Everything that the ranks logged."""
        return [
            json.loads(line)
            for log in self.folder.glob("logs/rank-*.jsonl")
            for line in log.read_text().splitlines()
            if line.startswith("{")
        ]

    def ranks(self) -> dict[int, int]:
        """The process of each rank, as it said itself."""
        serving = [e for e in self.events() if e["event"] == names.TELEMETRY_SERVING]
        return {event["rank"]: event["pid"] for event in serving}

    def summary(self) -> dict[str, Any]:
        """What it found."""
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


def samples(page: Path, metric: names.Metric, suffix: str = "") -> list[Any]:
    """The samples of one metric on a page that was saved."""
    return [
        sample
        for family in text_string_to_metric_families(page.read_text())
        for sample in family.samples
        if sample.name == metric.name + suffix
    ]


def alive(pid: int) -> bool:
    """Whether there is such a process, which has not ended."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def screen(written: str) -> list[str]:
    """The lines that a terminal has at the end, by the few escapes that are used."""
    plain = re.sub(r"\x1b\[[0-9]*m", "", written)
    first, *others = re.split(r"\r\x1b\[(\d+)A\x1b\[J", plain)
    lines = first.split("\n")
    for up, text in zip(others[::2], others[1::2], strict=True):
        lines[-1 - int(up) :] = text.split("\n")
    return lines


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Three at once, because each takes its time."""
    folder = tmp_path_factory.mktemp("demo")
    started = {
        "plain": Run(folder / "plain"),
        "terminal": Run(
            folder / "terminal", "--store=file", "--ranks=4", "--serve", terminal=True
        ),
        "served": Run(
            folder / "served", "--store=etcd", "--ranks=5", "--json", "--serve"
        ),
    }
    yield started
    for run in started.values():
        run.close()


@pytest.fixture
def plain(runs: dict[str, Run]) -> Run:
    """The one without a terminal, at its end."""
    code, errors = runs["plain"].ended()
    assert (code, errors) == (0, "")
    return runs["plain"]


@pytest.fixture(scope="module")
def terminal(runs: dict[str, Run]) -> Run:
    """The one on a terminal, which served and was ended."""
    run = runs["terminal"]
    wait_until(lambda: "tracedstore sd --store" in run.output, timeout=50)
    run.pids = run.started()
    run.press(b"\x03")
    assert run.ended() == (0, "")
    return run


class TestPlain:
    """Without a terminal."""

    def test_lines(self, plain: Run) -> None:
        """Nothing but lines, readable at 80 columns; all acts, and what is next."""
        lines = plain.output.splitlines()

        assert "\x1b" not in plain.output
        for line in lines:
            # A path is as long as it is, and stays whole for whoever copies it.
            assert len(line) <= 80 or str(plain.folder) in line
        acts = re.findall(r"^Act (\d) of 4: (.*)", plain.output, re.MULTILINE)
        assert [number for number, _ in acts] == ["1", "2", "3", "4"]
        assert "Hosts are simulated" in " ".join(lines)
        assert lines.index("Next, with DIR for that folder") > lines.index(
            f"Files in {plain.folder}"
        )

    def test_who_was_missing(self, plain: Run) -> None:
        """Log, exception, metric and trace of every survivor name those killed."""
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
            found = traced[rank]["attributes"][names.BARRIER_MISSING_RANKS]
            assert logged[rank]["missing_ranks"] == found == killed
            assert raised[rank]["missing_ranks"] == killed
            assert raised[rank]["missing_names"] == [
                f"sim-node-{rank // 2 + 1}" for rank in killed
            ]
        assert len({span["context"]["trace_id"] for span in traced.values()}) == 1
        named = [sorted(map(int, found)) for found in measured if found]
        assert named in ([killed], [killed] * 2)  # the first two to arrive look
        assert plain.summary()["missing"]["agree"]
        assert f"ranks {killed[0]},{killed[1]}. That is right." in re.sub(
            r"\s+", " ", plain.output
        )

    def test_early_warning(self, plain: Run) -> None:
        """It is there, with the hosts, seconds before the first one gives up."""
        events = [e for e in plain.events() if e.get("barrier") == "checkpoint/1"]
        warned = [e for e in events if e["event"] == names.BARRIER_WAITING]
        gave_up = [e for e in events if e["event"] == names.BARRIER_TIMEOUT]
        first = min(event["waited_seconds"] for event in warned)

        assert first < min(event["waited_seconds"] for event in gave_up) - 3
        assert plain.summary()["missing"]["warned_after_seconds"] == pytest.approx(
            first, abs=0.001
        )
        warning = plain.output.index("s into checkpoint/1")
        assert warning < plain.output.index("gives up after")
        assert warned[-1]["missing"] in plain.output[warning:]

    def test_numbers(self, plain: Run) -> None:
        """Calls, lost compare-and-sets and last arrivals are what the metrics say."""
        pages = {rank: plain.folder / f"metrics/rank-{rank}.prom" for rank in range(8)}
        calls, lost, last = 0.0, 0.0, Counter[str]()
        for rank, page in pages.items():
            calls += sum(
                s.value for s in samples(page, names.OPERATION_DURATION, "_count")
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
        assert summary["record_last_arrival"] == dict(+last)
        # One barrier to join, 12 healthy steps, 3 with a straggler: one last each.
        assert last.total() == 16
        assert f"  calls          {int(calls):,}, failed: 6 timeout\n" in plain.output
        assert f"{int(lost):,} lost to another writer\n" in plain.output

    def test_straggler(self, plain: Run) -> None:
        """It is named, with how late it was, which the warnings knew before."""
        late = plain.summary()["straggler"]
        warned = [
            event["missing_ranks"]
            for event in plain.events()
            if event["event"] == names.BARRIER_WAITING
            and event["barrier"] in ("step/13", "step/14", "step/15")
        ]

        assert (late["times"], late["of"]) == (3, 3)
        assert 1.0 < late["late_seconds"] < 2.5
        assert [late["rank"]] in warned
        assert f"rank {late['rank']} on {late['host']} was last" in plain.output

    def test_slowest_waits(self, plain: Run) -> None:
        """The timeout first, then the straggler's steps."""
        first, *others = plain.summary()["slowest_waits"]

        assert (first["what"], first["result"]) == ("barrier checkpoint/1", "timeout")
        assert first["seconds"] > 6
        assert all(wait["what"].startswith("barrier step/1") for wait in others)

    def test_files(self, plain: Run) -> None:
        """Those that are named are there; the events keep to their schema."""
        listed = re.findall(
            r"^  (\S+/rank-\*\.\w+|\w+\.json) ", plain.output, re.MULTILINE
        )

        assert len(listed) == 6
        for pattern in listed:
            assert list(plain.folder.glob(pattern)), pattern
        for event in plain.events():
            check(event)

    def test_nothing_is_left(self, plain: Run) -> None:
        """No process of it lives."""
        pids = plain.ranks()

        assert sorted(pids) == list(range(8))
        assert not any(map(alive, pids.values()))


class TestTerminal:
    """On a terminal, with another store, until Ctrl-C."""

    def test_view(self, terminal: Run) -> None:
        """It draws: which act, and what each rank is in, within 80 columns."""
        text = _ESCAPE.sub("", terminal.output)

        # The view goes up by as many lines as it has: a head, its columns, the ranks.
        assert f"\x1b[{3 + 4}A\x1b[J" in terminal.output
        assert re.search(r"\[#+\.*\] Act 4 of 4: two ranks die, \d+ s\n", text)
        assert re.search(r"   0  sim-node-1   no answer  ", text)
        assert re.search(r"   1  sim-node-1   waiting \d\.\d s at checkpoint/1  ", text)
        assert all(
            len(line) < 80
            for line in text.splitlines()
            if str(terminal.folder) not in line
        )
        assert terminal.summary()["missing"]["ranks"] == terminal.summary()["killed"]

    def test_what_stays(self, terminal: Run) -> None:
        """The lines, without a view; below what was typed there is a new line."""
        lines = screen(terminal.output)

        assert not [line for line in lines if line.startswith(("[", "rank  host"))]
        assert [line for line in lines if line.startswith("Act ")] == [
            "Act 1 of 4: healthy steps",
            "Act 2 of 4: contention",
            "Act 3 of 4: a straggler",
            "Act 4 of 4: two ranks die",
        ]
        assert lines[-3].startswith("  tracedstore sd --store file://")
        # The terminal sends the signal first and then shows the key, so either may
        # be there first.
        assert sorted(lines[-2:]) == ["", "^C"]
        # Colours end where they begin, and the cursor was never hidden.
        assert terminal.output.count("\x1b[0m") * 2 == len(
            re.findall(r"\x1b\[\d+m", terminal.output)
        )
        assert "\x1b[?" not in terminal.output

    def test_nothing_is_left(self, terminal: Run) -> None:
        """The two survivors served, and have ended too."""
        assert len(terminal.pids) == 2
        assert not any(map(alive, terminal.pids))


class TestServing:
    """With --serve and --json."""

    def test_until_interrupted(
        self, runs: dict[str, Run], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """JSON and no more; Prometheus finds the survivors; Ctrl-C ends it well."""
        run = runs["served"]
        wait_until(lambda: run.output.endswith("}\n"), timeout=50)
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
        assert run.ended() == (0, "")
        assert not any(map(alive, pids.values()))
        assert summary["cas_lost"] > 0


class TestEndings:
    """However it ends, it ends soon, says why, and leaves no process."""

    @pytest.fixture
    def running(self, tmp_path: Path) -> Iterator[Run]:
        """One that is in its first act."""
        run = Run(tmp_path / "demo", "--ranks=4", "--store=etcd")
        wait_until(lambda: "Act 1 of 4" in run.output, timeout=30)
        yield run
        run.close()

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
    )
    def test_interrupted(self, running: Run, number: int, code: int) -> None:
        """Ctrl-C, and a supervisor's word, which the terminal's group gets."""
        pids = running.ranks()
        running.send(number)

        assert running.ended() == (code, "")
        assert len(pids) == 4
        assert not any(map(alive, pids.values()))

    def test_a_key(self, tmp_path: Path) -> None:
        """Ctrl-C in an act, on a terminal, which is left tidy."""
        run = Run(tmp_path / "demo", "--ranks=4", terminal=True)
        try:
            wait_until(lambda: "] Act 1 of 4: healthy" in run.output, timeout=30)
            pids = run.started()
            run.press(b"\x03")

            assert run.ended() == (130, "")
        finally:
            run.close()
        assert "] Act 1 of 4: healthy" not in "".join(screen(run.output))
        assert screen(run.output)[-1] in ("", "^C")
        assert "\x1b[?" not in run.output
        assert len(pids) == 4
        assert not any(map(alive, pids))

    def test_killed(self, tmp_path: Path) -> None:
        """SIGKILL, which nobody can handle: its processes end with it, etcd too."""
        runs = {
            store: Run(tmp_path / store, "--ranks=4", f"--store={store}")
            for store in ("tcp", "file", "etcd")
        }
        pids: list[int] = []
        try:
            for run in runs.values():
                wait_until(lambda: "Act 1 of 4" in run.output, timeout=30)  # noqa: B023
                pids += run.started()
                run.kill()

            assert len(pids) == 4 + 4 + (4 + 1)
            wait_until(lambda: not any(map(alive, pids)))
        finally:
            for run in runs.values():
                run.close()
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)

    def test_a_rank_ends(self, running: Run) -> None:
        """One that was not to: one sentence says which, and where its words are."""
        pids = running.ranks()
        os.kill(pids[2], signal.SIGKILL)

        code, errors = running.ended()

        assert code == 1
        assert errors == (
            "tracedstore: rank 2 ended by itself during healthy steps;"
            f" {running.folder}/logs/rank-2.jsonl has its last words\n"
        )
        assert not any(map(alive, pids.values()))
