"""The behaviour that all commands share."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from support.flight_entries import entry, write_dumps
from support.log_events import completed_event, json_lines
from tracedstore._version import __version__
from tracedstore.tools.cli import sd
from tracedstore.tools.cli.main import COMMANDS, main

COMMAND_LINES = [[], *([name] for name in COMMANDS)]
NO_SPACE = os.strerror(errno.ENOSPC)
# tools/cli/report.py has its own text for exit code 64.
USAGE_TEXT = re.compile(r"\b64 (invalid command line|the command line makes no sense)")


def run_to_exit(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Run a command that raises SystemExit; return its exit code and output."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    written = capsys.readouterr()
    return ended.value.code, written.out, written.err


@pytest.mark.parametrize("command", COMMAND_LINES, ids=" ".join)
class TestEveryCommand:
    """Every command, and ``tracedstore`` without one."""

    def test_help(
        self,
        command: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The help has examples and exit codes, and is 80 columns wide at most."""
        monkeypatch.setenv("COLUMNS", "80")
        code, out, err = run_to_exit([*command, "--help"], capsys)

        assert (code, err) == (0, "")
        assert "\nExamples:\n  " in out
        assert "\nExit codes: 0 " in out
        assert USAGE_TEXT.search(" ".join(out.split()))
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.parametrize("core", ["native"], indirect=True)
    def test_version(
        self, command: list[str], capsys: pytest.CaptureFixture[str], core: str
    ) -> None:
        """``--version`` prints the version of the package and the recording base."""
        code, out, err = run_to_exit([*command, "--version"], capsys)

        assert (code, err) == (0, "")
        assert re.fullmatch(rf"tracedstore {__version__}\ncore: native, .*\n", out)

    def test_invalid_command_line(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One sentence refers to --help; the exit code is not the 2 of status."""
        code, out, err = run_to_exit([*command, "--no-such-option"], capsys)

        assert (code, out) == (64, "")
        assert re.fullmatch(r"(tracedstore.*): .*; try \1 --help\n", err)


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command is answered with a list of the commands."""
    code, _, err = run_to_exit(["stat"], capsys)

    assert code == 64
    assert "'stat'" in err
    assert all(f"'{name}'" in err for name in COMMANDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        ["sd", "--store=tcp://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_light_imports(arguments: list[str]) -> None:
    """Help and errors import neither torch nor rich, which take time."""
    script = (
        "import sys\n"
        "from tracedstore.tools.cli.main import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'rich', 'structlog', 'prometheus_client'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert done.stdout.endswith("set()\n"), done


@contextmanager
def closed_pipe() -> Iterator[int]:
    """Open a pipe whose reader has closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full_disk() -> Iterator[int]:
    """Open a file on a disk without space."""
    with Path("/dev/full").open("wb") as file:
        yield file.fileno()


EXPORT = ["dashboards", "export", "files", "--runbook-url", "https://wiki/runbook"]


@pytest.mark.parametrize("given", [["--help"], EXPORT])
class TestStandardOutput:
    """Standard output that cannot be written."""

    @pytest.mark.parametrize(
        ("output", "code", "message"),
        [
            (closed_pipe, 141, ""),
            (
                full_disk,
                1,
                f"tracedstore: standard output cannot be written: {NO_SPACE}\n",
            ),
        ],
    )
    def test_unwritable(
        self,
        given: list[str],
        output: Callable[[], AbstractContextManager[int]],
        code: int,
        message: str,
        tmp_path: Path,
    ) -> None:
        """A closed pipe has a shell's exit code, and a full disk a sentence."""
        with output() as stdout:
            done = self._run(given, tmp_path, stdout=stdout)

        assert (done.returncode, done.stderr) == (code, message)

    def test_closed(self, given: list[str], tmp_path: Path) -> None:
        """A command runs without standard output."""
        done = self._run(given, tmp_path, shell='exec "$@" >&-')

        assert (done.returncode, done.stderr) == (0, "")

    @staticmethod
    def _run(
        given: list[str],
        folder: Path,
        shell: str = 'exec "$@"',
        stdout: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "tracedstore.tools.cli.main"]
        return subprocess.run(
            ["sh", "-c", shell, "sh", *command, *given],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError(13, "Permission denied", "/data/file"),
            "/data/file cannot be read or written: Permission denied",
        ),
        (
            BlockingIOError(11, "Resource temporarily unavailable"),
            "the operating system refused a request: Resource temporarily unavailable",
        ),
        (OSError("odd"), "the operating system refused a request: odd"),
    ],
    ids=["file", "no file", "no errno"],
)
def test_system_errors(
    error: OSError,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An error of the operating system is one sentence that names the file, if any."""

    def fail(_arguments: object) -> int:
        raise error

    monkeypatch.setattr(sd, "run", fail)
    # Such an error ends the process: main() discards all further output.
    stdout = os.dup(1)
    try:
        code = main(["sd", "--store=tcp://a:1"])
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)

    assert (code, capfd.readouterr().err) == (1, f"tracedstore: {message}\n")


class TestOtherMachines:
    """The commands where torch, or the extra `tools`, is not installed."""

    def run(
        self, missing: str, *arguments: str, folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a process that cannot import one library."""
        script = (
            f"import sys; sys.modules[{missing!r}] = None\n"
            "from tracedstore.tools.cli.main import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *arguments],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            cwd=folder,
        )

    @pytest.mark.parametrize("arguments", [["--version"], ["--help"], EXPORT])
    def test_without_torch(self, arguments: list[str], tmp_path: Path) -> None:
        """These never import torch, so they answer at once, on a laptop too."""
        done = self.run("torch", *arguments, folder=tmp_path)

        assert (done.returncode, done.stderr) == (0, "")

    def test_report_without_torch(self, tmp_path: Path) -> None:
        """Logs and dumps are read where torch is not installed."""
        (tmp_path / "log").write_text(json_lines([completed_event(0, 1.0, 0.5)]))
        prefix = tmp_path / "nccl_trace_rank_"
        write_dumps(prefix, {0: [entry(1, retired=False)], 1: []}, {"0": [0, 1]})

        done = self.run("torch", "report", "log", str(prefix), folder=tmp_path)

        assert (done.returncode, done.stderr) == (0, "")
        assert "for rank 1: alive, has called nothing in group 0" in done.stdout
        assert (tmp_path / "report.html").exists()

    def test_replay_without_torch(self, tmp_path: Path) -> None:
        """The modules of ``top --replay`` do not import torch."""
        script = (
            "import sys; sys.modules['torch'] = None\n"
            "import tracedstore.tools.cli.report, tracedstore.tools.report.analysis\n"
            "import tracedstore.tools.top.replay\n"
        )

        subprocess.run(
            [sys.executable, "-c", script], check=True, timeout=50, cwd=tmp_path
        )

    @pytest.mark.parametrize(
        ("missing", "arguments", "installed"),
        [
            ("shtab", ["completion", "bash"], "'tracedstore[tools]'"),
            ("jinja2", ["report", "log"], "'tracedstore[tools]'"),
            ("torch", ["build-native"], "torch"),
        ],
    )
    def test_sentence(
        self, missing: str, arguments: list[str], installed: str, tmp_path: Path
    ) -> None:
        """One sentence has what is missing, and how to install it."""
        (tmp_path / "log").write_text(json_lines([completed_event(0, 1.0, 0.5)]))

        done = self.run(missing, *arguments, folder=tmp_path)

        assert done.returncode == 1
        assert done.stderr == (
            f"tracedstore: {arguments[0]} needs {missing}, which is not installed:"
            f" pip install {installed}\n"
        )
