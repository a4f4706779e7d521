"""What Prometheus, OpenTelemetry and the log get to see of a rendezvous."""

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
from support.rendezvous import BACKENDS, Rendezvous, a_state
from tracedstore import names
from tracedstore.rendezvous import TracedRendezvousBackend
from tracedstore.testing import FakeClock, FlakyStore

pytestmark = pytest.mark.etcd

WRITERS, WRITES_EACH = 8, 10


@pytest.fixture(params=BACKENDS)
def rendezvous(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_server: EtcdServer
) -> Rendezvous:
    """A rendezvous on each of torch's backends."""
    return Rendezvous(request.param, tmp_path, etcd_server)


def value(registry: CollectorRegistry, metric: names.Metric, *labels: str) -> float:
    """What a metric says."""
    found = registry.get_sample_value(
        metric.name, dict(zip(metric.labels, labels, strict=True))
    )
    assert found is not None, f"{metric.name}{labels} is not there"
    return found


def kind_of(backend: RendezvousBackend) -> str:
    """What the ``store`` label says."""
    return "rendezvous_" + backend.name.replace("-", "_")


class TestWrites:
    """Every write is accepted, in conflict, or failed."""

    def test_eight_writers(
        self,
        registry: CollectorRegistry,
        rendezvous: Rendezvous,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
    ) -> None:
        """What each of them saw, all that was counted, and what stands there agree."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, spans="all", log_format="off"
        )
        plain = rendezvous.connect()
        plain.set_state(b"0")
        everybody_read = threading.Barrier(WRITERS)

        def write(number: int) -> tuple[int, int]:
            backend = TracedRendezvousBackend(rendezvous.connect())
            accepted = conflicts = 0
            found: Any = backend.get_state()
            # All of them have the same token, which is good for one of them.
            everybody_read.wait(15)
            while accepted < WRITES_EACH:
                state, token, *_ = found
                count = int(state.split(b" ")[0])
                # Its own bytes each time: C10d takes equal bytes for its own.
                mine = f"{count + 1} by {number}".encode()
                found = backend.set_state(mine, token)
                won = found[2]
                accepted, conflicts = accepted + won, conflicts + (not won)
            return accepted, conflicts

        told = results(in_threads(WRITERS, write))

        accepted, conflicts = (sum(column) for column in zip(*told, strict=True))
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

    def test_refused_without_a_state(
        self, registry: CollectorRegistry, rendezvous: Rendezvous
    ) -> None:
        """A write that is refused, with nothing there to show, is a conflict too."""
        tracedstore.configure(registry=registry, log_format="off")
        backend = TracedRendezvousBackend(rendezvous.connect())

        assert backend.set_state(b"state", "invalid") is None

        assert value(registry, names.RENDEZVOUS_WRITES, backend.name, "conflict") == 1

    def test_failed(self, registry: CollectorRegistry, events: Events) -> None:
        """One that raised is counted as that, and told of."""
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
        """Told when they do not end, at most once in ten seconds, per writer."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)
        backend = TracedRendezvousBackend(C10dRendezvousBackend(FlakyStore(), "run"))
        found: Any = backend.set_state(b"state")

        def lose(times: int) -> None:
            for _ in range(times):
                backend.set_state(b"mine", "stale")

        lose(4)
        assert events() == []
        lose(10)
        clock.advance(10)
        lose(1)
        backend.set_state(b"won", found[1])
        lose(4)

        told = [
            (e["event"], e["losses_in_a_row"], e["suppressed_count"]) for e in events()
        ]
        assert told == [
            (names.RENDEZVOUS_CONFLICT, 5, 0),
            (names.RENDEZVOUS_CONFLICT, 15, 9),
        ]
        for event in events():
            check(event)
        assert value(registry, names.CAS_RETRIES, "rendezvous_c10d", "set_state") == 19


class TestState:
    """What stands in the state, as gauges and on the spans."""

    @pytest.fixture
    def state(self) -> bytes:
        """Two that joined, and one that waits."""
        return a_state(
            joined={"node-a": 3, "node-b": 40},
            waiting={"node-c": 1},
            round=7,
            complete=True,
        )

    def test_gauges(
        self, registry: CollectorRegistry, rendezvous: Rendezvous, state: bytes
    ) -> None:
        """As it was last read or written, by this node or by another one."""
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

        found: Any = backend.get_state()
        backend.set_state(a_state(round=8), found[1])

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
        """With each node's silence; and never a byte of the state."""
        tracedstore.configure(
            registry=registry, tracer_provider=provider, log_format="off"
        )
        backend = TracedRendezvousBackend(rendezvous.connect())
        backend.get_state()
        backend.set_state(state)

        empty, written = spans.get_finished_spans()
        assert names.RENDEZVOUS_STATE_ROUND not in (empty.attributes or {})
        said: dict[str, Any] = dict(written.attributes or {})
        assert said["db.operation.name"] == "set_state"
        assert said["db.namespace"].endswith(rendezvous.run_id)
        assert said[names.RENDEZVOUS_STATE_PARTICIPANTS] == 2
        assert said[names.RENDEZVOUS_STATE_WAIT_LIST] == 1
        assert said[names.RENDEZVOUS_STATE_ROUND] == 7
        assert said[names.RENDEZVOUS_STATE_COMPLETE] is True
        assert said[names.VALUE_SIZE] == len(state)
        assert said[names.RENDEZVOUS_NODES] == (
            "node-a (pid 100)",
            "node-b (pid 101)",
            "node-c (pid 200)",
        )
        a, b, c = said[names.RENDEZVOUS_SILENT_SECONDS]
        assert 1 <= c < 3 <= a < 40 <= b < 100
        assert set(said) <= {
            *names.ATTRIBUTES,
            *("db.system.name", "db.operation.name", "db.namespace"),
            *("server.address", "server.port"),
        }

    def test_many_backends(self, registry: CollectorRegistry) -> None:
        """A backend's name is a label, so there is an end to them."""
        tracedstore.configure(registry=registry, log_format="off")

        class Named(C10dRendezvousBackend):
            number = 0

            @property
            def name(self) -> str:
                return f"mine-{self.number}"

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
    """A call that hangs is seen while it does."""

    @pytest.mark.parametrize("call", ["get_state", "set_state"])
    def test_hanging(self, registry: CollectorRegistry, call: str) -> None:
        """In the table and in the gauge."""
        tracedstore.configure(registry=registry, log_format="off")
        flaky, go_on = FlakyStore(), threading.Event()

        def wait() -> None:
            assert go_on.wait(15)

        backend = TracedRendezvousBackend(C10dRendezvousBackend(flaky, "run"))
        for method in ("get", "compare_set"):
            flaky.before(method, wait)
        calls: dict[str, Callable[[], Any]] = {
            "get_state": backend.get_state,
            "set_state": lambda: backend.set_state(b"state"),
        }
        done = in_background(calls[call])
        (found,) = wait_until(tracedstore.in_flight)

        assert (found.operation, found.store) == (call, "rendezvous_c10d")
        assert value(registry, names.IN_FLIGHT, "rendezvous_c10d", call) == 1
        go_on.set()
        done.result(15)
        assert tracedstore.in_flight() == []
