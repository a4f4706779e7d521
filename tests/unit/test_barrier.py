"""The barrier, in threads over one HashStore, and what it tells."""

import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.utils import store as torchs

import tracedstore
from support.events import Events, check
from tracedstore import BarrierTimeout
from tracedstore.coordination.arrivals import record_arrival
from tracedstore.coordination.protocol import BarrierKeys
from tracedstore.core.recorder import RECORDER
from tracedstore.core.telemetry import TELEMETRY
from tracedstore.core.watcher import WATCHER
from tracedstore.export import setup
from tracedstore.testing import FakeClock, FlakyStore


@pytest.fixture(autouse=True)
def _configured(registry: CollectorRegistry) -> None:
    tracedstore.configure(registry=registry, log_format="json", spans="off")


@pytest.fixture
def store() -> tracedstore.TracedStore:
    """A store that all threads share, which has a timeout of its own."""
    store = tracedstore.wrap(dist.HashStore())
    store.set_timeout(timedelta(seconds=9))
    return store


def meet(store: Any, *ranks: int, world_size: int = 4, **options: Any) -> list[Any]:
    """Let ranks meet, each in a thread; give what each of them met with, or None."""

    def visit(rank: int) -> None:
        arguments = {"barrier_timeout": 0.2, "trace_timeout": 0.2} | options
        tracedstore.barrier(store, world_size, "barrier/7", rank=rank, **arguments)

    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        visits: list[Future[None]] = [pool.submit(visit, rank) for rank in ranks]
    return [one.exception() for one in visits]


class TestDropIn:
    """It stands where torch's stands."""

    def test_same_parameters(self) -> None:
        """By name, by position, with the same defaults; ours follow by keyword only."""
        ours = inspect.signature(tracedstore.barrier).parameters.values()
        theirs = inspect.signature(torchs.barrier).parameters.values()

        assert [(p.name, p.default) for p in ours if p.kind is not p.KEYWORD_ONLY] == [
            (p.name, p.default) for p in theirs
        ]

    def test_a_decoder_needs_a_rank(self, store: Any) -> None:
        """As with torch's."""
        with pytest.raises(AssertionError, match="Tracing requires rank information"):
            tracedstore.barrier(store, 2, "b", rank_tracing_decoder=str)


class TestMatrix:
    """Who comes, who does not, and who is named."""

    def test_all_arrive(self, store: Any) -> None:
        """All of them come through, and the store's timeout is what it was."""
        assert meet(store, 0, 1, 2, 3, barrier_timeout=20) == [None] * 4
        assert store.timeout == timedelta(seconds=9)

    def test_a_world_of_one(self, store: Any) -> None:
        """Who is alone waits for nobody."""
        assert meet(store, 0, world_size=1) == [None]

    @pytest.mark.parametrize("missing", [[2], [0], [0, 1], [1, 2, 3]])
    def test_some_never(self, store: Any, missing: list[int]) -> None:
        """Every survivor names exactly the missing ones."""
        came = [rank for rank in range(4) if rank not in missing]

        for error in meet(store, *came):
            assert isinstance(error, BarrierTimeout)
            assert error.missing_ranks == tuple(missing)
            assert error.arrived_ranks == tuple(came)
            assert (error.world_size, error.timeout) == (4, 0.2)
            assert error.waited >= 0.2
        assert store.timeout == timedelta(seconds=9)

    def test_died_while_waiting(self, store: Any) -> None:
        """Who arrived and gave up early did arrive."""
        meet(store, 2, barrier_timeout=0.001)

        assert [error.missing_ranks for error in meet(store, 0, 1)] == [(3,), (3,)]

    def test_restarted(self, store: Any) -> None:
        """Who comes twice is one, and both the error and its text say so."""
        meet(store, 2, world_size=5, barrier_timeout=0.001)

        for error in meet(store, 0, 2, world_size=5):
            assert error.missing_ranks == (1, 3, 4)
            assert error.duplicate_ranks == (2,)
            assert "the key prefix was used before" in str(error)

    def test_without_ranks(self, store: Any) -> None:
        """Callers that say no rank are counted, and nobody is accused."""
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

        errors = meet(
            store, *ranks, barrier_timeout=0.5, trace_timeout=5, warn_after=0.1
        )

        for error in errors:
            assert error.missing_ranks == (stopped,)
            assert f"ranks {stopped} stopped while arriving" in str(error)
        waiting = [e for e in events() if e["event"] == "barrier.waiting"]
        assert waiting
        assert all(stopped in event["possibly_missing_ranks"] for event in waiting)


