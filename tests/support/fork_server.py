"""Starts Python processes of tests by forking one that has imported torch."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any, Self

import coverage
from forked_python import MAX_REQUEST, Request

_TESTS = Path(__file__).parent.parent
_BENCHMARKS = _TESTS.parent / "benchmarks"
# Imported before the fork.
_IMPORTS = (
    "structlog",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.registry",
    "tracedstore",
)


class ForkedProcess:
    """A process of the server, with the part of Popen's interface that tests use."""

    def __init__(
        self,
        command: list[str],
        pid: int,
        status: "Future[int]",
        pipes: list[int | None],
    ) -> None:
        self.args = command
        self.pid = pid
        self._status = status
        stdin, stdout, stderr = pipes
        self.stdin: Any = None if stdin is None else os.fdopen(stdin, "w")
        self.stdout: Any = None if stdout is None else os.fdopen(stdout)
        self.stderr: Any = None if stderr is None else os.fdopen(stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._close()
        self.wait()

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self._status.result() if self._status.done() else None

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status."""
        return self._status.result(timeout)

    def communicate(
        self, given: str | None = None, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Write to its input, and read its outputs to their end."""
        if given is not None:
            self.stdin.write(given)
        if self.stdin is not None:
            self.stdin.close()
        outputs = (self.stdout, self.stderr)
        pool = ThreadPoolExecutor(2)
        reading = [pool.submit(one.read) if one else None for one in outputs]
        try:
            out, errors = (one and one.result(timeout) for one in reading)
            self.wait(timeout)
        except TimeoutError:
            self.kill()
            raise
        finally:
            pool.shutdown(wait=False)
        self._close()
        return out, errors

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def start_python(
    *command: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[Any] = DEVNULL,
    stdout: int | IO[Any] = PIPE,
    stderr: int | IO[Any] = PIPE,
    finalize: bool = False,
) -> "subprocess.Popen[str] | ForkedProcess":
    """Start Python with ``-c`` or ``-m``, in a session of its own, without warnings.

    The arguments are those of Popen. A forked process runs its exit hooks, and
    finalizes the interpreter only on request. Under coverage the interpreter is a new
    one, because coverage begins when an interpreter starts.
    """
    arguments = [str(part) for part in command]
    environ = dict(os.environ if env is None else env)
    if coverage.Coverage.current() is not None:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            env=environ,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    return fork_server().start(
        Request(arguments, environ, str(cwd or Path.cwd()), finalize=finalize),
        (stdin, stdout, stderr),
    )


def run_python(
    *command: object, timeout: float = 240.0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python as `start_python` starts it, and wait for its end."""
    process = start_python(*command, **options)
    out, errors = process.communicate(timeout=timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


class ForkServer:
    """The server, seen from the test process that started it."""

    def __init__(self) -> None:
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._server = subprocess.Popen(
                [
                    *(sys.executable, str(_BENCHMARKS / "forked_python.py")),
                    *(str(remote.fileno()), *_IMPORTS),
                ],
                env={**os.environ, "PYTHONPATH": python_path()},
                pass_fds=[remote.fileno()],
                start_new_session=True,
            )
        self._lock = threading.Lock()
        self._started: Future[int] = Future()
        self._ends: dict[int, Future[int]] = {}
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self.stop)

    def start(
        self, request: Request, streams: tuple[int | IO[Any], ...]
    ) -> ForkedProcess:
        """Fork a process with these standard streams, of which some may be PIPE."""
        theirs: list[int] = []
        pipes: list[int | None] = []
        opened: list[int] = []
        for number, stream in enumerate(streams):
            pipes.append(None)
            if stream == PIPE:
                reading, writing = os.pipe()
                pipes[-1], their_end = (
                    (writing, reading) if number == 0 else (reading, writing)
                )
                opened.append(their_end)
            elif stream == DEVNULL:
                their_end = os.open(os.devnull, os.O_RDWR)
                opened.append(their_end)
            else:
                their_end = stream if isinstance(stream, int) else stream.fileno()
            theirs.append(their_end)
        message = json.dumps(request).encode()
        with self._lock:
            self._started = Future()
            socket.send_fds(self._socket, [message], theirs)
            pid = self._started.result(240)
        for descriptor in opened:
            os.close(descriptor)
        return ForkedProcess(request.command, pid, self._ends[pid], pipes)

    def stop(self) -> None:
        """End the server, but not the processes that it started."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait(240)

    def _read(self) -> None:
        """Read what the server reports: new processes, and the status of ended ones."""
        while message := self._socket.recv(MAX_REQUEST):
            pid, status = json.loads(message)
            if status is None:
                self._ends[pid] = Future()
                self._started.set_result(pid)
            else:
                self._ends[pid].set_result(status)


_server: ForkServer | None = None
_creating = threading.Lock()


def fork_server() -> ForkServer:
    """Return the server of this test process."""
    global _server  # noqa: PLW0603 - one per process
    with _creating:
        if _server is None:
            _server = ForkServer()
        return _server


def python_path() -> str:
    """Return PYTHONPATH with the folders of the tests and benchmarks."""
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(_TESTS), str(_BENCHMARKS), *others])
