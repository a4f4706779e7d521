"""What all commands have in common."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tracedstore._version import __version__
from tracedstore.cli.main import COMMANDS, main

WAYS = [[], *([name] for name in COMMANDS)]


def said(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Run a command that ends by itself: its exit code and what it wrote."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    written = capsys.readouterr()
    return ended.value.code, written.out, written.err


@pytest.mark.parametrize("command", WAYS, ids=" ".join)
class TestEveryCommand:
    """And ``tracedstore`` itself."""

    def test_help(
        self,
        command: list[str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It shows examples and exit codes, and fits into a terminal."""
        monkeypatch.setenv("COLUMNS", "80")
        code, out, err = said([*command, "--help"], capsys)

        assert (code, err) == (0, "")
        assert "\nExamples:\n  " in out
        assert "\nExit codes: 0 " in out
        assert "64 the command line makes no sense" in " ".join(out.split())
        assert max(map(len, out.splitlines())) <= 80

    def test_version(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It is the package's."""
        version = f"tracedstore {__version__}\n"
        assert said([*command, "--version"], capsys) == (0, version, "")

    def test_what_makes_no_sense(
        self, command: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One sentence that says where to look, and not status' exit code 2."""
        code, out, err = said([*command, "--no-such-option"], capsys)

        assert (code, out) == (64, "")
        assert re.fullmatch(r"(tracedstore.*): .*; try \1 --help\n", err)


def test_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that there are get listed."""
    code, _, err = said(["stat"], capsys)

    assert code == 64
    assert "'stat'" in err
    assert all(f"'{name}'" in err for name in COMMANDS)


@contextmanager
def nobody_reads() -> Iterator[int]:
    """A pipe whose other end is closed."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@contextmanager
def full() -> Iterator[int]:
    """A disk without space."""
    with Path("/dev/full").open("wb") as file:
        yield file.fileno()


@pytest.mark.parametrize("given", [["--help"], ["dashboards", "export", "here"]])
class TestStandardOutput:
    """Where nobody can, or wants to, read what a command writes."""

    @pytest.mark.parametrize(
        ("output", "code", "said"),
        [
            (nobody_reads, 141, ""),
            (
                full,
                1,
                "tracedstore: cannot go on: [Errno 28] No space left on device\n",
            ),
        ],
    )
    def test_cannot_be_written(
        self,
        given: list[str],
        output: Callable[[], AbstractContextManager[int]],
        code: int,
        said: str,
        tmp_path: Path,
    ) -> None:
        """A shell's exit code, or a sentence."""
        with output() as stdout:
            done = self._run(given, tmp_path, stdout=stdout)

        assert (done.returncode, done.stderr) == (code, said)

    def test_closed(self, given: list[str], tmp_path: Path) -> None:
        """Then nothing is written."""
        done = self._run(given, tmp_path, shell='exec "$@" >&-')

        assert (done.returncode, done.stderr) == (0, "")

    @staticmethod
    def _run(
        given: list[str],
        folder: Path,
        shell: str = 'exec "$@"',
        stdout: int | None = None,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "ignore", "-m", "tracedstore.cli.main"]
        return subprocess.run(
            ["sh", "-c", shell, "sh", *command, *given],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )
