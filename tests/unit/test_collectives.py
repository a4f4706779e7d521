"""Collectives that do not end, from numbers that do not move and hand-made records.

The groups are made up, and so are the records: those of NCCL need GPUs. Records of
gloo, and the stacks of threads, are tested with real ranks
(`tests/integration/test_collective_hangs.py`).
"""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tracedstore.diagnosis.observe import collectives, flight_recorder
from tracedstore.diagnosis.observe.collectives import Collectives

STALL_AFTER = 30.0


class Group:
    """A process group with a number that a test sets."""

    def __init__(self, number: int | None, timeout: float = 1800.0) -> None:
        self.number = number
        self.reads = 0
        self.group_desc = "undefined"
        self._device_types = ["cuda"]
        self._timeout = timedelta(seconds=timeout)
        self.options = self

    def _get_backend(self, _device: str) -> "Group":
        return self

    def _get_sequence_number_for_group(self) -> int:
        self.reads += 1
        if self.number is None:
            raise RuntimeError("this backend has no numbers")
        return self.number


class World:
    """torch's table of groups."""

    def __init__(self) -> None:
        self.pg_map: dict[Group, Any] = {}
        self.pg_names: dict[Group, str] = {}
        self.pg_group_ranks: dict[Group, dict[int, int]] = {}
        self.default_pg: Group | None = None

    def add(self, name: str, number: int | None, ranks: int = 4, **more: Any) -> Group:
        """Add a group."""
        group = Group(number, **more)
        self.pg_map[group] = "nccl", None
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {rank: rank for rank in range(ranks)}
        return group


class Job:
    """A process with groups, records and a clock.

    Attributes:
        dumps: What the recorders have: that of gloo, then that of NCCL.
        reads: Which recorders were read: with NCCL's or without.
    """

    def __init__(self) -> None:
        self.world = World()
        self.now = 1000.0
        self.dumps = ["{}", "{}"]
        self.reads: list[bool] = []
        self.watched = Collectives(STALL_AFTER, lambda: self.now)

    def read(self, *, nccl: bool) -> Iterator[str]:
        """Return the texts of the recorders."""
        self.reads.append(nccl)
        yield from self.dumps if nccl else self.dumps[:1]

    def record(self, *entries: dict[str, Any], recorder: int = 1) -> None:
        """Set the entries of a recorder."""
        self.dumps[recorder] = json.dumps({"entries": list(entries)})

    def look(self, seconds: float = 0.0) -> list[collectives.StuckCall]:
        """Look after some seconds."""
        self.now += seconds
        return self.watched.look()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a process without groups."""
    made = Job()
    monkeypatch.setattr(flight_recorder, "_dumps", made.read)
    monkeypatch.setattr(collectives, "_world", lambda: made.world)
    return made


def entry(number: int, *, age: float = 60.0, **fields: Any) -> dict[str, Any]:
    """Return an entry of NCCL's recorder."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[10]],
        "output_sizes": [[10]],
        "is_p2p": False,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:all_reduce",
        "retired": True,
        "state": "completed",
        "thread_id": str(threading.get_ident()),
        "time_created_ns": int((time.time() - age) * 1e9),
        **fields,
    }


def test_a_number_that_moves(job: Job) -> None:
    """Nothing is read while it does, however long one call takes."""
    group = job.world.add("0", 1)
    for _ in range(100):
        group.number = (group.number or 0) + 1
        assert job.look(20.0) == []

    assert job.reads == []


def test_pending(job: Job) -> None:
    """The first entry that has not retired is what this process waits in."""
    job.world.add("0", 9)
    job.record(
        entry(7, profiling_name="nccl:_all_gather_base"),
        entry(8, retired=False),
        entry(9, retired=False, profiling_name="nccl:broadcast"),
    )

    assert job.look() == []
    assert job.look(20.0) == []
    (call,) = job.look(5.0)

    assert call.position.phase == "all_reduce 8 of group 0 (default_pg)"
    assert call.members == (0, 1, 2, 3)
    assert call.position.called == {"0": 9}
    assert [one.operation for one in call.position.recent] == ["all_gather"]
    assert call.timeout == 1800.0
    assert "test_collectives.py" in call.position.place
    assert job.watched.lasts(call)


