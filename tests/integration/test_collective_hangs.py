"""Hangs in collectives of gloo: the late rank is named, or what ranks called."""

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import TCPStore

from integration.conftest import StartChild
from integration.harness import Child, pause, wait_until
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe.blocked_record import read_blocked
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.processes

WORLD_SIZE = 3
LAST = WORLD_SIZE - 1
STALL_AFTER = 2.0
Job = tuple[list[Child], str]
StartJob = Callable[..., Job]


@pytest.fixture
def start_job(start_child: StartChild) -> StartJob:
    """Return a function that starts the ranks of a scenario; rank 0 has the store."""

    def start(scenario: str, world_size: int = WORLD_SIZE, **env: str) -> Job:
        env = {"TRACEDSTORE_STALL_AFTER": str(STALL_AFTER), **env}

        def child(port: int, rank: int) -> Child:
            script = "collective_rank"
            return start_child(script, scenario, port, rank, world_size, env=env)

        first = child(0, 0)
        port = first.next_report()["port"]
        others = [child(port, rank) for rank in range(1, world_size)]
        for other in others:
            other.next_report()
        ranks = [first, *others]
        for rank in ranks:
            assert rank.next_report() == {"joined": True}
        return ranks, f"tcp://127.0.0.1:{port}"

    return start


def stalls_of(ranks: list[Child]) -> list[dict[str, Any]]:
    """Return what all ranks have reported."""
    return [event for rank in ranks for event in rank.events("job.stalled")]


def first_stall(ranks: list[Child]) -> dict[str, Any]:
    """Wait for the first report."""
    return wait_until(lambda: stalls_of(ranks))[0]


def check_healthy(ranks: list[Child]) -> None:
    """Check that no part of the telemetry failed."""
    assert not [one for rank in ranks for one in rank.events("telemetry.disabled")]


@pytest.mark.parametrize(
    ("scenario", "phase"),
    [
        ("late", "all_reduce 4 of group 0 (default_pg)"),
        ("late_to_barrier", "barrier 4 of group 0 (default_pg)"),
        ("late_to_objects", "broadcast 4 of group 0 (default_pg)"),
        ("late_to_ddp", "all_gather 4 of group 0 (default_pg)"),
        ("late_to_asynchronous", "all_reduce 4 of group 0 (default_pg)"),
        ("late_to_monitored_barrier", "monitored_barrier of group 0 (default_pg)"),
        ("late_to_send", "recv of group 0 (default_pg)"),
        ("in_a_thread", "barrier 1 of group 1"),
    ],
)
def test_late_rank_is_named(scenario: str, phase: str, start_job: StartJob) -> None:
    """It alone, with what it does and where the others wait; and the job goes on."""
    ranks, _ = start_job(scenario)

    wait_until(lambda: any(one["waited_seconds"] > 4 for one in stalls_of(ranks)))
    ranks[LAST].write("\n")
    for rank in ranks:
        assert rank.next_report() == {"done": True}
    resumed = wait_until(
        lambda: [one for rank in ranks for one in rank.events("job.resumed")]
    )
    stalls = stalls_of(ranks)

    assert {tuple(one["awaited_ranks"]) for one in stalls} == {(LAST,)}, stalls
    assert {one["cause"] for one in stalls} == {"busy"}
    assert {one["phase"] for one in stalls} == {phase}
    doing = "in_a_thread" if scenario == "in_a_thread" else "load_dataset"
    assert doing in stalls[-1]["awaited"]
    assert "collective_rank.py" in str(stalls[-1]["evidence"])
    assert {one["group_ranks"] for one in stalls} == {"0-2"}
    assert {one["awaited_ranks"][0] for one in resumed} == {LAST}
    check_healthy(ranks)


def test_mismatch(start_job: StartJob) -> None:
    """A rank skipped one of four collectives: it is told which one, and where."""
    ranks, url = start_job("skips")

    stall = first_stall(ranks)
    status = main(["status", "--store", url])

    assert (stall["cause"], stall["awaited_ranks"]) == ("mismatch", [LAST])
    assert "skipped all_reduce 10 [10] Float: called barrier 10 at" in stall["awaited"]
    assert "collective_rank.py" in stall["awaited"]
    assert stall["phase"] == "all_reduce 10 of group 0 (default_pg)"
    assert (stall["sequence"], stall["collective"], stall["sizes"]) == (
        10,
        "all_reduce",
        "[10]",
    )
    assert any(one.startswith("ranks 0-1: all_reduce 10") for one in stall["evidence"])
    assert status == 2
    check_healthy(ranks)