class TestException:
    """What is caught."""

    def test_is_torchs(self, store: Any) -> None:
        """Code that catches torch's error catches ours, and reads what it read."""
        (error,) = meet(store, 1, world_size=2, rank_tracing_decoder=lambda n: f"h{n}")

        assert isinstance(error, dist.DistStoreError)
        assert str(error).startswith(
            "Timed out waiting on barrier on rank 1, for key prefix: barrier/7 "
            "(world_size=2, missing_ranks=[h0], timeout=0.2)"
        )

    def test_pickles(self, store: Any) -> None:
        """Torch's error files and multiprocessing pass exceptions on."""
        (error,) = meet(store, 1, world_size=2)

        copy = pickle.loads(pickle.dumps(error))

        assert str(copy) == str(error)
        assert (copy.missing_ranks, copy.rank, copy.waited) == (
            error.missing_ranks,
            error.rank,
            error.waited,
        )


class TestEvents:
    """What is told."""

    def test_timeout(self, store: Any, events: Events) -> None:
        """One line a survivor, that says who, where, and since when."""
        meet(store, 1, 3)

        told = [event for event in events() if event["event"] == "barrier.timeout"]
        assert sorted(event["rank"] for event in told) == [1, 3]
        for event in told:
            check(event)
            assert event["missing_ranks"] == [0, 2]
            assert event["missing"] == "missing 2 of 4: ranks 0,2"
            assert (event["barrier"], event["barrier_family"]) == (
                "barrier/7",
                "barrier/*",
            )

    def test_waiting(self, store: Any, events: Events) -> None:
        """The first to come warn, long before the timeout."""
        meet(store, 1, 3, barrier_timeout=1, warn_after=0.1)

        told = [event for event in events() if event["event"] == "barrier.waiting"]
        assert told
        for event in told:
            check(event)
            assert event["missing_ranks"] == [0, 2]
            assert event["waited_seconds"] < 1

    def test_stale_key(self, store: Any, events: Events) -> None:
        """A prefix that was used before lets everybody through, and is told."""
        meet(store, 0, 1, world_size=2, barrier_timeout=20)
        assert meet(store, 0, world_size=2) == [None]

        (event,) = [e for e in events() if e["event"] == "barrier.stale_key"]
        check(event)
        assert (event["arrived_count"], event["duplicate_ranks"]) == (3, [0])

    @pytest.mark.parametrize("kind", ["ledger", "no ledger"])
    def test_one_counted_for_another(
        self, store: Any, events: Events, tmp_path: Path, kind: str
    ) -> None:
        """The last one tells that the barrier let go though somebody is missing."""
        if kind == "no ledger":
            store = dist.FileStore(str(tmp_path / "store"), -1)
        meet(store, 0, world_size=3)  # and is restarted
        assert meet(store, 0, 2, world_size=3, barrier_timeout=20) == [None, None]

        (event,) = [e for e in events() if e["event"] == "barrier.stale_key"]
        check(event)
        assert (event["arrived_count"], event["duplicate_ranks"]) == (3, [0])

    def test_the_store_fails(self, events: Events) -> None:
        """The store's own error comes through, plus an event that says so."""
        flaky = FlakyStore()
        error = dist.DistNetworkError("connection lost")
        flaky.fail("wait", error)

        assert meet(tracedstore.wrap(flaky), 0) == [error]
        (event,) = [e for e in events() if e["event"] == "barrier.failed"]
        check(event)
        assert event["error"] == "connection lost"

    def test_disabled(self, store: Any, events: Events) -> None:
        """Where nothing is to be recorded nothing is told; the error names names."""
        tracedstore.configure(disabled=True, registry=CollectorRegistry())

        (error,) = meet(store, 1, world_size=2)

        assert error.missing_ranks == (0,)
        assert events() == []

    def test_completed_for_those_who_want_details(self, store: Any) -> None:
        """At debug level, through the application's own log."""
        import structlog

        with structlog.testing.capture_logs() as captured:
            structlog.configure(processors=structlog.get_config()["processors"])
            meet(store, 0, 1, world_size=2, barrier_timeout=20)
            assert setup._event_writer.flush(20)

        completed = [e for e in captured if e["event"] == "barrier.completed"]
        assert sorted(event["arrival_order"] for event in completed) == [1, 2]
        last = next(event["rank"] for event in completed if event["arrival_order"] == 2)
        assert {event["last_rank"] for event in completed} == {last}


