"""Daemon threads begin within a bound."""

import subprocess
import sys
import threading
import time

import pytest

from tracedstore.common import threads
from tracedstore.common.threads import DaemonThread


def test_runs_target() -> None:
    """The thread calls its target with the arguments, and does not keep the process."""
    results: list[str] = []
    thread = DaemonThread(results.append, "called", name="tracedstore-test")
    thread.start()
    thread.join(60)

    assert results == ["called"]
    assert thread.daemon
    assert thread.name == "tracedstore-test"


def test_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread on a busy machine, which takes more than a second to begin, is used."""
    bootstrap = DaemonThread._bootstrap  # type: ignore[attr-defined]

    def begin(thread: DaemonThread) -> None:
        time.sleep(1.5)  # what the machine takes
        bootstrap(thread)

    monkeypatch.setattr(DaemonThread, "_bootstrap", begin)
    called = threading.Event()

    DaemonThread(called.set).start()

    assert called.wait(60)


def test_join_while_another_thread_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``join`` waits for a thread that has not begun yet."""
    bootstrap = DaemonThread._bootstrap  # type: ignore[attr-defined]
    joining, results = threading.Event(), list[str]()

    def begin(thread: DaemonThread) -> None:
        joining.wait(60)
        bootstrap(thread)

    monkeypatch.setattr(DaemonThread, "_bootstrap", begin)
    monkeypatch.setattr(threads, "_START_TIMEOUT", 10.0)
    thread = DaemonThread(results.append, "called")
    starting = threading.Thread(target=thread.start)
    starting.start()
    threading.Timer(0.1, joining.set).start()
    thread.join(60)
    starting.join(60)

    assert results == ["called"]


def test_join_keeps_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """``join`` of a thread that does not begin waits no longer than its timeout."""
    monkeypatch.setattr(threads, "_START_TIMEOUT", 600.0)
    joined = threading.Event()

    def join() -> None:
        DaemonThread(print).join(0.1)
        joined.set()

    threading.Thread(target=join, daemon=True).start()

    assert joined.wait(60)


class TestNoBegin:
    """A thread that does not begin, as in a process that has no memory left."""

    @pytest.fixture(autouse=True)
    def short_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wait a tenth of a second."""
        monkeypatch.setattr(threads, "_START_TIMEOUT", 0.1)
        monkeypatch.setattr(DaemonThread, "_paused_until", 0.0)

    def test_start_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``start`` returns, although the thread ended before it reported its begin."""
        monkeypatch.setattr(DaemonThread, "_bootstrap", lambda _thread: None)

        with pytest.raises(RuntimeError, match=r"has not begun after 0\.1 s"):
            DaemonThread(print).start()

    def test_join(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``join`` returns."""
        monkeypatch.setattr(DaemonThread, "_bootstrap", lambda _thread: None)
        thread = DaemonThread(print)
        with pytest.raises(RuntimeError):
            thread.start()

        thread.join()

    def test_next_start_raises_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next thread is not tried for a while."""
        monkeypatch.setattr(DaemonThread, "_bootstrap", lambda _thread: None)
        with pytest.raises(RuntimeError):
            DaemonThread(print).start()

        with pytest.raises(RuntimeError, match="a moment ago"):
            DaemonThread(print).start()

    def test_begins_too_late(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thread that begins after ``start`` has raised does not call its target."""
        bootstrap = DaemonThread._bootstrap  # type: ignore[attr-defined]
        raised, ended = threading.Event(), threading.Event()

        def begin_late(thread: DaemonThread) -> None:
            raised.wait(60)
            bootstrap(thread)
            ended.set()

        monkeypatch.setattr(DaemonThread, "_bootstrap", begin_late)
        called: list[str] = []

        with pytest.raises(RuntimeError, match="has not begun"):
            DaemonThread(called.append, "called").start()
        raised.set()

        assert ended.wait(240)
        assert called == []


def test_stopped_process_loses_no_time() -> None:
    """A process that is stopped while a thread works gets most of its time after it."""
    script = """
import os, signal, subprocess, time
from tracedstore.common.threads import run_with_timeout

def work():
    # Continues this process after the second that it has.
    subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
    began = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    while time.monotonic() < began + 1:  # the signal stops any thread, at any time
        time.sleep(0.01)
    time.sleep(0.3)
    return "finished"

print(run_with_timeout(1, work))
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert run.stdout == "finished\n", run.stderr
