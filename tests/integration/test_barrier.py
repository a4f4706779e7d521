"""Ranks that are real processes meet at a barrier, or do not."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.children.fleet import connect
from integration.fleets import Fleet, Meeting
from integration.harness import Child, wait_until
from support.etcd import EtcdServer

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=["tcp", "file", "etcd"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of store that processes can share."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def fleet(
    kind: str, tmp_path_factory: pytest.TempPathFactory, etcd_server: EtcdServer
) -> Iterator[Fleet]:
    """A fleet for all tests on one kind of store: importing torch takes its time."""
    folder = tmp_path_factory.mktemp("fleet")
    server = Child(folder, "tcp_server", env={})
    where = {
        "tcp": str(server.next_report()["port"]),
        "file": str(folder / "store"),
        "etcd": f"{etcd_server.port},/fleet/{folder.name}",
    }[kind]
    child = Child(folder, "fleet", kind, where, env={})
    yield Fleet(child, connect(kind, where))
    child.kill()
    server.kill()


@pytest.fixture
def meeting(fleet: Fleet, kind: str) -> Meeting:
    """A barrier of the test's own."""
    return Meeting(fleet, kind)


class TestEverybodyComes:
    """Nobody is missing."""

    def test_all_arrive(self, meeting: Meeting) -> None:
        """All of them come through."""
        meeting.start(0, 1, 2, 3, timeout=20)

        meeting.completed(0, 1, 2, 3)

    def test_one_late(self, meeting: Meeting) -> None:
        """The others wait for the one that is late."""
        meeting.start(0, 1, 3, timeout=20)
        meeting.arrived(3)
        meeting.start(2, timeout=20)

        meeting.completed(0, 1, 2, 3)

    def test_a_world_of_one(self, meeting: Meeting) -> None:
        """Who is alone waits for nobody."""
        meeting.start(0, world_size=1)

        meeting.completed(0)


class TestSomeNeverCome:
    """Every survivor names exactly the missing ones."""

    @pytest.mark.parametrize(
        "missing", [[2], [0], [0, 1], [1, 2, 3]], ids=["one", "rank0", "half", "most"]
    )
    def test_named(self, meeting: Meeting, missing: list[int]) -> None:
        """From any rank, rank 0 among the missing or not."""
        came = [rank for rank in range(4) if rank not in missing]
        meeting.start(*came)

        results = meeting.missed(missing, *came)

        for one in results:
            assert one["arrived"] == came
            assert one["text"].startswith(
                f"Timed out waiting on barrier on rank {one['rank']}, for key prefix: "
                f"{meeting.prefix} (world_size=4, missing_ranks=["
            )
        events = meeting.events("barrier.timeout")
        assert [event["missing_ranks"] for event in events] == [missing] * len(came)

    def test_killed_while_waiting(self, meeting: Meeting) -> None:
        """Who arrived and then died is not missing; who never came is."""
        meeting.start(0, 1, 2, timeout=2)
        meeting.arrived(3)
        meeting.kill(2)

        meeting.missed([3], 0, 1)

    def test_with_a_decoder(self, meeting: Meeting) -> None:
        """The caller's own names are used."""
        meeting.start(0, 1, 3, decode=True)

        for one in meeting.missed([2], 0, 1, 3):
            assert one["names"] == ["host2"]
            assert "missing_ranks=[host2]" in one["text"]

    def test_warned_early(self, meeting: Meeting) -> None:
        """Long before the timeout the first to come say who is missing."""
        meeting.start(0, 1, 3, timeout=20, warn_after=0.2)
        warned = wait_until(lambda: meeting.events("barrier.waiting"))
        meeting.start(2, timeout=20)

        meeting.completed(0, 1, 2, 3)
        assert warned[0]["missing_ranks"] == [2]
        assert not meeting.events("barrier.timeout")


