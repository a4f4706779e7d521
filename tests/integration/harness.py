"""Helpers for tests and their child processes: polling, threads, processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from prometheus_client import CollectorRegistry

from support.fork_server import ForkedProcess, python_path, start_python
from support.metrics import exported_calls
from support.processes import kill_tree

T = TypeVar("T")


# Seconds. A bound that only a hang reaches: a process that takes seconds on a quiet
# machine takes a minute beside others.
HANG = 240.0


def wait_until(condition: Callable[[], T | None], timeout: float = HANG) -> T:
    """Poll a condition until it returns a true value, and return that."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"condition not met after {timeout} s")
        time.sleep(pause)
        # What is not there soon is polled less often: a condition may be expensive.
        pause = min(1.2 * pause, 0.1)
    return value


def pause(pid: int) -> None:
    """Stop a process with SIGSTOP, and return when all its threads have stopped.

    The signal takes effect later than `os.kill` returns: until then the process may
    still answer a request.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(
        lambda: all(
            (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
            for thread in threads.iterdir()
        )
    )


def in_threads(count: int, work: Callable[[int], T]) -> list["Future[T]"]:
    """Call a function in `count` threads at once; return when all have ended."""
    start = threading.Barrier(count)

    def run(number: int) -> T:
        start.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(run, number) for number in range(count)]


def results(futures: list["Future[T]"]) -> list[T]:
    """Return the results of all futures, or raise the first one's exception."""
    return [future.result() for future in futures]


def in_background(work: Callable[[], T], name: str = "background") -> "Future[T]":
    """Call a function in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def operation_count(
    registry: CollectorRegistry, store: str, operation: str, error_type: str = ""
) -> int:
    """Return the exported number of calls of an operation with this error type."""
    calls = exported_calls(registry.collect())
    return calls.get((store, operation, error_type), 0)


def operation_counts(registry: CollectorRegistry) -> dict[str, int]:
    """Return the exported number of calls by operation, without zeros.

    Operations are named with their store, as in "hash_store.get". Successful and
    failed calls are added up.
    """
    counts: dict[str, int] = {}
    for (store, operation, _), number in exported_calls(registry.collect()).items():
        name = f"{store}.{operation}"
        counts[name] = counts.get(name, 0) + number
    return counts


def report(**fields: Any) -> None:
    """Write a report from a child process to its test."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def forked(work: Callable[[], Any], timeout: float = HANG) -> Any:
    """Call a function in a forked child, and return its result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    os.close(writing)

    def ended() -> tuple[int] | None:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        return (status,) if ended_pid else None

    try:
        (status,) = wait_until(ended, timeout)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    with os.fdopen(reading) as pipe:
        result = pipe.read()
    assert status == 0, f"the forked child ended with {status}"
    return json.loads(result)


class Running:
    """A running command, whose standard error is written to a file.

    Attributes:
        pid: Its process id.
    """

    _process: "subprocess.Popen[str] | ForkedProcess"

    def __init__(
        self, folder: Path, name: str, *command: object, env: dict[str, str]
    ) -> None:
        self._errors = folder / f"{name}-{time.monotonic_ns()}.stderr"
        with self._errors.open("wb") as errors:
            self._process = self._start([str(part) for part in command], env, errors)
        self.pid = self._process.pid

    def _start(
        self, command: list[str], env: dict[str, str], errors: IO[bytes]
    ) -> "subprocess.Popen[str] | ForkedProcess":
        return subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # A new process group, so that its children are killed with it.
            start_new_session=True,
        )

    def exit_status(self, timeout: float = HANG) -> int:
        """Wait until the command ends, and return its exit status."""
        return self._process.wait(timeout)

    def errors(self) -> str:
        """Return what the command has written to standard error so far."""
        return self._errors.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a name, or all, from standard error."""
        lines = [line for line in self.errors().splitlines() if line[:1] == "{"]
        events = map(json.loads, lines)
        return [event for event in events if name in (None, event["event"])]

    def kill(self) -> None:
        """Kill the command and its descendants unless it has ended."""
        if self._process.returncode is None:
            kill_tree(self.pid)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Script(Running):
    """A running Python script: ``-c`` or ``-m``, and its arguments."""

    def _start(
        self, command: list[str], env: dict[str, str], errors: IO[bytes]
    ) -> "subprocess.Popen[str] | ForkedProcess":
        return start_python(
            *command,
            env={**os.environ, "PYTHONPATH": python_path(), **env},
            stdin=subprocess.PIPE,
            stderr=errors,
        )


class Child(Script):
    """A process that runs a script of children/ and writes reports in JSON.

    It is forked from one that has imported torch, unless it gets variables that the
    interpreter or a library reads when it starts, or that others read in /proc.

    Args:
        forked: False for an interpreter of its own.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *args: object,
        env: dict[str, str],
        forked: bool = True,
    ) -> None:
        self._forked = forked and all(name.startswith("TRACEDSTORE_") for name in env)
        module = f"integration.children.{script}"
        super().__init__(folder, script, module, *args, env=env)

    def _start(
        self, command: list[str], env: dict[str, str], errors: IO[bytes]
    ) -> "subprocess.Popen[str] | ForkedProcess":
        if self._forked:
            return super()._start(["-m", *command], env, errors)
        environ = {"PYTHONPATH": python_path(), **env}
        return Running._start(self, [sys.executable, "-m", *command], environ, errors)

    def next_report(self) -> dict[str, Any]:
        """Wait for the next report. pytest's timeout bounds the wait."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended without a report: {self.errors()}"
        fields: dict[str, Any] = json.loads(line)
        return fields

    def write(self, text: str) -> None:
        """Write to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def close(self) -> None:
        """Close its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
