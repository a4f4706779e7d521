"""The stacks of a job's ranks, grouped by what is the same."""

from collections.abc import Iterator, Mapping
from typing import Any

from tracedstore.common import ranges
from tracedstore.diagnosis.judgement.judge import describe_rank
from tracedstore.local.facts import Frame, ProcessFacts
from tracedstore.tools.attach.asking import Answers
from tracedstore.tools.terminal import Line

_MAX_PROCESSES_LISTED = 4
Stacks = tuple[tuple[str, tuple[Frame, ...]], ...]


def group_by_stacks(
    answers: Mapping[int, ProcessFacts], *, all_threads: bool
) -> list[tuple[Stacks, dict[int, ProcessFacts]]]:
    """Group ranks by their stacks, the smallest groups first.

    Args:
        answers: The answers with stacks.
        all_threads: Compare all threads; else the main threads only.
    """
    groups: dict[tuple[str, Stacks], dict[int, ProcessFacts]] = {}
    for rank in sorted(answers):
        answer = answers[rank]
        stacks = tuple(answer.stacks.items())
        if not all_threads:
            stacks = stacks[:1]
        # Ranks without stacks are grouped by what is known about them.
        state = "" if stacks else f"{answer.state} {answer.detail}"
        groups.setdefault((state, stacks), {})[rank] = answer
    by_size = sorted(groups.items(), key=lambda group: len(group[1]))
    return [(stacks, members) for (_, stacks), members in by_size]


def stack_lines(answers: Answers, *, all_threads: bool) -> Iterator[Line]:
    """Return the lines for one group of a job."""
    groups = group_by_stacks(answers.answers, all_threads=all_threads)
    for stacks, members in groups:
        named = ranges.ranks_text(members)
        where = f": {stacks[0][1][0]}" if stacks and stacks[0][1] else ""
        yield Line(f"{named}{where}", "bold")
        for rank, answer in list(members.items())[:_MAX_PROCESSES_LISTED]:
            info = answers.registered.get(rank)
            yield Line(f"  {describe_rank(rank, answer, info, '').describe()}", "", 4)
        if len(members) > _MAX_PROCESSES_LISTED:
            yield Line(f"  and {len(members) - _MAX_PROCESSES_LISTED} more")
        for thread, frames in stacks:
            if all_threads:
                yield Line(f"  thread {thread}")
            for frame in frames:
                yield Line(f"    {frame}", "dim", None)
        yield Line("")
    if answers.silent_ranks:
        absent = [r for r in answers.silent_ranks if r not in answers.registered]
        text = f"no answer: {ranges.ranks_text(answers.silent_ranks)}"
        if absent:
            text += f"; never registered in this store: {ranges.fold(absent)}"
        yield Line(text, "bold red", 2)


def rank_lines(answers: Answers, rank: int) -> Iterator[str]:
    """Return what is known about one rank: its process, and all of its threads."""
    answer = answers.answers.get(rank)
    if answer is None:
        if rank < answers.world_size:
            yield f"no answer from rank {rank}, and no process of its host answers"
        return
    yield describe_rank(rank, answer, answers.registered.get(rank), "").describe()
    for thread, frames in answer.stacks.items():
        yield f"thread {thread}"
        yield from (f"  {frame}" for frame in frames)


def to_json(answers: Answers) -> dict[str, Any]:
    """Return the answers as JSON values."""
    return {
        "world_size": answers.world_size,
        "answers": [
            answers.answers[rank].to_fields() for rank in sorted(answers.answers)
        ],
        "silent_ranks": answers.silent_ranks,
    }
