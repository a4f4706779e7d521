"""Forks Python processes from one that has imported torch.

Importing torch takes two to three seconds of processor time, and a test suite or a
benchmark of jobs starts hundreds of processes. A server has no thread of its own, so
that a forked process starts like a new one. What depends on the start or the end of an
interpreter, such as the environment in /proc, needs a process of its own.

A process that is the parent of those it starts, as an agent of torchrun is of its
workers, starts them with `OwnServer`.
"""

import atexit
import ctypes
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

# Bounds the length of arguments and environment.
MAX_REQUEST = 1 << 20
_SET_CHILD_SUBREAPER = 36
# What this process executes, if it was forked.
_request: "Request | None" = None


class Request(NamedTuple):
    """What a forked process executes.

    Attributes:
        command: The arguments of ``python``: ``-c`` or ``-m`` or a script, and its own.
        env: Its environment.
        folder: Its working directory.
        orphan: Its parent is not the server, but the next one above it that adopts.
        finalize: It ends as the interpreter does, with the destructors of torch, which
            take 0.4 s of processor time. Exit hooks run in any case.
    """

    command: list[str]
    env: dict[str, str]
    folder: str
    orphan: bool = False
    finalize: bool = False


def serve(control: socket.socket) -> Request | None:
    """Fork for each request. Return None at the end, and the request in a child.

    A request comes with the standard streams. The answer is the process id with None,
    and for a child of the server later the process id with its exit status.
    """
    # The collections of a forked process would copy the memory of all that is here.
    gc.collect()
    gc.freeze()
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
            message, streams, _, _ = socket.recv_fds(control, MAX_REQUEST, 3)
            if not message:
                return None
            request = Request(*json.loads(message))
            pid = os.fork()
            if pid == 0:
                _become(request, control, streams, running)
                return request
            for stream in streams:
                os.close(stream)
            if request.orphan:
                # Its child tells its own id, when it has been adopted.
                os.waitpid(pid, 0)
                continue
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            control.send(json.dumps([pid, None]).encode())


def _become(
    request: Request,
    control: socket.socket,
    streams: list[int],
    others: Iterable[int],
) -> None:
    """Make the process that a request asks for of a fork of the server."""
    for pidfd in others:
        os.close(pidfd)
    if request.orphan:
        _leave_parent(control)
    control.close()
    for standard, given in enumerate(streams):
        os.dup2(given, standard)
    os.closerange(3, max(streams) + 1)
    os.setsid()


def _leave_parent(control: socket.socket) -> None:
    """Fork again, and return in a process that another one has adopted."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)
    control.send(json.dumps([os.getpid(), None]).encode())


def adopt_orphans() -> None:
    """Become the parent of all processes below this one whose parent ends."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def in_forked_process() -> bool:
    """Return whether this process executes a request."""
    return _request is not None


def execute(request: Request) -> None:
    """Execute code, a module or a script as the interpreter does, in this process."""
    global _request  # noqa: PLW0603 - one per process
    _request = request
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.env)
    warnings.simplefilter("ignore")
    # New ones, because a stream keeps what kind of file it had at first.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the end
    unbuffered = "-u" in request.command
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", closefd=False),  # noqa: SIM115 - until the end
        write_through=unbuffered,
        line_buffering=unbuffered or os.isatty(1),
    )
    sys.stderr = open(  # noqa: SIM115 - until the end
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )
    folders = request.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [one for one in folders if one and one not in sys.path]
    option, *arguments = [part for part in request.command if part != "-u"]
    if option == "-m":
        sys.argv[1:] = arguments[1:]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [option, *arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(option)))  # noqa: PTH100, PTH120 - as Python does
        runpy.run_path(option, run_name="__main__")


def end(error: BaseException | None) -> NoReturn:
    """End this process as Python does, but do not finalize the interpreter."""
    status = 0
    try:
        if isinstance(error, SystemExit):
            if isinstance(error.code, int):
                status = error.code
            elif error.code is not None:
                print(error.code, file=sys.stderr)
                status = 1
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        for module, name in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
            vars(module)[name]()
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status & 0xFF)


class OwnProcess:
    """A child of this process that a server has forked, with what torchrun uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._handle)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return the exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.poll() is None:
            select.select([self._handle], [], [], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)


class OwnServer:
    """A server whose processes are children of the one that starts them.

    It is a process below that one, and adopts no orphans itself.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    @classmethod
    def forked(cls) -> "OwnServer":
        """Fork a server that is as this process is now; it ends with this process."""
        adopt_orphans()
        control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            control.close()
            os.setsid()
            run(remote)
            os._exit(0)
        remote.close()
        return cls(control)

    def start(
        self, command: list[str], env: Mapping[str, str], streams: tuple[int, int, int]
    ) -> OwnProcess:
        """Start Python with these standard streams."""
        request = Request(command, dict(env), os.getcwd(), orphan=True)  # noqa: PTH109
        socket.send_fds(self._control, [json.dumps(request).encode()], list(streams))
        pid, _ = json.loads(self._control.recv(MAX_REQUEST))
        return OwnProcess(pid)


def run(control: socket.socket) -> None:
    """Serve; execute the request in each forked process."""
    request = serve(control)
    if request is None or request.finalize:
        if request is not None:
            execute(request)
        return
    error: BaseException | None = None
    try:
        execute(request)
    except BaseException as raised:
        error = raised
    end(error)


def fork_workers() -> None:
    """Let the agent of torchrun in this process fork its workers.

    To be called before anything of torch has run here: workers are as this process is
    now.
    """
    server = OwnServer.forked()
    from torch.distributed.elastic.multiprocessing.subprocess_handler import (  # noqa: PLC0415 - this module is imported without torch, too
        SubprocessHandler,
    )

    execute_command = vars(SubprocessHandler)["_popen"]

    def start(handler: Any, command: tuple[str, ...], env: dict[str, str]) -> Any:
        if command[0] != sys.executable:
            return execute_command(handler, command, env)
        own = vars(handler)
        streams = [own["_stdout"] or sys.stdout, own["_stderr"] or sys.stderr]
        out, errors = (stream.fileno() for stream in streams)
        return server.start(list(command[1:]), env, (0, out, errors))

    setattr(SubprocessHandler, "_popen", start)  # noqa: B010 - a private method


def main(arguments: list[str]) -> None:
    """Import modules, and serve on an inherited socket."""
    for name in arguments[1:]:
        __import__(name)
    # A worker of pytest may ignore it, and a shell's background jobs do.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run(socket.socket(fileno=int(arguments[0])))


if __name__ == "__main__":
    # Once: the forked process may import it.
    import forked_python

    forked_python.main(sys.argv[1:])
