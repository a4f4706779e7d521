"""``tracedstore report``: what a job printed besides events."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.log_events import event, json_lines, missing_event, stall_event
from support.pages import Page
from tracedstore import names
from tracedstore.tools.cli.main import main
from tracedstore.tools.report import job_output
from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.failure_kinds import FailureKind
from tracedstore.tools.report.headline import Headline, headline
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.log_reader import ReadStats, read_events
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.output_reader import line_time
from tracedstore.tools.report.page import page

Analyse = Callable[[str], Analysis]

# 2026-11-19 10:00 UTC.
NOW = 1_795_082_400.0


@pytest.fixture
def analysis_of(tmp_path: Path) -> Analyse:
    """Return a function that analyses the log of a job, of 2026-11-19 10:00."""

    def analysis(text: str) -> Analysis:
        log = tmp_path / "job.out"
        log.write_text(text)
        os.utime(log, (NOW, NOW))
        records, output = LoggedEvents(), JobOutput()
        read_events([str(log)], records.add, ReadStats(), output=output)
        return analyse(records, output)

    return analysis


def traceback(
    rank: int, error: str, where: str = "load", file: str = "/job/train.py"
) -> str:
    """Return a traceback as torch prints it on a rank."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "{file}", line 12, in {where}',
        "    load(batch)",
        *error.split("\n"),
    ]
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
    " Connection closed by peer [127.0.0.1]:{}. This is typically caused by a remote"
    " worker crashing."
)


def worker(rank: int, code: int, pid: int, name: str = "") -> str:
    """Return the entry of a worker in torchrun's report of failures."""
    return (
        f"[{rank}]:\n"
        f"  time      : 2026-11-19_09:12:0{rank}\n"
        "  host      : node1\n"
        f"  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid}) {name}\n"
        "  error_file: <N/A>\n"
    )


def torchrun(root: str, *others: str) -> str:
    """Return torchrun's report of failures."""
    return (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
        f"Failures:\n{''.join(others)}"
        f"Root Cause (first observed failure):\n{root}{'=' * 40}\n"
    )


def found(analysis: Analysis) -> Headline:
    """Return the headline; the page has to be possible too."""
    page(analysis, ReadStats())
    return headline(analysis)


