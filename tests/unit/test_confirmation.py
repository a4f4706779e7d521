"""A verdict is checked against the processes that it names."""

from dataclasses import replace

import pytest

from tracedstore.common.causes import Cause
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.local.facts import ProcessFacts
from tracedstore.signals.inflight import InFlight
from tracedstore.tools.attach.rank_endpoints import Reply
from tracedstore.tools.attach.stall_records import (
    BlockedRank,
    Processes,
    StallRecord,
    find_doubt,
)

CALL = InFlight(
    operation="get",
    store="tcp_store",
    server="s",
    key="k",
    key_count=1,
    key_family="k",
    started=100.0,
    waited_seconds=40.0,
    thread="MainThread",
)
BLOCKED = BlockedRank(
    rank=0,
    host="a",
    pid=7,
    attempt=0,
    operation="get",
    key="k",
    phase="key k",
    awaits="1",
    members=None,
    started=100.0,
)
VERDICT = Verdict(
    phase="key k",
    cause="busy",
    awaited=(AwaitedRank(rank=1, cause="busy"),),
    awaited_ranks=(1,),
    waiting_ranks=(0,),
    time=130.0,
)


def doubt(
    verdict: Verdict = VERDICT,
    blocked: BlockedRank = BLOCKED,
    calls: dict[int, tuple[InFlight, ...]] | None = None,
) -> str:
    """Return the doubt; some ranks of two have replied with their calls."""
    infos = {
        rank: RankInfo(rank=rank, host="a", pid=7 + rank, world_size=2, started=1.0)
        for rank in (0, 1)
    }
    replies = {
        infos[rank]: Reply(
            state="answered",
            status=ProcessFacts(host="", recording=True, in_flight=some),
        )
        for rank, some in (calls or {}).items()
    }
    stall = StallRecord(prefix="", verdict=verdict, blocked=(blocked,))
    processes = Processes(world_size=2, registered=infos, replies=replies)
    return find_doubt(stall, verdict, processes)


def test_confirmed() -> None:
    """By its record alone, and by a reply that has the call."""
    assert doubt() == ""
    assert doubt(calls={0: (CALL,), 1: ()}) == ""


def test_process_in_no_call() -> None:
    """A process that replies is in no call: its record is forged, or it has ended."""
    assert doubt(calls={0: ()}).startswith("no rank that it says waits")


def test_server_that_waits_for_its_clients() -> None:
    """It is in no Store call."""
    assert doubt(blocked=replace(BLOCKED, operation="connect"), calls={0: ()}) == ""


@pytest.mark.parametrize("cause", ["gone", "not_started"])
def test_awaited_process_that_replies(cause: Cause) -> None:
    """It has started, and not ended."""
    awaited = replace(VERDICT.awaited[0], cause=cause)
    verdict = replace(VERDICT, cause=cause, awaited=(awaited,))

    assert doubt(verdict) == ""
    assert doubt(verdict, calls={1: ()}) == "rank 1 responded just now"


def test_description_of_another_rank() -> None:
    """All texts of the verdict are about ranks for which others wait."""
    other = replace(VERDICT, awaited=(AwaitedRank(rank=9, cause="gone"),))
    assert doubt(other) == "no blocked rank waits for rank 9"


def test_agents() -> None:
    """They do not register, and their number is not known."""
    verdict = replace(VERDICT, agents=True, waiting_ranks=(5,), awaited_ranks=(6,))
    verdict = replace(verdict, awaited=())
    blocked = replace(BLOCKED, rank=5, awaits=None)
    assert doubt(verdict, blocked) == ""
