"""EtcdV3Store on real servers: what it stores, how it waits, and how it fails."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import DistStoreError, HashStore, Store

import tracedstore
from integration.harness import in_background, in_threads, pause, results, wait_until
from support.etcd import EtcdServer, free_port
from support.stores import SHORT
from support.tools import tool
from tracedstore.common.errors import ConfigurationError, error_type
from tracedstore.etcd import EtcdError, EtcdUnreachableError, EtcdV3Store
from tracedstore.etcd.etcd_errors import EtcdLeaseError, WatchEnded
from tracedstore.etcd.etcd_v3_store import next_puts
from tracedstore.etcd.gateway import Gateway
from tracedstore.etcd.http_pool import parse_endpoints
from tracedstore.etcd.namespace import key_range, prefix_of, split
from tracedstore.rendezvous.etcd_v3 import EtcdV3RendezvousBackend

pytestmark = pytest.mark.etcd

LONG = timedelta(seconds=50)
SOON = timedelta(milliseconds=5)
MakeStore = Callable[[Path], Store]


@pytest.fixture
def store(etcd_v3_store: MakeStore, tmp_path: Path) -> Any:
    """A store in a namespace of its own."""
    return etcd_v3_store(tmp_path)


@pytest.fixture(scope="module")
def older_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """The etcd of Debian, another version than the one of the other tests."""
    program = tool("etcd-debian")
    server = EtcdServer(tmp_path_factory.mktemp("etcd-debian"), program=program)
    server.start()
    yield server
    server.stop()


KEYS = st.sampled_from(["a", "a/b", "b", "\0", "\1"])
VALUES = st.sampled_from(["", "1", "-7", "x", "12x", b"\xff\x00"])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, st.sampled_from([1, 1, 1, 0, 2, -3])),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
    st.tuples(st.just("delete_key"), KEYS),
    st.tuples(st.just("check"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("num_keys")),
    st.tuples(st.just("list_keys")),
    st.tuples(st.just("get"), KEYS),
    st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
        lambda pairs: (
            ("multi_set", *map(list, zip(*pairs, strict=True)))
            if pairs
            else ("multi_set", [], [])
        )
    ),
    st.tuples(st.just("multi_get"), st.lists(KEYS, max_size=3)),
    st.tuples(st.just("wait"), st.lists(KEYS, max_size=2), st.just(SOON)),
    st.tuples(st.just("queue_push"), KEYS, VALUES),
    st.tuples(st.just("queue_pop"), KEYS, st.just(False)),
    st.tuples(st.just("queue_len"), KEYS),
)


def outcome(store: Any, operation: str, *args: Any) -> Any:
    """Return the result of an operation, or the type of its exception."""
    if operation in ("get", "multi_get"):
        keys = [args[0]] if operation == "get" else args[0]
        # A queue makes a key exist, but get() waits for a value.
        if not set(keys) <= set(store.list_keys()):
            return "missing"
    try:
        result = getattr(store, operation)(*args)
    except Exception as error:
        return type(error)
    return sorted(result) if operation == "list_keys" else result


class TestSameAsHashStore:
    """Random operations have the outcome that torch's HashStore has."""

    def check(self, server: EtcdServer, operations: list[tuple[Any, ...]]) -> None:
        """Run the operations on both stores."""
        namespace = f"random/{os.urandom(6).hex()}"
        reference, store = HashStore(), EtcdV3Store(server.address, namespace)
        # Two clients take turns: no state of the store is in a client.
        clients = itertools.cycle([store, store.clone()])

        expected = [outcome(reference, *each) for each in operations]
        actual = [outcome(next(clients), *each) for each in operations]

        assert actual == expected
        for _ in range(2):
            next(clients).close()

    # The HashStore is asked which keys it has.
    # A busy machine takes ten times as long.
    @settings(max_examples=50)
    @given(st.lists(OPERATIONS, min_size=40, max_size=60))
    def test_random_operations(
        self, etcd_server: EtcdServer, operations: list[tuple[Any, ...]]
    ) -> None:
        """Thousands of operations on etcd 3.5."""
        self.check(etcd_server, operations)

    @settings(max_examples=20)
    @given(st.lists(OPERATIONS, min_size=40, max_size=60))
    def test_random_operations_on_another_version(
        self, older_server: EtcdServer, operations: list[tuple[Any, ...]]
    ) -> None:
        """A thousand operations on the etcd of Debian (3.4)."""
        self.check(older_server, operations)

    @pytest.mark.parametrize("value", ["", " 7", "12x", "7"])
    def test_add_zero(self, store: Any, value: str) -> None:
        """It replaces a value that is not the text of its number, as torch does."""
        stores = HashStore(), store
        for each in stores:
            each.set("k", value)
            each.add("k", 0)

        assert stores[0].get("k") == stores[1].get("k")