class TestCause:
    """Which failure is the cause, and which are consequences."""

    def test_exception_before_lost_connections(self, analysis_of: Analyse) -> None:
        """A rank that lost its connection is a victim, also if it printed first."""
        text = "".join(
            [
                *(traceback(rank, GLOO.format(4000 + rank)) for rank in (0, 2, 3)),
                traceback(1, "KeyError: 'labels'"),
            ]
        )

        analysis = analysis_of(text)

        shown = found(analysis)
        assert shown.text == "Rank 1 failed: KeyError: 'labels'"
        assert "In load, train.py:12." in shown.details
        assert "3 other processes are consequences: 3 lost connections" in shown.details
        # Ports differ; it is one group all the same.
        assert [group.ranks for group in analysis.failures] == [[1], [0, 2, 3]]

    def test_same_traceback_on_many_ranks(self, analysis_of: Analyse) -> None:
        """Many ranks with the same traceback are one failure."""
        text = "".join(
            traceback(rank, f"ValueError: bad size {rank}") for rank in range(64)
        )

        analysis = analysis_of(text)

        assert len(analysis.failures) == 1
        assert found(analysis).text == "Ranks 0-63 failed: ValueError: bad size 0"

    def test_interleaved_tracebacks(self, analysis_of: Analyse) -> None:
        """Lines of several ranks between each other are told apart."""
        one = traceback(0, "KeyError: 'a'").splitlines(keepends=True)
        other = traceback(1, GLOO.format(1)).splitlines(keepends=True)
        mixed = "".join(line for pair in zip(one, other, strict=True) for line in pair)

        assert found(analysis_of(mixed)).text == "Rank 0 failed: KeyError: 'a'"

    def test_only_timeouts(self, analysis_of: Analyse) -> None:
        """Timeouts alone have no cause: the rank without one is named, not accused."""
        timeout = (
            "RuntimeError: [/gloo/x/unbound_buffer.cc:78] Timed out waiting 8000ms"
        )
        text = traceback(0, timeout) + traceback(2, timeout)
        stopped = worker(1, -15, 11)
        text += torchrun(worker(0, 1, 10), stopped, worker(2, 1, 12))

        shown = found(analysis_of(text))

        assert shown.text == (
            "Ranks 0 and 2 timed out: RuntimeError: Timed out waiting 8000ms"
        )
        assert (
            "no failure in the logs is its cause. No failure of rank 1 is logged."
            in (shown.details)
        )
        assert "torchrun names rank 0 as the root cause." in shown.details

    def test_download_is_no_victim(self, analysis_of: Analyse) -> None:
        """A connection that is not of the job's communication is a cause."""
        text = traceback(0, GLOO.format(1)) + traceback(
            1, "ConnectionResetError: [Errno 104] Connection reset by peer"
        )

        assert found(analysis_of(text)).text.startswith("Rank 1 failed: Connection")

    def test_two_causes(self, analysis_of: Analyse) -> None:
        """The first in a log is named, and that there is another one."""
        text = traceback(3, "KeyError: 'a'") + traceback(1, "ValueError: b", "step")

        shown = found(analysis_of(text))

        assert shown.text.startswith("Rank 3 failed")
        assert (
            "first in the log; 1 other process failed in another way" in shown.details
        )

    def test_chained_exceptions(self, analysis_of: Analyse) -> None:
        """The last exception is shown, with the one that caused it."""
        text = traceback(0, "KeyError: 'x'")
        text += (
            "[rank0]: \n[rank0]: The above exception was the direct cause of the"
            " following exception:\n[rank0]: \n"
        )
        text += traceback(0, "RuntimeError: no shard 17")

        shown = found(analysis_of(text))

        assert shown.text == "Rank 0 failed: RuntimeError: no shard 17"
        assert "caused by KeyError: 'x'" in shown.details

    def test_consequence_of_a_consequence(self, analysis_of: Analyse) -> None:
        """An exception while a lost connection is handled is a consequence too."""
        text = traceback(0, GLOO.format(1))
        text += (
            "[rank0]: \n[rank0]: During handling of the above exception, another"
            " exception occurred:\n[rank0]: \n"
        )
        text += traceback(0, "OSError: no space") + traceback(1, "KeyError: 'a'")

        assert found(analysis_of(text)).text == "Rank 1 failed: KeyError: 'a'"

    def test_caught_exception(self, analysis_of: Analyse) -> None:
        """A rank that went on after an exception has caught it: nothing failed."""
        text = traceback(0, "OSError: retry") + "[rank0]: step\n" * 30

        analysis = analysis_of(text)

        assert not found(analysis).is_failure
        assert [each.failure.kind for each in analysis.failures] == [FailureKind.CAUGHT]

    def test_before_a_stall(self, analysis_of: Analyse) -> None:
        """The rank that the job waits for, and that raised, is the headline."""
        stall = json_lines([stall_event(0, 60, 30.0)])

        shown = found(analysis_of(stall + traceback(2, "KeyError: 'a'")))

        assert shown.text == "Rank 2 failed: KeyError: 'a'"
        assert "The job waited: " in shown.details

    def test_before_a_barrier(self, analysis_of: Analyse) -> None:
        """A barrier's timeout is a consequence of the missing rank's exception."""
        barrier = json_lines([missing_event(0, 20, 1)])

        shown = found(analysis_of(barrier + traceback(1, "KeyError: 'a'")))

        assert shown.text == "Rank 1 on node0 failed: KeyError: 'a'"


