"""What the tests and their child processes share: waiting, threads, processes."""

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
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

T = TypeVar("T")

_TESTS = Path(__file__).parent.parent


def wait_until(condition: Callable[[], T | None], timeout: float = 15.0) -> T:
    """Poll a condition until it holds, and give what it found."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about within {timeout} s")
        time.sleep(0.005)
    return found


def in_threads(count: int, work: Callable[[int], T]) -> list["Future[T]"]:
    """Do something in as many threads at once; ends when all of them ended."""
    start = threading.Barrier(count)

    def run(number: int) -> T:
        start.wait(15)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return [pool.submit(run, number) for number in range(count)]


def results(futures: list["Future[T]"]) -> list[T]:
    """What all of them returned; raises what one of them raised."""
    return [future.result() for future in futures]


def in_background(work: Callable[[], T], name: str = "background") -> "Future[T]":
    """Start something in a thread that no test has to wait for to end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def counted(
    registry: CollectorRegistry, store: str, operation: str, error_type: str = ""
) -> float:
    """How many calls of an operation ended so, as Prometheus is told."""
    labels = {"store": store, "operation": operation, "error_type": error_type}
    name = "tracedstore_operation_duration_seconds_count"
    return registry.get_sample_value(name, labels) or 0


def all_counted(registry: CollectorRegistry) -> dict[str, float]:
    """How many calls there were of each operation that had any, whatever became of it.

    Operations are named with their store, as in "hash_store.get".
    """
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.value and sample.name == (
                "tracedstore_operation_duration_seconds_count"
            ):
                name = f"{sample.labels['store']}.{sample.labels['operation']}"
                found[name] = found.get(name, 0) + sample.value
    return found


def report(**facts: Any) -> None:
    """Tell the test something, from a child process."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def forked(work: Callable[[], Any], timeout: float = 15.0) -> Any:
    """Do something in a forked child, and give what it returned there."""
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
        found, status = os.waitpid(pid, os.WNOHANG)
        return (status,) if found else None

    try:
        (status,) = wait_until(ended, timeout)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    with os.fdopen(reading) as answers:
        answer = answers.read()
    assert status == 0, f"the forked child ended with {status}"
    return json.loads(answer)


class Running:
    """A command under way, whose standard error is kept.

    Attributes:
        pid: Its process id.
    """

    def __init__(
        self, folder: Path, name: str, *command: object, env: dict[str, str]
    ) -> None:
        self._errors = folder / f"{name}-{time.monotonic_ns()}.stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # A group of its own, so that what it starts ends with it.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def exit_status(self, timeout: float = 30.0) -> int:
        """Wait until it ends by itself."""
        return self._process.wait(timeout)

    def errors(self) -> str:
        """What it wrote to standard error so far."""
        return self._errors.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The events of that name among it, or all."""
        lines = [line for line in self.errors().splitlines() if line[:1] == "{"]
        events = map(json.loads, lines)
        return [event for event in events if name in (None, event["event"])]

    def kill(self) -> None:
        """End it and what it started, without warning, unless it ended by itself."""
        if self._process.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Child(Running):
    """A process that runs one of the scripts in children/ and reports in JSON."""

    def __init__(
        self, folder: Path, script: str, *args: object, env: dict[str, str]
    ) -> None:
        module = f"integration.children.{script}"
        environ = {"PYTHONPATH": str(_TESTS), **env}
        super().__init__(
            folder, script, sys.executable, "-m", module, *args, env=environ
        )

    def next_report(self) -> dict[str, Any]:
        """Wait for what it reports next; how long is for pytest's timeout to say."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it ended without a report: {self.errors()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def write(self, text: str) -> None:
        """Tell it something."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def close(self) -> None:
        """End its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
