"""Starts Python processes by forking one that has imported torch.

Importing torch takes two seconds of CPU time, and the tests start hundreds of
processes. The server has no thread of its own and has called nothing of this package,
so that a forked process starts like a new one. What depends on the start of the
interpreter, such as its environment in /proc, needs a process of its own.
"""

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

_TESTS = Path(__file__).parent.parent
# Bounds the length of arguments and environment.
_MAX_REQUEST = 1 << 20


class _Request(NamedTuple):
    module: str
    args: list[str]
    env: dict[str, str]


class ForkedProcess:
    """A process of the server, with the part of Popen's interface that tests use."""

    def __init__(
        self, pid: int, status: "Future[int]", stdin: int, stdout: int
    ) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "w")
        self.stdout = os.fdopen(stdout)
        self._status = status

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self._status.result() if self._status.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status."""
        return self._status.result(timeout)


class ForkServer:
    """The server, seen from the test process that started it."""

    def __init__(self) -> None:
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "support.fork_server", str(remote.fileno())],
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
        self, module: str, *args: str, env: dict[str, str], errors: int
    ) -> ForkedProcess:
        """Run a module in a forked process, as `python -m` does."""
        stdin, writing = os.pipe()
        reading, stdout = os.pipe()
        request = _Request(module, list(args), {**os.environ, **env})
        message = json.dumps(request).encode()
        with self._lock:
            self._started = Future()
            socket.send_fds(self._socket, [message], [stdin, stdout, errors])
            pid = self._started.result(60)
        os.close(stdin)
        os.close(stdout)
        return ForkedProcess(pid, self._ends[pid], writing, reading)

    def stop(self) -> None:
        """End the server, but not the processes that it started."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._server.wait(240)

    def _read(self) -> None:
        """Read what the server reports: new processes, and the status of ended ones."""
        while message := self._socket.recv(_MAX_REQUEST):
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
    """Return PYTHONPATH with the folder of the tests."""
    return os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


def _serve(control: socket.socket) -> _Request | None:
    """Fork for each request. Return None at the end, and the request in a child."""
    running: dict[int, int] = {}  # pidfd -> pid
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in running:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid = running.pop(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                control.send(json.dumps([pid, status]).encode())
                continue
            request, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST, 3)
            if not request:
                return None
            pid = os.fork()
            if pid == 0:
                for pidfd in running:
                    os.close(pidfd)
                for standard, given in enumerate(descriptors):
                    os.dup2(given, standard)
                os.closerange(3, max(descriptors) + 1)
                control.close()
                os.setsid()
                return _Request(*json.loads(request))
            for given in descriptors:
                os.close(given)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            control.send(json.dumps([pid, None]).encode())


if __name__ == "__main__":
    import structlog  # noqa: F401 - imported before the fork
    import torch.distributed.elastic.rendezvous.registry  # noqa: F401

    import tracedstore  # noqa: F401

    # A worker of pytest may ignore it, and a shell's background jobs do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        os.environ.clear()
        os.environ.update(_request.env)
        sys.argv[1:] = _request.args
        runpy.run_module(_request.module, run_name="__main__", alter_sys=True)
