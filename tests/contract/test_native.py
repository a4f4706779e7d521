"""The native base: what the Python base cannot do, and what it must not lose."""

import gc
import os
import signal
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import native_caller
import pytest
from prometheus_client import CollectorRegistry
from torch.distributed import DistStoreError, HashStore, PrefixStore

import tracedstore
from contract.harness import SHAPES, Make, outcomes
from contract.scenarios import MINUTE, NOT_FROM_CPP, SCENARIOS
from integration.harness import wait_until
from support.metrics import exported_calls
from support.versions import needs_store_barrier
from tracedstore import TracedStore, wrap
from tracedstore.names import BUILD_INFO, OPERATIONS_DROPPED
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.testing import FakeClock, FlakyStore, OperationLog

pytestmark = pytest.mark.parametrize("core", ["native"], indirect=True)
NATIVE_KINDS = ["tcp", "tcp-legacy", "file", "hash"]


@pytest.fixture
def log(registry: CollectorRegistry) -> OperationLog:
    """Record the operations of all wrappers."""
    log = OperationLog()
    tracedstore.configure(
        observers=[log], slow_after=0, log_format="off", registry=registry
    )
    return log


@pytest.fixture
def caller() -> Any:
    """Calls of a store from C++."""
    return native_caller.load()


def counts(registry: CollectorRegistry) -> Counter[tuple[str, str]]:
    """Return the number of calls by operation and error type, without zeros."""
    calls = exported_calls(registry.collect())
    return Counter(
        {(operation, error): number for (_, operation, error), number in calls.items()}
    )


class TestChosen:
    """Which stores the native base records."""

    def test_for_cpp_stores(self, registry: CollectorRegistry) -> None:
        """Stores in C++ are native, stores in Python are not; both are traced."""
        tracedstore.configure(registry=registry, log_format="off")
        native: Any = wrap(HashStore())
        python: Any = wrap(FlakyStore())

        assert type(native) is not TracedStore
        assert type(python) is TracedStore
        assert isinstance(native, TracedStore)
        labels = {"version": tracedstore.__version__, "core": "native"}
        (build,) = (
            sample
            for family in registry.collect()
            for sample in family.samples
            if sample.name == BUILD_INFO.name
        )
        assert labels.items() <= build.labels.items()

    def test_python_base_for_python_subclass(self) -> None:
        """C++ would not call the methods of a subclass in Python."""

        class Loud(HashStore):
            def get(self, key: str) -> bytes:
                return super().get(key).upper()

        store = wrap(Loud())
        store.set("k", "v")

        assert type(store) is TracedStore
        assert store.get("k") == b"V"

    def test_python_base_for_fake_clock(self) -> None:
        """C++ reads the system's clock only."""
        tracedstore.configure(clock=FakeClock().clock, log_format="off")

        assert type(wrap(HashStore())) is TracedStore


class TestThroughPrefixStore:
    """Every method of a PrefixStore above reaches the native base."""

    @pytest.mark.parametrize("kind", NATIVE_KINDS, indirect=True)
    @pytest.mark.parametrize("scenario", sorted(NOT_FROM_CPP))
    def test_has_same_outcome(self, make: Make, scenario: str) -> None:
        """Queues, list_keys and keys that are no text work as on the bare store."""
        shape = SHAPES["under-prefix"]

        expected = outcomes(SCENARIOS[scenario], shape.bare(make()))

        assert outcomes(SCENARIOS[scenario], shape.wrapped(make())) == expected

    def test_timeout_reaches_inner_store_at_once(self) -> None:
        """set_timeout() of the PrefixStore is the inner store's."""
        inner: Any = HashStore()

        PrefixStore("p", wrap(inner)).set_timeout(MINUTE)

        assert inner.timeout == MINUTE

    @needs_store_barrier
    def test_barrier_is_one_call(self, log: OperationLog) -> None:
        """A barrier is recorded as such, and not as its parts."""
        store: Any = wrap(PrefixStore("p", wrap(HashStore())))

        store.barrier("b", 1)

        assert [operation.method.name for operation in log.operations] == ["barrier"]

    def test_lives_without_python_half(self) -> None:
        """A closed store that only C++ refers to works, and is traced."""
        store = wrap(HashStore())
        above: Any = PrefixStore("p", store)
        store.close()
        del store
        gc.collect()

        above.set("k", "v")

        assert above.get("k") == b"v"
        assert isinstance(above.underlying_store, TracedStore)
        assert above.underlying_store.get("p/k") == b"v"


