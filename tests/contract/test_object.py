"""The wrapper as an object: its attributes, and what wrap() takes and gives."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from etcd import Client
from torch._C._distributed_c10d import _test_python_store
from torch.distributed import HashStore, PrefixStore, Store

from contract.harness import Make, call, normalised, outcome
from support.stores import KINDS
from tracedstore import TracedStore, wrap
from tracedstore.testing import FlakyStore


class TestWrap:
    """What wrap() takes and gives."""

    def test_gives_store(self, make: Make) -> None:
        """Torch's functions insist on a Store, and it is one."""
        assert isinstance(wrap(make()), Store)

    def test_twice_gives_same(self, make: Make) -> None:
        """Wrapping a wrapped store changes nothing."""
        store = wrap(make())

        assert store is wrap(store)

    @pytest.mark.parametrize(
        ("thing", "name"),
        [
            (None, "NoneType"),
            ("tcp://127.0.0.1", "str"),
            (HashStore, "pybind11_type"),
            ({}, "dict"),
        ],
    )
    def test_takes_nothing_but_stores(self, thing: Any, name: str) -> None:
        """Anything else is refused with what it is and what it should be."""
        with pytest.raises(
            TypeError, match=rf"takes a torch\.distributed\.Store, not {name};"
        ):
            wrap(thing)

    @pytest.mark.parametrize("kind", sorted(KINDS), indirect=True)
    def test_passes_the_test_of_torch(self, make: Make) -> None:
        """Torch's own C++ check of stores in Python finds nothing wrong."""
        store: Any = wrap(make())

        _test_python_store(store)

        assert store.check(["key"])

    @pytest.mark.parametrize(
        "duplicate",
        [
            pickle.dumps,
            copy.copy,
            copy.deepcopy,
            lambda store: pickle.dumps(store, protocol=0),
            lambda store: pickle.dumps({"nested": [store]}),
        ],
    )
    def test_result_cannot_be_copied(self, duplicate: Callable[[Any], Any]) -> None:
        """Pickling and copying are refused, with what to do instead."""
        store = wrap(HashStore())

        with pytest.raises(TypeError, match="wrap one in each process"):
            duplicate(store)


class TestAttributes:
    """Every attribute but the methods of a Store is the inner store's."""

    @pytest.mark.parametrize(
        ("kind", "names"),
        [
            ("tcp", ["host", "port", "libuvBackend"]),
            ("tcp-legacy", ["host", "port", "libuvBackend"]),
            ("file", ["path"]),
            pytest.param("etcd", ["client", "prefix"], marks=pytest.mark.etcd),
        ],
        indirect=["kind"],
    )
    def test_of_its_own(self, make: Make, names: list[str]) -> None:
        """What a kind of store has beside its methods can be read."""
        inner = make()
        store = wrap(inner)

        assert [getattr(store, n) for n in names] == [getattr(inner, n) for n in names]
        assert set(names) <= set(dir(store))

    def test_of_prefix_store(self, make: Make) -> None:
        """What a PrefixStore stands on is what it stands on, wrapped or not."""
        inner = make()
        store: Any = wrap(PrefixStore("p", PrefixStore("q", inner)))
        above: Any = PrefixStore("p", wrap(inner))

        assert inner is store.underlying_store.underlying_store
        assert inner is store._underlying_non_prefix_store
        assert wrap(above.underlying_store) is above._underlying_non_prefix_store

    def test_repr_shows_inner_store(self, make: Make) -> None:
        """The inner store can be told from the wrapper's repr."""
        inner = make()
        expected = f"TracedStore({normalised(repr(inner))})"

        assert normalised(repr(wrap(inner))) == expected

    def test_set_reaches_inner_store(self) -> None:
        """An attribute that is set on the wrapper is the inner store's."""
        inner: Any = FlakyStore()
        store: Any = wrap(inner)

        store.tag = "mine"

        assert inner.tag == "mine"
        assert store.tag == "mine"

    def test_deleted_reaches_inner_store(self) -> None:
        """An attribute that is deleted on the wrapper is gone from the inner store."""
        inner: Any = FlakyStore()
        store: Any = wrap(inner)
        inner.tag = "mine"

        del store.tag

        assert not hasattr(inner, "tag")

    @pytest.mark.parametrize("name", ["tag", "timeout"])
    def test_not_to_be_set_is_refused_the_same(self, make: Make, name: str) -> None:
        """What the bare store does not let be set, the wrapper does not."""

        def set_it(store: Any) -> None:
            setattr(store, name, 1)

        expected = outcome(set_it, make())

        assert outcome(set_it, wrap(make())) == expected

    def test_replaced_method_is_called(self) -> None:
        """A method put in place of a Python store's own is the one that answers."""
        store: Any = wrap(FlakyStore())

        store.get = lambda key: f"instead of {key}".encode()

        assert store.get("k") == b"instead of k"
        assert PrefixStore("p", store).get("k") == b"instead of p/k"


@pytest.mark.etcd
class TestEtcdClient:
    """The client of an EtcdStore, which the wrapper counts the requests of."""

    @pytest.fixture
    def kind(self) -> str:
        """Only one kind of store has it."""
        return "etcd"

    def test_is_a_client(self, make: Make) -> None:
        """It passes for what it is, and says where it connects to."""
        inner = make()
        host, port = inner.client.host, inner.client.port

        client = wrap(inner).client

        assert isinstance(client, Client)
        assert (client.host, client.port) == (host, port)

    @pytest.mark.parametrize(
        "step",
        [
            lambda client: client.write("/one", "1").value,
            lambda client: client.read("/no-such-key"),
            lambda client: "/no-such-key" in client,
            call("no_such_method"),
            call("machines"),
        ],
        ids=["write", "read", "in", "unknown", "machines"],
    )
    def test_answers_the_same(self, make: Make, step: Callable[[Any], Any]) -> None:
        """Used by itself, it does what it did before its store was wrapped."""
        expected = outcome(step, make().client)

        assert outcome(step, wrap(make()).client) == expected

    def test_is_put_before_once(self, make: Make) -> None:
        """Wrapping the same EtcdStore again finds the client in place."""
        inner = make()
        first = wrap(inner).client

        assert first is wrap(inner).client
        assert first is wrap(PrefixStore("p", inner)).underlying_store.client


class TestClone:
    """A clone of a wrapped store."""

    @pytest.mark.parametrize("kind", sorted(KINDS), indirect=True)
    def test_is_traced(self, make: Make) -> None:
        """Whether Python makes it or C++ does, a clone is traced too."""
        direct: Any = wrap(make())
        over: Any = wrap(PrefixStore("p", make()))
        under: Any = PrefixStore("p", wrap(make()))

        clones = [direct.clone(), over.clone(), under.clone().underlying_store]

        assert list(map(type, clones)) == [TracedStore] * 3

    def test_that_is_the_store_itself(self) -> None:
        """A HashStore's clone is the store itself, and so is its wrapper's."""
        store = wrap(HashStore())

        assert store is store.clone()
