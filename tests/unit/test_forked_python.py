"""Processes that an agent of torchrun forks are its own, as interpreters are."""

import os
import signal
from pathlib import Path

import pytest
from forked_python import OwnServer

from integration.harness import forked


def start_and_wait(code: str) -> tuple[str, int, bool]:
    """Start code; return its output, its exit status, and whose child it said it is."""
    server = OwnServer.forked()
    reading, writing = os.pipe()
    with Path(os.devnull).open("r+b") as nothing:
        streams = (nothing.fileno(), writing, nothing.fileno())
        process = server.start(["-u", "-c", code], os.environ, streams)
    os.close(writing)
    process.poll()  # right away: it is a child already
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    own = text.startswith(f"{os.getpid()} {process.pid}")
    return text, process.wait(240), own


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('why')", 1),
        ("1 // 0", 1),
        ("pass", 0),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os._exit(7)", 7),
    ],
)
def test_exit_status_and_parent(end: str, status: int) -> None:
    """The parent is the process that asked for it, and gets its exit status."""
    code = f"import os, sys\nprint(os.getppid(), os.getpid())\n{end}"

    text, ended, own = forked(lambda: start_and_wait(code))

    assert (ended, own) == (status, True), text


def test_exit_hooks_and_threads() -> None:
    """Exit hooks run, after threads have been joined."""
    code = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'hook')\n"
        "ended = threading.Event()\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    print('thread')\n"
        "threading.Thread(target=work).start()\n"
    )

    text, status, _ = forked(lambda: start_and_wait(code))

    assert (text.split(), status) == (["thread", "hook"], 0)
