"""The metrics of a call, and which calls are passed to observers."""

import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from support.metrics import exported_calls
from tracedstore import Operation
from tracedstore.recording.operation import Reason
from tracedstore.recording.recorder import RECORDER
from tracedstore.testing import FakeClock, FlakyStore, OperationLog


class Recorded:
    """A wrapped FlakyStore on a fake clock."""

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
        """Return the call that was last passed to observers."""
        return self.log.operations[-1]

    def metric(self, name: str, operation: str, **labels: str) -> float | None:
        """Return one sample of the flaky store."""
        return self._registry.get_sample_value(
            f"tracedstore_{name}",
            {"store": "flaky_store", "operation": operation, **labels},
        )


@pytest.fixture
def recorded(registry: CollectorRegistry) -> Recorded:
    """Return one with default thresholds and without spans."""
    return Recorded(registry)


class TestNotable:
    """Slow and failed calls are passed to observers, others are only counted."""

    def test_other_calls_are_only_counted(self, recorded: Recorded) -> None:
        """A fast, successful call is counted and not passed to observers."""
        recorded.store.set("key", "value")

        assert recorded.log.operations == []
        count = recorded.metric(
            "operation_duration_seconds_count", "set", error_type=""
        )
        assert count == 1

    def test_slow(self, recorded: Recorded) -> None:
        """A call of at least slow_after is passed to observers with all fields."""
        recorded.flaky.before("set", lambda: recorded.clock.advance(0.010))

        recorded.store.set("worker/3", "value")

        operation = recorded.last()
        assert operation.reasons == Reason.SLOW | Reason.OVERDUE
        assert operation.method.name == "set"
        assert operation.store.kind == "flaky_store"
        assert operation.keys == ("worker/3",)
        assert operation.key_count == 1
        assert operation.family == "worker/*"
        assert operation.seconds == 0.010
        assert operation.started_ns == 1_700_000_000 * 10**9
        assert operation.value_bytes == 5
        assert operation.thread_id == threading.get_ident()
        assert operation.error is None

    def test_just_below_threshold(self, recorded: Recorded) -> None:
        """A call just below slow_after is not passed to observers."""
        recorded.flaky.before("set", lambda: recorded.clock.advance(0.009_999))

        recorded.store.set("key", "value")

        assert recorded.log.operations == []

    def test_failed(self, recorded: Recorded) -> None:
        """The caller gets the same exception, and the label has its type."""
        error = ConnectionResetError("gone")
        recorded.flaky.fail("get", error)

        with pytest.raises(ConnectionResetError) as raised:
            recorded.store.get("key")

        assert raised.value is error
        assert recorded.last().error is error
        assert recorded.last().error_type == "ConnectionResetError"
        count = "wait_duration_seconds_count"
        assert recorded.metric(count, "get", error_type="ConnectionResetError") == 1
        assert recorded.metric(count, "get", error_type="") is None

    def test_empty_queue_is_not_notable(self, recorded: Recorded) -> None:
        """Torch raises when an empty queue is polled; that is only counted."""
        with pytest.raises(RuntimeError, match="queue is empty"):
            recorded.store.queue_pop("queue", block=False)

        assert recorded.log.operations == []

    def test_interrupt(self, recorded: Recorded) -> None:
        """KeyboardInterrupt reaches the caller and ends the call in flight."""
        recorded.flaky.fail("wait", KeyboardInterrupt())

        with pytest.raises(KeyboardInterrupt):
            recorded.store.wait(["key"])

        assert recorded.last().error_type == "KeyboardInterrupt"
        assert tracedstore.in_flight() == []

    def test_clock_set_back(self, recorded: Recorded) -> None:
        """The duration is right even if the wall clock is set back during a call."""

        def set_clock_back() -> None:
            recorded.clock.advance(2)
            recorded.clock.set_back(3600)

        recorded.flaky.before("set", set_clock_back)
        recorded.store.set("key", "value")

        assert recorded.last().seconds == 2