class TestMetrics:
    """What Prometheus sees."""

    def test_durations_and_stragglers(
        self, store: Any, registry: CollectorRegistry
    ) -> None:
        """How barriers ended, and that this process came last once."""
        meet(store, 0, 1, world_size=2, barrier_timeout=20)
        tracedstore_family = {"barrier": "barrier/*"}

        def sample(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(
                f"tracedstore_barrier_{name}", tracedstore_family | labels
            )

        assert sample("duration_seconds_count", result="completed") == 2
        assert sample("duration_seconds_count", result="timeout") == 0
        assert sample("last_arrivals_total") == 1

    def test_gauges_while_stalled(
        self,
        store: Any,
        registry: CollectorRegistry,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The missing ranks and hosts while the barrier waits, and none afterwards."""
        seen: list[tuple[Any, ...]] = []
        emit = TELEMETRY.emit

        def observe(event: str, **fields: Any) -> None:
            emit(event, **fields)
            if event == "barrier.waiting":
                seen.append(gauges())

        def gauges() -> tuple[Any, ...]:
            family = {"barrier": "barrier/*"}
            rank = family | {"missing_rank": "2", "missing_host": "h2"}
            return (
                registry.get_sample_value("tracedstore_barrier_arrived_ranks", family),
                registry.get_sample_value("tracedstore_barrier_missing_ranks", family),
                registry.get_sample_value("tracedstore_barrier_rank_missing", rank),
            )

        monkeypatch.setattr(TELEMETRY, "emit", observe)
        meet(
            store,
            0,
            1,
            3,
            barrier_timeout=0.5,
            warn_after=0.1,
            rank_tracing_decoder=lambda rank: f"h{rank}",
        )

        assert seen[0] == (3, 1, 1)
        assert gauges() == (None, None, None)

    def test_gauges_of_a_barrier_that_completed(
        self, store: Any, registry: CollectorRegistry, events: Events
    ) -> None:
        """A warning that is read while the barrier completes sets no gauge."""
        reading, completed = threading.Event(), threading.Event()

        def decoder(rank: int) -> str:
            reading.set()
            assert completed.wait(20)
            return f"h{rank}"

        def first() -> None:
            tracedstore.barrier(
                store, 2, "b", 20, 0, decoder, warn_after=0.01, trace_timeout=0
            )
            completed.set()

        thread = threading.Thread(target=first)
        thread.start()
        assert reading.wait(20)
        tracedstore.barrier(store, 2, "b", 20, 1)
        thread.join(20)
        WATCHER.stop_if_idle(20)

        for name in ("missing_ranks", "arrived_ranks"):
            gauge = f"tracedstore_barrier_{name}"
            assert registry.get_sample_value(gauge, {"barrier": "b"}) is None
        assert "barrier.waiting" not in {event["event"] for event in events()}

    def test_gauges_of_an_interrupted_barrier(
        self, registry: CollectorRegistry
    ) -> None:
        """A barrier call that KeyboardInterrupt ends is no longer stalled."""
        store = FlakyStore()
        store.fail("wait", KeyboardInterrupt())

        with pytest.raises(KeyboardInterrupt):
            tracedstore.barrier(store, 2, "b", 20, 0)

        assert RECORDER.barriers._calls == {}
        labels = {"barrier": "b", "result": "failed"}
        duration = "tracedstore_barrier_duration_seconds_count"
        assert registry.get_sample_value(duration, labels) == 1

    def test_durations_use_the_configured_clock(
        self, registry: CollectorRegistry
    ) -> None:
        """The time of a barrier is the recorder's, like that of a call."""
        clock, store = FakeClock(), FlakyStore()
        tracedstore.configure(registry=registry, clock=clock.clock, log_format="off")
        store.before("add", lambda: clock.advance(5))

        tracedstore.barrier(store, 1, "b", rank=0)

        labels = {"barrier": "b", "result": "completed"}
        duration = "tracedstore_barrier_duration_seconds_sum"
        assert registry.get_sample_value(duration, labels) == 5


class TestBadWeather:
    """What the barrier can do without may fail."""

    def test_a_decoder_that_raises(self, store: Any) -> None:
        """It costs that name only."""

        def decoder(rank: int) -> str:
            if rank == 0:
                raise ZeroDivisionError
            return f"h{rank}"

        for error in meet(store, 2, 3, rank_tracing_decoder=decoder):
            assert error.missing_names == ("rank 0", "h1")

    @pytest.mark.parametrize("method", ["append", "check", "has_extended_api"])
    def test_a_store_that_cannot(
        self, registry: CollectorRegistry, method: str
    ) -> None:
        """Without signatures the barrier still is a barrier."""
        flaky = FlakyStore()
        flaky.fail(method, NotImplementedError(), times=100)

        (error,) = meet(flaky, 0, world_size=2)

        assert isinstance(error, BarrierTimeout)
        assert error.missing_ranks in ((), (1,))
        assert meet(flaky, 1, world_size=2) == [None]

    def test_registry_entries_that_are_none(self, store: Any) -> None:
        """Whatever stands there, names are found for those that wrote theirs."""
        from tracedstore.coordination import rank_registry

        store.append(rank_registry.REGISTRY, 'not json\n{"rank": "x"}\n[]\n\xff\n')
        rank_registry.register(store, 0, 4)

        assert list(rank_registry.read_ranks(store, range(4))) == [0]


class TestRegistry:
    """Ranks say who they are, once."""

    @pytest.mark.parametrize("make", [dist.HashStore, FlakyStore])
    def test_once(self, make: Callable[[], Any]) -> None:
        """Host, process and world; a second time nothing is written."""
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
