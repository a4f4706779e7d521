"""The demo on the screen of ``tracedstore top``.

The demo runs in a child process, which writes its lines into a file and announces its
course through a pipe. This process shows the screen, which reads the demo's store as it
reads any other, and prints the lines when the screen has ended.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tracedstore.common.errors import CommandError
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.child_process import die_with_parent
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.top.live import LiveApp
from tracedstore.tools.top.reader_process import JobReader
from tracedstore.tools.top.rows import TextRow, row, styled, wrap

# Seconds between two readings, and after which a barrier's absent ranks are awaited.
_INTERVAL, _AFTER = 0.5, 1.0
# Seconds for the demo to end its ranks.
_END_TIMEOUT = 10.0
_POLL = 0.02
_STYLES = {"green": "good", "yellow": "notable", "red": "bad"}
_MAX_NOTE_ROWS = 3
_FAILED = "The demo has failed. q prints why."

Run = Callable[[Callable[..., None]], int]


def run_on_top(run: Run) -> int:
    """Run the demo behind the screen, and return the exit code.

    Args:
        run: Runs the demo; it gets the function that announces its course.
    """
    with TemporaryFile("w+", encoding="utf-8") as lines:
        demo = _DemoProcess(run, lines)
        try:
            code = _show(demo)
        finally:
            failed = demo.end()
            lines.seek(0)
            sys.stdout.write(lines.read())
    return failed or code


def _show(demo: "_DemoProcess") -> int:
    url = demo.wait_for_store()
    if url is None:  # it has failed, and said why
        return 1
    # Forked before the screen starts a thread.
    reader = JobReader(Address(url), TokenPolicy(), after=_AFTER)
    try:
        code = DemoApp(reader, demo).run()
    finally:
        reader.close()
    return 1 if code is None else code


class _DemoProcess:
    """The child process that runs the demo.

    Attributes:
        course: What it has announced last, by kind.
    """

    def __init__(self, run: Run, lines: IO[str]) -> None:
        self.course: dict[str, str] = {}
        self._received = b""
        self._pipe, theirs = os.pipe()
        start, self._start = os.pipe()
        self._started = False
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            os.close(self._pipe)
            os.close(self._start)
            _run_child(run, lines, theirs, start)
        os.close(theirs)
        os.close(start)

    def start(self) -> None:
        """Let it begin, once the screen has read its store."""
        if not self._started:
            self._started = True
            # Not by closing it: the reader has it open, too.
            with suppress(BrokenPipeError):
                os.write(self._start, b"\n")
            os.close(self._start)

    def wait_for_store(self) -> str | None:
        """Return the URL of its store; None if it ends before it has one."""
        while "store" not in self.course:
            if not self._read():
                return None
        os.set_blocking(self._pipe, False)
        return self.course["store"]

    def poll(self) -> None:
        """Read what was announced."""
        with suppress(BlockingIOError):
            while self._read():
                pass

    def _read(self) -> bool:
        """Read once; return whether there may be more."""
        new = os.read(self._pipe, 65536)
        *messages, self._received = (self._received + new).split(b"\n")
        for message in messages:
            announced: dict[str, str] = json.loads(message)
            if "scenario" in announced:
                self.course.pop("note", None)
            self.course |= announced
        if not new:
            self.course |= {"note": _FAILED, "style": "red"}
        return bool(new)

    def end(self) -> int:
        """End it; return its exit code if it has failed by itself, else 0."""
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        os.close(self._pipe)
        self.start()
        if pid:
            return os.waitstatus_to_exitcode(status)
        os.kill(self._pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_TIMEOUT
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                # Its ranks end with it.
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                break
            time.sleep(_POLL)
        return 0


def _run_child(run: Run, lines: IO[str], pipe: int, start: int) -> None:
    """Run the demo, and exit."""
    code = 1

    def announce(**announced: str) -> None:
        os.write(pipe, json.dumps(announced).encode() + b"\n")
        if "store" in announced:
            # The screen needs seconds to import torch, and would miss the beginning.
            os.read(start, 1)

    try:
        for stream in (1, 2):
            os.dup2(lines.fileno(), stream)
        code = run(announce)
    except CommandError as error:
        sys.stderr.write(f"tracedstore: {error}\n")
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


class DemoApp(LiveApp):
    """The screen, with the scenario of the demo and what was printed last."""

    def __init__(self, reader: JobReader, demo: _DemoProcess) -> None:
        super().__init__(reader, _INTERVAL, Path.cwd())
        self._demo = demo

    def note_rows(self, width: int) -> list[TextRow]:
        """Return the scenario, its question and the last note."""
        self._demo.poll()
        if self.has_read:
            self._demo.start()
        course = self._demo.course
        rows = []
        if "scenario" in course:
            rows = [
                row(styled(course["scenario"], "heading")),
                *wrap(course["question"], width)[:1],
            ]
        if "note" in course:
            style = _STYLES.get(course["style"], "")
            rows += wrap(course["note"], width, style)[:_MAX_NOTE_ROWS]
        return rows