class TestUsedPrefixes:
    """A prefix that was used before is told."""

    def test_stale(self, meeting: Meeting) -> None:
        """A second barrier on one prefix completes at once, as torch's, and is told."""
        meeting.start(0, 1, world_size=2, timeout=20)
        meeting.completed(0, 1)
        meeting.start(0, world_size=2, timeout=20)

        meeting.completed(0)
        (event,) = meeting.events("barrier.stale_key")
        assert (event["arrived_count"], event["world_size"]) == (3, 2)

    def test_restarted(self, meeting: Meeting) -> None:
        """A rank that comes twice is not taken for two, and is told of."""
        meeting.start(0, 1, 2, world_size=5, timeout=4)
        meeting.arrived(3)
        meeting.kill(2)
        meeting.start(2, world_size=5, timeout=2)

        for one in meeting.missed([3, 4], 0, 1, 2):
            assert one["duplicates"] == [2]
            assert "ranks 2 arrived more than once" in one["text"]


def patience(meeting: Meeting) -> float:
    """How long to wait for names of torch's ranks, which only come over TCP."""
    return 10 if meeting.kind == "tcp" else 0.2


class TestMixedFleets:
    """Traced ranks and torch's own meet."""

    @pytest.mark.parametrize("plain", [[0], [1], [0, 2], [1, 2, 3]])
    def test_complete(self, meeting: Meeting, plain: list[int]) -> None:
        """In every mixture."""
        traced = [rank for rank in range(4) if rank not in plain]
        meeting.start(*plain, flavour="torch", timeout=20)
        meeting.start(*traced, timeout=20)

        meeting.completed(0, 1, 2, 3)

    def test_nobody_who_came_is_accused(self, meeting: Meeting) -> None:
        """Torch's ranks write their names late; they get the time to do so."""
        meeting.start(0, 2, flavour="torch", trace_timeout=2)
        meeting.arrived(2)
        meeting.start(1, trace_timeout=patience(meeting))

        plain, traced, _ = meeting.results(0, 1, 2)

        assert traced["result"] == "timeout"
        if meeting.kind == "tcp":
            # Only here torch's own ranks write their names at all.
            assert traced["missing"] == [3]
            assert "missing_ranks=[3]" in plain["text"]
        else:
            assert traced["missing"] == []
            assert traced["unidentified"] == 2
            assert "1 of ranks 0,2-3 missing, 2 more arrived" in traced["text"]

    def test_torchs_rank_0_looks(self, meeting: Meeting) -> None:
        """It finds traced ranks present, and names exactly those that are missing.

        These come last: after the first that is missing torch gives each of the others
        1 ms, and accuses some on a busy machine.
        """
        meeting.start(0, 3, world_size=8, flavour="torch", trace_timeout=2)
        meeting.arrived(2)
        meeting.start(1, 2, 4, world_size=8, trace_timeout=patience(meeting))

        looked, *traced, _ = meeting.results(0, 1, 2, 4, 3)

        assert [one["result"] for one in traced] == ["timeout"] * 3
        if meeting.kind == "tcp":
            (named,) = re.findall(r"missing_ranks=\[(.*?)\]", looked["text"])
            assert sorted(named.split(", ")) == ["5", "6", "7"]
            assert [one["missing"] for one in traced] == [[5, 6, 7]] * 3
        else:
            # Elsewhere torch's rank 0 does not look at all.
            assert "missing_ranks" not in looked["text"]

    def test_torchs_others_learn_where_to_look(self, meeting: Meeting) -> None:
        """A traced rank 0 opens the gate that torch's other ranks wait at."""
        meeting.start(0, trace_timeout=patience(meeting))
        meeting.arrived(1)
        meeting.start(1, 2, flavour="torch")

        traced, *plain = meeting.results(0, 1, 2)

        assert traced["result"] == "timeout"
        for one in plain:
            referred = "[<check rank 0 (0) for missing rank info>]" in one["text"]
            assert referred == (meeting.kind == "tcp")


