"""The text of ``tracedstore stacks``."""

import json
from dataclasses import replace

from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import Frame, ProcessFacts, State
from tracedstore.tools.attach.job_reading import Answers
from tracedstore.tools.attach.job_text import group_by_place, stack_lines, to_json

TRAIN = (
    Frame(file="c10d.py", line=5, function="all_reduce"),
    Frame(file="train.py", line=9, function="main"),
)
LOAD = (Frame(file="data.py", line=88, function="load_dataset"),)


def answer(
    rank: int,
    frames: tuple[Frame, ...] = (),
    state: State = "running",
    detail: str = "",
) -> ProcessFacts:
    """Return the answer of a rank whose main thread has these frames."""
    stacks = {"MainThread": frames, f"worker-{rank}": LOAD} if frames else {}
    return ProcessFacts(
        rank=rank,
        host=f"node{rank}",
        pid=100 + rank,
        state=state,
        frames=frames,
        stacks=stacks,
        detail=detail,
    )


def answers(world_size: int, *given: ProcessFacts) -> Answers:
    """Return the answers of a job; all ranks that answered have registered."""
    return Answers(
        world_size=world_size,
        registered={
            one.rank or 0: RankInfo(
                rank=one.rank or 0,
                host=one.host,
                pid=1,
                world_size=world_size,
                started=1,
            )
            for one in given
        },
        answers={one.rank or 0: one for one in given},
    )


def text(given: Answers, *, all_threads: bool = False) -> str:
    """Return the lines as plain text."""
    lines = stack_lines(given, all_threads=all_threads)
    return "\n".join(line.text for line in lines)


def test_odd_ones_come_first() -> None:
    """One rank loads data while the others wait in a collective."""
    job = answers(4, *(answer(rank, TRAIN) for rank in (0, 1, 3)), answer(2, LOAD))
    shown = text(job)
    assert shown.index("rank 2: data.py:88 load_dataset") < shown.index("ranks 0-1,3: ")
    assert "rank 2 on node2 (pid 102): alive" in shown
    assert "no answer" not in shown


def test_threads_are_compared_if_they_are_shown() -> None:
    """The names of the second threads differ."""
    given = {rank: answer(rank, TRAIN) for rank in (0, 1)}
    assert len(group_by_place(given, all_threads=False)) == 1
    assert len(group_by_place(given, all_threads=True)) == 2
    assert "thread worker-1" in text(answers(2, *given.values()), all_threads=True)


def test_call_sites_are_compared() -> None:
    """Ranks in one call of the program differ in torch; others in what they wait in."""
    call = "all_reduce 7 of group 0 (default_pg)"
    place = "train.py:9 main, in torch: all_reduce"
    waiting = [
        replace(answer(rank, frames), collective=call, place=place)
        for rank, frames in enumerate((TRAIN, TRAIN[1:], TRAIN))
    ]
    behind = replace(answer(3, TRAIN), place=place)
    shown = text(answers(4, *waiting, behind)).splitlines()

    assert shown[0] == f"rank 3: {place}"
    assert f"ranks 0-2: {call} at {place}" in shown


def test_ranks_without_stacks_are_grouped_by_their_state() -> None:
    """A stopped process has none."""
    stopped = [answer(rank, state="stopped", detail="(T)") for rank in (0, 1)]
    gone = answer(2, state="gone", detail="exited with code 1")
    shown = text(answers(3, *stopped, gone))
    assert "ranks 0-1" in shown
    assert "its process has ended: exited with code 1" in shown


def test_silent_ranks() -> None:
    """Those that never registered are listed as well."""
    job = answers(4, answer(0, TRAIN))
    assert text(job).endswith(
        "no answer: ranks 1-3; never registered in this store: 1-3"
    )
    assert to_json(job)["silent_ranks"] == [1, 2, 3]


def test_many_ranks_are_bounded() -> None:
    """A thousand equal stacks are a few lines."""
    job = answers(1000, *(answer(rank, TRAIN) for rank in range(1000)))
    shown = text(job).splitlines()
    assert shown[0].startswith("ranks 0-999: ")
    assert "  and 996 more" in shown
    assert len(shown) < 12


def test_json() -> None:
    """All answers, in the order of their ranks."""
    fields = to_json(answers(2, answer(1, LOAD), answer(0, TRAIN)))
    assert [one["rank"] for one in json.loads(json.dumps(fields))["answers"]] == [0, 1]
