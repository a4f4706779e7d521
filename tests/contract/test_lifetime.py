"""How long a wrapper lives: as long as C++ may call it, and no longer than closed."""

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

CLONING_KINDS = sorted(KINDS)


def is_gone(reference: "weakref.ref[Any]") -> bool:
    """Tell whether nothing refers to it any more."""
    gc.collect()
    return reference() is None


class TestKeptAlive:
    """torch's C++ keeps no Python object alive, so the wrapper does it itself."""

    def test_without_python_reference(self, make: Make) -> None:
        """A PrefixStore goes on working when nobody in Python has the wrapper."""
        above = PrefixStore("p", wrap(make()))
        gc.collect()

        above.set("k", "v")

        assert above.get("k") == b"v"

    @pytest.mark.parametrize("kind", CLONING_KINDS, indirect=True)
    @pytest.mark.parametrize("generations", [1, 2])
    def test_clone_made_by_cpp(self, make: Make, generations: int) -> None:
        """So does one that C++ cloned, which Python never had."""
        above: Any = PrefixStore("p", wrap(make()))
        above.set("k", "v")
        for _ in range(generations):
            above = above.clone()
        gc.collect()

        assert above.get("k") == b"v"

    def test_inner_store(self) -> None:
        """The wrapper keeps a store in Python alive that only it refers to."""
        above = PrefixStore("p", wrap(FlakyStore()))
        gc.collect()

        above.set("k", "v")

        assert above.get("k") == b"v"


def just_wrapped() -> TracedStore:
    """Never used."""
    return wrap(FlakyStore())


def used_and_failed() -> TracedStore:
    """With an exception behind it, whose traceback holds frames."""
    flaky = FlakyStore()
    flaky.fail("get", ConnectionError("gone"))
    store = wrap(flaky)
    store.set("k", "v")
    with pytest.raises(ConnectionError):
        store.get("k")
    return store


def used_by_cpp() -> TracedStore:
    """Once below a PrefixStore."""
    store = wrap(FlakyStore())
    PrefixStore("p", store).set("k", "v")
    return store


def wrapped_above_and_below() -> TracedStore:
    """The wrapper of a PrefixStore over another wrapper."""
    with wrap(FlakyStore()) as below:
        return wrap(PrefixStore("p", below))


class TestFreed:
    """Once closed, a wrapper is an object like any other."""

    @pytest.mark.parametrize(
        "make_store",
        [just_wrapped, used_and_failed, used_by_cpp, wrapped_above_and_below],
    )
    def test_when_closed_and_dropped(
        self, make_store: Callable[[], TracedStore]
    ) -> None:
        """Nothing keeps a closed wrapper, nor its inner store, once dropped."""
        store: Any = make_store()
        references = [weakref.ref(store), weakref.ref(store._traced.inner)]

        store.close()
        del store

        assert [is_gone(reference) for reference in references] == [True, True]

    def test_after_with(self) -> None:
        """Leaving a with block closes."""
        with wrap(FlakyStore()) as store:
            store.set("k", "v")
        reference = weakref.ref(store)

        del store

        assert is_gone(reference)

    def test_not_before_closed(self) -> None:
        """Dropping alone frees nothing: C++ might still call it."""
        reference = weakref.ref(wrap(HashStore()))

        assert not is_gone(reference)

    def test_closing_twice_does_nothing(self) -> None:
        """A second close is allowed, and the store still works."""
        store = wrap(HashStore())

        store.close()
        store.close()
        store.set("k", "v")

        assert store.get("k") == b"v"

    @pytest.mark.parametrize("kind", ["tcp", "file"], indirect=True)
    def test_clones_with_their_origin(self, make: Make) -> None:
        """Closing a store lets go of its clones, and of theirs."""
        store = wrap(make())
        clone = store.clone()
        grandchild = clone.clone()
        by_cpp: Any = PrefixStore("p", store)
        by_cpp = by_cpp.clone()
        clones = [clone, grandchild, by_cpp.underlying_store]
        references = [weakref.ref(each) for each in clones]

        store.close()
        del clone, grandchild, by_cpp, clones

        assert [is_gone(reference) for reference in references] == [True] * 3

    def test_clone_is_not_gone_while_used(self) -> None:
        """What somebody in Python still refers to works after its origin's close."""
        store = wrap(PrefixStore("p", HashStore()))
        clone = store.clone()
        above = PrefixStore("q", clone)

        store.close()
        del store
        gc.collect()
        above.set("k", "v")

        assert clone.get("q/k") == b"v"
