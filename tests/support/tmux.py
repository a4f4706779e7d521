"""A shell in tmux: a real terminal, whose screen can be read."""

import os
import subprocess
import time
from pathlib import Path
from typing import Self
from uuid import uuid4

from support.tools import tool

# Seconds for a text on the screen.
_TIMEOUT = 240.0


class Tmux:
    """A terminal of 80x24 with a shell; use it in a ``with`` block."""

    def __init__(self, folder: Path) -> None:
        # A server of its own, with nobody's configuration.
        self._tmux = [
            tool("tmux"),
            "-L",
            f"tracedstore-{uuid4().hex}",
            "-f",
            "/dev/null",
        ]
        environ = {k: v for k, v in os.environ.items() if k not in {"TMUX", "NO_COLOR"}}
        self._environ = {**environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        shell = ["env", "PS1=ready$ ", "sh"]
        self._run(
            "new-session", "-d", "-x", "80", "-y", "24", "-c", str(folder), *shell
        )

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._tmux, *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        return done.stdout

    def __enter__(self) -> Self:
        # What is typed before the shell's prompt is echoed before it, too.
        self.wait_for("ready$")
        return self

    def __exit__(self, *_error: object) -> None:
        self._run("kill-server")

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names, such as ``Enter``; other text is typed."""
        self._run("send-keys", *keys)

    def screen(self, *options: str) -> str:
        """Return the text on the screen; with ``-e`` its colours too."""
        return self._run("capture-pane", "-p", *options)

    def wait_for(self, text: str) -> str:
        """Wait for a text on the screen, and return the screen."""
        deadline = time.monotonic() + _TIMEOUT
        while text not in (screen := self.screen()):
            assert time.monotonic() < deadline, f"no {text!r} in\n{screen}"
            time.sleep(0.05)
        return screen
