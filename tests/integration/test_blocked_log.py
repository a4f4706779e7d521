"""A job whose log blocks goes on and ends, and nothing else is lost."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.processes

# Emits more events than a pipe and the queue hold, then reports over standard output.
MANY_EVENTS = """
import time
from torch.distributed import HashStore
import tracedstore
from prometheus_client import REGISTRY
from tracedstore import names
from tracedstore.recording.telemetry import TELEMETRY

tracedstore.configure(slow_after=0, spans="off", log_format="json")
store = tracedstore.wrap(HashStore())
began = time.monotonic()
store.set("first", "value")
for number in range(3000):
    TELEMETRY.emit(names.TELEMETRY_SERVING, url=f"http://{number:0100d}")
    store.set("key", "value")
dropped = REGISTRY.get_sample_value("tracedstore_events_dropped_total")
print(int(dropped), time.monotonic() - began, flush=True)
"""

BLOCKING_HANDLER = """
import threading
from torch.distributed import HashStore
import structlog, tracedstore

def block(_logger, _level, event):
    threading.Event().wait()

structlog.configure(processors=[block])
tracedstore.configure(slow_after=0, spans="off")
store = tracedstore.wrap(HashStore())
for number in range(50):
    store.set(f"key/{number}", "value")
print("done", flush=True)
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """The write end of a pipe that nothing reads and nothing fits into."""
    read, write = os.pipe()
    flags = fcntl.fcntl(write, fcntl.F_GETFL)
    fcntl.fcntl(write, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    for size in (4096, 1):
        try:
            while True:
                os.write(write, b"x" * size)
        except BlockingIOError:
            pass
    fcntl.fcntl(write, fcntl.F_SETFL, flags)
    yield write
    os.close(write)
    os.close(read)


def run(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a script."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-W", "ignore", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


class TestFullPipe:
    """Standard error is a pipe that its reader has stopped to read."""

    def test_job_goes_on_and_ends(self, full_pipe: int) -> None:
        """Calls return, what does not fit is counted, and the process exits."""
        done = run(MANY_EVENTS, stderr=full_pipe)

        assert done.returncode == 0
        dropped, calls = done.stdout.split()
        # 3,000 events and one for each of two slow keys: one is being written, 1,024
        # are queued.
        assert int(dropped) == 3002 - 1025
        # Without the queue they would never return; 3,000 waits of 0.2 s are 600 s.
        assert float(calls) < 200

    def test_reader_comes_back(self) -> None:
        """Lines that were queued are written, in order."""
        read, write = os.pipe()
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", MANY_EVENTS],
            stdout=subprocess.PIPE,
            stderr=write,
            text=True,
        )
        os.close(write)
        assert child.stdout is not None
        # Nothing is read before the job has emitted everything.
        dropped = int(child.stdout.readline().split()[0])
        with os.fdopen(read) as log:
            events = [json.loads(line) for line in log]
        assert child.wait(240) == 0
        child.stdout.close()

        urls = [event["url"] for event in events if "url" in event]
        assert urls == sorted(urls)
        assert len(events) == 3002 - dropped


class TestBlockingHandler:
    """The application's own structlog configuration blocks."""

    def test_job_goes_on_and_ends(self) -> None:
        """The handler runs in the writer, and no call waits for it twice."""
        done = run(BLOCKING_HANDLER, stderr=subprocess.DEVNULL)

        assert done.returncode == 0
        assert done.stdout == "done\n"


class TestExit:
    """What is queued is written before the process ends."""

    @pytest.mark.parametrize(
        "end", ["", "tracedstore.shutdown()", "raise SystemExit(3)", "1 // 0"]
    )
    def test_queued_events(self, end: str) -> None:
        """At the end of the script, on shutdown, and on an exception."""
        script = (
            "import tracedstore\n"
            "from tracedstore import names\n"
            "from tracedstore.recording.telemetry import TELEMETRY\n"
            "tracedstore.configure(log_format='json')\n"
            "for n in range(100):\n"
            "    TELEMETRY.emit(names.TELEMETRY_SERVING, url=str(n))\n" + end
        )
        done = run(script, stderr=subprocess.PIPE)

        events = [
            json.loads(line) for line in done.stderr.splitlines() if '"url"' in line
        ]
        assert [event["url"] for event in events] == [str(n) for n in range(100)]

    def test_forked_child(self) -> None:
        """A child does not write the parent's queue, and writes its own events."""
        script = (
            "import os, tracedstore\n"
            "from tracedstore import names\n"
            "from tracedstore.recording.telemetry import TELEMETRY\n"
            "tracedstore.configure(log_format='json')\n"
            "for n in range(50):\n"
            "    TELEMETRY.emit(names.TELEMETRY_SERVING, url=f'parent {n}')\n"
            "child = os.fork()\n"
            "if child:\n"
            "    os.waitpid(child, 0)\n"
            "else:\n"
            "    TELEMETRY.emit(names.TELEMETRY_SERVING, url='child')\n"
        )
        done = run(script, stderr=subprocess.PIPE)

        urls = [json.loads(line)["url"] for line in done.stderr.splitlines()]
        assert sorted(urls) == sorted([f"parent {n}" for n in range(50)] + ["child"])

    def test_context_variables(self) -> None:
        """An event has the context variables of the thread that emitted it."""
        script = (
            "import structlog, tracedstore\n"
            "from torch.distributed import HashStore\n"
            "tracedstore.configure(log_format='json', slow_after=0, spans='off')\n"
            "structlog.contextvars.bind_contextvars(step=7)\n"
            "tracedstore.wrap(HashStore()).set('key', 'value')\n"
        )
        done = run(script, stderr=subprocess.PIPE)

        (event,) = map(json.loads, done.stderr.splitlines())
        assert event["step"] == 7
