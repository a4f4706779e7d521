"""Metrics, spans and events of a rendezvous backend."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

import tracedstore
from integration.harness import in_background, in_threads, results, wait_until
from support.etcd import EtcdServer
from support.events import Events, check
from support.rendezvous import BACKENDS, Rendezvous, pickled_state
from tracedstore import names
from tracedstore.rendezvous import TracedRendezvousBackend
from tracedstore.testing import FakeClock, FlakyStore

pytestmark = pytest.mark.etcd

WRITERS, WRITES_EACH = 8, 10


@pytest.fixture(params=BACKENDS)
def rendezvous(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_server: EtcdServer
) -> Rendezvous:
    """Return a rendezvous on each of torch's backends."""
    return Rendezvous(request.param, tmp_path, etcd_server)


def value(registry: CollectorRegistry, metric: names.Metric, *labels: str) -> float:
    """Return the value of a metric, which must have a sample with these labels."""
    sample_value = registry.get_sample_value(
        metric.name, dict(zip(metric.labels, labels, strict=True))
    )
    assert sample_value is not None, f"{metric.name}{labels} is missing"
    return sample_value


def kind_of(backend: RendezvousBackend) -> str:
    """Return the value of the ``store`` label."""
    return "rendezvous_" + backend.name.replace("-", "_")


