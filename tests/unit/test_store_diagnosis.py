"""Stores of one process that hang or refuse, next to others of the same process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore, TCPStore

import tracedstore
from integration.harness import in_background, wait_until
from support.native import on_both_bases
from support.waits import all_wait_as_ranks
from tracedstore.common import threads as own_threads
from tracedstore.diagnosis import service, store_diagnosis

Events = Callable[[], list[dict[str, Any]]]

pytestmark = on_both_bases

MINUTE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def rank_0_of_2(monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    """This process is rank 0 of 2; rank 1 was never started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    all_wait_as_ranks(monkeypatch)
    tracedstore.configure(stall_after=0.4, log_format="json")


def stalls(events: Events) -> list[dict[str, Any]]:
    """Return the stalls that were reported."""
    return [event for event in events() if event["event"] == "job.stalled"]


class HangingStore(HashStore):
    """A store whose checks hang."""

    def __init__(self) -> None:
        super().__init__()
        self.checked, self.released = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        """Hang until the end of the test."""
        self.checked.set()
        self.released.wait()
        return bool(super().check(keys))


class RefusingStore(HashStore):
    """A store whose server cannot be reached by a check."""

    def check(self, keys: list[str]) -> bool:
        """Fail."""
        raise DistNetworkError(f"refused: {keys}")


@contextmanager
def waiting_in_two(
    hanging: HangingStore, other: HashStore
) -> Iterator[tuple[Any, Any]]:
    """Wait in a store that hangs, and then in another one too."""
    first, second = tracedstore.wrap(hanging), tracedstore.wrap(other)
    waits = [in_background(lambda: first.wait(["go"], MINUTE))]
    assert hanging.checked.wait(60)
    waits.append(in_background(lambda: second.wait(["other"], MINUTE)))
    yield first, second
    for store, key in ((hanging, "go"), (other, "other")):
        store.set(key, "")
    hanging.released.set()
    for wait in waits:
        wait.result(60)


def test_store_that_hangs_does_not_hold_up_others(events: Events) -> None:
    """The stall in the other store is reported."""
    with waiting_in_two(HangingStore(), HashStore()):
        (stall,) = wait_until(lambda: stalls(events))

    assert (stall["key"], stall["awaited_ranks"]) == ("other", [1])


def test_timeout_next_to_a_store_that_hangs_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before calls count as stalled, so that the watcher has not looked."""
    tracedstore.configure(stall_after=600, log_format="off")
    # A busy machine gets the time that it needs.
    monkeypatch.setattr(service, "_EXPLAIN_BOUNDS", (60.0, 60.0))
    monkeypatch.setattr(service, "_HAND_OVER_AFTER", 0.2)
    hanging = HangingStore()
    first, second = tracedstore.wrap(hanging), tracedstore.wrap(HashStore())
    wait = in_background(lambda: first.wait(["go"], timedelta(seconds=2)))
    assert hanging.checked.wait(60)

    with pytest.raises(DistStoreError) as raised:
        second.wait(["other"], timedelta(seconds=1.2))

    hanging.released.set()
    assert isinstance(wait.exception(120), DistStoreError)
    (note,) = raised.value.__notes__
    assert "waiting in key other for rank 1" in note


def test_short_call_is_explained_by_the_answers_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes may take far longer to answer than the call lasts; none does here."""
    tracedstore.configure(stall_after=600, log_format="off")
    monkeypatch.setattr(service, "_EXPLAIN_BOUNDS", (60.0, 60.0))
    monkeypatch.setattr(store_diagnosis, "_ANSWER_TIMEOUT", 600.0)
    store = tracedstore.wrap(HashStore())

    with pytest.raises(DistStoreError) as raised:
        store.wait(["go"], timedelta(seconds=4))

    (note,) = raised.value.__notes__
    assert "waiting in key go for rank 1" in note


def test_thread_that_hung_ends(events: Events) -> None:
    """When its store responds: one thread goes on, and none is kept for the end."""

    def threads() -> list[threading.Thread]:
        found = threading.enumerate()
        return [one for one in found if one.name == "tracedstore-diagnosis"]

    with waiting_in_two(HangingStore(), HashStore()):
        wait_until(lambda: stalls(events))
        # A busy machine may take so long for a step that one more is started.
        assert len(threads()) >= 2

    wait_until(lambda: len(threads()) == 1)
    assert not {*threads()} & own_threads._threads


def test_store_that_refuses_does_not_hold_up_others(events: Events) -> None:
    """In each round, the steps in other stores are taken all the same."""
    refusing, other = RefusingStore(), HashStore()
    stores = [tracedstore.wrap(refusing), tracedstore.wrap(other)]
    waits = [in_background(lambda: stores[0].wait(["go"], MINUTE))]
    time.sleep(0.1)  # examined first
    waits.append(in_background(lambda: stores[1].wait(["go"], MINUTE)))

    (stall,) = wait_until(lambda: stalls(events))

    assert stall["awaited_ranks"] == [1]
    for store in (refusing, other):
        store.set("go", "")
    for wait in waits:
        wait.result(60)


SERVER = """
from torch.distributed import TCPStore
server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(server.port, flush=True)
input()
"""


def test_server_that_responds_is_not_blamed(events: Events) -> None:
    """One of two servers is stopped. The stall in the other one is that of a rank."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    stopped_port = int(process.stdout.readline())
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [
        tracedstore.wrap(TCPStore("127.0.0.1", port, None, False))
        for port in (stopped_port, server.port)
    ]
    for store in stores:
        store.set("ready", "")
    os.kill(process.pid, signal.SIGSTOP)
    try:
        waits = [
            in_background(lambda: stores[0].wait(["go"], MINUTE)),
            in_background(lambda: stores[1].wait(["other"], MINUTE)),
        ]

        (stall, *_) = wait_until(
            lambda: [one for one in stalls(events) if one["key"] == "other"]
        )
        found = stalls(events)
    finally:
        os.kill(process.pid, signal.SIGCONT)
        for client, key in ((stores[0].clone(), "go"), (server, "other")):
            client.set(key, "")
        for wait in waits:
            wait.result(60)
        process.communicate("\n", 60)

    assert (stall["cause"], stall["awaited_ranks"]) == ("not_started", [1])
    assert str(server.port) not in json.dumps(
        [one for one in found if one["cause"].startswith("server")]
    )
