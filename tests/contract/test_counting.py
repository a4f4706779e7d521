"""Nested wrappers count each call once."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore

import tracedstore
from contract.harness import Step, call
from support.metrics import exported_calls
from support.versions import needs_store_barrier
from tracedstore import wrap

CALLS = [
    call("set", "k", "v"),
    call("get", "present"),
    call("add", "n", 1),
    call("check", ["present"]),
    call("wait", ["present"]),
    call("compare_set", "k", "", "v"),
    call("delete_key", "present"),
    call("num_keys"),
    call("append", "k", "v"),
    call("multi_get", ["present"]),
    call("multi_set", ["k"], ["v"]),
    pytest.param(call("barrier", "b", 1), marks=needs_store_barrier),
    call("clone"),
]


def once(store: Any) -> Any:
    """Wrap the store below a PrefixStore."""
    return PrefixStore("a", wrap(store))


def twice(store: Any) -> Any:
    """Wrap below a PrefixStore and above it."""
    return wrap(PrefixStore("a", wrap(store)))


def twice_under_prefixes(store: Any) -> Any:
    """Wrap twice, with PrefixStores below and between the wrappers."""
    return wrap(PrefixStore("c", PrefixStore("b", wrap(PrefixStore("a", store)))))


def thrice(store: Any) -> Any:
    """Wrap below, between and above PrefixStores."""
    return wrap(PrefixStore("b", wrap(PrefixStore("a", wrap(store)))))


class TestCountedOnce:
    """Every call counts once, with the kind of the innermost store as its label."""

    @pytest.fixture(autouse=True)
    def _configured(self, registry: CollectorRegistry) -> None:
        tracedstore.configure(registry=registry, log_format="off")

    @staticmethod
    def counts(registry: CollectorRegistry) -> dict[tuple[str, str], int]:
        """Return the number of calls by store and operation, without zeros."""
        calls = exported_calls(registry.collect())
        return {
            (store, operation): number
            for (store, operation, _), number in calls.items()
        }

    @pytest.mark.parametrize("wrapped", [twice, twice_under_prefixes, thrice])
    @pytest.mark.parametrize("step", CALLS, ids=lambda step: step.__name__)
    def test_through_wrappers(
        self, registry: CollectorRegistry, wrapped: Callable[[Any], Any], step: Step
    ) -> None:
        """Only the outermost wrapper counts the call."""
        store = wrapped(HashStore())
        store.set("present", "v")
        before = self.counts(registry)

        step(store)

        counted = Counter(self.counts(registry))
        counted.subtract(before)
        assert +counted == {("hash_store", step.__name__): 1}

    @pytest.mark.parametrize("core", ["python"], indirect=True)
    def test_failure(self, registry: CollectorRegistry) -> None:
        """A failed call counts once."""
        store = twice(HashStore())

        with pytest.raises(TypeError):
            store.set("k", 1)

        assert self.counts(registry) == {("hash_store", "set"): 1}

    @pytest.mark.parametrize("core", ["native"], indirect=True)
    def test_rejected_arguments(self, registry: CollectorRegistry) -> None:
        """A call that torch rejects does not reach the store, and is not counted."""
        store = twice(HashStore())

        with pytest.raises(TypeError):
            store.set("k", 1)

        assert self.counts(registry) == {}

    def test_from_cpp(self, registry: CollectorRegistry) -> None:
        """A call that C++ makes on the wrapper counts once."""
        store = once(HashStore())

        store.set("k", "v")
        store.get("k")

        assert self.counts(registry) == {
            ("hash_store", "set"): 1,
            ("hash_store", "get"): 1,
        }

    def test_direct_call_of_lower_wrapper(self, registry: CollectorRegistry) -> None:
        """A direct call of the lower wrapper counts too."""
        below = wrap(HashStore())
        above = wrap(PrefixStore("a", below))

        above.set("k", "v")
        below.set("k", "v")

        assert self.counts(registry) == {("hash_store", "set"): 2}
