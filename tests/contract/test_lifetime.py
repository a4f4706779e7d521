"""A wrapper stays alive while C++ may call it, and is freed when it is not used.

One of the Python base is freed only after it is closed.
"""

import gc
import socket
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore

import tracedstore
from contract.harness import Make
from contract.scenarios import MINUTE
from integration.harness import in_background, operation_count, wait_until
from support.stores import KINDS, client_of
from support.waits import all_wait_as_ranks
from tracedstore import TracedStore, wrap
from tracedstore.coordination import rank_registry
from tracedstore.coordination.store_access import bare_store
from tracedstore.diagnosis.observe.blocked_record import read_blocked
from tracedstore.recording.recorder import RECORDER
from tracedstore.testing import FlakyStore

KIND_NAMES = sorted(KINDS)


def is_freed(reference: "weakref.ref[Any]") -> bool:
    """Return whether the object of a weak reference has been freed."""
    gc.collect()
    return reference() is None


class TestKeptAlive:
    """torch's C++ keeps no Python object alive; a wrapper works without one."""

    def test_without_python_reference(self, make: Make) -> None:
        """A PrefixStore keeps working without a Python reference to the wrapper."""
        above = PrefixStore("p", wrap(make()))
        gc.collect()

        above.set("k", "v")

        assert above.get("k") == b"v"

    @pytest.mark.parametrize("kind", KIND_NAMES, indirect=True)
    @pytest.mark.parametrize("generations", [1, 2])
    def test_clone_made_by_cpp(self, make: Make, generations: int) -> None:
        """A clone made by C++, which Python never referenced, stays alive too."""
        above: Any = PrefixStore("p", wrap(make()))
        above.set("k", "v")
        for _ in range(generations):
            above = above.clone()
        gc.collect()

        assert above.get("k") == b"v"

    def test_inner_store(self) -> None:
        """The wrapper keeps a Python store alive that only it references."""
        above = PrefixStore("p", wrap(FlakyStore()))
        gc.collect()

        above.set("k", "v")

        assert above.get("k") == b"v"


def unused() -> TracedStore:
    """Return a wrapper without any call."""
    return wrap(FlakyStore())


def used_and_failed() -> TracedStore:
    """Return a wrapper that raised an exception, whose traceback holds frames."""
    flaky = FlakyStore()
    flaky.fail("get", ConnectionError("connection lost"))
    store = wrap(flaky)
    store.set("k", "v")
    with pytest.raises(ConnectionError):
        store.get("k")
    return store


def used_by_cpp() -> TracedStore:
    """Return a wrapper that a PrefixStore has called."""
    store = wrap(FlakyStore())
    PrefixStore("p", store).set("k", "v")
    return store


def wrapped_above_and_below() -> TracedStore:
    """Return the wrapper of a PrefixStore over another wrapper."""
    with wrap(FlakyStore()) as below:
        return wrap(PrefixStore("p", below))


class TestFreed:
    """A closed wrapper is freed like any other object."""

    @pytest.mark.parametrize(
        "make_store",
        [unused, used_and_failed, used_by_cpp, wrapped_above_and_below],
    )
    def test_when_closed_and_dropped(
        self, make_store: Callable[[], TracedStore]
    ) -> None:
        """Nothing references a closed wrapper or its inner store after del."""
        store: Any = make_store()
        references = [weakref.ref(store), weakref.ref(store._traced.inner)]

        store.close()
        del store

        assert [is_freed(reference) for reference in references] == [True, True]

    def test_after_with(self) -> None:
        """Leaving a with block closes the wrapper."""
        with wrap(FlakyStore()) as store:
            store.set("k", "v")
        reference = weakref.ref(store)

        del store

        assert is_freed(reference)

    def test_not_before_closed(self, core: str) -> None:
        """A wrapper with methods in Python stays alive: C++ may still call it."""
        reference = weakref.ref(wrap(HashStore())._traced)

        assert is_freed(reference) == (core == "native")

    def test_second_close_does_nothing(self) -> None:
        """A second close() is allowed, and the store still works."""
        store = wrap(HashStore())

        store.close()
        store.close()
        store.set("k", "v")

        assert store.get("k") == b"v"

    @pytest.mark.parametrize("kind", ["tcp", "file"], indirect=True)
    def test_clones_with_their_original(self, make: Make) -> None:
        """Closing a store releases its clones and the clones of these."""
        store = wrap(make())
        clone = store.clone()
        grandchild = clone.clone()
        by_cpp: Any = PrefixStore("p", store)
        by_cpp = by_cpp.clone()
        clones = [clone, grandchild, by_cpp.underlying_store]
        references = [weakref.ref(each) for each in clones]

        store.close()
        del clone, grandchild, by_cpp, clones

        assert [is_freed(reference) for reference in references] == [True] * 3

    def test_clone_is_not_freed_while_referenced(self) -> None:
        """A clone with a Python reference works after its original is closed."""
        store = wrap(PrefixStore("p", HashStore()))
        clone = store.clone()
        above = PrefixStore("q", clone)

        store.close()
        del store
        gc.collect()
        above.set("k", "v")

        assert clone.get("q/k") == b"v"