def test_the_recorder_is_read_once(job: Job) -> None:
    """An idle group is examined once at each of its numbers."""
    group = job.world.add("0", 9)
    job.record(entry(9))
    job.look()

    for _ in range(60):
        assert job.look(1.0) == []
    assert len(job.reads) == 1
    group.number = 10
    for _ in range(60):
        job.look(1.0)
    assert len(job.reads) == 2


def test_the_end_of_a_call(job: Job) -> None:
    """It shows in the number, or in the recorder if no other call follows."""
    group = job.world.add("0", 9)
    job.record(entry(9, retired=False))
    job.look()
    (call,) = job.look(25.0)
    group.number = 10
    assert job.look(1.0) == []
    assert not job.watched.lasts(call)

    group.number = 11
    job.record(entry(11, retired=False))
    job.look()
    assert len(job.look(25.0)) == 1
    job.record(entry(11))
    job.look(6.0)
    assert job.look(1.0) == []


def test_nccl_is_read_only_if_nothing_moves(job: Job) -> None:
    """Before torch 2.14 a read may use events that were freed."""
    job.world.add("0", 9)
    other = job.world.add("1", 1)
    job.record(entry(9, retired=False))
    job.look()
    for _ in range(40):
        other.number = (other.number or 0) + 1
        assert job.look(1.0) == []
    assert set(job.reads) == {False}

    (call,) = [job.look(1.0) for _ in range(30)][-1]
    assert call.position.number == 9
    assert job.reads[-1] is True


def test_coalesced_and_retired_members(job: Job) -> None:
    """Members of a coalesced call never retire; this one has."""
    job.world.add("0", 9)
    job.record(
        entry(9, retired=False),
        entry(9, retired=False, profiling_name="nccl:broadcast"),
        entry(9, profiling_name="nccl:coalesced"),
    )
    job.look()

    assert job.look(25.0) == []


def test_point_to_point(job: Job) -> None:
    """The peer's number is one of the group."""
    group = job.world.add("0", 9)
    job.world.pg_group_ranks[group] = {4: 0, 6: 1}
    job.record(
        entry(
            3,
            is_p2p=True,
            p2p_seq_id=2,
            retired=False,
            profiling_name="nccl:recv 0<-1",
        )
    )
    job.look()
    (call,) = job.look(25.0)

    assert (call.position.operation, call.position.number) == ("recv", None)
    assert (call.members, call.peers) == ((4, 6), (6,))


def test_young_entries_and_small_groups(job: Job) -> None:
    """A call that has just begun is none, and alone a rank waits for nobody."""
    job.world.add("0", 9, ranks=1)
    job.record(entry(9, retired=False))
    job.look()
    assert job.look(25.0) == []
    assert job.reads == []

    job.world.add("1", 5)
    job.record(entry(5, retired=False, age=1.0, process_group=["1", "dp"]))
    job.look()
    assert job.look(25.0) == []


def test_short_timeout(job: Job) -> None:
    """A group whose calls fail after 10 s is examined after 4 s."""
    job.world.add("0", 9, timeout=10.0)
    job.record(entry(9, retired=False))
    job.look()

    assert job.look(3.0) == []
    assert len(job.look(1.5)) == 1


def test_a_backend_without_numbers(job: Job) -> None:
    """It fails the read of its number, and nothing else."""
    job.world.add("0", None)
    job.world.add("1", 3)
    job.record(entry(3, retired=False, process_group=["1", "dp"]))
    job.look()

    (call,) = job.look(25.0)
    assert call.position.group == "1"


def test_many_groups_in_turns(job: Job) -> None:
    """At most 64 numbers are read in one look, and each in its turn."""
    groups = [job.world.add(str(number), 1) for number in range(150)]
    for _ in range(3):
        before = sum(group.reads for group in groups)
        job.look(1.0)
        assert sum(group.reads for group in groups) - before <= 64

    assert all(group.reads for group in groups)