class TestTraces:
    """One trace over all ranks, read back from what their exporters wrote."""

    @pytest.fixture
    def exported(self, tmp_path: Path) -> "Exported":
        """Where the ranks of a test export to."""
        return Exported(tmp_path / "spans")

    def test_completed(self, meeting: Meeting, exported: "Exported") -> None:
        """The first one's span is the root, the others' are its children."""
        meeting.start(2, timeout=20, spans=exported.path)
        meeting.led()
        meeting.start(0, 1, 3, timeout=20, spans=exported.path)

        meeting.completed(0, 1, 2, 3)
        first, *others = exported.spans(4, first=2)
        assert first["parent_id"] is None
        for span in others:
            assert span["parent_id"] == first["context"]["span_id"]
            assert span["context"]["trace_id"] == first["context"]["trace_id"]
        last = max(others, key=lambda one: one["attributes"][PLACE])
        for span in (first, *others):
            assert span["name"] == "barrier barrier/*"
            assert span["attributes"][RESULT] == "completed"
            assert span["attributes"][LAST] == last["attributes"][RANK]

    def test_callers_with_traces_of_their_own(
        self, meeting: Meeting, exported: "Exported"
    ) -> None:
        """They stay in them, with a link to the first one's."""
        meeting.start(0, timeout=20, world_size=3, spans=exported.path)
        meeting.led()
        options: dict[str, Any] = {
            "timeout": 20,
            "world_size": 3,
            "spans": exported.path,
        }
        meeting.start(1, 2, caller="step", **options)

        meeting.completed(0, 1, 2)
        first, *others = exported.spans(3)
        steps = {span["context"]["span_id"]: span for span in exported.all("step")}
        for span in others:
            (link,) = span["links"]
            assert link["context"]["span_id"] == first["context"]["span_id"]
            assert span["parent_id"] in steps
            assert span["context"]["trace_id"] != first["context"]["trace_id"]

    def test_timeout(self, meeting: Meeting, exported: "Exported") -> None:
        """Exported before it is raised, with the ids that the event has."""
        meeting.start(0, timeout=2, spans=exported.path)
        meeting.led()
        meeting.start(1, 3, spans=exported.path)

        meeting.missed([2], 0, 1, 3)
        first, *others = exported.spans(3)
        for span in (first, *others):
            assert span["attributes"]["tracedstore.barrier.missing_ranks"] == [2]
            assert span["status"]["status_code"] == "ERROR"
        for span in others:
            assert span["parent_id"] == first["context"]["span_id"]
        told = {
            (event["rank"], "0x" + event["trace_id"], "0x" + event["span_id"])
            for event in meeting.events("barrier.timeout")
        }
        assert told == {
            (
                span["attributes"][RANK],
                span["context"]["trace_id"],
                span["context"]["span_id"],
            )
            for span in (first, *others)
        }

    def test_the_first_one_killed(self, meeting: Meeting, exported: "Exported") -> None:
        """Its span is lost; the others' are in one trace, and say all there is."""
        meeting.start(0, timeout=20, spans=exported.path)
        meeting.led()
        meeting.start(1, 2, timeout=20, spans=exported.path)
        meeting.arrived(3)
        meeting.kill(0)
        meeting.start(3, timeout=20, spans=exported.path)

        meeting.completed(1, 2, 3)
        spans = exported.spans(3)
        assert len({span["context"]["trace_id"] for span in spans}) == 1
        assert len({span["parent_id"] for span in spans}) == 1
        assert {span["attributes"][LAST] for span in spans} == {3}

    def test_plain_torch_among_them(
        self, meeting: Meeting, exported: "Exported"
    ) -> None:
        """Torch's own rank leads nobody; whoever is last does."""
        meeting.start(0, timeout=20, world_size=3, flavour="torch")
        meeting.arrived(1)
        options: dict[str, Any] = {
            "timeout": 20,
            "world_size": 3,
            "spans": exported.path,
        }
        meeting.start(1, **options)
        meeting.arrived(2)
        meeting.start(2, **options)

        meeting.completed(0, 1, 2)
        last, other = exported.spans(2, first=2)
        assert other["parent_id"] == last["context"]["span_id"]


RANK = "tracedstore.rank"
PLACE = "tracedstore.barrier.arrival_order"
RESULT = "tracedstore.barrier.result"
LAST = "tracedstore.barrier.last_rank"


class Exported:
    """The spans that ranks exported to one file, a line each."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def all(self, name: str) -> list[dict[str, Any]]:
        """The spans of one name so far."""
        lines = Path(self.path).read_text().splitlines()
        return [span for span in map(json.loads, lines) if span["name"] == name]

    def spans(self, count: int, first: int = 0) -> list[dict[str, Any]]:
        """So many spans of barriers, and no others; that of one rank first."""
        found = self.all("barrier barrier/*")
        assert len(found) == count
        return sorted(found, key=lambda span: span["attributes"][RANK] != first)
