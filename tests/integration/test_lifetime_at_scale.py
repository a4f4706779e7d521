"""Stores and threads that come and go by the thousand leave nothing behind."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from integration.harness import in_threads, operation_count, results, wait_until
from support.stores import tcp
from tracedstore import TracedStore, wrap
from tracedstore import store as store_module
from tracedstore.core.recorder import RECORDER

_PAGE = os.sysconf("SC_PAGE_SIZE")
MEGABYTE = 1_000_000


def memory() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def traced_stores() -> int:
    """How many there are, used or not."""
    gc.collect()
    return sum(type(each) is TracedStore for each in gc.get_objects())


def use_and_close(stores: int) -> None:
    """Wrap, use and close as many; each would hold 8 kB if it were not freed."""
    for _ in range(stores):
        with wrap(HashStore()) as store:
            store.set("k", "x" * 8192)


class TestClosedStores:
    """What was closed is gone."""

    def test_memory(self) -> None:
        """10,000 stores leave the memory as it was, and no object."""
        use_and_close(1_000)
        objects, before = traced_stores(), memory()

        use_and_close(10_000)

        assert traced_stores() == objects
        assert store_module._kept_alive == {}
        assert memory() - before < 20 * MEGABYTE

    def test_memory_would_tell(self) -> None:
        """Stores that are not closed do show in all of these."""
        objects, before = traced_stores(), memory()

        for _ in range(10_000):
            wrap(HashStore()).set("k", "x" * 8192)

        assert traced_stores() == objects + 10_000
        assert len(store_module._kept_alive) == 10_000
        assert memory() - before > 20 * MEGABYTE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dist.TCPStore]:
    """The server of a TCPStore in this process: both ends of a socket are seen."""
    store = tcp(tmp_path)
    store.set("k", "v")
    yield store
    del store
    gc.collect()


def client(server: dist.TCPStore) -> dist.TCPStore:
    """A connection of its own."""
    return dist.TCPStore("127.0.0.1", server.port, None, is_master=False)


class TestSockets:
    """A closed store gives its socket back, and so do its clones."""

    def test_clients(self, server: dist.TCPStore) -> None:
        """500 clients, one after the other, leave as many files open as before."""
        before = open_files()

        for _ in range(500):
            with wrap(client(server)) as store:
                assert store.get("k") == b"v"
        assert open_files() > before  # the last one still has a name
        del store

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert store_module._kept_alive == {}

    def test_clones_with_their_origin(self, server: dist.TCPStore) -> None:
        """A store's clones go when it is closed, though nobody closed them."""
        before = open_files()

        for _ in range(10):
            with wrap(client(server)) as store:
                for _ in range(20):
                    assert store.clone().get("k") == b"v"
                assert open_files() > before + 20
        del store

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert store_module._kept_alive == {}

    def test_clones_by_themselves(self, server: dist.TCPStore) -> None:
        """A clone that is closed goes, though its origin stays open."""
        store = wrap(client(server))
        before = open_files()

        for _ in range(300):
            with store.clone() as clone:
                assert clone.get("k") == b"v"
        gone = weakref.ref(clone)
        del clone

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert gone() is None
        assert len(store._traced.clones) == 0
        assert list(store_module._kept_alive.values()) == [store]


class TestThreads:
    """A thread's counters are used again by those that come after it."""

    def test_short_lived(self, registry: CollectorRegistry) -> None:
        """2,000 threads with a call each have few counters, and all their calls."""
        tracedstore.configure(registry=registry)
        store = wrap(HashStore())

        for _ in range(100):
            results(in_threads(10, lambda number: store.add(f"key/{number}", 1)))
        for _ in range(1_000):
            thread = threading.Thread(target=store.add, args=("key", 1))
            thread.start()
            thread.join()

        assert operation_count(registry, "hash_store", "add") == 2_000
        assert len(RECORDER.counters) < 200
