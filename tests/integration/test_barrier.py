"""tracedstore.barrier() with ranks that are real processes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.children.fleet import connect
from integration.fleets import Fleet, FleetBarrier
from integration.harness import Child, wait_until
from support.etcd import EtcdServer

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["tcp", "file", "etcd"])
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind of store that processes can share."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def fleet(
    kind: str, tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer
) -> Iterator[Fleet]:
    """Return one fleet per kind of store, because importing torch is slow."""
    folder = tmp_path_factory.mktemp("fleet")
    server = Child(folder, "tcp_server", env={})
    address = {
        "tcp": str(server.next_report()["port"]),
        "file": str(folder / "store"),
        "etcd": f"{etcd_server.port},/fleet/{folder.name}",
    }[kind]
    child = Child(folder, "fleet", kind, address, env={})
    yield Fleet(child, connect(kind, address))
    child.kill()
    server.kill()


@pytest.fixture
def barrier(fleet: Fleet, kind: str) -> FleetBarrier:
    """Return a new barrier for each test."""
    return FleetBarrier(fleet, kind)


class TestAllArrive:
    """The barrier completes when no rank is missing."""

    def test_all_arrive(self, barrier: FleetBarrier) -> None:
        """The barrier completes for all ranks."""
        barrier.start(0, 1, 2, 3, timeout=60)

        barrier.assert_completed(0, 1, 2, 3)

    def test_late_rank(self, barrier: FleetBarrier) -> None:
        """The other ranks wait for a late one."""
        barrier.start(0, 1, 3, timeout=60)
        barrier.wait_for_arrivals(3)
        barrier.start(2, timeout=60)

        barrier.assert_completed(0, 1, 2, 3)

    def test_world_size_one(self, barrier: FleetBarrier) -> None:
        """A single rank completes at once."""
        barrier.start(0, world_size=1)

        barrier.assert_completed(0)


class TestMissingRanks:
    """Every arrived rank reports exactly the missing ones."""

    @pytest.mark.parametrize(
        "missing", [[2], [0], [0, 1], [1, 2, 3]], ids=["one", "rank0", "half", "most"]
    )
    def test_reported(self, barrier: FleetBarrier, missing: list[int]) -> None:
        """Every rank reports them, whether rank 0 is missing or not."""
        arrived = [rank for rank in range(4) if rank not in missing]
        barrier.start(*arrived)

        reports = barrier.assert_timed_out(missing, *arrived)

        for report in reports:
            assert report["arrived"] == arrived
            assert report["text"].startswith(
                f"Timed out waiting on barrier on rank {report['rank']}, for key"
                f" prefix: {barrier.prefix} (world_size=4, missing_ranks=["
            )
        events = barrier.events("barrier.timeout")
        assert [event["missing_ranks"] for event in events] == [missing] * len(arrived)

    def test_killed_while_waiting(self, barrier: FleetBarrier) -> None:
        """A rank that was killed after it arrived is not missing."""
        barrier.start(0, 1, 2, timeout=2)
        barrier.wait_for_arrivals(3)
        barrier.kill(2)

        barrier.assert_timed_out([3], 0, 1)

    def test_decoder(self, barrier: FleetBarrier) -> None:
        """The caller's decoder names the missing ranks."""
        barrier.start(0, 1, 3, decode=True)

        for report in barrier.assert_timed_out([2], 0, 1, 3):
            assert report["names"] == ["host2"]
            assert "missing_ranks=[host2]" in report["text"]

    def test_warning(self, barrier: FleetBarrier) -> None:
        """Waiting ranks report the missing ones long before the timeout."""
        barrier.start(0, 1, 3, timeout=60, warn_after=0.2)
        # The first warning may be earlier than the last of the three arrivals.
        wait_until(
            lambda: [
                event
                for event in barrier.events("barrier.waiting")
                if event["missing_ranks"] == [2]
            ]
        )
        barrier.start(2, timeout=60)

        barrier.assert_completed(0, 1, 2, 3)
        assert not barrier.events("barrier.timeout")


class TestReusedPrefix:
    """A key prefix that was used before is reported."""

    def test_stale(self, barrier: FleetBarrier) -> None:
        """A second barrier completes at once, as torch's does, and emits an event."""
        barrier.start(0, 1, world_size=2, timeout=60)
        barrier.assert_completed(0, 1)
        barrier.start(0, world_size=2, timeout=60)

        barrier.assert_completed(0)
        (event,) = barrier.events("barrier.stale_key")
        assert (event["arrived_count"], event["world_size"]) == (3, 2)

    def test_restarted(self, barrier: FleetBarrier) -> None:
        """A rank that arrives twice counts once and is reported."""
        barrier.start(0, 1, 2, world_size=5, timeout=4)
        barrier.wait_for_arrivals(3)
        barrier.kill(2)
        barrier.start(2, world_size=5, timeout=2)

        for report in barrier.assert_timed_out([3, 4], 0, 1, 2):
            assert report["duplicates"] == [2]
            assert "rank 2 arrived more than once" in report["text"]