@pytest.mark.parametrize(
    ("scenario", "cause", "awaited"),
    [
        ("another_collective", "mismatch", [LAST]),
        ("another_order", "diverged", [0, LAST]),
        ("creates_a_group", "diverged", [LAST]),
    ],
)
def test_ranks_that_disagree(
    scenario: str, cause: str, awaited: list[int], start_job: StartJob
) -> None:
    """Ranks that wait for each other are named with what each of them waits in."""
    ranks, _ = start_job(scenario)

    # On a busy machine a look may come before all of them have called what they wait
    # in.
    stall = wait_until(
        lambda: next((one for one in stalls_of(ranks) if one["cause"] == cause), None)
    )

    assert stall["awaited_ranks"] == awaited
    assert "collective_rank.py" in stall["awaited"] + str(stall["evidence"])
    check_healthy(ranks)


@pytest.mark.parametrize(
    ("stop", "cause"), [(signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")]
)
def test_state_of_the_late_process(
    stop: signal.Signals, cause: str, start_job: StartJob
) -> None:
    """A rank that is stopped, or was killed, before it calls the collective."""
    ranks, _ = start_job("late")
    if stop is signal.SIGSTOP:
        pause(ranks[LAST].pid)
    else:
        ranks[LAST].kill()

    if cause == "gone":
        # gloo notices that the connection is closed, and the others do not hang.
        assert "peer" in ranks[0].next_report()["error"]
        return
    stall = first_stall(ranks)

    assert (stall["cause"], stall["awaited_ranks"]) == (cause, [LAST])


def test_forged_verdict_ends_no_process(start_job: StartJob) -> None:
    """A client of the store claims that the busy rank has ended.

    With ``TRACEDSTORE_ON_STALL=abort`` no rank acts on a verdict that it has not found.
    """
    ranks, url = start_job(
        "late", TRACEDSTORE_ON_STALL="abort", TRACEDSTORE_STALL_AFTER="1"
    )
    port = int(url.rpartition(":")[2])
    store: Any = TCPStore("127.0.0.1", port, None, is_master=False)
    own = wait_until(lambda: read_blocked(store, WORLD_SIZE).get(0))

    def forge() -> bool:
        """Write it again; return whether ranks have waited for long enough."""
        verdict = Verdict(
            phase=own.phase,
            cause="gone",
            awaited=(AwaitedRank(rank=LAST, cause="gone"),),
            awaited_ranks=(LAST,),
            waiting_ranks=(0, 1),
            time=time.time(),
        )
        store.set(VERDICT, verdict.to_bytes())
        # One that has found it would have ended after two.
        return time.time() - own.started > 7

    wait_until(forge)

    assert not [one for rank in ranks for one in rank.events("job.aborted")]
    ranks[LAST].write("\n")
    for rank in ranks:
        assert rank.next_report() == {"done": True}


def test_exception_has_the_verdict(start_job: StartJob) -> None:
    """That of a collective that times out; type and text are torch's."""
    ranks, _ = start_job("times_out")

    failed = ranks[0].next_report()
    ranks[LAST].write("\n")

    (note,) = failed["notes"]
    assert note.startswith("tracedstore: waiting in all_reduce 1 of group 1 for rank 2")
    assert "load_dataset" in note
    assert "tracedstore" not in failed["error"]
    check_healthy(ranks)


def test_long_computation(
    start_job: StartJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing has moved, and nothing hangs: nobody is named."""
    ranks, url = start_job("computes")
    for rank in ranks:
        assert rank.next_report() == {"computes": True}
    capsys.readouterr()

    # Longer than a stall takes to be reported.
    wait_until(lambda: "nothing has moved for" in status_of(url, capsys)[1])
    code, written = status_of(url, capsys)
    for rank in ranks:
        rank.write("\n")
    for rank in ranks:
        assert rank.next_report() == {"done": True}

    assert "load_dataset" in written
    assert "healthy" not in written
    assert code == 3
    assert not stalls_of(ranks)
    check_healthy(ranks)


def status_of(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command; return its exit code and what it wrote."""
    code = main(["status", "--store", url])
    return code, capsys.readouterr().out


def test_uneven_steps(start_job: StartJob) -> None:
    """Ranks that wait for a slower one in every step are not reported."""
    ranks, _ = start_job("uneven", TRACEDSTORE_STALL_AFTER="20")

    for rank in ranks:
        assert rank.next_report() == {"done": True}

    assert not stalls_of(ranks)
    check_healthy(ranks)


def test_switched_off(start_job: StartJob) -> None:
    """With ``TRACEDSTORE_COLLECTIVES=off`` a late rank is not reported."""
    ranks, url = start_job("late", TRACEDSTORE_COLLECTIVES="off")
    # The one that watches reports meanwhile.
    others, _ = start_job("late")
    first_stall(others)

    assert not stalls_of(ranks)
    assert main(["status", "--store", url]) == 0