class TestLayout:
    """Keys in etcd."""

    @given(st.binary(max_size=20))
    def test_key_is_found_again(self, key: bytes) -> None:
        """Any key survives the way to etcd and back."""
        prefix = prefix_of("job")
        found = split(prefix, key_range(prefix, key).counter)

        assert found is not None
        assert found == (key.decode("utf-8", "surrogateescape"), b"c")

    @pytest.mark.parametrize("namespace", ["", "/a", "a/", "a//b", "a\0b"])
    def test_invalid_namespace(self, namespace: str) -> None:
        """A namespace that could include another one's keys is refused."""
        with pytest.raises(ConfigurationError, match="namespace"):
            EtcdV3Store("127.0.0.1", namespace)

    def test_namespaces_are_separate(self, etcd_server: EtcdServer) -> None:
        """A namespace below another one shares no keys with it."""
        above = EtcdV3Store(etcd_server.address, "separate")
        below = EtcdV3Store(etcd_server.address, "separate/below")

        below.set("k", "v")

        assert above.list_keys() == []
        assert below.list_keys() == ["k"]

    def test_many_keys_are_listed_in_pages(self, store: Any) -> None:
        """A listing that takes several requests is complete."""
        keys = [f"k{number}" for number in range(5100)]
        store.multi_set(keys, ["v"] * len(keys))

        assert store.num_keys() == len(keys)
        assert store.check(keys)
        assert store.multi_get(keys[:300]) == [b"v"] * 300


class TestConcurrent:
    """Threads that use one key, through one store or several."""

    def test_adds_and_appends(self, store: Any) -> None:
        """None is lost, and none counts twice."""

        def work(number: int) -> list[int]:
            sums = []
            for _ in range(20):
                sums.append(store.add("n", 1))
                store.append("log", f"{number},")
                store.add("by-two", 2)
            return sums

        found = results(in_threads(6, work))

        sums = sorted(each for sums in found for each in sums)
        assert sums == list(range(1, 121))
        assert store.get("by-two") == b"240"
        entries = store.get("log").decode().split(",")[:-1]
        assert {entry: entries.count(entry) for entry in set(entries)} == {
            str(number): 20 for number in range(6)
        }

    def test_queue(self, store: Any) -> None:
        """Every entry is popped once, and those of one pusher in their order."""

        def work(number: int) -> list[str]:
            if number < 3:
                for entry in range(15):
                    store.queue_push("q", f"{number}:{entry}")
                return []
            return [store.queue_pop("q").decode() for _ in range(15)]

        store.set_timeout(LONG)
        popped = results(in_threads(6, work))

        everything = sorted(entry for entries in popped for entry in entries)
        assert everything == sorted(f"{n}:{e}" for n in range(3) for e in range(15))
        assert store.queue_len("q") == 0
        for entries in popped:
            for number in "012":
                own = [int(e[2:]) for e in entries if e[0] == number]
                assert own == sorted(own)

    def test_one_compare_set_wins(self, store: Any) -> None:
        """All callers agree on the winner."""

        def work(number: int) -> bytes:
            found: bytes = store.compare_set("leader", "", f"rank {number}")
            return found

        assert len(set(results(in_threads(12, work)))) == 1


class TestWaiting:
    """Calls that block."""

    def test_timeout_has_keys(self, store: Any) -> None:
        """A timeout is a DistStoreError with the keys that are missing."""
        store.set("there", "v")
        started = time.monotonic()

        with pytest.raises(DistStoreError, match=r"^Wait timeout.*: k1, k2$") as caught:
            store.wait(["there", "k1", "k2"], SHORT)

        assert time.monotonic() - started >= SHORT.total_seconds()
        assert error_type(caught.value) == "timeout"

    def test_existing_key_with_timeout_zero(self, store: Any) -> None:
        """A key that exists is returned whatever the timeout is."""
        store.set("k", "v")
        store.set_timeout(timedelta(0))

        assert store.get("k") == b"v"

    def test_wakes_for_each_kind_of_write(self, store: Any) -> None:
        """set, add, append, compare_set and multi_set wake a get()."""
        writers: dict[str, Callable[[str], Any]] = {
            "1": lambda key: store.add(key, 1),
            "2": lambda key: store.append(key, "2"),
            "3": lambda key: store.compare_set(key, "", "3"),
            "4": lambda key: store.multi_set([key], ["4"]),
            "5": lambda key: store.set(key, "5"),
        }
        store.set_timeout(LONG)
        gets = {key: in_background(partial(store.get, key)) for key in writers}
        everything = in_background(lambda: store.wait(list(writers)))

        for key, write in writers.items():
            write(key)

        assert {key: call.result(60).decode() for key, call in gets.items()} == {
            key: key for key in writers
        }
        assert everything.result(60) is None

    def test_close_ends_a_wait(self, store: Any) -> None:
        """close() ends a call that is blocked in another thread."""
        traced = tracedstore.wrap(store)
        call = in_background(lambda: traced.get("never"))
        wait_until(tracedstore.in_flight)

        store.close()

        with pytest.raises(EtcdError, match="closed"):
            call.result(60)

    def test_survives_restart(self, own_etcd: EtcdServer) -> None:
        """A wait continues when the server comes back, and is woken."""
        store: Any = EtcdV3Store(own_etcd.address, "restart", timeout=LONG)
        other = store.clone()
        other.set("before", "v")
        store.get("before")
        call = in_background(lambda: store.get("late"))
        wait_until(lambda: store._gateway._pool._own().busy)

        own_etcd.kill()
        own_etcd.restart()
        other.get("before")
        other.set("late", "v")

        assert call.result(60) == b"v"

    def test_survives_stopped_server(self, own_etcd: EtcdServer) -> None:
        """A wait on a server that does not answer times out, and can be repeated."""
        store: Any = EtcdV3Store(own_etcd.address, "stopped", timeout=SHORT)
        store.set("k", "v")
        pause(own_etcd.pid)
        try:
            with pytest.raises(DistStoreError, match=r"Wait timeout .*keys: k; .*etcd"):
                store.get("k")
        finally:
            own_etcd.resume()

        store.set_timeout(LONG)
        assert store.get("k") == b"v"

    def test_compacted_revision(self, own_etcd: EtcdServer) -> None:
        """A watch from a revision that is compacted ends, so that its caller reads."""
        store: Any = EtcdV3Store(own_etcd.address, "compacted")
        for number in range(5):
            store.set("k", str(number))
        own_etcd.call("kv/compaction", {"revision": 4, "physical": True})
        gateway = Gateway(parse_endpoints(own_etcd.address, secure=False))
        keys = key_range(prefix_of("compacted"), "k")

        with pytest.raises(WatchEnded):
            next_puts(gateway, keys.content, 2, time.monotonic() + 20)

    def test_forked_child(self, store: Any) -> None:
        """A forked child uses the store of its parent, and the parent does as well."""
        store.set("k", "v")
        child = os.fork()
        if child == 0:
            os._exit(0 if store.get("k") == b"v" and store.add("n", 1) == 1 else 1)

        _, status = os.waitpid(child, 0)

        assert status == 0
        assert store.add("n", 1) == 2


