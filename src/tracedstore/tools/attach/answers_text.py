"""What the ranks of a job answered, for ``tracedstore status --ask``."""

from collections.abc import Collection, Iterator

from tracedstore.common import ranges
from tracedstore.diagnosis.judgement.judge import describe_rank
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.asking import Answers
from tracedstore.tools.terminal import Line

# Groups of ranks that do the same; the smallest ones are shown.
_MAX_GROUPS = 16


def answer_lines(answers: Answers, blocked: Collection[int]) -> Iterator[Line]:
    """Return the lines on one group of a job: the odd ranks first.

    Args:
        answers: What the ranks answered.
        blocked: Ranks that are shown as blocked already.
    """
    groups: dict[str, dict[int, ProcessFacts]] = {}
    for rank, answer in sorted(answers.answers.items()):
        if rank not in blocked:
            frame = f"{answer.frames[0]}" if answer.frames else ""
            what = f"{answer.state} {answer.operation} {frame} {answer.detail}"
            groups.setdefault(what, {})[rank] = answer
    if groups:
        yield Line("ranks that are not blocked in a published call:", "bold")
    by_size = sorted(groups.values(), key=len)
    for members in by_size[:_MAX_GROUPS]:
        first, *others = members
        info = answers.registered.get(first)
        text = f"  {describe_rank(first, members[first], info, '').describe()}"
        if others:
            text += f"; the same: {ranges.ranks_text(others)}"
        yield Line(text, "", 4)
    if len(by_size) > _MAX_GROUPS:
        more = sum(map(len, by_size[_MAX_GROUPS:]))
        yield Line(f"  and {more} more, which tracedstore stacks lists")
    if answers.silent_ranks:
        silent = ranges.ranks_text(answers.silent_ranks)
        yield Line(f"no answer: {silent}", "yellow", 2)
