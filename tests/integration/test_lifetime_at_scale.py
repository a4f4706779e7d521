"""Thousands of stores and threads do not leak memory, sockets or counters."""

import ctypes
import gc
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
from support.native import on_both_bases
from support.stores import tcp
from tracedstore import store as store_module
from tracedstore import wrap
from tracedstore.recording.counters import StoreState
from tracedstore.recording.recorder import RECORDER

MEGABYTE = 1_000_000


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory() -> int:
    """Return the memory in bytes that malloc has given out.

    The resident memory shrinks whenever the kernel reclaims idle pages.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    used = mallinfo2()
    return int(used.uordblks + used.hblkhd)


def open_files() -> int:
    """Return the number of open files and sockets of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def traced_stores() -> int:
    """Return the number of traced stores: each has one state."""
    gc.collect()
    return sum(issubclass(type(item), StoreState) for item in gc.get_objects())


def use_and_close(stores: int) -> None:
    """Wrap, use and close stores; each holds 8 kB until it is freed."""
    for _ in range(stores):
        with wrap(HashStore()) as store:
            store.set("k", "x" * 8192)


class TestClosedStores:
    """Closed stores are freed."""

    def test_memory(self) -> None:
        """10,000 closed stores leak neither memory nor objects."""
        use_and_close(1_000)
        objects, before = traced_stores(), memory()

        use_and_close(10_000)

        assert traced_stores() == objects
        assert store_module._kept_alive == {}
        assert memory() - before < 20 * MEGABYTE

    def test_open_stores_are_measured(self) -> None:
        """Open stores are visible in each of these measurements."""
        objects, before = traced_stores(), memory()

        stores = [wrap(HashStore()) for _ in range(10_000)]
        for store in stores:
            store.set("k", "x" * 8192)

        assert traced_stores() == objects + 10_000
        assert memory() - before > 20 * MEGABYTE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[dist.TCPStore]:
    """A TCPStore server in this process, which has both ends of each socket."""
    store = tcp(tmp_path)
    store.set("k", "v")
    yield store
    del store
    gc.collect()


def client(server: dist.TCPStore) -> dist.TCPStore:
    """Return a new connection to the server."""
    return dist.TCPStore("127.0.0.1", server.port, None, is_master=False)


class TestSockets:
    """Closed stores and their clones close their sockets."""

    def test_clients(self, server: dist.TCPStore) -> None:
        """500 closed clients leave no open files."""
        before = open_files()

        for _ in range(500):
            with wrap(client(server)) as store:
                assert store.get("k") == b"v"
        assert open_files() > before  # the variable references the last one
        del store

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert store_module._kept_alive == {}

    @on_both_bases
    def test_clones_of_a_closed_store(self, server: dist.TCPStore, core: str) -> None:
        """A store's clones are freed when it is closed; native ones when unused."""
        before = open_files()

        for _ in range(10):
            with wrap(client(server)) as store:
                for _ in range(20):
                    assert store.clone().get("k") == b"v"
                assert (open_files() > before + 20) == (core == "python")
        del store

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert store_module._kept_alive == {}

    def test_closed_clones(self, server: dist.TCPStore) -> None:
        """A closed clone is freed while its store stays open."""
        store = wrap(client(server))
        before = open_files()

        for _ in range(300):
            with store.clone() as clone:
                assert clone.get("k") == b"v"
        weak_clone = weakref.ref(clone)
        del clone

        wait_until(lambda: abs(open_files() - before) <= 2)
        assert weak_clone() is None
        assert len(store._traced.clones) == 0
        assert store.get("k") == b"v"


class TestThreads:
    """Later threads reuse the counters of ended threads."""

    def test_short_lived(self, registry: CollectorRegistry) -> None:
        """2,000 threads with one call each need few counters, and all are counted."""
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