class TestWrites:
    """Every write is counted as accepted, conflict or failed."""

    def test_eight_writers(
        self,
        registry: CollectorRegistry,
        rendezvous: Rendezvous,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """Results of the writers, metrics, spans and the final state agree."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, spans="all", log_format="off"
        )
        plain = rendezvous.connect()
        plain.set_state(b"0")
        all_have_read = threading.Barrier(WRITERS)

        def write(number: int) -> tuple[int, int]:
            backend = TracedRendezvousBackend(rendezvous.connect())
            accepted = conflicts = 0
            current: Any = backend.get_state()
            # All writers have the same token, with which only one write succeeds.
            all_have_read.wait(60)
            while accepted < WRITES_EACH:
                state, token, *_ = current
                count = int(state.split(b" ")[0])
                # Unique bytes per write: C10d treats equal bytes as its own write.
                desired = f"{count + 1} by {number}".encode()
                current = backend.set_state(desired, token)
                won = current[2]
                accepted, conflicts = accepted + won, conflicts + (not won)
            return accepted, conflicts

        counts = results(in_threads(WRITERS, write))

        accepted, conflicts = (sum(column) for column in zip(*counts, strict=True))
        final: Any = plain.get_state()
        assert final[0].startswith(b"%d by" % (WRITERS * WRITES_EACH))
        assert accepted == WRITERS * WRITES_EACH
        assert conflicts >= WRITERS - 1
        backend, kind = plain.name, kind_of(plain)
        writes = names.RENDEZVOUS_WRITES
        assert value(registry, writes, backend, "accepted") == accepted
        assert value(registry, writes, backend, "conflict") == conflicts
        assert value(registry, writes, backend, "failed") == 0
        attempts = names.CAS_ATTEMPTS
        assert value(registry, attempts, kind, "set_state", "won") == accepted
        assert value(registry, attempts, kind, "set_state", "lost") == conflicts
        assert value(registry, names.CAS_RETRIES, kind, "set_state") == conflicts
        swapped = [
            span.attributes[names.CAS_SWAPPED]
            for span in spans.get_finished_spans()
            if span.attributes and names.CAS_SWAPPED in span.attributes
        ]
        assert (swapped.count(True), swapped.count(False)) == (accepted, conflicts)

    def test_conflict_without_state(
        self, registry: CollectorRegistry, rendezvous: Rendezvous
    ) -> None:
        """A rejected write is a conflict even if the backend has no state."""
        tracedstore.configure(registry=registry, log_format="off")
        backend = TracedRendezvousBackend(rendezvous.connect())

        assert backend.set_state(b"state", "invalid") is None

        assert value(registry, names.RENDEZVOUS_WRITES, backend.name, "conflict") == 1

    def test_failed(self, registry: CollectorRegistry, events: Events) -> None:
        """A write that raises counts as failed and emits an event."""
        tracedstore.configure(registry=registry)
        flaky = FlakyStore()
        backend = TracedRendezvousBackend(C10dRendezvousBackend(flaky, "run"))
        flaky.fail("compare_set", RuntimeError("gone"))

        with pytest.raises(RendezvousConnectionError):
            backend.set_state(b"state")

        counts = {
            result: value(registry, names.RENDEZVOUS_WRITES, "c10d", result)
            for result in ("accepted", "conflict", "failed")
        }
        assert counts == {"accepted": 0, "conflict": 0, "failed": 1}
        (event,) = events()
        check(event)
        assert event["event"] == names.OPERATION_FAILED
        assert (event["operation"], event["store"]) == ("set_state", "rendezvous_c10d")

    def test_conflicts_in_a_row(
        self, registry: CollectorRegistry, events: Events
    ) -> None:
        """Repeated conflicts emit an event at most every ten seconds per writer."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)
        backend = TracedRendezvousBackend(C10dRendezvousBackend(FlakyStore(), "run"))
        written: Any = backend.set_state(b"state")

        def lose(times: int) -> None:
            for _ in range(times):
                backend.set_state(b"other", "stale")

        lose(4)
        assert events() == []
        lose(10)
        clock.advance(10)
        lose(1)
        backend.set_state(b"won", written[1])
        lose(4)

        emitted = [
            (e["event"], e["losses_in_a_row"], e["suppressed_count"]) for e in events()
        ]
        assert emitted == [
            (names.RENDEZVOUS_CONFLICT, 5, 0),
            (names.RENDEZVOUS_CONFLICT, 15, 9),
        ]
        for event in events():
            check(event)
        assert value(registry, names.CAS_RETRIES, "rendezvous_c10d", "set_state") == 19


class TestState:
    """The rendezvous state in gauges and span attributes."""

    @pytest.fixture
    def state(self) -> bytes:
        """Return a state with two participants and one node in the wait list."""
        return pickled_state(
            joined={"node-a": 3, "node-b": 40},
            waiting={"node-c": 1},
            round=7,
            complete=True,
        )

    def test_gauges(
        self, registry: CollectorRegistry, rendezvous: Rendezvous, state: bytes
    ) -> None:
        """Gauges have the state last read or written, whichever node wrote it."""
        tracedstore.configure(registry=registry, log_format="off")
        backend = TracedRendezvousBackend(rendezvous.connect())
        name = backend.name
        for metric in (names.RENDEZVOUS_PARTICIPANTS, names.RENDEZVOUS_STATE_BYTES):
            assert registry.get_sample_value(metric.name, {"backend": name}) is None

        rendezvous.connect().set_state(state)
        backend.get_state()

        assert value(registry, names.RENDEZVOUS_PARTICIPANTS, name) == 2
        assert value(registry, names.RENDEZVOUS_WAIT_LIST, name) == 1
        assert value(registry, names.RENDEZVOUS_ROUND, name) == 7
        assert value(registry, names.RENDEZVOUS_COMPLETE, name) == 1
        assert value(registry, names.RENDEZVOUS_STATE_BYTES, name) == len(state)
        oldest = value(registry, names.RENDEZVOUS_OLDEST_HEARTBEAT, name)
        assert 40 <= time.time() - oldest < 100

        current: Any = backend.get_state()
        backend.set_state(pickled_state(round=8), current[1])

        assert value(registry, names.RENDEZVOUS_PARTICIPANTS, name) == 0
        assert value(registry, names.RENDEZVOUS_COMPLETE, name) == 0
        assert value(registry, names.RENDEZVOUS_ROUND, name) == 8
        absent = names.RENDEZVOUS_OLDEST_HEARTBEAT.name
        assert registry.get_sample_value(absent, {"backend": name}) is None

    def test_spans(
        self,
        registry: CollectorRegistry,
        rendezvous: Rendezvous,
        state: bytes,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """Spans have each node's heartbeat age and never the bytes of the state."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, log_format="off"
        )
        backend = TracedRendezvousBackend(rendezvous.connect())
        backend.get_state()
        backend.set_state(state)

        empty, written = spans.get_finished_spans()
        assert names.RENDEZVOUS_STATE_ROUND not in (empty.attributes or {})
        attributes: dict[str, Any] = dict(written.attributes or {})
        assert attributes["db.operation.name"] == "set_state"
        assert rendezvous.run_id in attributes["db.namespace"]
        assert attributes[names.RENDEZVOUS_STATE_PARTICIPANTS] == 2
        assert attributes[names.RENDEZVOUS_STATE_WAIT_LIST] == 1
        assert attributes[names.RENDEZVOUS_STATE_ROUND] == 7
        assert attributes[names.RENDEZVOUS_STATE_COMPLETE] is True
        assert attributes[names.VALUE_SIZE] == len(state)
        assert attributes[names.RENDEZVOUS_NODES] == (
            "node-a (pid 100)",
            "node-b (pid 101)",
            "node-c (pid 200)",
        )
        a, b, c = attributes[names.RENDEZVOUS_SILENT_SECONDS]
        assert 1 <= c < 3 <= a < 40 <= b < 100
        assert set(attributes) <= {
            *names.ATTRIBUTES,
            *("db.system.name", "db.operation.name", "db.namespace"),
            *("server.address", "server.port"),
        }

    def test_many_backends(self, registry: CollectorRegistry) -> None:
        """The number of backend names is limited, because the name is a label."""
        tracedstore.configure(registry=registry, log_format="off")

        class Named(C10dRendezvousBackend):
            number = 0

            @property
            def name(self) -> str:
                return f"custom-{self.number}"

        for number in range(20):
            inner = Named(FlakyStore(), "run")
            inner.number = number
            TracedRendezvousBackend(inner).set_state(b"state")

        metric = "tracedstore_rendezvous_state_writes"
        (family,) = [f for f in registry.collect() if f.name == metric]
        backends = {sample.labels["backend"] for sample in family.samples}
        assert len(backends) == 17
        assert value(registry, names.RENDEZVOUS_WRITES, "other", "accepted") == 4


class TestInFlight:
    """A blocked call is visible while it is blocked."""

    @pytest.mark.parametrize("call", ["get_state", "set_state"])
    def test_blocked_call(self, registry: CollectorRegistry, call: str) -> None:
        """in_flight() and the gauge have the call until it returns."""
        tracedstore.configure(registry=registry, log_format="off")
        flaky, release = FlakyStore(), threading.Event()

        def wait() -> None:
            assert release.wait(60)

        backend = TracedRendezvousBackend(C10dRendezvousBackend(flaky, "run"))
        for method in ("get", "compare_set"):
            flaky.before(method, wait)
        calls: dict[str, Callable[[], Any]] = {
            "get_state": backend.get_state,
            "set_state": lambda: backend.set_state(b"state"),
        }
        done = in_background(calls[call])
        (blocked,) = wait_until(tracedstore.in_flight)

        assert (blocked.operation, blocked.store) == (call, "rendezvous_c10d")
        assert value(registry, names.IN_FLIGHT, "rendezvous_c10d", call) == 1
        release.set()
        done.result(60)
        assert tracedstore.in_flight() == []
