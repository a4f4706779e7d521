"""tracedstore.barrier() in threads over one HashStore, and its telemetry."""

import inspect
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from integration.harness import in_background
from support.events import Events, check
from support.native import on_both_bases
from support.stores import KINDS, is_listening, second_client
from tracedstore import BarrierTimeout
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    StalledBarrier,
    record_arrival,
)
from tracedstore.coordination.store_access import close_connection
from tracedstore.export import setup
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import TELEMETRY
from tracedstore.recording.watcher import WATCHER
from tracedstore.testing import FakeClock, FlakyStore

pytestmark = on_both_bases


@pytest.fixture(autouse=True)
def _configured(registry: CollectorRegistry, core: str) -> None:
    tracedstore.configure(registry=registry, log_format="json", spans="off")


@pytest.fixture
def store() -> tracedstore.TracedStore:
    """Return a store for all threads, with a timeout other than the default."""
    store = tracedstore.wrap(dist.HashStore())
    store.set_timeout(timedelta(seconds=9))
    return store


def run_barrier(
    store: Any, *ranks: int, world_size: int = 4, **options: Any
) -> list[Any]:
    """Call the barrier in a thread per rank; return each one's exception or None."""

    def call(rank: int) -> None:
        arguments = {"barrier_timeout": 0.5, "trace_timeout": 0.2} | options
        tracedstore.barrier(store, world_size, "barrier/7", rank=rank, **arguments)

    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        calls: list[Future[None]] = [pool.submit(call, rank) for rank in ranks]
    return [future.exception() for future in calls]


class TestDropIn:
    """The signature is compatible with torch's barrier."""

    def test_same_parameters(self) -> None:
        """Names, order and defaults are torch's; added parameters are keyword-only."""
        ours = inspect.signature(tracedstore.barrier).parameters.values()
        torch_parameters = inspect.signature(torch_store.barrier).parameters.values()

        assert [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY] == [
            (p.name, p.default) for p in torch_parameters
        ]

    def test_decoder_needs_rank(self, store: Any) -> None:
        """A decoder without a rank raises torch's AssertionError."""
        with pytest.raises(AssertionError, match="Tracing requires rank information"):
            tracedstore.barrier(store, 2, "b", rank_tracing_decoder=str)


class TestMissingRanks:
    """The missing ranks by which ranks arrive."""

    def test_all_arrive(self, store: Any) -> None:
        """The barrier completes for all ranks and restores the store's timeout."""
        assert run_barrier(store, 0, 1, 2, 3, barrier_timeout=20) == [None] * 4
        assert store.timeout == timedelta(seconds=9)

    def test_world_size_one(self, store: Any) -> None:
        """A single rank completes at once."""
        assert run_barrier(store, 0, world_size=1) == [None]

    @pytest.mark.parametrize("missing", [[2], [0], [0, 1], [1, 2, 3]])
    def test_some_never_arrive(self, store: Any, missing: list[int]) -> None:
        """Every arrived rank reports exactly the missing ones."""
        arrived = [rank for rank in range(4) if rank not in missing]

        for error in run_barrier(store, *arrived):
            assert isinstance(error, BarrierTimeout)
            assert error.missing_ranks == tuple(missing)
            assert error.arrived_ranks == tuple(arrived)
            assert (error.world_size, error.timeout) == (4, 0.5)
            assert error.waited >= 0.5
        assert store.timeout == timedelta(seconds=9)

    def test_died_while_waiting(self, store: Any) -> None:
        """A rank that arrived and stopped waiting counts as arrived."""
        run_barrier(store, 2, barrier_timeout=0.001)

        # Both arrive before the first one times out, on a busy machine too.
        errors = run_barrier(store, 0, 1, barrier_timeout=2)
        assert [error.missing_ranks for error in errors] == [(3,), (3,)]

    def test_restarted(self, store: Any) -> None:
        """A rank that arrives twice counts once; error and text report it."""
        run_barrier(store, 2, world_size=5, barrier_timeout=0.001)

        for error in run_barrier(store, 0, 2, world_size=5):
            assert error.missing_ranks == (1, 3, 4)
            assert error.duplicate_ranks == (2,)
            assert "the key prefix was used before" in str(error)

    def test_without_ranks(self, store: Any) -> None:
        """Callers without a rank are counted, and no rank is reported as missing."""
        with pytest.raises(BarrierTimeout) as raised:
            tracedstore.barrier(store, 3, "b", 0.1, trace_timeout=0)

        assert raised.value.missing_ranks == ()
        assert raised.value.possibly_missing_ranks == (0, 1, 2)
        assert raised.value.unidentified_count == 1