class TestEnds:
    """Exit codes, signals, and what the kernel says."""

    def test_killed(self, analysis_of: Analyse) -> None:
        """A process that was killed printed nothing: torchrun has its signal."""
        text = "W1119 09:12:00.1 5 x.py:1] Sending process 10 closing signal SIGTERM\n"
        text += traceback(0, GLOO.format(1))
        text += torchrun(worker(1, -9, 11, "(SIGKILL)"), worker(0, -9, 10))

        analysis = analysis_of(text)

        shown = found(analysis)
        assert shown.text == "Rank 1 on node1 ended with SIGKILL"
        assert "(dmesg)" in shown.details
        assert "torchrun names rank 1 as the root cause." in shown.details

    @pytest.mark.parametrize(("pid", "note"), [(11, ""), (4711, "its pid is 11 here")])
    def test_out_of_memory(self, analysis_of: Analyse, pid: int, note: str) -> None:
        """The kernel's line is about its pid, or about the only worker killed."""
        kernel = (
            f"[Thu Nov 19 09:11:58 2026] Memory cgroup out of memory: Killed process"
            f" {pid} (pt_main_thread) total-vm:1kB, anon-rss:1kB\n"
        )

        shown = found(analysis_of(torchrun(worker(1, -9, 11)) + kernel))

        assert shown.text == (
            f"Rank 1 on node1 failed: out of memory: the kernel killed process {pid}"
            " (pt_main_thread)"
        )
        assert note in shown.details.lower()
        assert "09:11:58" in shown.details

    def test_killed_after_a_caught_exception(self, analysis_of: Analyse) -> None:
        """An exception does not end a process with SIGKILL, so it is not the cause."""
        text = traceback(1, "OSError: retry") + torchrun(worker(1, -9, 11))

        assert found(analysis_of(text)).text == "Rank 1 on node1 ended with SIGKILL"

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            ("Killed", "failed: killed by SIGKILL"),
            ("run.sh: line 3: 77 Killed    python train.py", "killed by SIGKILL"),
            (
                "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.batch",
                "failed: out of memory: Detected 1 oom-kill event",
            ),
            (
                "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off",
                "failed: GPU error Xid 79 on PCI:0000:3b:00: pid=7, GPU has fallen off",
            ),
            ("Fatal Python error: Segmentation fault", "failed: Segmentation fault"),
        ],
    )
    def test_one_line(self, analysis_of: Analyse, line: str, text: str) -> None:
        """Lines of shells, Slurm, the kernel and faulthandler."""
        assert text in found(analysis_of(f"loss 0.5\n{line}\n")).text

    def test_cuda_memory(self, analysis_of: Analyse) -> None:
        """CUDA's out of memory is an exception with a kind of its own."""
        error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"

        analysis = analysis_of(traceback(3, error))

        assert analysis.failures[0].failure.kind is FailureKind.OUT_OF_MEMORY
        assert found(analysis).text.startswith("Rank 3 failed: OutOfMemoryError: CUDA")

    def test_stopped(self, analysis_of: Analyse) -> None:
        """A job that was stopped has no failure, and the last lines are shown."""
        text = "[rank0]: step 3\n" + torchrun(worker(0, -15, 10))

        shown = found(analysis_of(text))

        assert shown.text == (
            "Rank 0 on node1 was stopped by SIGTERM, and no failure is logged"
        )


class TestWatchdog:
    """Lines of NCCL's watchdog."""

    def line(self, rank: int, call: str) -> str:
        """Return the line of one rank."""
        return (
            f"[rank{rank}]:[E1119 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank"
            f" {rank}] Watchdog caught collective operation timeout: WorkNCCL({call},"
            " NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600004 milliseconds"
            " before timing out.\n"
        )

    def test_timeout(self, analysis_of: Analyse) -> None:
        """Ranks in the same call are one group, and the others are named."""
        call = "SeqNum=1580, OpType=ALLREDUCE"
        text = "".join(self.line(rank, call) for rank in (0, 1, 2) * 2)

        analysis = analysis_of(f"[rank3]: step 7\n{text}")

        shown = found(analysis)
        assert shown.text == (
            "Ranks 0, 1 and 2 timed out: SeqNum=1580, OpType=ALLREDUCE did not end"
            " within 600 s"
        )
        assert "02:07:08.408" in shown.details
        assert "No failure of rank 3 is logged." in shown.details

    def test_different_calls(self, analysis_of: Analyse) -> None:
        """Ranks that were in different calls are different groups."""
        text = self.line(0, "SeqNum=5, OpType=ALLREDUCE")
        text += self.line(1, "SeqNum=4, OpType=BROADCAST")

        groups = analysis_of(text).failures

        assert [group.ranks for group in groups] == [[0], [1]]


