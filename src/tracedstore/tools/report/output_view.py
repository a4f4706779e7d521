"""What the ranks of a job printed last, and where their stacks were."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import duration, plural, shorten
from tracedstore.tools.report.job_output import JobOutput, OutputSource
from tracedstore.tools.report.logged_events import NO_RANK
from tracedstore.tools.report.output_reader import line_time

_MAX_LINE_LENGTH = 120
_MAX_STACKS = 4
_MAX_NAMES = 3
# Files that were written longer ago are copies, or of a job that ended.
_MAX_IDLE = 86_400.0
# A job that runs may print nothing for so long.
_MIN_IDLE = 60.0


@dataclass(slots=True)
class LastLines:
    """Sources that printed the same line last.

    Attributes:
        line: The line.
        sources: The sources.
        time: When the latest of them was printed, 0 if not known.
    """

    line: str
    sources: list[OutputSource] = field(default_factory=list)
    time: float = 0.0


@dataclass(slots=True)
class SameStack:
    """Sources whose main thread was at the same place.

    Attributes:
        frames: Function, file and line of the innermost frames.
        sources: The sources.
    """

    frames: list[str]
    sources: list[OutputSource] = field(default_factory=list)


def last_lines(output: JobOutput) -> list[LastLines]:
    """Return what the sources printed last, those with the same line together.

    A launcher's own lines are left out if there are lines of ranks.
    """
    groups: dict[str, LastLines] = {}
    of_ranks = {each: lines for each, lines in output.lines.items() if each.is_of_rank}
    for source, lines in (of_ranks or output.lines).items():
        group = groups.setdefault(lines.last, LastLines(lines.last))
        group.sources.append(source)
        time = line_time(lines.last_prefix, output.last_write)
        group.time = max(group.time, time or line_time(lines.last, output.last_write))
    return sorted(groups.values(), key=lambda group: -len(group.sources))


def stacks(output: JobOutput) -> list[SameStack]:
    """Return the stacks, those of the same place together."""
    groups: dict[tuple[str, ...], SameStack] = {}
    for source, stack in output.stacks.items():
        key = tuple(stack.frames)
        groups.setdefault(key, SameStack(stack.frames)).sources.append(source)
    return list(groups.values())


def sources_text(output: JobOutput, sources: Iterable[OutputSource]) -> str:
    """Format as ``ranks 0-2``, as ``local ranks 0-1`` or as ``train.log``."""
    ranks: set[int] = set()
    local_ranks: set[int] = set()
    others: list[str] = []
    for source in sources:
        if (rank := output.rank(source)) != NO_RANK:
            ranks.add(rank)
        elif source.local_rank != NO_RANK:
            local_ranks.add(source.local_rank)
        else:
            others.append(source.shown)
    parts = [ranks_text(sorted(ranks))] if ranks else []
    parts += [f"local {ranks_text(sorted(local_ranks))}"] if local_ranks else []
    parts += others[:_MAX_NAMES]
    if len(others) > _MAX_NAMES:
        parts.append(plural(len(others) - _MAX_NAMES, "more source"))
    return ", ".join(parts)


def idle_time(output: JobOutput) -> float | None:
    """Return for how long nothing was written, None if that is not known."""
    idle = output.read_at - output.last_write
    return idle if output.last_write and 0 <= idle < _MAX_IDLE else None


def summary(output: JobOutput) -> tuple[str, str]:
    """Return a headline and its details for logs without events and failures."""
    text = "The logs contain no event and no failure"
    if (idle := idle_time(output)) is not None and idle >= _MIN_IDLE:
        text += f"; nothing was written in the last {duration(idle)}"
    return text, " ".join(details(output))


def details(output: JobOutput) -> list[str]:
    """Return sentences on what the ranks printed last, and on their stacks."""
    sentences = []
    for group in last_lines(output)[:2]:
        named = sources_text(output, group.sources)
        line = shorten(group.line, _MAX_LINE_LENGTH)
        sentences.append(f"The last line of {named}: {line}.")
    for stack in stacks(output)[:_MAX_STACKS]:
        named = sources_text(output, stack.sources)
        sentences.append(f"A stack of {named}: {stack.frames[0]}.")
    return sentences