class TestStoppedWhileArriving:
    """A rank that dies after it recorded its arrival and before it is counted."""

    @pytest.mark.parametrize("stopped", [0, 3])
    def test_named(self, store: Any, stopped: int, events: Events) -> None:
        """Every survivor names it, and a warning is emitted before the timeout."""
        record_arrival(store, BarrierKeys("barrier/7"), stopped)
        ranks = [rank for rank in range(4) if rank != stopped]

        errors = run_barrier(
            store, *ranks, barrier_timeout=0.5, trace_timeout=5, warn_after=0.1
        )

        for error in errors:
            assert error.missing_ranks == (stopped,)
            assert f"rank {stopped} stopped while arriving" in str(error)
        waiting = [e for e in events() if e["event"] == "barrier.waiting"]
        assert waiting
        for event in waiting:
            # Certain if the warning is late, and the others have confirmed theirs.
            named = event["possibly_missing_ranks"] or event["missing_ranks"]
            assert stopped in named


class TestStoreLosesData:
    """The store forgets the arrivals: a restarted server, or a damaged file."""

    def test_does_not_name_itself(self) -> None:
        """A rank whose own arrival is gone names no rank as missing."""
        inner, keys = dist.HashStore(), BarrierKeys("barrier/7")
        store = FlakyStore(inner)

        def forget() -> None:
            inner.delete_key(keys.num_members)
            inner.delete_key(keys.ledger)

        store.before("wait", forget)
        (error,) = run_barrier(tracedstore.wrap(store), 0, world_size=2)

        assert isinstance(error, BarrierTimeout)
        assert error.missing_ranks == ()
        assert error.possibly_missing_ranks == (0, 1)


class TestException:
    """The BarrierTimeout that a caller catches."""

    def test_is_compatible_with_torch(self, store: Any) -> None:
        """It is a DistStoreError whose text starts with that of torch's error."""
        (error,) = run_barrier(
            store, 1, world_size=2, rank_tracing_decoder=lambda n: f"h{n}"
        )

        assert isinstance(error, dist.DistStoreError)
        assert str(error).startswith(
            "Timed out waiting on barrier on rank 1, for key prefix: barrier/7 "
            "(world_size=2, missing_ranks=[h0], timeout=0.5)"
        )

    def test_pickles(self, store: Any) -> None:
        """It can be pickled, which torch's error files and multiprocessing need."""
        (error,) = run_barrier(store, 1, world_size=2)

        copy = pickle.loads(pickle.dumps(error))

        assert str(copy) == str(error)
        assert (copy.missing_ranks, copy.rank, copy.waited) == (
            error.missing_ranks,
            error.rank,
            error.waited,
        )