class TestSources:
    """Who printed a line, and when."""

    def test_error_file(self, tmp_path: Path) -> None:
        """Torchrun's error file has the exception, its time, and a local rank."""
        folder = tmp_path / "run_x/attempt_0/2"
        folder.mkdir(parents=True)
        lines = ["Traceback (most recent call last):"]
        lines += ['  File "/job/train.py", line 3, in main', "KeyError: 'x'", ""]
        extra = {"py_callstack": "\n".join(lines), "timestamp": "1795064261"}
        error = {"message": {"message": "KeyError: 'x'", "extraInfo": extra}}
        (folder / "error.json").write_text(json.dumps(error))
        output = tmp_path / "report.html"

        assert main(["report", str(tmp_path), "--output", str(output)]) == 0

        shown = Page(output.read_text("utf-8"))
        assert shown.texts["headline"] == (
            "local rank 2 in attempt_0/2/error.json failed: KeyError: 'x'"
        )
        assert "at 04:57:41.000 UTC" in shown.texts["lead"]

    def test_times_of_containers(self, analysis_of: Analyse) -> None:
        """The time that a container runtime wrote is the time of a failure."""
        lines = traceback(1, "KeyError: 'a'").splitlines()
        cri = "".join(f"2026-11-19T09:12:44.5Z stderr F {line}\n" for line in lines)

        (group,) = analysis_of(cri).failures

        assert (group.ranks, group.failure.time) == ([1], 1_795_079_564.5)

    @pytest.mark.parametrize(
        ("text", "time"),
        [
            ("2026-11-19 09:12:44,500 ERROR no", 1_795_079_564.5),
            ("[E1119 09:12:44.500000 x.cpp:1] no", 1_795_079_564.5),
            ("[Thu Nov 19 09:12:44 2026] no", 1_795_079_564.0),
            ("Nov 19 09:12:44.5 node1 kernel: no", 1_795_079_564.0),
            # A year before: the file was written on November 19.
            ("E1225 09:12:44 x", 1_766_653_964.0),
            ("[2059991.49] no", 0.0),
            ("E1345 99:99:99 no", 0.0),
            ("Foo 19 09:12:44 no", 0.0),
        ],
    )
    def test_times(self, text: str, time: float) -> None:
        """Times of logging, glog, dmesg and syslog; UTC without a time zone."""
        assert line_time(text, NOW) == time

    def test_hung_job(self, analysis_of: Analyse) -> None:
        """Without events and failures, the page has what each rank printed last."""
        text = "".join(f"[rank{rank}]: step {9 - rank // 3}\n" for rank in range(4))
        text += (
            "[rank3]: Thread 0x00007f01 (most recent call first):\n"
            '[rank3]:   File "x.py", line 1 in _worker\n'
            "[rank3]: Current thread 0x00007f02 (most recent call first):\n"
            '[rank3]:   File "/job/data.py", line 88 in load\n'
            '[rank3]:   File "/job/train.py", line 9 in <module>\n'
        )

        analysis = analysis_of(text)

        shown = Page(page(analysis, ReadStats()))
        assert shown.texts["headline"].startswith(
            "The logs contain no event and no failure"
        )
        assert shown.rows("t-output") == [
            {"time (UTC)": "", "printed by": "ranks 0-2", "last line": "step 9"},
            {"time (UTC)": "", "printed by": "rank 3", "last line": "step 8"},
        ]
        (stack,) = shown.rows("t-stacks")
        assert stack["printed by"] == "rank 3"
        assert stack["stack"].startswith("load, data.py:88")

    def test_py_spy(self, analysis_of: Analyse) -> None:
        """The main thread of a py-spy dump is read."""
        text = (
            "Process 77: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\n"
            'Thread 78 (idle): "pin"\n    wait (threading.py:3)\n'
            'Thread 77 (active): "MainThread"\n    load (data.py:88)\n'
        )

        (stack,) = analysis_of(text).output.stacks.values()

        assert stack.frames == ["load, data.py:88"]

    def test_idle_time(self, analysis_of: Analyse) -> None:
        """For how long nothing was written is known from the files."""
        analysis = analysis_of("[rank0]: step 1\n")
        analysis.output.read_at = NOW + 754

        assert found(analysis).text.endswith(
            "nothing was written in the last 12 min 34 s"
        )


