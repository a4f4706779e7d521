"""Doing something in a process of its own, which ends whatever it hangs in."""

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

from tracedstore.attach.child_process import ChildTimeoutError, Mark, run_in_child
from tracedstore.core.errors import CommandError

# Keeps the GIL while it sleeps, as torch does while it lists keys.
FREEZE = ctypes.PyDLL(None).sleep


@pytest.fixture(autouse=True)
def _nobody_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child is there, dead or alive, when a test has ended."""
    made: list[int] = []
    fork = os.fork

    def forked() -> int:
        made.append(fork())
        return made[-1]

    monkeypatch.setattr(os, "fork", forked)
    yield
    for child in made:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_what_it_returned() -> None:
    """Comes back, whole, from another process."""
    found, process = run_in_child(20, lambda _: (b"x" * (1 << 22), os.getpid()))

    assert len(found) == 1 << 22
    assert process != os.getpid()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (CommandError("no store"), "no store"),
        (ValueError("first\nsecond"), "ValueError: first"),
    ],
)
def test_what_it_raised(error: Exception, said: str) -> None:
    """Is one sentence here."""

    def work(_: Mark) -> None:
        raise error

    with pytest.raises(CommandError) as raised:
        run_in_child(20, work)
    assert str(raised.value) == said


@pytest.mark.parametrize("marked", [True, False])
def test_what_hangs(marked: bool) -> None:
    """Is ended, even where it keeps the GIL; and how far it came is known."""

    def work(mark: Mark) -> None:
        if marked:
            mark()
        FREEZE(100)

    began = time.monotonic()
    with pytest.raises(ChildTimeoutError) as late:
        run_in_child(1.0, work, 1.0)

    assert late.value.marked == marked
    assert time.monotonic() - began < 15


def test_a_mark_gives_more_time() -> None:
    """Who is under way may go on."""

    def work(mark: Mark) -> str:
        mark()
        time.sleep(1.3)
        return "done"

    assert run_in_child(1.0, work, 20) == "done"


def crash() -> None:
    """End as C++ does that reads where it must not."""
    # pytest would tell where that was.
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def die_while_speaking() -> None:
    """End, for want of memory say, when a part of the answer is written."""
    there = [one for one in gc.get_objects() if type(one) is Connection]
    # The one that was made last.
    writing = max(
        (one for one in there if not one.closed and one.writable),
        key=Connection.fileno,
    )
    os.write(writing.fileno(), struct.pack("!i", 100) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (crash, "ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
        (lambda: os._exit(3), "ended with 3"),
        (die_while_speaking, "ended by SIGKILL"),
    ],
)
def test_what_dies(end: Callable[[], None], said: str) -> None:
    """Says nothing itself, so that is said."""
    with pytest.raises(ChildProcessError, match=said):
        run_in_child(20, lambda _: end())


ORPHAN = """
import ctypes, os, signal
from tracedstore.attach.child_process import run_in_child

def work(mark):
    os.kill(os.getppid(), signal.SIGKILL)
    ctypes.PyDLL(None).sleep(100)

run_in_child(0.3, work)
"""


def test_an_orphan() -> None:
    """Ends by itself when nobody is there any more to end it."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        # Which has an end when nobody has it open any more.
        assert parent.stdout.read() == b""

    assert parent.returncode == -signal.SIGKILL
