"""The end of a process: nothing of ours delays it for long or aborts it."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import native_caller
import pytest

from support.fork_server import start_python
from support.native import on_both_bases

pytestmark = pytest.mark.processes

# The verdict is read by the watcher and by the rank itself when the process ends.
WARNING_AT_THE_TIMEOUT = """
import torch.distributed as dist, tracedstore
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
traced = tracedstore.wrap(store)
tracedstore.barrier(traced, 2, "b", 0.3, rank=0, warn_after=0.3, trace_timeout=0)
"""

SPANS = """
import torch.distributed as dist, tracedstore
tracedstore.configure(tracing=True, log_format="off", spans="all")
store = tracedstore.wrap(dist.HashStore())
for number in range(100):
    store.set(f"key/{number}", "value")
print("at the end", flush=True)
"""

# Each server is the last rank to arrive, and ends at once.
SERVER_ENDS_AT_ONCE = """
import os, threading, time
import torch.distributed as dist, tracedstore
from tracedstore.elastic import barrier
tracedstore.configure(log_format="off", spans="off")

def signal_when_waiting(port):
    other = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while "wait" not in {call.operation for call in tracedstore.in_flight()}:
        time.sleep(0.001)
    other.set("waiting", "")

completed = 0
for attempt in range(20):
    read, write = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode() + b"\\n")
        store.wait(["waiting"])
        barrier(store, 2, "b", 20)
        os._exit(0)
    with os.fdopen(read) as ports:
        port = int(ports.readline())
    os.close(write)
    threading.Thread(target=signal_when_waiting, args=(port,)).start()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    barrier(tracedstore.wrap(store), 2, "b", 20)
    os.waitpid(server, 0)
    completed += 1
print(completed)
"""

# The provider ends with the process, by a hook that is registered after ours.
BARRIER_AT_THE_END = """
import torch.distributed as dist, tracedstore
store = tracedstore.wrap(dist.HashStore())
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")
provider.add_span_processor(BatchSpanProcessor(exporter))
trace.set_tracer_provider(provider)
tracedstore.barrier(store, 1, "b", rank=0)
"""

# Each child ends while threads that Python does not know are in calls that do not
# return.
CALLS_OF_CPP = """
import os, sys, time
import native_caller, torch.distributed as dist, tracedstore
caller = native_caller.load()
statuses = []
for attempt in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        store = tracedstore.wrap(dist.HashStore())
        for _ in range(3):
            caller.wait_in_background(store, "never")
        while len(tracedstore.in_flight()) < 3:
            time.sleep(0.001)
        sys.exit(7)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(statuses)
"""


def start(script: str, *arguments: str, **environ: str) -> Any:
    """Start a script."""
    env = {"PATH": "/usr/bin:/bin", "RES_OPTIONS": "attempts:0", **environ}
    return start_python("-c", script, *arguments, env=env, finalize=True)


@pytest.fixture
def silent_collector() -> Iterator[str]:
    """The URL of a collector that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


class TestAbort:
    """No thread of ours returns from a Store call while Python finalizes."""

    def test_warning_at_the_timeout(self) -> None:
        """The process ends with its exception, not with SIGABRT."""
        children = [start(WARNING_AT_THE_TIMEOUT) for _ in range(6)]
        for child in children:
            _, errors = child.communicate(timeout=240)

            assert child.returncode == 1, errors
            assert "BarrierTimeout" in errors
            assert "terminate called" not in errors


class TestCollector:
    """A collector that is down or hangs."""

    @pytest.mark.parametrize("state", ["refused", "silent"])
    def test_exit_is_bounded(self, state: str, silent_collector: str) -> None:
        """Exporting at the end takes `exit_timeout` at most."""
        endpoint = silent_collector if state == "silent" else "http://127.0.0.1:9"
        child = start(
            SPANS,
            OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
            # So long would an exit without a bound take.
            OTEL_EXPORTER_OTLP_TIMEOUT="1000",
            TRACEDSTORE_EXIT_TIMEOUT="1",
        )
        output, errors = child.communicate(timeout=240)

        assert child.returncode == 0, errors
        assert output == "at the end\n"

    @on_both_bases
    def test_barrier_at_the_end(self, core: str) -> None:
        """The span of a barrier that completes just before the end is exported."""
        child = start(BARRIER_AT_THE_END, TRACEDSTORE_CORE=core)
        output, errors = child.communicate(timeout=240)

        assert "barrier b\n" in output, errors
        assert child.returncode == 0


class TestServer:
    """A process that serves the store and ends."""

    def test_last_rank_serves_the_store(self) -> None:
        """The last rank returns from the barrier when the others are released."""
        child = start(SERVER_ENDS_AT_ONCE)
        output, errors = child.communicate(timeout=240)

        assert (output, child.returncode) == ("20\n", 0), errors


class TestCallsOfCpp:
    """Threads that Python does not know are in Store calls when the process ends."""

    @on_both_bases
    def test_exit_status_is_kept(self, core: str) -> None:
        """The process ends, though the calls would last for minutes more."""
        child = start(
            CALLS_OF_CPP,
            "3",
            PYTHONPATH=str(Path(native_caller.__file__).parent),
            TRACEDSTORE_CORE=core,
            TRACEDSTORE_EXIT_TIMEOUT="0.2",
        )
        output, errors = child.communicate(timeout=240)

        assert output == "[7, 7, 7]\n", errors
