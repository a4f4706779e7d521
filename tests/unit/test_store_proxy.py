"""What is counted of a call, and which calls observers are told of."""

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from tracedstore import Operation
from tracedstore.core.operation import Reason
from tracedstore.testing import FakeClock, FlakyStore, OperationLog


class Recorded:
    """A FlakyStore, wrapped, on a clock that stands still."""

    def __init__(self, registry: CollectorRegistry, **settings: Any) -> None:
        self.clock = FakeClock()
        self.log = OperationLog()
        self._registry = registry
        tracedstore.configure(
            registry=registry,
            clock=self.clock.clock,
            observers=[self.log],
            log_format="off",
            **({"spans": "off"} | settings),
        )
        self.flaky = FlakyStore()
        self.store = tracedstore.wrap(self.flaky)

    def last(self) -> Operation:
        """The call that observers were last told of."""
        return self.log.operations[-1]

    def metric(self, name: str, operation: str, **labels: str) -> float | None:
        """One sample of the flaky store."""
        return self._registry.get_sample_value(
            f"tracedstore_{name}",
            {"store": "flaky_store", "operation": operation, **labels},
        )


@pytest.fixture
def recorded(registry: CollectorRegistry) -> Recorded:
    """One with default thresholds and no span budget."""
    return Recorded(registry)


class TestNotable:
    """Observers hear of slow and failed calls, and not of the others."""

    def test_ordinary_calls_are_only_counted(self, recorded: Recorded) -> None:
        """A quick success is a number, nothing more."""
        recorded.store.set("key", "value")

        assert recorded.log.operations == []
        count = recorded.metric(
            "operation_duration_seconds_count", "set", error_type=""
        )
        assert count == 1

    def test_slow(self, recorded: Recorded) -> None:
        """From slow_after on a call is told of, with all its facts."""
        recorded.flaky.before("set", lambda: recorded.clock.advance(0.010))

        recorded.store.set("worker/3", "value")

        told = recorded.last()
        assert told.reasons == Reason.SLOW | Reason.OVERDUE
        assert told.method.name == "set"
        assert told.store.kind == "flaky_store"
        assert told.keys == ("worker/3",)
        assert told.key_count == 1
        assert told.family == "worker/*"
        assert told.seconds == 0.010
        assert told.started_ns == 1_700_000_000 * 10**9
        assert told.value_bytes == 5
        assert told.thread_id == threading.get_ident()
        assert told.error is None

    def test_just_not_slow(self, recorded: Recorded) -> None:
        """The threshold is a threshold."""
        recorded.flaky.before("set", lambda: recorded.clock.advance(0.009_999))

        recorded.store.set("key", "value")

        assert recorded.log.operations == []

    def test_failed(self, recorded: Recorded) -> None:
        """The very exception reaches the caller, and its type the label."""
        error = ConnectionResetError("gone")
        recorded.flaky.fail("get", error)

        with pytest.raises(ConnectionResetError) as raised:
            recorded.store.get("key")

        assert raised.value is error
        assert recorded.last().error is error
        assert recorded.last().error_type == "ConnectionResetError"
        count = "operation_duration_seconds_count"
        assert recorded.metric(count, "get", error_type="ConnectionResetError") == 1
        assert recorded.metric(count, "get", error_type="") == 0

    def test_an_empty_queue_is_no_incident(self, recorded: Recorded) -> None:
        """Torch answers a poll of an empty queue with an exception; it is counted."""
        with pytest.raises(RuntimeError, match="queue is empty"):
            recorded.store.queue_pop("queue", block=False)

        assert recorded.log.operations == []

    def test_interrupt(self, recorded: Recorded) -> None:
        """Ctrl-C in a call passes through and leaves nothing in flight."""
        recorded.flaky.fail("wait", KeyboardInterrupt())

        with pytest.raises(KeyboardInterrupt):
            recorded.store.wait(["key"])

        assert recorded.last().error_type == "KeyboardInterrupt"
        assert tracedstore.in_flight() == []

    def test_clock_set_back(self, recorded: Recorded) -> None:
        """The time of day may jump during a call; its duration does not."""

        def jump() -> None:
            recorded.clock.advance(2)
            recorded.clock.set_back(3600)

        recorded.flaky.before("set", jump)
        recorded.store.set("key", "value")

        assert recorded.last().seconds == 2


class TestCompareAndSet:
    """A compare-and-set is won or lost, and a lost one is no error."""

    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_won_and_lost(self, recorded: Recorded, as_bytes: bool) -> None:
        """Text or bytes: it is won if the store holds what was desired."""

        def value(text: str) -> Any:
            return text.encode() if as_bytes else text

        store = recorded.store
        store.compare_set("key", value(""), value("ä"))
        store.compare_set("key", value("ä"), value("b"))
        store.compare_set("key", value("ä"), value("c"))

        assert recorded.metric("cas_attempts_total", "compare_set", result="won") == 2
        assert recorded.metric("cas_attempts_total", "compare_set", result="lost") == 1

    def test_missing_key_with_an_expectation_is_lost(self, recorded: Recorded) -> None:
        """The store answers with what was expected then, which is not to be won."""
        recorded.store.compare_set("missing", "expected", "desired")

        assert recorded.metric("cas_attempts_total", "compare_set", result="lost") == 1

    def test_losing_again_and_again_is_told(self, registry: CollectorRegistry) -> None:
        """From contended_after losses in a row on; a win starts anew."""
        recorded = Recorded(registry, contended_after=3)
        recorded.store.set("key", "taken")
        for _ in range(2):
            recorded.store.compare_set("key", "free", "mine")
        assert recorded.log.operations == []

        recorded.store.compare_set("key", "free", "mine")

        assert recorded.last().losses_in_a_row == 3
        assert recorded.last().swapped is False
        assert recorded.last().error is None
        recorded.store.compare_set("key", "taken", "mine")
        recorded.store.compare_set("key", "free", "mine")
        assert len(recorded.log.operations) == 1