class TestRecorded:
    """Operations, counts and calls in flight."""

    def test_operations(self, log: OperationLog) -> None:
        """Keys, sizes, compare-and-sets and errors are those of the calls."""
        store: Any = wrap(HashStore())

        store.set("a", "12345")
        store.compare_set("a", "other", "new")
        store.compare_set("a", "12345", "new")
        store.check(["a", "b"])
        with pytest.raises(Exception, match="timeout"):
            store.wait(["missing"], timedelta(milliseconds=1))

        assert [
            (o.method.name, o.keys, o.value_bytes, o.swapped, o.error_type)
            for o in log.operations
        ] == [
            ("set", ("a",), 5, None, ""),
            ("compare_set", ("a",), 3, False, ""),
            ("compare_set", ("a",), 3, True, ""),
            ("check", ("a", "b"), 0, None, ""),
            ("wait", ("missing",), 0, None, "timeout"),
        ]
        assert log.operations[1].losses_in_a_row == 1

    def test_counted_exactly_by_many_threads(
        self, registry: CollectorRegistry, caller: Any
    ) -> None:
        """No call of 8 threads of Python's and 8 of C++'s is lost or counted twice."""
        tracedstore.configure(registry=registry, log_format="off")
        store: Any = wrap(HashStore())
        store.set("k", "v")

        def work() -> None:
            for _ in range(1000):
                store.add("n", 1)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        caller.call_from_threads(store, "k", 1000, 8)
        for thread in threads:
            thread.join()

        assert store.add("n", 0) == 8000
        assert counts(registry) == {
            ("set", ""): 1,
            ("add", ""): 8001,
            ("get", ""): 8000,
        }

    def test_call_in_flight_keeps_its_identity(self, log: OperationLog) -> None:
        """A blocked call is shown with all keys, and is the same at each reading."""
        store: Any = wrap(HashStore())
        keys = [f"k{number}" for number in range(40)]
        thread = threading.Thread(target=store.wait, args=(keys, MINUTE))
        thread.start()
        first = wait_until(RECORDER.counters.calls)
        second = RECORDER.counters.calls()
        (shown,) = tracedstore.in_flight()
        store.multi_set(keys, ["v"] * len(keys))
        thread.join()

        assert first[0].call is second[0].call
        assert first[0].args == (tuple(keys), MINUTE)
        assert first[0].thread_id == thread.ident
        assert (shown.operation, shown.key, shown.key_count) == ("wait", "k0", 40)
        assert tracedstore.in_flight() == []

    def test_unrecorded(self, registry: CollectorRegistry) -> None:
        """The telemetry's own calls are not recorded."""
        tracedstore.configure(registry=registry, log_format="off")
        store = wrap(HashStore())

        with RECORDER.unrecorded():
            store.set("k", "v")
        store.set("k", "v")

        assert counts(registry) == {("set", ""): 1}

    def test_disabled(self, registry: CollectorRegistry) -> None:
        """Nothing is recorded after shutdown()."""
        tracedstore.configure(registry=registry, log_format="off")
        store = wrap(HashStore())
        tracedstore.shutdown()

        store.set("k", "v")

        assert RECORDER.counters.sums() == {}


