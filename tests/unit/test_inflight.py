"""Calls in flight, and the events of stalled calls."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import tracedstore
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import Telemetry
from tracedstore.recording.watcher import WATCHER, Watch
from tracedstore.signals.inflight import StallReporter
from tracedstore.testing import FakeClock, FlakyStore


class EventLog(Telemetry):
    """Keeps the events that are emitted."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        """Keep the event."""
        self.events.append({"event": event, **fields})


class Blocked:
    """Calls that stay blocked until they are released, on a fake clock."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.clock = FakeClock()
        log = EventLog()
        self.events = log.events
        tracedstore.configure(
            registry=registry,
            clock=self.clock.clock,
            log_format="off",
            stall_after=0,
            spans="off",
        )
        self.stalls = StallReporter(RECORDER, log, after=30)
        self.flaky = FlakyStore()
        self.store = tracedstore.wrap(self.flaky)

    @contextmanager
    def call(self, *keys: str, name: str = "waiter") -> Iterator[None]:
        """Block in wait() for these keys in another thread."""
        entered, release = threading.Event(), threading.Event()

        def block() -> None:
            entered.set()
            assert release.wait(60)

        self.flaky.set("unused", "")
        for key in keys:
            self.flaky.set(key, "value")
        self.flaky.before("wait", block)
        thread = threading.Thread(target=self.store.wait, args=(list(keys),), name=name)
        thread.start()
        assert entered.wait(60)
        try:
            yield
        finally:
            release.set()
            thread.join(60)


@pytest.fixture
def blocked(registry: CollectorRegistry) -> Blocked:
    """Return the blocked calls of one test."""
    return Blocked(registry)


class TestInFlight:
    """The table of calls in flight."""

    def test_fields(self, blocked: Blocked) -> None:
        """A call has operation, store, key, start time and thread."""
        with blocked.call("worker/1", "worker/2"):
            blocked.clock.advance(5)
            (call,) = tracedstore.in_flight()

        assert call == tracedstore.InFlight(
            operation="wait",
            store="flaky_store",
            server="",
            key="worker/1",
            key_count=2,
            key_family="worker/*",
            started=1_700_000_000.0,
            waited_seconds=5.0,
            thread="waiter",
        )
        assert tracedstore.in_flight() == []

    def test_gauges(self, blocked: Blocked, registry: CollectorRegistry) -> None:
        """The gauges exist while there is a call: the number and the oldest start."""
        labels = {"store": "flaky_store", "operation": "wait"}

        def gauges() -> tuple[float | None, float | None]:
            return (
                registry.get_sample_value("tracedstore_operations_in_flight", labels),
                registry.get_sample_value(
                    "tracedstore_oldest_operation_start_timestamp_seconds", labels
                ),
            )

        assert gauges() == (None, None)
        with blocked.call("first"):
            blocked.clock.advance(5)
            with blocked.call("second"):
                assert gauges() == (2, 1_700_000_000.0)
        assert gauges() == (None, None)


class TestStallReporter:
    """A stalled call is reported while it is in flight."""

    def test_doubling(self, blocked: Blocked) -> None:
        """A call is reported after 30 s and then each time its wait has doubled."""
        waited = []
        with blocked.call("worker/1"):
            for _ in range(250):
                blocked.clock.advance(1)
                blocked.stalls.report()
            waited = [event["waited_seconds"] for event in blocked.events]

        assert waited == [30.0, 60.0, 120.0, 240.0]
        assert blocked.events[0] == {
            "event": "store.operation.stalled",
            "operation": "wait",
            "store": "flaky_store",
            "server": "",
            "key": "worker/1",
            "key_count": 1,
            "key_family": "worker/*",
            "waited_seconds": 30.0,
            "thread": "waiter",
            "stalled_calls": 1,
        }

    def test_returns_delay_until_next_report(self, blocked: Blocked) -> None:
        """The reporter runs again when the next call can be due, not earlier."""
        assert blocked.stalls.report() == 30
        with blocked.call("key"):
            blocked.clock.advance(12)
            assert blocked.stalls.report() == 18
            blocked.clock.advance(18)
            # The next report of this call is due in 30 s, as is a new call's first.
            assert blocked.stalls.report() == 30
            assert len(blocked.events) == 1

    def test_calls_are_distinguished(self, blocked: Blocked) -> None:
        """A later call of the same thread is reported as a new one."""
        for _ in range(2):
            with blocked.call("key"):
                blocked.clock.advance(31)
                blocked.stalls.report()

        assert [event["waited_seconds"] for event in blocked.events] == [31, 31]

    def test_limits_events(self, blocked: Blocked) -> None:
        """At most 16 stalled calls are reported at once, with their total number."""
        with ExitStack() as calls:
            for number in range(20):
                calls.enter_context(blocked.call(f"key/{number}"))
            blocked.clock.advance(31)
            blocked.stalls.report()

        assert len(blocked.events) == 16
        assert {event["stalled_calls"] for event in blocked.events} == {20}

    def test_broken_log(self, blocked: Blocked) -> None:
        """The failure is counted, and the call is not affected."""
        emitted = threading.Event()

        class BrokenLog(Telemetry):
            def emit(self, event: str, **fields: Any) -> None:
                emitted.set()
                raise OSError("disk full")

        stalls = StallReporter(RECORDER, BrokenLog(), after=0)
        watch = Watch("inflight", stalls.report, after=0)
        with blocked.call("key"):
            WATCHER.add(watch)
            assert emitted.wait(60)
            WATCHER.remove(watch)
            WATCHER.stop_if_idle(20)

        assert RECORDER.failures.counts()["inflight"] >= 1

    def test_thread_starts_with_first_call(
        self, registry: CollectorRegistry, events: Any
    ) -> None:
        """No thread runs before the first call, and then a real stall is reported."""

        def watching() -> bool:
            return any(
                thread.name == "tracedstore-watcher" for thread in threading.enumerate()
            )

        tracedstore.configure(registry=registry, stall_after=0.05, log_format="json")
        flaky = FlakyStore()
        store = tracedstore.wrap(flaky)
        assert not watching()
        reported = threading.Event()
        flaky.before("get", lambda: wait_for_event(events, reported))
        flaky.set("key", "value")

        store.get("key")

        assert reported.is_set()
        assert watching()
        tracedstore.shutdown()
        assert not watching()


def wait_for_event(events: Any, reported: threading.Event) -> None:
    """Block until the stall event is in the log, at most 20 s."""
    for _ in range(2000):
        if any(event["event"] == "store.operation.stalled" for event in events()):
            reported.set()
            return
        threading.Event().wait(0.01)