class TestBytes:
    """Sizes are counted, values are not kept."""

    def test_each_way(self, recorded: Recorded) -> None:
        """What is written and what is read, in bytes and not in characters."""
        store = recorded.store
        store.set("key", "äö")
        store.append("key", b"xyz")
        store.get("key")
        store.multi_set(["a", "b"], ["1", "22"])
        store.multi_get(["a", "b"])
        store.queue_push("queue", "1234")
        store.queue_pop("queue")

        sizes = {
            operation: recorded.metric("value_bytes_total", operation)
            for operation in (
                "set",
                "append",
                "get",
                "multi_set",
                "multi_get",
                "queue_push",
                "queue_pop",
            )
        }
        assert sizes == {
            "set": 4,
            "append": 3,
            "get": 7,
            "multi_set": 3,
            "multi_get": 3,
            "queue_push": 4,
            "queue_pop": 4,
        }

    def test_what_a_python_store_returns_is_its_own_affair(
        self, registry: CollectorRegistry
    ) -> None:
        """A get that returns no bytes is passed on, and counted as none."""
        tracedstore.configure(registry=registry, log_format="off")

        class Odd(Store):
            def get(self, key: str) -> Any:
                return {"not": "bytes"}

            def multi_get(self, keys: list[str]) -> Any:
                return None

        store = tracedstore.wrap(Odd())

        assert store.get("key") == {"not": "bytes"}  # type: ignore[comparison-overlap]
        assert store.multi_get(["key"]) is None
        failures = registry.get_sample_value(
            "tracedstore_telemetry_failures_total", {"observer": "recording"}
        )
        assert failures == 0


class TestKeywords:
    """Arguments by name, as Python stores allow, are recorded all the same."""

    def test_key_by_name(self, registry: CollectorRegistry) -> None:
        """The key is found by its name, and a value is never taken for it."""

        class ByName(FlakyStore):
            def set(self, *, value: str, key: str) -> None:  # type: ignore[override]
                super().set(key, value)

        log = OperationLog()
        tracedstore.configure(
            registry=registry, observers=[log], slow_after=0, log_format="off"
        )
        store: Any = tracedstore.wrap(ByName())

        store.set(value="secret", key="name")

        assert log.operations[0].keys == ("name",)
        assert log.operations[0].value_bytes == 6


class TestNested:
    """A traced store under a PrefixStore under a traced store records a call once."""

    def test_counted_once(self, registry: CollectorRegistry) -> None:
        """By the outer one, which the caller called."""
        tracedstore.configure(registry=registry, log_format="off")
        inner = tracedstore.wrap(HashStore())
        outer = tracedstore.wrap(PrefixStore("a", PrefixStore("b", inner)))

        outer.set("key", "value")
        outer.get("key")
        inner.set("key", "value")

        def count(operation: str) -> float | None:
            return registry.get_sample_value(
                "tracedstore_operation_duration_seconds_count",
                {"store": "hash_store", "operation": operation, "error_type": ""},
            )

        assert count("set") == 2
        assert count("get") == 1

    def test_a_traced_store_inside_a_users_store_is_its_own(
        self, registry: CollectorRegistry
    ) -> None:
        """A user's store that uses a traced one makes calls of its own on that."""
        tracedstore.configure(registry=registry, log_format="off")
        outer = tracedstore.wrap(FlakyStore(tracedstore.wrap(HashStore())))

        outer.set("key", "value")

        for kind in ("flaky_store", "hash_store"):
            count = registry.get_sample_value(
                "tracedstore_operation_duration_seconds_count",
                {"store": kind, "operation": "set", "error_type": ""},
            )
            assert count == 1


class TestSwitches:
    """Recording can be off, and then a call is only forwarded."""

    def test_disabled(self, registry: CollectorRegistry) -> None:
        """TRACEDSTORE_DISABLED leaves the store working and counts nothing."""
        recorded = Recorded(registry, disabled=True, slow_after=0)

        recorded.store.set("key", "value")

        assert recorded.store.get("key") == b"value"
        assert recorded.log.operations == []
        count = recorded.metric(
            "operation_duration_seconds_count", "set", error_type=""
        )
        assert count == 0

    def test_after_shutdown(self, recorded: Recorded) -> None:
        """A store outlives the telemetry."""
        tracedstore.shutdown()

        recorded.store.set("key", "value")

        assert recorded.store.get("key") == b"value"
