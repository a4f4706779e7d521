"""Runs a command in a pseudo-terminal, which it has to leave as it was."""

import os
import pty
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from integration.harness import wait_until

# Columns and lines.
SIZE = (80, 24)


class Terminal:
    """A command in a terminal of 80x24; use it in a ``with`` block.

    Attributes:
        process: The command.
        output: What it has written so far.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._ours, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._theirs, SIZE[::-1])
        self._settings = termios.tcgetattr(self._theirs)
        # What changes the output on a terminal.
        ignored = ("NO_COLOR", "LINES", "COLUMNS")
        inherited = {k: v for k, v in os.environ.items() if k not in ignored}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**inherited, "TERM": "xterm-256color", **(environ or {})},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
        )
        os.set_blocking(self._ours, False)
        self.output = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def wait_for(self, text: str) -> None:
        """Read until a text was written."""

        def found() -> bool:
            self.read()
            return text in self.output

        wait_until(found)

    def read(self) -> None:
        """Read what was written."""
        try:
            while new := os.read(self._ours, 65536):
                self.output += new.decode("utf-8", "replace")
        except BlockingIOError:
            pass

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def end(self) -> int:
        """Return the exit code; the terminal has to be as it was."""
        code = self.process.wait(240)
        self.read()
        assert termios.tcgetattr(self._theirs) == self._settings
        # The main screen, and the cursor.
        assert self.output.rindex("\x1b[?1049l") > self.output.rindex("\x1b[?1049h")
        assert self.output.rindex("\x1b[?25h") > self.output.rindex("\x1b[?25l")
        return code
