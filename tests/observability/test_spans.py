"""The spans of store calls, exported by a real OpenTelemetry SDK."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import (
    _SUPPRESS_INSTRUMENTATION_KEY,
    attach,
    detach,
    set_value,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from support.stores import SHORT, tcp
from tracedstore.testing import FakeClock, FlakyStore

Configure = Callable[..., None]


@pytest.fixture
def configure(provider: TracerProvider, registry: CollectorRegistry) -> Configure:
    """Configure with the test's provider and registry, and without events."""

    def configure(**settings: Any) -> None:
        tracedstore.configure(
            tracer_provider=provider, registry=registry, log_format="off", **settings
        )

    return configure


def only(spans: InMemorySpanExporter) -> ReadableSpan:
    """Return the only finished span."""
    (span,) = spans.get_finished_spans()
    return span


class TestContent:
    """Names, kinds and attributes follow the database conventions."""

    def test_tcp_store(
        self, configure: Configure, spans: InMemorySpanExporter, tmp_path: Path
    ) -> None:
        """The span has the server's address, and the key family in its name."""
        configure()
        bare = tcp(tmp_path)
        tracedstore.wrap(bare).set("worker/3", "four")

        span = only(spans)
        assert span.name == "set worker/*"
        assert span.kind is SpanKind.CLIENT
        assert span.status.status_code is StatusCode.UNSET
        assert dict(span.attributes or {}) == {
            "host.name": socket.gethostname(),
            "db.system.name": "pytorch.tcp_store",
            "db.operation.name": "set",
            "db.query.summary": "set worker/*",
            "server.address": "127.0.0.1",
            "server.port": bare.port,
            "tracedstore.key": "worker/3",
            "tracedstore.value.size": 4,
        }
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "tracedstore"
        assert span.instrumentation_scope.version == tracedstore.__version__

    def test_hash_store_is_internal(
        self, configure: Configure, spans: InMemorySpanExporter
    ) -> None:
        """A HashStore call stays in the process, so its span is not a client span."""
        configure()
        tracedstore.wrap(HashStore()).num_keys()

        span = only(spans)
        assert (span.name, span.kind) == ("num_keys", SpanKind.INTERNAL)

    def test_many_keys(self, configure: Configure, spans: InMemorySpanExporter) -> None:
        """The span has the first 16 keys and their number, but no query summary."""
        configure()
        store = tracedstore.wrap(HashStore())

        store.check([f"{letter}{n}" for letter in "ab" for n in range(10)])

        attributes = dict(only(spans).attributes or {})
        assert only(spans).name == "check"
        assert attributes["tracedstore.key.count"] == 20
        assert len(attributes["tracedstore.keys"]) == 16  # type: ignore[arg-type]
        assert "db.query.summary" not in attributes

    def test_below_prefix_store(
        self, configure: Configure, spans: InMemorySpanExporter
    ) -> None:
        """A call from torch's C++ has a span with the full key."""
        configure()
        PrefixStore("default_pg", tracedstore.wrap(HashStore())).set("0//cpu", "x")

        assert (only(spans).attributes or {})["tracedstore.key"] == "default_pg/0//cpu"

    def test_identity(
        self,
        configure: Configure,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Every span has the rank and job that torchrun sets in the environment."""
        for name, value in {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "TORCHELASTIC_RUN_ID": "job-7",
        }.items():
            monkeypatch.setenv(name, value)
        configure()
        tracedstore.wrap(HashStore()).num_keys()

        attributes = dict(only(spans).attributes or {})
        assert attributes["tracedstore.rank"] == 3
        assert attributes["tracedstore.local_rank"] == 1
        assert attributes["tracedstore.world_size"] == 8
        assert attributes["tracedstore.run_id"] == "job-7"

    def test_times(self, provider: TracerProvider, spans: InMemorySpanExporter) -> None:
        """The span is created after the call and has the call's start and end."""
        clock = FakeClock(wall=1_000.0)
        tracedstore.configure(
            tracer_provider=provider, clock=clock.clock, log_format="off"
        )
        flaky = FlakyStore()
        flaky.before("set", lambda: clock.advance(2.5))
        tracedstore.wrap(flaky).set("key", "value")

        span = only(spans)
        assert (span.start_time, span.end_time) == (1_000 * 10**9, 1_002_500_000_000)

    def test_parent(
        self,
        configure: Configure,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """The caller's current span is the parent."""
        configure()
        store = tracedstore.wrap(HashStore())

        with provider.get_tracer("job").start_as_current_span("step") as step:
            store.num_keys()

        call = spans.get_finished_spans()[0]
        assert call.parent is not None
        assert call.parent.span_id == step.get_span_context().span_id


class TestErrors:
    """Which outcomes set the error status."""

    def test_timeout(self, configure: Configure, spans: InMemorySpanExporter) -> None:
        """The span has status, description and error.type, and no exception event."""
        configure(spans="notable")
        store = tracedstore.wrap(HashStore())
        with pytest.raises(RuntimeError):
            store.wait(["never"], SHORT)

        span = only(spans)
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "Wait timeout"
        assert (span.attributes or {})["error.type"] == "timeout"
        assert not span.events

    def test_has_no_values(
        self, configure: Configure, spans: InMemorySpanExporter
    ) -> None:
        """pybind11 quotes the arguments in its TypeError; the span omits them.

        The native base does not get such a call: see the contract suite.
        """
        configure(spans="notable", core="python")
        store: Any = tracedstore.wrap(HashStore())
        with pytest.raises(TypeError, match="secret"):
            store.set(1, "secret")

        assert "secret" not in only(spans).to_json()

    def test_lost_compare_set_is_no_error(
        self, configure: Configure, spans: InMemorySpanExporter
    ) -> None:
        """A compare_set that lost to another writer is an expected outcome."""
        configure()
        store = tracedstore.wrap(HashStore())
        store.compare_set("key", "expected", "desired")

        span = only(spans)
        assert span.status.status_code is StatusCode.UNSET
        attributes = dict(span.attributes or {})
        assert attributes["tracedstore.cas.swapped"] is False
        assert "error.type" not in attributes


class TestWhichCalls:
    """Which calls have a span."""

    def suppressed(self, registry: CollectorRegistry, reason: str) -> float:
        """Return how many calls had no span for this reason."""
        name = "tracedstore_spans_suppressed_total"
        return registry.get_sample_value(name, {"reason": reason}) or 0

    def test_budget(
        self,
        configure: Configure,
        spans: InMemorySpanExporter,
        registry: CollectorRegistry,
    ) -> None:
        """The first 200 calls have spans; the others are counted as suppressed."""
        configure(clock=FakeClock().clock)
        store = tracedstore.wrap(HashStore())
        for _ in range(1000):
            store.set("key", "value")

        assert len(spans.get_finished_spans()) == 200
        assert self.suppressed(registry, "budget") == 800

    def test_notable_calls_need_no_budget(
        self, configure: Configure, spans: InMemorySpanExporter
    ) -> None:
        """Failed calls have a span even without a budget."""
        configure(span_rate=0, slow_after=60)
        flaky = FlakyStore()
        flaky.fail("get", OSError("gone"), times=50)
        store = tracedstore.wrap(flaky)
        for _ in range(50):
            store.set("key", "value")
            with pytest.raises(OSError, match="gone"):
                store.get("key")

        names = {span.name for span in spans.get_finished_spans()}
        assert (names, len(spans.get_finished_spans())) == ({"get key"}, 50)

    @pytest.mark.parametrize(("mode", "expected"), [("all", 300), ("off", 0)])
    def test_modes(
        self,
        configure: Configure,
        spans: InMemorySpanExporter,
        registry: CollectorRegistry,
        mode: str,
        expected: int,
    ) -> None:
        """spans="all" exports every call and spans="off" none."""
        configure(spans=mode)
        flaky = FlakyStore()
        flaky.fail("set", OSError("gone"))
        store = tracedstore.wrap(flaky)
        with pytest.raises(OSError, match="gone"):
            store.set("key", "value")
        for _ in range(299):
            store.set("key", "value")

        assert len(spans.get_finished_spans()) == expected
        assert self.suppressed(registry, "budget") == 0

    def test_suppressed_by_caller(
        self,
        configure: Configure,
        spans: InMemorySpanExporter,
        registry: CollectorRegistry,
    ) -> None:
        """OpenTelemetry's suppression key suppresses the span, which is counted."""
        configure()
        store = tracedstore.wrap(HashStore())
        token = attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, value=True))
        try:
            store.num_keys()
        finally:
            detach(token)

        assert spans.get_finished_spans() == ()
        assert self.suppressed(registry, "suppressed") == 1

    def test_no_provider(self, registry: CollectorRegistry) -> None:
        """Without a provider no span is created and none counts as suppressed."""
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(HashStore())
        for _ in range(1000):
            store.num_keys()

        assert self.suppressed(registry, "budget") == 0


class TestEtcd:
    """Requests inside one call of an EtcdStore."""

    def test_attributes(
        self,
        configure: Configure,
        spans: InMemorySpanExporter,
        etcd_store: Callable[[Path], Store],
        tmp_path: Path,
    ) -> None:
        """The span of a call has its requests, watch timeouts and retries."""
        configure(spans="all")
        bare: Any = etcd_store(tmp_path)
        store = tracedstore.wrap(bare)
        store.add("counter", 1)
        store.add("counter", 1)
        store.set_timeout(SHORT)
        with pytest.raises(LookupError):
            store.get("never")

        created, added, missed = spans.get_finished_spans()
        attributes = [dict(span.attributes or {}) for span in (created, added, missed)]
        assert attributes[0]["db.system.name"] == "etcd"
        assert attributes[0]["db.namespace"] == bare.prefix
        # The first add creates the key with one request. The second one sends
        # create-if-absent, read and compare-and-set.
        assert attributes[0]["tracedstore.etcd.requests"] == 1
        assert attributes[1]["tracedstore.etcd.requests"] == 3
        assert attributes[1]["tracedstore.cas.retries"] == 0
        assert attributes[2]["tracedstore.etcd.watch_timeouts"] == 1
