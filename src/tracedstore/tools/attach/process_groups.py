"""The process groups in which a collective does not end: who is where, and who behind.

Ranks publish their positions only while they wait. A rank that does not wait tells the
number of its last collective in an answer. The numbers of a job that moves are not
compared: they are read at different times.
"""

from collections.abc import Iterable, Mapping, Sequence

from tracedstore.common import ranges
from tracedstore.tools.attach.job_reading import Answers
from tracedstore.tools.attach.stall_records import BlockedRank
from tracedstore.tools.job_view import ProcessGroupView

# Groups that are shown.
_MAX_GROUPS = 64


def process_groups(
    blocked: Iterable[BlockedRank],
    answers: Iterable[Answers],
    awaited: Mapping[str, Sequence[int]],
    world_size: int,
) -> tuple[ProcessGroupView, ...]:
    """Return the groups in which ranks wait, the longest wait first.

    Args:
        blocked: The blocked ranks, the longest wait first.
        answers: What ranks answered.
        awaited: The ranks that verdicts name, by group.
        world_size: The number of ranks of the job.
    """
    by_group: dict[str, list[BlockedRank]] = {}
    called: dict[str, dict[int, int]] = {}
    for answered in answers:
        for rank, facts in answered.answers.items():
            _add_called(called, rank, facts.called)
    for one in blocked:
        if one.collective is not None:
            by_group.setdefault(one.collective.group, []).append(one)
            _add_called(called, one.rank, one.collective.called)
    return tuple(
        _view(name, ranks, called.get(name, {}), awaited.get(name, ()), world_size)
        for name, ranks in list(by_group.items())[:_MAX_GROUPS]
    )


def _add_called(
    called: dict[str, dict[int, int]], rank: int, numbers: Mapping[str, int]
) -> None:
    for name, number in numbers.items():
        called.setdefault(name, {})[rank] = number


def _view(
    name: str,
    ranks: list[BlockedRank],
    called: Mapping[int, int],
    awaited: Sequence[int],
    world_size: int,
) -> ProcessGroupView:
    folded = next((one.members for one in ranks if one.members is not None), None)
    members = range(world_size) if folded is None else ranges.unfold_shared(folded)
    waiting: dict[tuple[int, str], list[int]] = {}
    places: dict[str, list[int]] = {}
    # A large group has too many absent ranks for each record to list them.
    behind = set(awaited)
    for text in {one.awaits for one in ranks if one.awaits}:
        behind.update(ranges.unfold_shared(text))
    numbers = dict(called)
    for one in ranks:
        position = one.collective
        if position is None:
            continue
        what = " ".join(
            filter(None, (position.operation, position.sizes, position.dtype))
        )
        waiting.setdefault((position.number or 0, what), []).append(one.rank)
        places.setdefault(position.place, []).append(one.rank)
        if position.number is not None:
            numbers[one.rank] = position.number
    # A record may be older than that of a rank that has arrived since.
    least = min((number for number, _ in waiting if number), default=0)
    behind = {rank for rank in behind if numbers.get(rank, 0) < least or not least}
    description = next(
        (one.collective.description for one in ranks if one.collective), ""
    )
    return ProcessGroupView(
        name=name,
        description=description,
        members=tuple(members),
        waiting={what: tuple(sorted(some)) for what, some in waiting.items()},
        called=numbers,
        behind=tuple(sorted(behind)),
        started=min(one.started for one in ranks),
        places={place: tuple(sorted(some)) for place, some in places.items() if place},
    )
