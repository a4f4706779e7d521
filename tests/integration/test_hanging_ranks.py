"""Ranks that hang in ways of their own: the late one is named, and nobody else."""

import re
from typing import Any

import pytest

from integration.children.hanging_rank import ODD
from integration.conftest import StartChild
from integration.harness import Child, wait_until
from support.native import on_both_bases
from tracedstore.tools.cli.main import main

pytestmark = pytest.mark.processes

WORLD_SIZE = 3
LATE = WORLD_SIZE - 1
# Seconds.
STALL_AFTER = 1.5


@pytest.fixture
def start_job(start_child: StartChild, core: str) -> Any:
    """Return a function that starts all ranks; rank 0 serves the store."""

    def start(
        scenario: str, world_size: int = WORLD_SIZE, **env: str
    ) -> tuple[list[Child], str]:
        env = {"TRACEDSTORE_STALL_AFTER": str(STALL_AFTER), **env}
        first = start_child("hanging_rank", scenario, 0, 0, world_size, env=env)
        port = first.next_report()["port"]
        others = [
            start_child("hanging_rank", scenario, port, rank, world_size, env=env)
            for rank in range(1, world_size)
        ]
        for other in others:
            other.next_report()
        return [first, *others], f"tcp://127.0.0.1:{port}"

    return start


def end(ranks: list[Child]) -> list[int]:
    """Let the job end; return the exit statuses."""
    statuses = [rank.exit_status() for rank in ranks[1:]]
    ranks[0].close()
    return [ranks[0].exit_status(), *statuses]


def stalls_of(ranks: list[Child]) -> list[dict[str, Any]]:
    """Return what all ranks have reported."""
    return [event for rank in ranks for event in rank.events("job.stalled")]


@on_both_bases
@pytest.mark.parametrize(
    "scenario",
    [
        "late_with_listener",
        "joins_a_thread",
        "awaits_a_future",
        "repeats_short_waits",
        "polls",
        "writes_in_turn",
        "only_wrapped",
    ],
)
def test_late_rank_is_named(start_job: Any, scenario: str, core: str) -> None:
    """It alone, in every report, and the job goes on when it arrives."""
    ranks, url = start_job(scenario)

    wait_until(lambda: stalls_of(ranks))
    # Reports are repeated when the wait has doubled.
    wait_until(lambda: max(s["waited_seconds"] for s in stalls_of(ranks)) > 4)
    ranks[LATE].write("\n")
    statuses = end(ranks)
    stalls = stalls_of(ranks)

    assert statuses == [0] * WORLD_SIZE
    assert {tuple(one["awaited_ranks"]) for one in stalls} == {(LATE,)}
    assert {one["store_url"] for one in stalls} == {url}
    key = "epoch/5/go" if scenario == "writes_in_turn" else "go"
    assert {one["phase"] for one in stalls} == {f"key {key}"}
    assert all(one["waited_seconds"] >= STALL_AFTER for one in stalls)
    assert "load_dataset" in stalls[-1]["awaited"]
    assert not [one for rank in ranks for one in rank.events("telemetry.disabled")]


@on_both_bases
@pytest.mark.parametrize("scenario", ["healthy_with_listeners", "healthy_polls"])
def test_healthy_job(
    start_job: Any, capsys: pytest.CaptureFixture[str], scenario: str, core: str
) -> None:
    """Nobody waits for a rank: no event, and `status` finds nothing missing."""
    ranks, url = start_job(scenario)
    for rank in ranks:
        rank.next_report()
    capsys.readouterr()
    status = main(["status", "--store", url])
    written = capsys.readouterr().out
    for rank in ranks:
        rank.write("\n")
    statuses = end(ranks)

    # 3 if nothing has moved for so long.
    assert status in (0, 3), written
    assert statuses == [0] * WORLD_SIZE
    for rank in ranks:
        assert not rank.events("job.stalled")
        assert not rank.events("store.operation.stalled")


@on_both_bases
def test_groups_in_another_order(start_job: Any, core: str) -> None:
    """The rank with the other order is named, by what it and the others created.

    Group 2 of rank 5 is [1, 5]; that of ranks 4, 6 and 7 is [4, 5, 6, 7]. Gloo connects
    some of them all the same, which ends in a later group.
    """
    ranks, _ = start_job("groups_in_another_order", 8)

    stall = wait_until(lambda: stalls_of(ranks))[0]

    assert stall["cause"] == "diverged"
    assert re.fullmatch(r"ranks? .* created it with ranks .*", stall["evidence"][0])
    if not stall["awaited_ranks"]:
        # Gloo has connected ranks such that only two are there, and either may be odd.
        assert re.search(r"created group \d with different members", stall["awaited"])
        return
    assert stall["awaited_ranks"] == [ODD]
    assert re.search(r"created group \d with ranks [-0-9,]+$", stall["awaited"])
    assert str(ODD) not in stall["waiting_ranks"].split(",")