def name_timeout(barrier: FleetBarrier) -> float:
    """Return how long to wait for names of torch's ranks, written only over TCP."""
    return 10 if barrier.kind == "tcp" else 0.2


class TestMixedRanks:
    """Ranks with our barrier and ranks with torch's share one barrier."""

    @pytest.mark.parametrize("plain", [[0], [1], [0, 2], [1, 2, 3]])
    def test_complete(self, barrier: FleetBarrier, plain: list[int]) -> None:
        """The barrier completes for every mixture."""
        traced = [rank for rank in range(4) if rank not in plain]
        barrier.start(*plain, flavour="torch", timeout=60)
        barrier.start(*traced, timeout=60)

        barrier.assert_completed(0, 1, 2, 3)

    def test_arrived_torch_ranks_are_not_missing(self, barrier: FleetBarrier) -> None:
        """Our ranks wait for torch's ranks to write their names, which is late."""
        barrier.start(0, 2, flavour="torch", trace_timeout=2)
        barrier.wait_for_arrivals(2)
        barrier.start(1, trace_timeout=name_timeout(barrier))

        plain, traced, _ = barrier.results(0, 1, 2)

        assert traced["result"] == "timeout"
        if barrier.kind == "tcp":
            # torch's ranks write their names only over TCP.
            assert traced["missing"] == [3]
            assert "missing_ranks=[3]" in plain["text"]
        else:
            assert traced["missing"] == []
            assert traced["unidentified"] == 2
            assert "1 of ranks 0,2-3 missing, 2 arrivals unidentified" in traced["text"]

    def test_torch_rank_0_reports_missing(self, barrier: FleetBarrier) -> None:
        """Torch's rank 0 sees our ranks as arrived and reports exactly the missing.

        The missing ranks have the highest numbers: after the first missing rank torch
        waits 1 ms for each of the others, and reports some wrongly on a busy machine.
        """
        barrier.start(0, 3, world_size=8, flavour="torch", trace_timeout=2)
        barrier.wait_for_arrivals(2)
        barrier.start(1, 2, 4, world_size=8, trace_timeout=name_timeout(barrier))

        rank_0, *traced, _ = barrier.results(0, 1, 2, 4, 3)

        assert [report["result"] for report in traced] == ["timeout"] * 3
        if barrier.kind == "tcp":
            (missing,) = re.findall(r"missing_ranks=\[(.*?)\]", rank_0["text"])
            assert sorted(missing.split(", ")) == ["5", "6", "7"]
            assert [report["missing"] for report in traced] == [[5, 6, 7]] * 3
        else:
            # On other stores torch's rank 0 does not read who arrived.
            assert "missing_ranks" not in rank_0["text"]

    def test_torch_ranks_refer_to_rank_0(self, barrier: FleetBarrier) -> None:
        """Our rank 0 sets the key that torch's other ranks wait for."""
        barrier.start(0, trace_timeout=name_timeout(barrier))
        barrier.wait_for_arrivals(1)
        barrier.start(1, 2, flavour="torch")

        traced, *plain = barrier.results(0, 1, 2)

        assert traced["result"] == "timeout"
        for report in plain:
            referred = "[<check rank 0 (0) for missing rank info>]" in report["text"]
            assert referred == (barrier.kind == "tcp")


