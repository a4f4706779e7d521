"""EtcdStore on a real etcd: the requests inside its calls."""

from collections.abc import Callable, Mapping
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
    """Return a function that makes stores with one prefix and separate clients."""
    first: Any = etcd_store(tmp_path)
    return lambda: EtcdStore(etcd_server.client(), first.prefix)


def cas(registry: CollectorRegistry) -> dict[str, float | None]:
    """Return the metrics of the compare-and-sets inside EtcdStore.add."""
    labels = {"store": "etcd_store", "operation": "add"}
    attempts = "tracedstore_cas_attempts_total"
    return {
        "won": registry.get_sample_value(attempts, labels | {"result": "won"}),
        "lost": registry.get_sample_value(attempts, labels | {"result": "lost"}),
        "retries": registry.get_sample_value("tracedstore_cas_retries_total", labels),
    }


def attributes(spans: InMemorySpanExporter, operation: str) -> list[Mapping[str, Any]]:
    """Return the attributes of the spans of one operation."""
    return [
        span.attributes
        for span in spans.get_finished_spans()
        if span.attributes is not None
        and span.attributes["db.operation.name"] == operation
    ]


class TestContendedAdd:
    """Threads add to one key, each through a separate store."""

    def test_retries(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        make_store: MakeStore,
    ) -> None:
        """Every lost compare-and-set is counted in the metric and the span."""
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
        counts = cas(registry)
        # One call created the key, without a compare-and-set.
        assert counts["won"] == 159
        assert counts["retries"] == counts["lost"]
        assert counts["lost"]
        adds = attributes(spans, "add")
        assert len(adds) == 160
        assert sum(add[names.CAS_RETRY_COUNT] for add in adds) == counts["lost"]
        # A write that fails because the key exists, then a read and a swap per try; or
        # the one write that created the key.
        requests = [
            (add[names.ETCD_REQUESTS], add[names.CAS_RETRY_COUNT]) for add in adds
        ]
        assert requests.count((1, 0)) == 1
        assert all(
            count == 3 + 2 * retries for count, retries in requests if count != 1
        )
        assert {add[names.ETCD_WATCH_TIMEOUTS] for add in adds} == {0}


class TestRequests:
    """The requests of a call are counted on its span."""

    @pytest.fixture
    def store(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        make_store: MakeStore,
    ) -> Any:
        """A traced store with a span for every call."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, spans="all", log_format="off"
        )
        return tracedstore.wrap(make_store())

    def test_get_times_out(self, store: Any, spans: InMemorySpanExporter) -> None:
        """At least one watch has timed out."""
        store.set_timeout(SHORT)

        with pytest.raises(LookupError):
            store.get("never")

        (span,) = attributes(spans, "get")
        assert span["error.type"] == "timeout"
        assert span[names.ETCD_WATCH_TIMEOUTS] >= 1
        assert span[names.ETCD_REQUESTS] > span[names.ETCD_WATCH_TIMEOUTS]
        assert span[names.CAS_RETRY_COUNT] == 0

    def test_get_waits(
        self, store: Any, make_store: MakeStore, spans: InMemorySpanExporter
    ) -> None:
        """A watch that succeeds is counted without a timeout."""
        # EtcdStore can miss the first key of an empty directory.
        make_store().set("another", "v")
        value = in_background(lambda: store.get("k"))
        wait_until(tracedstore.in_flight)

        make_store().set("k", "v")

        assert value.result(60) == b"v"
        (span,) = wait_until(lambda: attributes(spans, "get"))
        assert span[names.ETCD_REQUESTS] >= 1
        assert span[names.ETCD_WATCH_TIMEOUTS] == 0

    def test_client(self, store: Any, spans: InMemorySpanExporter) -> None:
        """The store's client is an instance of etcd.Client, and works as one."""
        store.set("k", "v")

        assert isinstance(store.client, etcd.Client)
        children = list(store.client.get(store.prefix).children)
        assert [store._decode(child.value) for child in children] == [b"v"]
        (span,) = attributes(spans, "set")
        # A direct request of the client belongs to no call.
        assert span[names.ETCD_REQUESTS] == 1


LATER_CALLS: dict[str, Callable[[Any], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "add": lambda store: store.add("n", 1),
    "check": lambda store: store.check(["k"]),
}


@pytest.mark.processes
class TestKilled:
    """etcd is killed during a call."""

    def test_same_errors(
        self, registry: CollectorRegistry, own_etcd: EtcdServer
    ) -> None:
        """A blocked call, and all later calls, fail as with a bare store."""
        tracedstore.configure(registry=registry, log_format="off")

        def make() -> Any:
            client = own_etcd.client()
            return EtcdStore(client, "/killed", timedelta(seconds=50))

        bare, traced = make(), tracedstore.wrap(make())
        # Bare first: only the traced call can be seen in flight.
        bare_call = in_background(lambda: bare.get("never"))
        traced_call = in_background(lambda: traced.get("never"))
        wait_until(lambda: any(c.waited_seconds > 0.3 for c in tracedstore.in_flight()))

        own_etcd.kill()
        raised = [type(call.exception(60)) for call in (bare_call, traced_call)]
        for later_call in LATER_CALLS.values():
            for store in (bare, traced):
                with pytest.raises(etcd.EtcdException) as error:
                    later_call(store)
                raised.append(type(error.value))

        assert raised == [etcd.EtcdConnectionFailed] * 2 * (1 + len(LATER_CALLS))
        for operation in ("get", *LATER_CALLS):
            error_type = "etcd.EtcdConnectionFailed"
            assert operation_count(registry, "etcd_store", operation, error_type) == 1
        assert tracedstore.in_flight() == []