class TestEvents:
    """The events of a barrier."""

    def test_timeout(self, store: Any, events: Events) -> None:
        """Each waiting rank emits one event with the missing ranks."""
        run_barrier(store, 1, 3)

        timeouts = [event for event in events() if event["event"] == "barrier.timeout"]
        assert sorted(event["rank"] for event in timeouts) == [1, 3]
        for event in timeouts:
            check(event)
            assert event["missing_ranks"] == [0, 2]
            assert event["missing"] == "missing 2 of 4: ranks 0,2"
            assert (event["barrier"], event["barrier_family"]) == (
                "barrier/7",
                "barrier/*",
            )

    def test_waiting(self, store: Any, events: Events) -> None:
        """Waiting ranks emit a warning before the timeout."""
        run_barrier(store, 1, 3, barrier_timeout=1, warn_after=0.1)

        emitted = events()
        order = [event["event"] for event in emitted]
        assert order.index("barrier.waiting") < order.index("barrier.timeout")
        for event in emitted:
            if event["event"] == "barrier.waiting":
                check(event)
                assert event["missing_ranks"] == [0, 2]

    def test_stale_key(self, store: Any, events: Events) -> None:
        """A key prefix that was used before completes at once and emits an event."""
        run_barrier(store, 0, 1, world_size=2, barrier_timeout=20)
        assert run_barrier(store, 0, world_size=2) == [None]

        (event,) = [e for e in events() if e["event"] == "barrier.stale_key"]
        check(event)
        assert (event["arrived_count"], event["duplicate_ranks"]) == (3, [0])

    @pytest.mark.parametrize("kind", ["ledger", "no ledger"])
    def test_restarted_rank_counted_twice(
        self, store: Any, events: Events, tmp_path: Path, kind: str
    ) -> None:
        """The last rank reports that the barrier completed without a missing rank."""
        if kind == "no ledger":
            store = dist.FileStore(str(tmp_path / "store"), -1)
        run_barrier(store, 0, world_size=3)  # rank 0 restarts after this
        assert run_barrier(store, 0, 2, world_size=3, barrier_timeout=20) == [
            None,
            None,
        ]

        (event,) = [e for e in events() if e["event"] == "barrier.stale_key"]
        check(event)
        assert (event["arrived_count"], event["duplicate_ranks"]) == (3, [0])

    def test_store_fails(self, events: Events) -> None:
        """The caller gets the store's exception, and an event reports it."""
        flaky = FlakyStore()
        error = dist.DistNetworkError("connection lost")
        flaky.fail("wait", error)

        assert run_barrier(tracedstore.wrap(flaky), 0) == [error]
        (event,) = [e for e in events() if e["event"] == "barrier.failed"]
        check(event)
        # The store is the test's own, not torch's.
        assert event["error"] == ""

    def test_disabled(self, store: Any, events: Events) -> None:
        """disabled=True emits no events; the error still has the missing ranks."""
        tracedstore.configure(disabled=True, registry=CollectorRegistry())

        (error,) = run_barrier(store, 1, world_size=2)

        assert error.missing_ranks == (0,)
        assert events() == []

    def test_completed(self, store: Any) -> None:
        """barrier.completed is emitted at debug level to the application's log."""
        import structlog

        with structlog.testing.capture_logs() as captured:
            structlog.configure(processors=structlog.get_config()["processors"])
            run_barrier(store, 0, 1, world_size=2, barrier_timeout=20)
            assert setup._deferred.flush(60)
            assert setup._event_writer.flush(60)

        completed = [e for e in captured if e["event"] == "barrier.completed"]
        assert sorted(event["arrival_order"] for event in completed) == [1, 2]
        last = next(event["rank"] for event in completed if event["arrival_order"] == 2)
        assert {event["last_rank"] for event in completed} == {last}


