"""Forks the processes of a case, and follows them over pipes and process handles.

Lines of JSON go over the pipes, between the director of a case and its processes.
"""

import json
import os
import selectors
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracedstore.tools.attach.child_process import die_with_parent

# Kept, because a fault replaces the functions of `time` in a rank.
_monotonic = time.monotonic


class Channel:
    """The end of a rank or server: it sends lines and waits for the answer."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def send(self, kind: str, **fields: Any) -> None:
        """Send a line with the time; it survives the death of this process."""
        line = json.dumps({"kind": kind, "at": _monotonic(), **fields}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._writing, data) :]

    def wait(self) -> bytes:
        """Wait for one byte from the director; b"" if it has ended."""
        return os.read(self._reading, 1)


class Lines:
    """The lines of one pipe, as they arrive."""

    def __init__(self, reading: int) -> None:
        self.reading = reading
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the lines that have arrived; None at the end of the pipe."""
        data = os.read(self.reading, 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Process:
    """A forked process.

    Attributes:
        pid: Its process id.
        lines: All lines that it has sent.
        exit_status: As of `Popen.returncode`; None while it runs.
        exited: When it had ended.
    """

    def __init__(self, work: Callable[[Channel], Any]) -> None:
        reading, child_writing = os.pipe()
        child_reading, writing = os.pipe()
        director = os.getpid()
        self.lines: list[dict[str, Any]] = []
        # How many of them `wait_for` has looked at.
        self._looked_at = 0
        self.exit_status: int | None = None
        self.exited = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            die_with_parent(director)
            try:
                work(Channel(child_reading, child_writing))
            except BaseException:
                traceback.print_exc()
            os._exit(70)
        os.close(child_reading)
        os.close(child_writing)
        os.set_blocking(reading, False)
        self._pipe = Lines(reading)
        self._writing = writing
        self.handle = os.pidfd_open(self.pid)

    @property
    def reading(self) -> int:
        """The file descriptor of its lines."""
        return self._pipe.reading

    def receive(self) -> list[dict[str, Any]]:
        """Return the lines that have arrived."""
        arrived: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            while lines := self._pipe.read():
                arrived += lines
        self.lines += arrived
        return arrived

    def go(self) -> None:
        """Let the process go on."""
        with suppress(BrokenPipeError):
            os.write(self._writing, b"g")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.exit_status is None:
            os.kill(self.pid, number)

    def stopped(self) -> bool:
        """Return whether SIGSTOP has taken effect in all its threads."""
        try:
            return all(
                (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
                for thread in Path(f"/proc/{self.pid}/task").iterdir()
            )
        except (FileNotFoundError, ProcessLookupError):
            return True

    def resume(self) -> None:
        """Let the process go on after SIGSTOP, once that has taken effect."""
        deadline = time.monotonic() + 5
        while not self.stopped() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.signal(signal.SIGCONT)

    def reap(self) -> bool:
        """Return whether the process has ended, and keep its exit status."""
        if self.exit_status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_status = os.waitstatus_to_exitcode(status)
                self.exited = time.monotonic()
        return self.exit_status is not None

    def kill(self) -> None:
        """Kill the process unless it has ended, and wait for that."""
        if self.exit_status is None:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self.exit_status = os.waitstatus_to_exitcode(status)
            self.exited = time.monotonic()

    def close(self) -> None:
        """Close the pipes and the handle of a process that has ended."""
        for file in (self.reading, self._writing, self.handle):
            os.close(file)

    def wait_for(self, kind: str, timeout: float) -> dict[str, Any]:
        """Wait for a new line of a kind, and return it.

        Raises:
            TimeoutError: The process has ended, or sent none in time.
        """
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.reading, selectors.EVENT_READ)
            selector.register(self.handle, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                self.receive()
                for line in self.lines[self._looked_at :]:
                    self._looked_at += 1
                    if line["kind"] == kind:
                        return line
                if self.exit_status is not None:
                    break
                selector.select(left)
                self.reap()
        raise TimeoutError(f"process {self.pid} sent no {kind!r}")
