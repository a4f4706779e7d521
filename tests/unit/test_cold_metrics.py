"""The table of counts and gauges of what is rare."""

import threading
from collections.abc import Mapping

import pytest

from tracedstore import names
from tracedstore.coordination.arrivals import StalledBarrier
from tracedstore.diagnosis.judgement.stall_reports import StalledJob
from tracedstore.recording import cold_metrics
from tracedstore.recording.cold_metrics import TABLE, ColdMetrics, Labels
from tracedstore.recording.counters import BUCKETS, NANOSECONDS, SeriesCounts


def numbers(cold: ColdMetrics, metric: names.Metric) -> Mapping[Labels, float]:
    """Return the numbers of a metric."""
    return next(one.numbers for one in cold.read() if one.cold.metric is metric)


def histograms(
    cold: ColdMetrics, metric: names.Metric
) -> Mapping[Labels, SeriesCounts]:
    """Return the histograms of a metric."""
    return next(one.histograms for one in cold.read() if one.cold.metric is metric)


def stalled(family: str = "b", arrived: int = 1) -> StalledBarrier:
    """Return the state of a barrier without rank 1."""
    return StalledBarrier(
        family=family, arrived=arrived, missing={1: "node1"}, possible=0
    )


class TestCounts:
    """Counters and histograms."""

    def test_label_sets_exist_together(self) -> None:
        """A label set that exists has those with the other results, from zero."""
        cold = ColdMetrics()
        cold.record((names.RENDEZVOUS_WRITES, ("c10d", "conflict"), 1))
        cold.record((names.RENDEZVOUS_WRITES, ("c10d", "conflict"), 1))

        assert numbers(cold, names.RENDEZVOUS_WRITES) == {
            ("c10d", "accepted"): 0,
            ("c10d", "conflict"): 2,
            ("c10d", "failed"): 0,
        }

    def test_histogram(self) -> None:
        """A duration is in one bucket and in the sum; None adds nothing."""
        cold = ColdMetrics()
        for duration in (5, None, 7):
            cold.record((names.BARRIER_DURATION, ("b", "timeout"), duration))

        found = histograms(cold, names.BARRIER_DURATION)
        counts = {result: sum(each[BUCKETS:]) for (_, result), each in found.items()}
        assert counts == {"completed": 0, "timeout": 2, "failed": 0}
        assert found["b", "timeout"][NANOSECONDS] == 12

    def test_label_values_are_bounded(self) -> None:
        """Users name barriers and backends; the number of label values is bounded."""
        cold = ColdMetrics()
        for number in range(100):
            word = "".join(chr(ord("a") + int(digit)) for digit in str(number))
            cold.record(
                (names.RENDEZVOUS_WRITES, (f"backend-{number}", "failed"), 1),
                (names.BARRIER_LAST_ARRIVALS, (f"{word}/k",), 1),
            )

        writes = numbers(cold, names.RENDEZVOUS_WRITES)
        assert len({backend for backend, _ in writes}) == 17
        assert writes["other", "failed"] == 84
        last = numbers(cold, names.BARRIER_LAST_ARRIVALS)
        assert (len(last), last["other",]) == (65, 36)

    def test_counted_without_a_reader(self) -> None:
        """What is not counted yet is bounded."""
        cold = ColdMetrics()
        for _ in range(10_000):
            cold.record((names.ETCD_BYTES, ("sent",), 2))

        assert len(cold._uncounted) < cold_metrics._MAX_UNCOUNTED
        assert numbers(cold, names.ETCD_BYTES) == {("sent",): 20_000}

    def test_recorded_while_counting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A `__del__` that runs during the counting may record, and be counted."""
        cold = ColdMetrics()
        apply = ColdMetrics._apply
        nested: list[bool] = []

        def run_del(self: ColdMetrics, *change: object) -> None:
            if not nested:
                nested.append(True)
                cold.record((names.ETCD_BYTES, ("sent",), 1))
                cold.read()
            apply(self, *change)  # type: ignore[arg-type]

        monkeypatch.setattr(ColdMetrics, "_apply", run_del)
        cold.record((names.ETCD_BYTES, ("sent",), 1), (names.ETCD_BYTES, ("sent",), 1))

        assert numbers(cold, names.ETCD_BYTES) == {("sent",): 3}

    def test_threads(self) -> None:
        """Nothing is lost where threads record and read at once."""
        cold = ColdMetrics()

        def record() -> None:
            for _ in range(2000):
                cold.record((names.ETCD_BYTES, ("sent",), 1))

        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            cold.read()

        assert numbers(cold, names.ETCD_BYTES) == {("sent",): 8000}


class TestGauges:
    """Values that are set, and states that last."""

    def test_value_disappears(self) -> None:
        """A gauge that is set to None has no series."""
        cold = ColdMetrics()
        gauge = names.RENDEZVOUS_OLDEST_HEARTBEAT
        cold.record((gauge, ("c10d",), 7), (gauge, ("c10d",), 8))
        assert numbers(cold, gauge) == {("c10d",): 8}

        cold.record((gauge, ("c10d",), None))

        assert not numbers(cold, gauge)

    def test_state_that_ended(self) -> None:
        """Its gauges go, without anybody who removes them; a late one is refused."""
        cold = ColdMetrics()
        ended: list[bool] = []
        assert cold.begin("call", stalled(), lambda: not ended)
        assert numbers(cold, names.BARRIER_ARRIVED) == {("b",): 1}
        assert numbers(cold, names.BARRIER_RANK_MISSING) == {("b", "1", "node1", ""): 1}

        ended.append(True)

        assert not numbers(cold, names.BARRIER_ARRIVED)
        assert not cold.begin("call", stalled(), lambda: not ended)
        assert not cold.states(StalledBarrier)

    def test_states_of_ended_calls_are_not_kept(self) -> None:
        """A process whose metrics nobody reads keeps none of them."""
        cold = ColdMetrics()
        for number in range(10):
            ended: list[bool] = []
            cold.begin(number, stalled(), lambda ended=ended: not ended)  # type: ignore[misc]
            ended.append(True)

        assert len(cold._states) == 1

    def test_one_of_a_group(self) -> None:
        """Of the barriers of a family, and of the stalls, the latest is exported."""
        cold = ColdMetrics()
        for arrived, family in enumerate("aab"):
            cold.begin(arrived, stalled(family, arrived))
        for cause in ("exited", "busy"):
            cold.begin(cause, StalledJob(cause=cause, awaited_count=0, awaited={}))

        assert numbers(cold, names.BARRIER_ARRIVED) == {("a",): 1, ("b",): 2}
        assert numbers(cold, names.JOB_AWAITED) == {("busy",): 0}
        assert cold.end("busy")
        assert not cold.end("busy")
        assert numbers(cold, names.JOB_AWAITED) == {("exited",): 0}


def test_forked() -> None:
    """A child starts from zero, though a thread of the parent held the lock."""
    cold = ColdMetrics()
    cold.record((names.ETCD_BYTES, ("sent",), 1))
    cold.begin("call", stalled())
    holder = threading.Thread(target=cold._lock.acquire)
    holder.start()
    holder.join()

    cold.reset()

    readings = cold.read()
    assert [one.cold for one in readings] == list(TABLE)
    assert not any(one.numbers or one.histograms for one in readings)