class TestThreadsUnknownToPython:
    """Threads that torch's C++ starts."""

    def test_notable_calls(
        self, log: OperationLog, registry: CollectorRegistry, caller: Any
    ) -> None:
        """All are counted; those that the ring has no room for are not observed."""
        store: Any = wrap(HashStore())
        store.set("k", "v")

        caller.call_from_threads(store, "k", 5000, 2)

        assert counts(registry) == {("set", ""): 1, ("get", ""): 10_000}
        (*_, last) = observed = [o for o in log.operations if o.method.name == "get"]
        dropped = registry.get_sample_value(OPERATIONS_DROPPED.name)
        assert dropped == 10_000 - len(observed)
        assert 1024 <= len(observed) < 10_000
        assert (last.keys, last.value_bytes) == (("k",), 1)
        assert last.thread_id not in {t.ident for t in threading.enumerate()}

    def test_are_watched(
        self, registry: CollectorRegistry, caller: Any, events: Any
    ) -> None:
        """A stall is reported though no thread of Python ever calls the store."""
        tracedstore.configure(registry=registry, log_format="json", stall_after=0.1)
        inner = HashStore()
        caller.wait_in_background(wrap(inner), "late")

        found = wait_until(
            lambda: [e for e in events() if e["event"] == "store.operation.stalled"]
        )
        inner.set("late", "")
        wait_until(lambda: not tracedstore.in_flight())

        assert (found[0]["operation"], found[0]["key"]) == ("wait", "late")
        assert found[0]["thread"].startswith("native-")


@pytest.mark.processes
class TestFork:
    """A forked child records its own calls only."""

    def test_starts_from_zero(self, log: OperationLog) -> None:
        """Counts and calls in flight of the parent are not the child's."""
        store: Any = wrap(HashStore())
        store.set("k", "v")
        thread = threading.Thread(target=store.wait, args=(["other"], MINUTE))
        thread.start()
        wait_until(tracedstore.in_flight)
        pid = os.fork()
        if pid == 0:
            store.check(["k"])
            sums = RECORDER.counters.sums()
            names = [series.method.name for series in sums]
            os._exit(0 if (names, tracedstore.in_flight()) == (["check"], []) else 1)
        _, status = os.waitpid(pid, 0)
        store.set("other", "v")
        thread.join()

        assert os.waitstatus_to_exitcode(status) == 0


class TestNote:
    """What is known about a wait is a note on the exception that Python gets."""

    @pytest.mark.parametrize("through", [wrap, lambda s: PrefixStore("p", wrap(s))])
    def test_is_added(
        self, through: Any, log: OperationLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The exception is torch's, called from Python or through C++."""

        def explain(_call: Any, error: BaseException | None) -> dict[str, Any]:
            if error is not None:
                error.add_note("tracedstore: rank 3 is missing")
            return {}

        monkeypatch.setattr(TELEMETRY, "explain_wait", explain)
        store, bare = through(HashStore()), HashStore()
        errors = []
        for each in (store, bare):
            with pytest.raises(RuntimeError, match="timeout") as caught:
                each.wait(["missing"], timedelta(milliseconds=1))
            errors.append(caught.value)

        assert type(errors[0]) is type(errors[1])
        assert str(errors[0]) == str(errors[1])
        assert errors[0].__notes__ == ["tracedstore: rank 3 is missing"]
        assert not hasattr(errors[1], "__notes__")


class TestSignals:
    """What a signal handler raises while a call waits."""

    @pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
    @pytest.mark.parametrize("found", [True, False])
    def test_reaches_the_caller(
        self, log: OperationLog, error: type[BaseException], *, found: bool
    ) -> None:
        """The call is notable; telemetry must not take the exception for its own."""

        def handle(*_: object) -> None:
            raise error("from the handler")

        inner = HashStore()
        store = wrap(inner)

        def send() -> None:
            wait_until(lambda: bool(RECORDER.counters.calls()))
            os.kill(os.getpid(), signal.SIGUSR1)
            if found:
                inner.set("key", "value")

        sender = threading.Thread(target=send)

        def wait() -> None:
            sender.start()
            with suppress(DistStoreError):
                store.wait(["key"], MINUTE if found else timedelta(seconds=1))
            sender.join()

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with pytest.raises(error, match="from the handler"):
                wait()
        finally:
            sender.join()
            signal.signal(signal.SIGUSR1, before)
        # A call during which a signal arrived does not wait for its observers.
        wait_until(lambda: [each.method.name for each in log.operations] == ["wait"])
        store.set("key", "value")
        assert len(log.operations) == 2