class TestCompareAndSet:
    """compare_set() is won or lost, and a lost one is not an error."""

    @pytest.mark.parametrize("as_bytes", [False, True])
    def test_won_and_lost(self, recorded: Recorded, as_bytes: bool) -> None:
        """It is won if the store returns the desired value, as text or bytes."""

        def value(text: str) -> Any:
            return text.encode() if as_bytes else text

        store = recorded.store
        store.compare_set("key", value(""), value("ä"))
        store.compare_set("key", value("ä"), value("b"))
        store.compare_set("key", value("ä"), value("c"))

        assert recorded.metric("cas_attempts_total", "compare_set", result="won") == 2
        assert recorded.metric("cas_attempts_total", "compare_set", result="lost") == 1

    def test_missing_key_with_expected_value_is_lost(self, recorded: Recorded) -> None:
        """The store returns the expected value for a missing key, which is lost."""
        recorded.store.compare_set("missing", "expected", "desired")

        assert recorded.metric("cas_attempts_total", "compare_set", result="lost") == 1

    def test_repeated_losses_are_notable(self, registry: CollectorRegistry) -> None:
        """contended_after losses in a row are notable; a win resets the count."""
        recorded = Recorded(registry, contended_after=3)
        recorded.store.set("key", "taken")
        for _ in range(2):
            recorded.store.compare_set("key", "free", "desired")
        assert recorded.log.operations == []

        recorded.store.compare_set("key", "free", "desired")

        assert recorded.last().losses_in_a_row == 3
        assert recorded.last().swapped is False
        assert recorded.last().error is None
        recorded.store.compare_set("key", "taken", "desired")
        recorded.store.compare_set("key", "free", "desired")
        assert len(recorded.log.operations) == 1


class TestBytes:
    """The sizes of values are counted in bytes."""

    def test_written_and_read(self, recorded: Recorded) -> None:
        """Written and read values count in bytes, not in characters."""
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

    def test_result_is_not_bytes(self, registry: CollectorRegistry) -> None:
        """A result that is not bytes is returned, and counts no bytes."""
        tracedstore.configure(registry=registry, log_format="off")

        class UnexpectedTypes(Store):
            def get(self, key: str) -> Any:
                return {"not": "bytes"}

            def multi_get(self, keys: list[str]) -> Any:
                return None

        store = tracedstore.wrap(UnexpectedTypes())

        assert store.get("key") == {"not": "bytes"}  # type: ignore[comparison-overlap]
        assert store.multi_get(["key"]) is None
        assert RECORDER.failures.counts() == {}


class TestKeywords:
    """Keyword arguments, which Python stores allow, are recorded."""

    def test_key_by_name(self, registry: CollectorRegistry) -> None:
        """The key is read from its keyword, and the value is not taken for it."""

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
    """A traced store below a PrefixStore below a traced store counts a call once."""

    def test_counted_once(self, registry: CollectorRegistry) -> None:
        """Only the outer store counts the call."""
        tracedstore.configure(registry=registry, log_format="off")
        inner = tracedstore.wrap(HashStore())
        outer = tracedstore.wrap(PrefixStore("a", PrefixStore("b", inner)))

        outer.set("key", "value")
        outer.get("key")
        inner.set("key", "value")

        assert exported_calls(registry.collect()) == {
            ("hash_store", "set", ""): 2,
            ("hash_store", "get", ""): 1,
        }

    def test_traced_store_inside_python_store(
        self, registry: CollectorRegistry
    ) -> None:
        """Calls that a user's store makes on a traced store count separately."""
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
    """Without recording, calls are only forwarded."""

    def test_disabled(self, registry: CollectorRegistry) -> None:
        """disabled=True keeps the store working and counts nothing."""
        recorded = Recorded(registry, disabled=True, slow_after=0)

        recorded.store.set("key", "value")

        assert recorded.store.get("key") == b"value"
        assert recorded.log.operations == []
        count = recorded.metric(
            "operation_duration_seconds_count", "set", error_type=""
        )
        assert count is None

    def test_after_shutdown(self, recorded: Recorded) -> None:
        """A store works after shutdown()."""
        tracedstore.shutdown()

        recorded.store.set("key", "value")

        assert recorded.store.get("key") == b"value"
