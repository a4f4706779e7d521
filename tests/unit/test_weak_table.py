"""Weak tables are read while other threads write to them, and run no callbacks."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

import tracedstore
from tracedstore.auto import replacements
from tracedstore.common.weak_table import WeakTable
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import Member

_ENTRIES = 300
_WRITES = 3000


class _Key:
    """An object that can be referred to weakly."""


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def read_during(write: Callable[[int], object], read: Callable[[], object]) -> None:
    """Read again and again until another thread has written all it has to."""
    for number in range(_ENTRIES):
        write(number)
    writer = threading.Thread(
        target=lambda: [write(number) for number in range(_ENTRIES, _WRITES)]
    )
    writer.start()
    try:
        while writer.is_alive():
            read()
    finally:
        writer.join()


def test_items() -> None:
    """Entries that live are returned, and those that are added meanwhile may be."""
    table: WeakTable[int] = WeakTable()
    kept: list[_Key] = []

    def write(number: int) -> None:
        kept.append(_Key())
        table.set(kept[-1], number)
        table.set(_Key(), number)

    read_during(write, table.items)

    assert sorted(number for _, number in table.items()) == [*range(_WRITES)]


def test_address_that_is_used_again() -> None:
    """The value of a dead key is not that of another key at its address."""
    table: WeakTable[str] = WeakTable()
    key = _Key()
    table.set(key, "first")
    address = id(key)
    del key
    others: list[_Key] = []
    while not others or id(others[-1]) != address:
        others.append(_Key())

    assert others[-1] not in table
    assert table.get(others[-1]) is None
    assert table.setdefault(others[-1], "second") == "second"
    assert len(table) == 1


def test_agents() -> None:
    """A rendezvous ends while the stall watch reads the agents."""
    kept: list[Any] = []
    own = Member(rank=0, world_size=1, host_of=str)

    def write(_number: int) -> None:
        kept.append(HashStore())
        rank_registry.record_agent(kept[-1], own)

    read_during(write, rank_registry.recorded_agents)


@pytest.mark.parametrize(
    "read",
    [
        rank_registry.registered_stores,
        partial(rank_registry.set_metrics_address, "http://127.0.0.1:1/metrics"),
    ],
)
def test_registered_stores(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank registers in a new store while those that exist are read."""
    monkeypatch.setattr(rank_registry, "run_with_timeout", lambda *_arguments: None)
    kept: list[Any] = []

    def write(_number: int) -> None:
        kept.append(HashStore())
        rank_registry.register(kept[-1], 0, 1)

    read_during(write, read)


@pytest.mark.parametrize("of_threads", [False, True])
def test_ranks_of_a_store(of_threads: bool) -> None:
    """Ranks that are threads register in one store while its ranks are read."""
    store = HashStore()

    def read() -> None:
        if of_threads:
            rank_registry.rank_of_thread(store, 0)
        else:
            rank_registry.registered_stores()

    read_during(lambda rank: rank_registry.register(store, rank, _WRITES), read)


def test_stores_of_the_patches() -> None:
    """A thread wraps a store while another one looks for a wrapper."""
    tracedstore.configure(core="python", log_format="off")
    kept: list[Any] = []
    other = HashStore()

    def write(_number: int) -> None:
        kept.append(tracedstore.wrap(HashStore()))
        replacements.own(kept[-1])

    read_during(write, lambda: replacements.wrapper_of(other))