def test_groups_come_and_go(job: Job) -> None:
    """A group that was destroyed is forgotten, and a later one is another."""
    group = job.world.add("0", 9)
    job.record(entry(9, retired=False))
    job.look()
    assert len(job.look(25.0)) == 1
    for table in (job.world.pg_map, job.world.pg_names, job.world.pg_group_ranks):
        table.pop(group)
    assert job.look(1.0) == []
    assert not job.watched.groups

    job.world.add("0", 1)
    job.record()
    job.look()
    assert job.look(25.0) == []


def test_asked_before_it_is_due(job: Job) -> None:
    """A process that another one asks answers at once, and publishes it then."""
    job.world.add("0", 9)
    job.record(entry(8), entry(9, retired=False, age=3.0), recorder=0)
    job.look()
    job.now += 2.0

    assert job.watched.answer() == ("all_reduce 9 of group 0 (default_pg)", {"0": 9})
    assert len(job.look(1.0)) == 1


def test_switched_off(job: Job) -> None:
    """Nothing is read."""
    group = job.world.add("0", 9)
    watched: Any = Collectives(0.0, lambda: job.now)

    assert (watched.look(), watched.answer()) == ([], ("", {}))
    assert (group.reads, job.reads) == (0, [])


def in_torch(job: Job, function: str, number: int) -> None:
    """Let the main thread be in a call of torch.distributed from now on."""
    thread = threading.main_thread().ident or 0
    found = collectives._InTorch(
        frame=1,
        line=2,
        function=function,
        group="0",
        peer=None,
        place="train.py:3 step",
        number=number,
        since=job.now,
    )

    def look_at_threads(_world: Any, _now: float) -> None:
        job.watched._in_torch = {thread: found}

    job.watched._look_at_threads = look_at_threads  # type: ignore[method-assign, assignment]


def test_calls_that_were_enqueued(job: Job) -> None:
    """The CPU runs ahead: the first that has not ended is waited in.

    A rank is late only for what it has not enqueued.
    """
    job.world.add("0", 9)
    job.record(entry(6), *(entry(one, retired=False) for one in (7, 8, 9)))
    job.look()

    (stuck,) = job.look(30.0)

    assert stuck.position.number == 7
    assert stuck.position.called == {"0": 9}
    assert job.watched.answer()[1] == {"0": 9}


def test_a_communicator_that_is_being_created(job: Job) -> None:
    """The number is raised before; the entry follows when the communicator exists."""
    job.world.add("0", 5)
    job.record(entry(4))
    in_torch(job, "all_reduce", 5)
    job.look()

    (stuck,) = job.look(30.0)

    assert (stuck.position.number, stuck.position.operation) == (5, "all_reduce")
    assert stuck.position.place == "train.py:3 step"


@pytest.mark.parametrize("function", ["monitored_barrier", "batch_isend_irecv"])
def test_what_no_recorder_has(function: str, job: Job) -> None:
    """Such a call has no number: those of two ranks may differ."""
    job.world.add("0", 5)
    job.record(entry(4))
    in_torch(job, function, 5)
    job.look()

    (stuck,) = job.look(30.0)

    assert (stuck.position.number, stuck.position.operation) == (None, function)


def test_what_is_invisible(job: Job) -> None:
    """Replays of CUDA graphs, pynccl, NVSHMEM: nothing moves, nothing is claimed."""
    job.world.add("0", 5)
    job.record(entry(5))
    job.look()

    assert job.look(30.0) == job.look(300.0) == []
    assert job.watched.moved is not None
    assert job.now - job.watched.moved[0] == pytest.approx(330.0)


def test_without_start_events(job: Job) -> None:
    """``TORCH_NCCL_ENABLE_TIMING`` adds them; without them an entry is not started."""
    job.world.add("0", 2)
    job.record(
        entry(1, time_discovered_started_ns=None),
        entry(2, state="scheduled", retired=False, time_discovered_started_ns=None),
    )
    job.look()

    (stuck,) = job.look(30.0)

    assert stuck.position.number == 2
