"""Threads that ask for the same keys again and again."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore, Store

import tracedstore
from integration.harness import in_background, wait_until
from tracedstore.diagnosis.observe.polls import POLLS, Poll


@pytest.fixture
def store() -> Any:
    """A traced store; every call is sampled."""
    tracedstore.configure(log_format="off", stall_after=3600)
    return tracedstore.wrap(HashStore())


def found() -> list[Poll]:
    """Look once."""
    return POLLS.look()


def work() -> None:
    """Use CPU time in another function."""
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        sum(range(1000))


def loops(
    store: Any, ended: threading.Event, step: Callable[[], object]
) -> Callable[[], None]:
    """Return a function that asks until the end of a test, with a step in between."""

    def run() -> None:
        while not store.check(["go", "there"]) and not ended.is_set():
            step()

    return run


def test_poll_is_found(store: Any) -> None:
    """A thread that asks and pauses; it ends when the thread does something else."""
    ended = threading.Event()

    def poll_for_ever() -> None:
        while not store.check(["go", "there"]) and not ended.is_set():
            ended.wait(0.06)

    polling = in_background(poll_for_ever)

    (poll,) = wait_until(found)
    ended.set()
    polling.result(60)

    assert poll.keys == ("go", "there")
    assert poll.store == store._traced.identity
    wait_until(lambda: not found())


class SlowStore(Store):
    """A store in Python whose requests take longer than the pauses between them."""

    def check(self, keys: list[str]) -> bool:
        """Take a while."""
        del keys
        self._respond()
        return False

    def _respond(self) -> None:
        time.sleep(0.06)


def test_poll_of_a_store_in_python_is_found() -> None:
    """The code of the store is part of the request."""
    tracedstore.configure(log_format="off", stall_after=3600)
    ended, store = threading.Event(), tracedstore.wrap(SlowStore())

    def poll_for_ever() -> None:
        while not store.check(["go", "there"]) and not ended.is_set():
            ended.wait(0.01)

    polling = in_background(poll_for_ever)

    (poll,) = wait_until(found)
    ended.set()
    polling.result(60)

    assert poll.keys == ("go", "there")


@pytest.mark.parametrize("step", ["works", "makes other calls"])
def test_thread_that_works_does_not_poll(store: Any, step: str) -> None:
    """It asks once in each step, whether to stop for example."""
    ended = threading.Event()
    asked = threading.Semaphore(0)

    def take_step() -> None:
        asked.release()
        if step == "works":
            work()
        else:
            time.sleep(0.06)
            store.add("steps", 1)
            time.sleep(0.06)

    asking = in_background(loops(store, ended, take_step))
    looks = []
    for _ in range(8):
        assert asked.acquire(timeout=60)
        looks.append(found())
    ended.set()
    asking.result(60)

    assert looks == [[]] * 8
