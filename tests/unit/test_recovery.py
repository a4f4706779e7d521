"""What stopped because of a failure begins again: a failure may pass."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from integration.harness import operation_count
from support.native import on_both_bases
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis import service
from tracedstore.diagnosis.connection import connecting
from tracedstore.diagnosis.connection.addresses import ConnectTarget
from tracedstore.export import setup
from tracedstore.export.setup import StallWatch
from tracedstore.recording import recorder
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import NULL_TELEMETRY


class Clock:
    """Stands for the module `time`; it moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


@pytest.fixture
def watch() -> Iterator[StallWatch]:
    """A watch of calls, which is stopped."""
    stall_watch = StallWatch(NULL_TELEMETRY, 30.0, answers=False)
    yield stall_watch
    stall_watch.stop(5.0)


@on_both_bases
def test_recording_comes_back_after_a_minute(
    registry: CollectorRegistry,
    core: str,
    clock: Clock,
    watch: StallWatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watcher switches it on again; calls meanwhile are not counted."""
    tracedstore.configure(registry=registry, core=core, log_format="off")
    store = tracedstore.wrap(HashStore())
    monkeypatch.setattr(recorder, "time", clock)
    count = partial(operation_count, registry, "hash_store", "set")

    RECORDER.stop_recording(ValueError("recording failed"))
    clock.now += 59.0
    watch._report()
    store.set("key", "1")
    assert (RECORDER.on, count()) == (False, 0)
    clock.now += 1.0
    watch._report()
    store.set("key", "2")

    assert (RECORDER.on, count()) == (True, 1)


def test_refused_thread_is_started_by_a_later_call(
    clock: Clock, watch: StallWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the next call: each attempt costs one, and there may be thousands."""
    refused = [True]
    attempts = []

    class Thread(DaemonThread):
        def start(self) -> None:
            attempts.append(clock.now)
            if refused[0]:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(service, "DaemonThread", Thread)
    monkeypatch.setattr(setup, "time", clock)

    watch.start()
    running = [watch._diagnosis.is_running]
    refused[0] = False
    for seconds in (9.0, 1.0):
        clock.now += seconds
        watch.start()
        running.append(watch._diagnosis.is_running)

    assert running == [False, False, True]
    assert attempts == [1000.0, 1010.0]


def test_connecting_is_looked_at_after_a_thread_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step at a time, and the next one after a step that failed in any way."""
    started: list[Callable[[], Any]] = []

    def refuse(_work: Callable[[], Any]) -> None:
        raise RuntimeError("can't start new thread")

    target = ConnectTarget(host="127.0.0.1", port_text="1", rank=1, world_size=3)
    phase = connecting.ConnectingPhase(target, 600.0)
    monkeypatch.setattr(
        connecting, "connection_attempt", SimpleNamespace(connect_once=_fail)
    )
    phase._look_after = 0.0

    monkeypatch.setattr(connecting, "start_bounded_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        phase.report()
    monkeypatch.setattr(connecting, "start_bounded_thread", started.append)
    phase.report()
    phase.report()
    assert len(started) == 1
    started[0]()
    phase.report()

    assert len(started) == 2


def _fail(*_args: Any) -> None:
    raise OSError("no route")
