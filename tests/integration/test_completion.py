"""``tracedstore completion``: its scripts in real shells."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.tools import tool

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PATH with the commands."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("tracedstore", "tracedstore-run"):
        (folder / name).symlink_to(Path(sys.executable).parent / name)
    return f"{folder}:/usr/bin:/bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with names to complete."""
    (tmp_path / "joblogs").mkdir()
    (tmp_path / "joblog.txt").touch()
    (tmp_path / "train.py").touch()
    return tmp_path


class Shell:
    """An interactive shell on a pseudo-terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def expect(self, text: str, timeout: float = 20.0) -> None:
        """Read until the shell has written a text, or fail."""
        output = ""
        deadline = time.monotonic() + timeout
        while text not in output:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._terminal], [], [], max(0.0, left))
            assert ready, f"no {text!r} in {output!r}"
            output += os.read(self._terminal, 65536).decode(errors="replace")


@contextmanager
def shell(*command: str, folder: Path, path: str) -> Iterator[Shell]:
    """Start a shell, and kill it on exit."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Shell(ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# Typed text, and the text after Tab.
COMPLETIONS = [
    ("tracedstore stat", "tracedstore status "),
    ("tracedstore report --ou", "tracedstore report --output "),
    ("tracedstore demo --store f", "tracedstore demo --store file "),
    ("tracedstore report joblog.", "tracedstore report joblog.txt "),
    ("tracedstore dashboards export jobl", "tracedstore dashboards export joblogs/"),
    ("tracedstore-run printen", "tracedstore-run printenv "),
    ("tracedstore-run python trai", "tracedstore-run python train.py "),
]


@pytest.mark.parametrize(
    ("name", "options", "before"),
    [
        ("bash", ["--norc", "--noprofile", "-i"], ""),
        ("zsh", ["-f", "-i"], "autoload compinit; compinit -u; "),
    ],
    ids=["bash", "zsh"],
)
def test_bash_and_zsh(
    name: str, options: list[str], before: str, folder: Path, path: str
) -> None:
    """Commands, options, choices, files and folders are completed at a prompt."""
    with shell(tool(name), *options, folder=folder, path=path) as prompt:
        prompt.type(f'{before}eval "$(tracedstore completion {name})"; echo the""re\n')
        prompt.expect("there")
        for typed, completed in COMPLETIONS:
            prompt.type(f"{typed}\t")
            prompt.expect(completed)
            # Ctrl-U deletes the line.
            prompt.type("\x15")


def test_fish(folder: Path, path: str) -> None:
    """Completions are listed by a command of fish, without a terminal."""
    for typed, completed in COMPLETIONS:
        done = subprocess.run(
            [
                tool("fish"),
                "--no-config",
                "-c",
                f"tracedstore completion fish | source; complete -C '{typed}'",
            ],
            cwd=folder,
            env={"PATH": path, "HOME": str(folder), "TERM": "dumb"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        last = completed.split()[-1]
        assert last in re.split(r"[\t\n]", done.stdout), (typed, done)
        assert done.stderr == ""
