"""EtcdStore against a real etcd: what happens inside its calls."""

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import etcd
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import Store
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

import tracedstore
from integration.harness import (
    in_background,
    in_threads,
    operation_count,
    results,
    wait_until,
)
from support.etcd import EtcdServer
from support.stores import SHORT
from tracedstore import names

pytestmark = pytest.mark.etcd

MakeStore = Callable[[], Any]


@pytest.fixture
def make_store(
    etcd_server: EtcdServer, etcd_store: Callable[[Path], Store], tmp_path: Path
) -> MakeStore:
    """Make stores of one prefix, each with a client of its own, as ranks do."""
    first: Any = etcd_store(tmp_path)
    return lambda: EtcdStore(etcd_server.client(), first.prefix)


def cas(registry: CollectorRegistry) -> dict[str, float | None]:
    """What is told of the compare-and-sets inside EtcdStore.add."""
    labels = {"store": "etcd_store", "operation": "add"}
    attempts = "tracedstore_cas_attempts_total"
    return {
        "won": registry.get_sample_value(attempts, labels | {"result": "won"}),
        "lost": registry.get_sample_value(attempts, labels | {"result": "lost"}),
        "retries": registry.get_sample_value("tracedstore_cas_retries_total", labels),
    }


def attributes(spans: InMemorySpanExporter, operation: str) -> list[Mapping[str, Any]]:
    """The attributes of the spans of one operation."""
    return [
        span.attributes
        for span in spans.get_finished_spans()
        if span.attributes is not None
        and span.attributes["db.operation.name"] == operation
    ]


class TestContendedAdd:
    """Threads that all add to one key, each through its own store."""

    def test_retries(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        make_store: MakeStore,
    ) -> None:
        """The sum is right, and every lost compare-and-set is in metric and span."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, spans="all", log_format="off"
        )

        def add(_number: int) -> None:
            store = tracedstore.wrap(make_store())
            for _ in range(20):
                store.add("n", 1)

        results(in_threads(8, add))

        assert make_store().get("n") == b"160"
        assert operation_count(registry, "etcd_store", "add") == 160
        told = cas(registry)
        # One of them made the key, and had nothing to compare with.
        assert told["won"] == 159
        assert told["retries"] == told["lost"]
        assert told["lost"]
        of_add = attributes(spans, "add")
        assert len(of_add) == 160
        assert sum(each[names.CAS_RETRY_COUNT] for each in of_add) == told["lost"]
        # A write that finds the key there, then a read and a swap for each try; or
        # the one write that made the key.
        asked = [
            (each[names.ETCD_REQUESTS], each[names.CAS_RETRY_COUNT]) for each in of_add
        ]
        assert asked.count((1, 0)) == 1
        assert all(
            requests == 3 + 2 * retries for requests, retries in asked if requests != 1
        )
        assert {each[names.ETCD_WATCH_TIMEOUTS] for each in of_add} == {0}


class TestInsideACall:
    """What the client does for the store shows on the call's span."""

    @pytest.fixture
    def store(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        make_store: MakeStore,
    ) -> Any:
        """A traced store all of whose calls get a span."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, spans="all", log_format="off"
        )
        return tracedstore.wrap(make_store())

    def test_get_that_times_out(self, store: Any, spans: InMemorySpanExporter) -> None:
        """It watched in vain at least once."""
        store.set_timeout(SHORT)

        with pytest.raises(LookupError):
            store.get("never")

        (of_get,) = attributes(spans, "get")
        assert of_get["error.type"] == "timeout"
        assert of_get[names.ETCD_WATCH_TIMEOUTS] >= 1
        assert of_get[names.ETCD_REQUESTS] > of_get[names.ETCD_WATCH_TIMEOUTS]
        assert of_get[names.CAS_RETRY_COUNT] == 0

    def test_get_that_waits(
        self, store: Any, make_store: MakeStore, spans: InMemorySpanExporter
    ) -> None:
        """One that got what it watched for has the watch, and no timeout."""
        # While there is no key at all, EtcdStore can miss the first one.
        make_store().set("another", "v")
        answer = in_background(lambda: store.get("k"))
        wait_until(tracedstore.in_flight)

        make_store().set("k", "v")

        assert answer.result(15) == b"v"
        (of_get,) = wait_until(lambda: attributes(spans, "get"))
        assert of_get[names.ETCD_REQUESTS] >= 1
        assert of_get[names.ETCD_WATCH_TIMEOUTS] == 0

    def test_client(self, store: Any, spans: InMemorySpanExporter) -> None:
        """The store's client is still an etcd.Client, and works as one."""
        store.set("k", "v")

        assert isinstance(store.client, etcd.Client)
        children = list(store.client.get(store.prefix).children)
        assert [store._decode(child.value) for child in children] == [b"v"]
        (of_set,) = attributes(spans, "set")
        # What was asked of the client directly is nobody's call.
        assert of_set[names.ETCD_REQUESTS] == 1


AFTERWARDS: dict[str, Callable[[Any], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "add": lambda store: store.add("n", 1),
    "check": lambda store: store.check(["k"]),
}


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that no other test needs."""
    server = EtcdServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.mark.processes
class TestKilled:
    """etcd is gone from one moment to the next."""

    def test_as_bare(
        self, registry: CollectorRegistry, mortal_server: EtcdServer
    ) -> None:
        """A blocked call, and every one after it, fails as it does with bare."""
        tracedstore.configure(registry=registry, log_format="off")

        def make() -> Any:
            client = mortal_server.client()
            return EtcdStore(client, "/mortal", timedelta(seconds=50))

        bare, traced = make(), tracedstore.wrap(make())
        # Bare first: when the traced one has been in its call for a while, so has it.
        of_bare = in_background(lambda: bare.get("never"))
        of_traced = in_background(lambda: traced.get("never"))
        wait_until(lambda: any(c.waited_seconds > 0.3 for c in tracedstore.in_flight()))

        mortal_server.kill()
        raised = [type(of.exception(15)) for of in (of_bare, of_traced)]
        for call in AFTERWARDS.values():
            for store in (bare, traced):
                with pytest.raises(etcd.EtcdException) as error:
                    call(store)
                raised.append(type(error.value))

        assert raised == [etcd.EtcdConnectionFailed] * 2 * (1 + len(AFTERWARDS))
        for operation in ("get", *AFTERWARDS):
            error_type = "etcd.EtcdConnectionFailed"
            assert operation_count(registry, "etcd_store", operation, error_type) == 1
        assert tracedstore.in_flight() == []