class TestTraces:
    """All ranks share one trace, as their exporters wrote it."""

    @pytest.fixture
    def exported(self, tmp_path: Path) -> "Exported":
        """Return the file that the ranks of a test export spans to."""
        return Exported(tmp_path / "spans")

    def test_completed(self, barrier: FleetBarrier, exported: "Exported") -> None:
        """The spans of all ranks have one parent."""
        barrier.start(0, 1, 3, timeout=60, spans=exported.path)
        barrier.wait_for_arrivals(3)
        barrier.start(2, timeout=60, spans=exported.path)

        barrier.assert_completed(0, 1, 2, 3)
        spans = exported.spans(4)
        assert_one_parent(spans)
        orders = {
            span["attributes"][RANK]: span["attributes"][ARRIVAL_ORDER]
            for span in spans
        }
        assert orders[2] == 4
        for span in spans:
            assert span["name"] == "barrier barrier/*"
            assert span["attributes"][RESULT] == "completed"
            assert span["attributes"][LAST] == 2

    def test_callers_with_traces(
        self, barrier: FleetBarrier, exported: "Exported"
    ) -> None:
        """Spans of callers with a trace stay in it, and link to the others' parent."""
        options: dict[str, Any] = {
            "timeout": 20,
            "world_size": 3,
            "spans": exported.path,
        }
        barrier.start(1, 2, caller="step", **options)
        barrier.wait_for_arrivals(2)
        barrier.start(0, **options)

        barrier.assert_completed(0, 1, 2)
        # One in the trace of its caller, and one in that of the barrier.
        alone, *others = exported.spans(5, first=0)
        steps = {span["context"]["span_id"]: span for span in exported.all("step")}
        own = [span for span in others if span["parent_id"] in steps]
        shared = [span for span in others if span not in own]
        assert_one_parent([alone, *shared])
        assert {span["attributes"][RANK] for span in own} == {1, 2}
        assert {span["attributes"][RANK] for span in shared} == {1, 2}
        for span in own:
            (link,) = span["links"]
            assert link["context"]["trace_id"] == alone["context"]["trace_id"]
            assert span["context"]["trace_id"] != alone["context"]["trace_id"]

    def test_timeout(self, barrier: FleetBarrier, exported: "Exported") -> None:
        """The span is exported before the exception, with the ids of the event."""
        barrier.start(0, 1, 3, timeout=2, spans=exported.path)

        barrier.assert_timed_out([2], 0, 1, 3)
        spans = exported.spans(3)
        assert_one_parent(spans)
        for span in spans:
            assert span["attributes"]["tracedstore.barrier.missing_ranks"] == [2]
            assert span["status"]["status_code"] == "ERROR"
        event_ids = {
            (event["rank"], "0x" + event["trace_id"], "0x" + event["span_id"])
            for event in barrier.events("barrier.timeout")
        }
        assert event_ids == {
            (
                span["attributes"][RANK],
                span["context"]["trace_id"],
                span["context"]["span_id"],
            )
            for span in spans
        }

    def test_waiting_rank_killed(
        self, barrier: FleetBarrier, exported: "Exported"
    ) -> None:
        """Its span is lost; the other spans are in one trace."""
        barrier.start(0, 1, 2, timeout=60, spans=exported.path)
        barrier.wait_for_arrivals(3)
        barrier.kill(0)
        barrier.start(3, timeout=60, spans=exported.path)

        barrier.assert_completed(1, 2, 3)
        spans = exported.spans(3)
        assert_one_parent(spans)
        assert {span["attributes"][LAST] for span in spans} == {3}

    def test_torch_rank_is_first(
        self, barrier: FleetBarrier, exported: "Exported"
    ) -> None:
        """Torch's rank has no span, and the others share a trace all the same."""
        barrier.start(0, timeout=60, world_size=3, flavour="torch")
        barrier.wait_for_arrivals(1)
        options: dict[str, Any] = {
            "timeout": 20,
            "world_size": 3,
            "spans": exported.path,
        }
        barrier.start(1, **options)
        barrier.wait_for_arrivals(2)
        barrier.start(2, **options)

        barrier.assert_completed(0, 1, 2)
        assert_one_parent(exported.spans(2))

    def test_torch_rank_is_last(
        self, barrier: FleetBarrier, exported: "Exported"
    ) -> None:
        """The others share a trace though it writes nothing about one."""
        options: dict[str, Any] = {"timeout": 20, "world_size": 3}
        barrier.start(1, 2, spans=exported.path, **options)
        barrier.wait_for_arrivals(2)
        barrier.start(0, flavour="torch", **options)

        barrier.assert_completed(0, 1, 2)
        assert_one_parent(exported.spans(2))


def assert_one_parent(spans: list[dict[str, Any]]) -> None:
    """Assert that spans are in one trace, below a parent that is none of them."""
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    (parent,) = {span["parent_id"] for span in spans}
    assert parent not in (None, *(span["context"]["span_id"] for span in spans))


RANK = "tracedstore.rank"
ARRIVAL_ORDER = "tracedstore.barrier.arrival_order"
RESULT = "tracedstore.barrier.result"
LAST = "tracedstore.barrier.last_rank"
ROOT = "tracedstore.barrier.root"


class Exported:
    """The spans that ranks exported to one file, one per line."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def all(self, name: str) -> list[dict[str, Any]]:
        """Return the spans of one name so far."""
        lines = Path(self.path).read_text().splitlines()
        return [span for span in map(json.loads, lines) if span["name"] == name]

    def spans(self, count: int, first: int = 0) -> list[dict[str, Any]]:
        """Return all spans of ranks in barriers, `count`, with one rank's first."""
        spans = self.all("barrier barrier/*")
        spans = [span for span in spans if ROOT not in span["attributes"]]
        assert len(spans) == count
        return sorted(spans, key=lambda span: span["attributes"][RANK] != first)