class TestErrors:
    """Each error is one sentence with the server and the cause."""

    def test_refused(self) -> None:
        """Nothing listens at the address: an error at once."""
        store = EtcdV3Store(f"127.0.0.1:{free_port()}", "errors")

        with pytest.raises(EtcdUnreachableError, match="nothing listens there"):
            store.set("k", "v")

    def test_unknown_host(self) -> None:
        """The host name is in the text."""
        store = EtcdV3Store("no-such-host.invalid", "errors")

        with pytest.raises(EtcdUnreachableError, match=r"'no-such-host\.invalid'"):
            store.get("k")

    def test_too_large(self, store: Any) -> None:
        """The limit is in the text."""
        with pytest.raises(EtcdError, match=r"too large: it accepts 1\.5 MiB"):
            store.set("k", b"x" * 1_700_000)

        assert not store.check(["k"])

    def test_lease_is_gone(
        self, etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The error is one sentence; a rendezvous gets a new lease and writes again."""
        client = EtcdV3Store(etcd_server.address, "lease")
        backend = EtcdV3RendezvousBackend(client.transport, "lease")
        backend.set_state(b"first")
        lease = backend._lease
        etcd_server.call("lease/revoke", {"ID": lease})

        with pytest.raises(EtcdLeaseError, match="the lease: it has expired or was re"):
            backend._swap(b"second", 0)

        assert backend.set_state(b"second") == (b"second", ANY, True)
        # It ends between the refresh and the write.
        monkeypatch.setattr(backend, "_lease_is_alive", lambda: True)
        etcd_server.call("lease/revoke", {"ID": backend._lease})
        assert backend.set_state(b"third") == (b"third", ANY, True)
        assert backend._lease != lease

    def test_gateway_is_off(self, tmp_path: Path) -> None:
        """The text has the option that switches the JSON API off."""
        server = EtcdServer(tmp_path, "--enable-grpc-gateway=false")
        server.start()
        try:
            store = EtcdV3Store(server.address, "errors")
            with pytest.raises(EtcdError, match="--enable-grpc-gateway=false"):
                store.set("k", "v")
        finally:
            server.stop()

    def test_another_server(self) -> None:
        """The text says that it is no etcd."""
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            call = in_background(server.handle_request)
            store = EtcdV3Store(f"127.0.0.1:{server.server_port}", "errors")
            with pytest.raises(EtcdError, match="does not answer as etcd does"):
                store.check(["k"])
            call.result(60)

    @pytest.mark.parametrize("endpoints", ["", "ftp://a:1", "a:x", "a:1/path", []])
    def test_invalid_endpoints(self, endpoints: Any) -> None:
        """The accepted forms are in the text."""
        with pytest.raises(ConfigurationError, match="accepted is HOST:PORT"):
            EtcdV3Store(endpoints, "errors")

    def test_first_endpoint_is_down(self, etcd_server: EtcdServer) -> None:
        """Another endpoint serves the request, in whatever order they are tried."""
        down = f"127.0.0.1:{free_port()}"
        for _ in range(4):
            store = EtcdV3Store(f"{down},{etcd_server.address}", "failover")
            store.set("k", "v")
            assert store.get("k") == b"v"
