"""Wrappers above wrappers: a call is one call, however many see it."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore

import tracedstore
from contract.harness import Step, call
from tracedstore import wrap
from tracedstore.names import OPERATION_DURATION

CALLS = [
    call("set", "k", "v"),
    call("get", "there"),
    call("add", "n", 1),
    call("check", ["there"]),
    call("wait", ["there"]),
    call("compare_set", "k", "", "v"),
    call("delete_key", "there"),
    call("num_keys"),
    call("append", "k", "v"),
    call("multi_get", ["there"]),
    call("multi_set", ["k"], ["v"]),
    call("barrier", "b", 1),
    call("clone"),
]


def once(store: Any) -> Any:
    """Wrapped, and a PrefixStore above."""
    return PrefixStore("a", wrap(store))


def twice(store: Any) -> Any:
    """Below the PrefixStore and above it."""
    return wrap(PrefixStore("a", wrap(store)))


def twice_under_prefixes(store: Any) -> Any:
    """Likewise, with more PrefixStores everywhere."""
    return wrap(PrefixStore("c", PrefixStore("b", wrap(PrefixStore("a", store)))))


def thrice(store: Any) -> Any:
    """Below, between and above PrefixStores."""
    return wrap(PrefixStore("b", wrap(PrefixStore("a", wrap(store)))))


class TestCountedOnce:
    """Every call counts once, under the kind of store at the bottom."""

    @pytest.fixture(autouse=True)
    def _configured(self, registry: CollectorRegistry) -> None:
        tracedstore.configure(registry=registry, log_format="off")

    @staticmethod
    def counts(registry: CollectorRegistry) -> dict[tuple[str, str], int]:
        """Give the number of calls by store and operation, without the zeros."""
        return {
            (sample.labels["store"], sample.labels["operation"]): int(sample.value)
            for family in registry.collect()
            for sample in family.samples
            if sample.name == f"{OPERATION_DURATION.name}_count" and sample.value
        }

    @pytest.mark.parametrize("wrapped", [twice, twice_under_prefixes, thrice])
    @pytest.mark.parametrize("step", CALLS, ids=lambda step: step.__name__)
    def test_through_wrappers(
        self, registry: CollectorRegistry, wrapped: Callable[[Any], Any], step: Step
    ) -> None:
        """The outermost wrapper counts the call, those below it do not."""
        store = wrapped(HashStore())
        store.set("there", "v")
        before = self.counts(registry)

        step(store)

        counted = Counter(self.counts(registry))
        counted.subtract(before)
        assert +counted == {("hash_store", step.__name__): 1}

    def test_failure(self, registry: CollectorRegistry) -> None:
        """A call that fails counts once as well."""
        store = twice(HashStore())

        with pytest.raises(TypeError):
            store.set("k", 1)

        assert self.counts(registry) == {("hash_store", "set"): 1}

    def test_from_cpp(self, registry: CollectorRegistry) -> None:
        """A call that only C++ makes on the wrapper counts."""
        store = once(HashStore())

        store.set("k", "v")
        store.get("k")

        assert self.counts(registry) == {
            ("hash_store", "set"): 1,
            ("hash_store", "get"): 1,
        }

    def test_wrapper_below_by_itself(self, registry: CollectorRegistry) -> None:
        """What is called on the lower wrapper itself counts there."""
        below = wrap(HashStore())
        above = wrap(PrefixStore("a", below))

        above.set("k", "v")
        below.set("k", "v")

        assert self.counts(registry) == {("hash_store", "set"): 2}
