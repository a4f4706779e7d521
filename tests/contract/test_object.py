"""wrap(), and the wrapper's attributes, repr, copies and clones."""

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
    """Argument and result of wrap()."""

    def test_returns_store(self, make: Make) -> None:
        """The result is a Store, which torch's functions require."""
        assert isinstance(wrap(make()), Store)

    def test_twice_returns_same(self, make: Make) -> None:
        """Wrapping a wrapped store returns it."""
        store = wrap(make())

        assert store is wrap(store)

    @pytest.mark.parametrize(
        ("value", "name"),
        [
            (None, "NoneType"),
            ("tcp://127.0.0.1", "str"),
            (HashStore, "pybind11_type"),
            ({}, "dict"),
        ],
    )
    def test_rejects_other_types(self, value: Any, name: str) -> None:
        """Anything else raises TypeError with the actual and the expected type."""
        with pytest.raises(
            TypeError, match=rf"takes a torch\.distributed\.Store, not {name};"
        ):
            wrap(value)

    @pytest.mark.parametrize("kind", sorted(KINDS), indirect=True)
    def test_passes_test_of_torch(self, make: Make) -> None:
        """The result passes torch's C++ check of Python stores."""
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
        """Pickling and copying raise TypeError with the remedy."""
        store = wrap(HashStore())

        with pytest.raises(TypeError, match="wrap one in each process"):
            duplicate(store)


class TestAttributes:
    """Every attribute except the methods of Store is the inner store's."""

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
    def test_of_inner_store(self, make: Make, names: list[str]) -> None:
        """Properties that only one kind of store has can be read."""
        inner = make()
        store = wrap(inner)

        assert [getattr(store, n) for n in names] == [getattr(inner, n) for n in names]
        assert set(names) <= set(dir(store))

    def test_of_prefix_store(self, make: Make) -> None:
        """underlying_store of a PrefixStore is the same, wrapped or not."""
        inner = make()
        store: Any = wrap(PrefixStore("p", PrefixStore("q", inner)))
        above: Any = PrefixStore("p", wrap(inner))

        assert inner is store.underlying_store.underlying_store
        assert inner is store._underlying_non_prefix_store
        assert wrap(above.underlying_store) is above._underlying_non_prefix_store

    def test_repr_shows_inner_store(self, make: Make) -> None:
        """The wrapper's repr has the inner store's repr."""
        inner = make()
        expected = f"TracedStore({normalised(repr(inner))})"

        assert normalised(repr(wrap(inner))) == expected

    def test_set_reaches_inner_store(self) -> None:
        """Setting an attribute of the wrapper sets the inner store's."""
        inner: Any = FlakyStore()
        store: Any = wrap(inner)

        store.tag = "example"

        assert inner.tag == "example"
        assert store.tag == "example"

    def test_deleted_reaches_inner_store(self) -> None:
        """Deleting an attribute of the wrapper deletes the inner store's."""
        inner: Any = FlakyStore()
        store: Any = wrap(inner)
        inner.tag = "example"

        del store.tag

        assert not hasattr(inner, "tag")

    @pytest.mark.parametrize("name", ["tag", "timeout"])
    def test_read_only_raises_same(self, make: Make, name: str) -> None:
        """An attribute that cannot be set raises as it does on the bare store."""

        def set_attribute(store: Any) -> None:
            setattr(store, name, 1)

        expected = outcome(set_attribute, make())

        assert outcome(set_attribute, wrap(make())) == expected

    def test_replaced_method_is_called(self) -> None:
        """A method that replaces a Python store's method is called instead."""
        store: Any = wrap(FlakyStore())

        store.get = lambda key: f"instead of {key}".encode()

        assert store.get("k") == b"instead of k"
        assert PrefixStore("p", store).get("k") == b"instead of p/k"


@pytest.mark.etcd
class TestEtcdClient:
    """The client of an EtcdStore, whose requests the wrapper counts."""

    @pytest.fixture
    def kind(self) -> str:
        """Only EtcdStore has a client."""
        return "etcd"

    def test_is_a_client(self, make: Make) -> None:
        """The client is an etcd.Client with the original host and port."""
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
    def test_has_same_outcome(self, make: Make, step: Callable[[Any], Any]) -> None:
        """Direct use of the client has the same outcome as before wrapping."""
        expected = outcome(step, make().client)

        assert outcome(step, wrap(make()).client) == expected

    def test_is_replaced_once(self, make: Make) -> None:
        """Wrapping the same EtcdStore again keeps the counting client."""
        inner = make()
        first = wrap(inner).client

        assert first is wrap(inner).client
        assert first is wrap(PrefixStore("p", inner)).underlying_store.client


class TestClone:
    """A clone of a wrapped store."""

    @pytest.mark.parametrize("kind", sorted(KINDS), indirect=True)
    def test_is_traced(self, make: Make) -> None:
        """A clone made by Python or by C++ is traced too."""
        direct: Any = wrap(make())
        over: Any = wrap(PrefixStore("p", make()))
        under: Any = PrefixStore("p", wrap(make()))

        clones = [direct.clone(), over.clone(), under.clone().underlying_store]

        assert [isinstance(clone, TracedStore) for clone in clones] == [True] * 3
        assert {repr(type(clone)) for clone in clones} == {repr(TracedStore)}

    def test_of_hash_store_is_itself(self) -> None:
        """A HashStore's clone is the store itself, so its wrapper returns itself."""
        store = wrap(HashStore())

        assert store is store.clone()