class TestMetrics:
    """The metrics of a barrier."""

    def test_durations_and_stragglers(
        self, store: Any, registry: CollectorRegistry
    ) -> None:
        """Durations are counted by result, and last arrivals once per barrier."""
        run_barrier(store, 0, 1, world_size=2, barrier_timeout=20)
        family_labels = {"barrier": "barrier/*"}

        def sample(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(
                f"tracedstore_barrier_{name}", family_labels | labels
            )

        assert sample("duration_seconds_count", result="completed") == 2
        assert sample("duration_seconds_count", result="timeout") is None
        assert sample("last_arrivals_total") == 1

    def test_gauges_while_stalled(
        self,
        store: Any,
        registry: CollectorRegistry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Gauges have missing ranks and hosts only while the barrier waits."""
        observed: list[tuple[Any, ...]] = []
        emit = TELEMETRY.emit

        def observe(event: str, **fields: Any) -> None:
            emit(event, **fields)
            if event == "barrier.waiting":
                observed.append(gauges())

        def gauges() -> tuple[Any, ...]:
            family = {"barrier": "barrier/*"}
            rank = family | {"missing_rank": "2", "missing_host": "h2"}
            name = "tracedstore_barrier_rank_missing"
            found = (
                registry.get_sample_value(name, rank | {"cause": cause})
                for cause in ("", "not_started")
            )
            return (
                registry.get_sample_value("tracedstore_barrier_arrived_ranks", family),
                registry.get_sample_value("tracedstore_barrier_missing_ranks", family),
                next((value for value in found if value is not None), None),
            )

        monkeypatch.setattr(TELEMETRY, "emit", observe)
        run_barrier(
            store,
            0,
            1,
            3,
            barrier_timeout=1,
            warn_after=0.1,
            rank_tracing_decoder=lambda rank: f"h{rank}",
        )

        # On a busy machine the first warning may precede an arrival.
        assert (3, 1, 1) in observed
        assert gauges() == (None, None, None)

    def test_gauges_of_completed_barrier(
        self, store: Any, registry: CollectorRegistry, events: Events
    ) -> None:
        """A warning in preparation when the barrier completes sets no gauge."""
        reading, completed = threading.Event(), threading.Event()

        def decoder(rank: int) -> str:
            reading.set()
            assert completed.wait(60)
            return f"h{rank}"

        def first() -> None:
            tracedstore.barrier(
                store, 2, "b", 20, 0, decoder, warn_after=0.01, trace_timeout=0
            )
            completed.set()

        thread = threading.Thread(target=first)
        thread.start()
        assert reading.wait(60)
        tracedstore.barrier(store, 2, "b", 20, 1)
        thread.join(60)
        WATCHER.stop_if_idle(20)

        for name in ("missing_ranks", "arrived_ranks"):
            gauge = f"tracedstore_barrier_{name}"
            assert registry.get_sample_value(gauge, {"barrier": "b"}) is None
        assert "barrier.waiting" not in {event["event"] for event in events()}

    def test_gauges_of_interrupted_barrier(self, registry: CollectorRegistry) -> None:
        """KeyboardInterrupt ends the barrier call, which is then not stalled."""
        store = FlakyStore()
        store.fail("wait", KeyboardInterrupt())

        with pytest.raises(KeyboardInterrupt):
            tracedstore.barrier(store, 2, "b", 20, 0)

        assert RECORDER.cold.states(StalledBarrier) == []
        labels = {"barrier": "b", "result": "failed"}
        duration = "tracedstore_barrier_duration_seconds_count"
        assert registry.get_sample_value(duration, labels) == 1

    def test_durations_use_configured_clock(self, registry: CollectorRegistry) -> None:
        """The duration of a barrier is read from the recorder's clock."""
        clock, store = FakeClock(), FlakyStore()
        tracedstore.configure(registry=registry, clock=clock.clock, log_format="off")
        store.before("add", lambda: clock.advance(5))

        tracedstore.barrier(store, 1, "b", rank=0)

        labels = {"barrier": "b", "result": "completed"}
        duration = "tracedstore_barrier_duration_seconds_sum"
        assert registry.get_sample_value(duration, labels) == 5

    def test_calls(self, store: Any, registry: CollectorRegistry) -> None:
        """Both bases make and count the same calls, and write the same ledger."""
        run_barrier(store, 0, 1, world_size=2, barrier_timeout=20)  # registers
        before = calls(registry)
        started = time.time()
        with ThreadPoolExecutor(2) as pool:
            for rank in (0, 1):
                pool.submit(tracedstore.barrier, store, 2, "b", 20, rank)

        assert calls(registry) - before == {
            "append": 2,
            "add": 2,
            "wait": 1,
            "set": 1,
            "compare_set": 1,
        }
        ledger = Ledger(store.get("b/ARRIVALS"))
        assert sorted(ledger.ranks()) == [0, 1]
        assert all(started <= each <= time.time() for each in ledger.times())


def calls(registry: CollectorRegistry) -> Counter[str]:
    """Return the number of calls of a store, by method."""
    return Counter(
        {
            sample.labels["operation"]: int(sample.value)
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name.endswith("_duration_seconds_count")
            and "operation" in sample.labels
        }
    )


class TestLifetime:
    """A barrier that has completed keeps nothing of the job."""

    def test_server_ends_while_a_thread_reads(self, tmp_path: Path) -> None:
        """The thread reads who is missing, and does not keep the store meanwhile."""
        stores: list[Any] = [tracedstore.wrap(KINDS["tcp"](tmp_path))]
        port, other = stores[0].port, second_client(stores[0])
        reading, freed = threading.Event(), threading.Event()

        def decoder(rank: int) -> str:
            reading.set()
            assert freed.wait(60)
            return f"h{rank}"

        def call() -> None:
            tracedstore.barrier(
                stores[0], 2, "b", 20, 0, decoder, warn_after=0.01, trace_timeout=0
            )

        waiting = in_background(call)
        assert reading.wait(60)
        tracedstore.barrier(other, 2, "b", 20, 1)
        waiting.result(60)
        close_connection(stores.pop())
        listening = is_listening(port)
        freed.set()

        assert not listening


class TestOptionalSteps:
    """Failures of steps that the barrier does not need."""

    def test_decoder_raises(self, store: Any) -> None:
        """A missing rank that the decoder fails for is named by its number."""

        def decoder(rank: int) -> str:
            if rank == 0:
                raise ZeroDivisionError
            return f"h{rank}"

        for error in run_barrier(store, 2, 3, rank_tracing_decoder=decoder):
            assert error.missing_names == ("rank 0", "h1")

    @pytest.mark.parametrize("method", ["append", "check", "has_extended_api"])
    def test_store_lacks_method(self, registry: CollectorRegistry, method: str) -> None:
        """The barrier works on a store that lacks a method for recording arrivals."""
        flaky = FlakyStore()
        flaky.fail(method, NotImplementedError(), times=100)

        (error,) = run_barrier(flaky, 0, world_size=2)

        assert isinstance(error, BarrierTimeout)
        assert error.missing_ranks in ((), (1,))
        assert run_barrier(flaky, 1, world_size=2) == [None]

    def test_invalid_registry_entries(self, store: Any) -> None:
        """Invalid entries are skipped, and valid ones are returned."""
        from tracedstore.coordination import rank_registry

        store.append(rank_registry.REGISTRY, 'not json\n{"rank": "x"}\n[]\n\xff\n')
        rank_registry.register(store, 0, 4)

        assert list(rank_registry.read_ranks(store, range(4))) == [0]


class TestRegistry:
    """Every rank registers its host and process once."""

    @pytest.mark.parametrize("make", [dist.HashStore, FlakyStore])
    def test_once(self, make: Callable[[], Any]) -> None:
        """The entry has host, pid and world size; a second call writes nothing."""
        import os
        import socket

        from tracedstore.coordination import rank_registry

        store = make()
        rank_registry.register(store, 3, 8)
        (first,) = rank_registry.read_ranks(store, range(8)).values()
        rank_registry.register(store, 3, 8)

        (info,) = rank_registry.read_ranks(store, range(8)).values()
        assert (info.rank, info.world_size) == (3, 8)
        assert (info.host, info.pid) == (socket.gethostname(), os.getpid())
        assert info == first
