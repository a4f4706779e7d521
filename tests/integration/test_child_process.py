"""Running a function in a child process, which ends whatever it blocks in."""

import ctypes
import gc
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

from tracedstore.common.errors import CommandError
from tracedstore.tools.attach.child_process import (
    ChildTimeoutError,
    Heartbeat,
    run_in_child,
)

# Keeps the GIL while it sleeps, as torch does while it lists keys.
sleep_with_gil = ctypes.PyDLL(None).sleep


@pytest.fixture(autouse=True)
def _no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no child exists, not even as a zombie."""
    children: list[int] = []
    fork = os.fork

    def recorded_fork() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", recorded_fork)
    yield
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_result() -> None:
    """A large result is returned whole, from another process."""
    result, process = run_in_child(20, lambda _: (b"x" * (1 << 22), os.getpid()))

    assert len(result) == 1 << 22
    assert process != os.getpid()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CommandError("no store"), "no store"),
        (ValueError("first\nsecond"), "ValueError: first"),
    ],
)
def test_exception(error: Exception, message: str) -> None:
    """An exception in the child is raised as a CommandError of one line."""

    def work(_: Heartbeat) -> None:
        raise error

    with pytest.raises(CommandError) as raised:
        run_in_child(20, work)
    assert str(raised.value) == message


@pytest.mark.parametrize("made_progress", [True, False])
def test_timeout(made_progress: bool) -> None:
    """A child that blocks with the GIL held is killed, and its progress is known."""

    def work(heartbeat: Heartbeat) -> None:
        if made_progress:
            heartbeat()
        sleep_with_gil(1000)

    with pytest.raises(ChildTimeoutError) as raised:
        run_in_child(1.0, work, 1.0)

    assert raised.value.made_progress == made_progress


def test_heartbeat_extends_the_timeout() -> None:
    """A child that makes progress may take longer."""

    def work(heartbeat: Heartbeat) -> str:
        heartbeat()
        time.sleep(1.3)
        return "done"

    assert run_in_child(1.0, work, 20) == "done"


def crash() -> None:
    """End as after an invalid memory access."""
    # pytest's handler would print a traceback.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def die_while_sending() -> None:
    """End, as for lack of memory, when a part of the result is written."""
    gc.unfreeze()  # frozen objects are not listed
    connections = [one for one in gc.get_objects() if type(one) is Connection]
    # The latest one is that of this child.
    sender = max(
        (one for one in connections if not one.closed and one.writable),
        key=Connection.fileno,
    )
    os.write(sender.fileno(), struct.pack("!i", 100) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (crash, "ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
        (lambda: os._exit(3), "ended with exit code 3"),
        (die_while_sending, "ended by SIGKILL"),
    ],
)
def test_death(end: Callable[[], None], message: str) -> None:
    """A child that dies without a result is reported with its signal or exit code."""
    with pytest.raises(ChildProcessError, match=message):
        run_in_child(20, lambda _: end())


ORPHAN = """
import ctypes, os, signal
from tracedstore.tools.attach.child_process import run_in_child

def work(heartbeat):
    os.kill(os.getppid(), signal.SIGKILL)
    ctypes.PyDLL(None).sleep(100)

run_in_child(0.3, work)
"""


def test_orphan() -> None:
    """A child whose parent was killed ends itself."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        # The pipe ends when neither process has it open.
        assert parent.stdout.read() == b""

    assert parent.returncode == -signal.SIGKILL


def test_garbage_of_the_parent() -> None:
    """The child collects its own garbage, and runs no destructor of the parent's."""
    collected: list[str] = []

    class Cycle:
        def __init__(self, name: str) -> None:
            self.name = name
            self.itself = self

        def __del__(self) -> None:
            collected.append(self.name)

    def work(_: Heartbeat) -> list[str]:
        Cycle("child")
        gc.collect()
        return collected

    gc.disable()
    try:
        Cycle("parent")
        in_child = run_in_child(30.0, work)
    finally:
        gc.enable()
    gc.collect()

    assert in_child == ["child"]
    assert collected == ["parent"]