@pytest.mark.parametrize("core", ["native"], indirect=True)
class TestHeldByCpp:
    """A native store lives exactly as long as Python or C++ refers to it."""

    @pytest.mark.parametrize("kind", ["tcp", "tcp-legacy"])
    @pytest.mark.parametrize("through", [wrap, lambda s: PrefixStore("p", wrap(s))])
    def test_port_is_free_when_dropped(
        self, kind: str, through: Any, tmp_path: Path
    ) -> None:
        """The server ends with the last reference, without close()."""
        store: Any = through(KINDS[kind](tmp_path))
        port = bare_store(store).port
        store.set("k", "v")

        del store

        with socket.create_server(("127.0.0.1", port)) as taken:
            assert taken.getsockname()[1] == port

    def test_inner_store_stays_the_same(self) -> None:
        """Its text does not change while Python refers to the traced store."""
        store: Any = wrap(HashStore())
        kept = [repr(store), HashStore()]

        assert repr(store) == kept[0]

    def test_reader_of_a_call_does_not_keep_it(self, tmp_path: Path) -> None:
        """What the telemetry still has of a call in flight keeps no server."""
        store: Any = wrap(KINDS["tcp"](tmp_path))
        port = store.port
        with client_of(store) as client:
            waiting = in_background(partial(store.wait, ["go"], MINUTE))
            (call,) = wait_until(RECORDER.counters.calls)
            client.set("go", "")
            waiting.result(60)
        state = call.state

        del store, waiting

        assert state.inner is None
        assert state.wrapper() is None
        socket.create_server(("127.0.0.1", port)).close()

    def test_goes_on(self, registry: CollectorRegistry) -> None:
        """Calls, counts, calls in flight and the registration of a rank."""
        tracedstore.configure(registry=registry, log_format="off")
        above: Any = PrefixStore("p", wrap(HashStore()))
        rank_registry.register(above.underlying_store, 0, 2)
        gc.collect()

        waiting = in_background(partial(above.wait, ["go"], MINUTE))
        (shown,) = wait_until(tracedstore.in_flight)
        ((handle, ranks),) = rank_registry.registrations()
        above.set("go", "")
        waiting.result(60)
        tracedstore.barrier(above.underlying_store, 1, "b", 5, rank=0)

        assert shown.key == "p/go"
        assert (list(ranks), handle.inner.get("p/go")) == ([0], b"")
        assert operation_count(registry, "hash_store", "wait") == 1
        again = above.underlying_store
        assert isinstance(again, TracedStore)
        assert repr(again).startswith("TracedStore(<")
        with again as same:
            assert same.get("p/go") == b""

        del above, again, same, handle, waiting

        # The diagnosis refers to a store while it reads questions from it.
        wait_until(lambda: rank_registry.registrations() == [])

    @pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
    def test_stall_is_diagnosed(
        self,
        kind: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        events: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """A wait of C++ is reported with the rank that is missing, and withdrawn."""
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        all_wait_as_ranks(monkeypatch)
        tracedstore.configure(stall_after=0.4, log_format="json")
        above: Any = PrefixStore("p", wrap(KINDS[kind](tmp_path)))
        other = above.clone()
        gc.collect()

        # A key of its own: which keys this process has written is not forgotten.
        waiting = in_background(lambda: above.wait([kind], MINUTE))
        (stall,) = wait_until(
            lambda: [e for e in events() if e["event"] == "job.stalled"]
        )
        other.set(kind, "")
        waiting.result(60)

        assert (stall["phase"], stall["awaited_ranks"]) == (f"key p/{kind}", [1])
        wait_until(lambda: read_blocked(bare_store(above), 2) == {})