class TestPage:
    """What the page and the command show."""

    def test_open_stall_is_an_incident(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A job that hangs at this moment has an incident, with no end."""
        log, output = tmp_path / "rank0.log", tmp_path / "report.html"
        log.write_text(json_lines([stall_event(0, 60, 30.0)]))

        assert main(["report", str(log), "--output", str(output)]) == 0

        assert "0 barriers, 1 incident, 0 failed processes" in capsys.readouterr().out
        shown = Page(output.read_text("utf-8"))
        assert shown.texts["n-open-stalls"] == "1"
        (row,) = shown.rows("t-stalls")
        assert "no end" in row["duration"]

    def test_empty_sections_are_left_out(self, analysis_of: Analyse) -> None:
        """A plain DDP job has the failure and the input, and no empty section."""
        html = page(analysis_of(traceback(1, "KeyError: 'a'")), ReadStats())

        shown = Page(html)
        assert html.count("<h2") == 2
        assert {"failures", "read"} <= shown.texts.keys()
        assert {name for name in shown.texts if name.startswith("n-")} == {
            "n-ranks",
            "n-failures",
        }

    def test_hostile_lines(self, analysis_of: Analyse) -> None:
        """What is printed is escaped wherever the page has it."""
        hostile = "<script>alert(1)</script>"
        text = traceback(1, f"KeyError: {hostile}", where=hostile, file=f"/{hostile}")
        text += worker(0, 1, 10).replace("node1", hostile)
        text += f"[rank2]: {hostile}\n[pod/{hostile}] Killed\n"
        text += "[rank2]: Current thread 0x1 (most recent call first):\n"
        text += f'[rank2]:   File "{hostile}", line 1 in {hostile}\n'

        for each in (text, text[text.index("[rank2]") :]):
            html = page(analysis_of(each), ReadStats())
            assert hostile not in html
            assert "alert(1)" in html

    def test_bounds(
        self, analysis_of: Analyse, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Failures beyond the limit are counted, and long lines are cut."""
        monkeypatch.setattr(job_output, "_MAX_FAILURES", 5)
        text = "".join(
            traceback(rank, f"E{rank}Error: {'x' * 100_000}") for rank in range(9)
        )

        analysis = analysis_of(text)

        assert (len(analysis.output.failures), analysis.output.unread) == (5, 4)
        assert len(page(analysis, ReadStats())) < 40_000

    def test_first_failure_is_a_cause(self, analysis_of: Analyse) -> None:
        """A failed call comes before a timeout that was logged earlier."""
        call = {"operation": "set", "store": "tcp", "key_family": "k", "key": "k"}
        failed = event(
            names.OPERATION_FAILED,
            30,
            rank=3,
            error_type="RuntimeError",
            error="disk full",
            duration_seconds=1.0,
            **call,
        )
        analysis = analysis_of(json_lines([missing_event(0, 20, 3), failed]))

        shown = Page(page(analysis, ReadStats()))

        assert shown.texts["first-failure"].startswith("rank 3 on node1 at 09:00:30")
