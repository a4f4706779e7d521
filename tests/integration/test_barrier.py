"""Ranks that are real processes meet at a barrier, or do not."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.children.fleet import connect
from integration.harness import Child, wait_until
from support.etcd import EtcdServer
from tracedstore.coordination.missing import leader, read_ledger
from tracedstore.coordination.protocol import Keys

pytestmark = pytest.mark.processes

# A FileStore rounds up to whole seconds.
TIMEOUT = 1.0


class Fleet:
    """Processes that become ranks, and a client of the store they meet through."""

    def __init__(self, child: Child, store: Any) -> None:
        self.child = child
        self.store = store
        self._reports: list[dict[str, Any]] = []
        assert child.next_report() == {"ready": True}

    def tell(self, command: dict[str, Any]) -> None:
        """Start a rank, or kill one."""
        self.child.write(json.dumps(command) + "\n")

    def report(self, kind: str, prefix: str) -> dict[str, Any]:
        """Wait for the next report of a kind from one barrier."""
        for index, one in enumerate(self._reports):
            if kind in one and one["prefix"] == prefix:
                return self._reports.pop(index)
        while True:
            one = self.child.next_report()
            if kind in one and one["prefix"] == prefix:
                return one
            self._reports.append(one)


class Meeting:
    """One barrier that ranks of a fleet come to."""

    _numbers = itertools.count()

    def __init__(self, fleet: Fleet, kind: str) -> None:
        self.kind = kind
        self.prefix = f"barrier/{next(self._numbers)}"
        self._fleet = fleet
        self._pids: dict[int, int] = {}

    def start(self, *ranks: int, world_size: int = 4, **options: Any) -> None:
        """Let ranks come to the barrier."""
        for rank in ranks:
            self._fleet.tell(
                {
                    "rank": rank,
                    "world_size": world_size,
                    "prefix": self.prefix,
                    "timeout": TIMEOUT,
                    "flavour": "traced",
                    "trace_timeout": 10,
                    "warn_after": 0,
                    "decode": False,
                }
                | options
            )
            self._pids[rank] = self._fleet.report("started", self.prefix)["pid"]

    def kill(self, rank: int) -> None:
        """Kill a rank that came, with SIGKILL."""
        self._fleet.tell({"kill": self._pids[rank]})

    def arrived(self, count: int) -> None:
        """Wait until so many have been counted."""
        key = f"{self.prefix}/num_members"
        wait_until(lambda: self._fleet.store.add(key, 0) >= count)

    def led(self) -> None:
        """Wait until the first one has left its trace for the others."""
        store, keys = self._fleet.store, Keys(self.prefix)
        wait_until(lambda: leader(store, keys, read_ledger(store, keys)))

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events that were told of this barrier."""
        found = self._fleet.child.events(name)
        return [event for event in found if event["barrier"] == self.prefix]

    def results(self, *ranks: int) -> list[dict[str, Any]]:
        """Wait until these ranks are through; give what each of them says."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(ranks):
            ended = self._fleet.report("result", self.prefix)
            found[ended["rank"]] = ended
        assert sorted(found) == sorted(ranks)
        assert all(one["timeout_kept"] for one in found.values())
        return [found[rank] for rank in ranks]

    def completed(self, *ranks: int) -> None:
        """All of these came through."""
        results = [one["result"] for one in self.results(*ranks)]
        assert results == ["completed"] * len(ranks)

    def missed(self, missing: list[int], *ranks: int) -> list[dict[str, Any]]:
        """All of these name exactly the missing ones."""
        results = self.results(*ranks)
        for one in results:
            assert (one["result"], one["missing"]) == ("timeout", missing), one
            assert one["unidentified"] == 0
        return results


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
            assert one["signed_twice"] == [2]
            assert "ranks 2 arrived more than once" in one["text"]


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
        meeting.start(1)

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
PLACE = "tracedstore.barrier.place"
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
