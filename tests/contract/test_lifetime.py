"""A wrapper stays alive while C++ may call it, and can be freed once it is closed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from contract.harness import Make
from support.stores import KINDS
from tracedstore import TracedStore, wrap
from tracedstore.testing import FlakyStore

KIND_NAMES = sorted(KINDS)


def is_freed(reference: "weakref.ref[Any]") -> bool:
    """Return whether the object of a weak reference has been freed."""
    gc.collect()
    return reference() is None


class TestKeptAlive:
    """torch's C++ keeps no Python object alive, so the wrapper keeps itself alive."""

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

    def test_not_before_closed(self) -> None:
        """A wrapper that is not closed stays alive: C++ may still call it."""
        reference = weakref.ref(wrap(HashStore()))

        assert not is_freed(reference)

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
