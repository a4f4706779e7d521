"""The text of ``tracedstore status`` and of ``tracedstore stacks``, as lines."""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from tracedstore.common.ranges import fold, ranks_text
from tracedstore.common.text import duration, plural, shorten
from tracedstore.diagnosis.judgement.verdict import describe_answer
from tracedstore.local.facts import ProcessFacts
from tracedstore.naming.decoders import by_host
from tracedstore.tools.attach.job_reading import Answers
from tracedstore.tools.job_view import (
    AnsweredView,
    BarrierView,
    JobView,
    RankGroup,
    RankState,
    RankView,
    RendezvousView,
    StallView,
    counts,
)
from tracedstore.tools.terminal import Line

_MAX_IN_PROGRESS = 16
_MAX_ABANDONED = 4
_MAX_FINISHED = 8
_MAX_HOSTS = 32
# So many hosts have a line each, whatever the state of their ranks.
_FEW_HOSTS = 4
_MAX_CALLS = 24
_MAX_REASONS = 16
_MAX_STALLS = 4
_MAX_EVIDENCE = 8
# Groups of ranks that do the same; the smallest ones are shown.
_MAX_ACTIVITIES = 16
# Processes of ranks with the same stacks.
_MAX_PROCESSES = 4
# Characters of one fact.
_MAX_LENGTH = 1000
_NO_NEWS = {"no endpoint"}
_HEADING, _WARNING = "bold", "yellow"


def status_lines(view: JobView) -> list[Line]:
    """Return the lines to print: stalls and what is missing, then the details."""
    sections: list[Iterable[Line]] = [
        [
            *_stalls(view),
            *_wait(view),
            _missing(view),
            *_next(view),
            _line(f"store: {view.source}"),
        ],
        *(_ranks(view, group) for group in view.groups),
        (_line(note, _WARNING) for note in view.notes),
        _blocked(view),
        *map(answer_lines, view.answered),
        _in_progress(view),
        _calls(view),
        *map(_rendezvous, view.rendezvous),
        _abandoned(view),
        _finished(view),
    ]
    if not view.groups:
        sections.insert(1, [_line("ranks: none registered")])
    lines: list[Line] = []
    for section in map(list, sections):
        if lines and section:
            lines.append(Line(""))
        lines += section
    return lines


def _line(text: str, style: str = "") -> Line:
    """Indent continuation lines by four more columns than the line."""
    indent = len(text) - len(text.lstrip()) + 4
    return Line(text, style, indent=indent)


def _fact(text: str, style: str = "") -> Line:
    """Return a line of what the store says, which is of any length."""
    return _line(shorten(text, _MAX_LENGTH), style)


def _more(
    number: int, noun: str, style: str = "", indent: str = "  "
) -> Iterator[Line]:
    """Yield how many more there are than those that are shown, if there are any."""
    if number > 0:
        yield _line(f"{indent}and {plural(number, f'more {noun}')}", style)


def _stalls(view: JobView) -> Iterator[Line]:
    for stall in view.stalls[:_MAX_STALLS]:
        yield from _stall(view, stall)
    yield from _more(len(view.stalls) - _MAX_STALLS, "stall", "bold red", "")


def _stall(view: JobView, stall: StallView) -> Iterator[Line]:
    yield _fact(stall.sentence(view.time if stall.waits else None), "bold red")
    yield _line(f"  cause: {stall.cause}")
    for sentence in stall.evidence[:_MAX_EVIDENCE]:
        yield _fact(f"  evidence: {sentence}")
    if stall.remedy:
        yield _fact(f"  remedy: {stall.remedy}")
    ago = duration(view.time - stall.reported)
    yield _line(f"  waiting: {stall.waiting}, reported {ago} ago")
    if not stall.waits:
        text = "  none of them is blocked in this call now: it may have ended"
        yield _line(text, _WARNING)


def _wait(view: JobView) -> Iterator[Line]:
    """Yield whom the barrier waits for that waits for longest, if no stall says it."""
    late = [one for one in view.in_progress if one.late and one.missing]
    if late and not view.stalls:
        longest = min(late, key=lambda one: one.first or 0.0)
        yield _fact(longest.sentence(view.time), "bold red")


def _next(view: JobView) -> Iterator[Line]:
    """Yield the command that says more."""
    if view.groups and (view.missing or view.nothing_moves()):
        yield _line(f"next: tracedstore stacks --store {view.source}")


def _missing(view: JobView) -> Line:
    if view.missing:
        return _line(f"missing: {', '.join(view.missing)}", "bold red")
    if unknown := view.nothing_moves() or view.unknown():
        return _line(unknown, "bold yellow")
    return _line("nothing is missing", "bold green")


def _ranks(view: JobView, group: RankGroup) -> Iterator[Line]:
    hosts = group.hosts
    under = f" under {group.prefix}" if group.prefix else ""
    heading = f"ranks{under}: {len(hosts)} of {group.world_size} registered"
    yield _line(heading, _HEADING)
    by_name = list(by_host(hosts, hosts.__getitem__).items())
    # With many hosts, only those that are not well have a line each.
    odd = _odd_ranks(view, group) if len(by_name) > _FEW_HOSTS else {}
    well = [one for one in by_name if len(by_name) > _FEW_HOSTS and one[0] not in odd]
    shown = [one for one in by_name if one not in well]
    for host, ranks in shown[:_MAX_HOSTS]:
        of_it = odd.get(host)
        states = "" if of_it is None else f", of these {of_it}"
        yield _line(f"  {host}: {ranks_text(ranks)}{states}")
    yield from _more(len(shown) - _MAX_HOSTS, "host")
    if well:
        number = sum(len(ranks) for _, ranks in well)
        noun = "other host" if shown else "host"
        text = f"{plural(len(well), noun)}: {plural(number, 'rank')}, none is awaited"
        yield _line(f"  {text}")
    if absent := set(range(group.world_size)) - hosts.keys():
        yield _line(f"  not registered: {ranks_text(absent)}", _WARNING)


def _odd_ranks(view: JobView, group: RankGroup) -> dict[str, str]:
    """Return the ranks that are neither running nor waiting, as text by host."""
    odd: dict[str, list[RankView]] = {}
    for rank in view.ranks:
        if rank.host and rank.state < RankState.WAITING and rank.rank in group.hosts:
            odd.setdefault(rank.host, []).append(rank)
    return {
        host: f"{ranks_text([one.rank for one in some])} ({counts(some)})"
        for host, some in odd.items()
    }


def _blocked(view: JobView) -> Iterator[Line]:
    if view.blocked or view.more_blocked:
        yield _line("blocked ranks:", _HEADING)
    for one in view.blocked[:_MAX_CALLS]:
        call = f" ({one.call})" if one.call else ""
        text = f"{one.phase}, waiting {duration(one.waited)} for {one.awaited}{call}"
        yield _fact(f"  {ranks_text(one.ranks)}: {text}")
    rest = sum(len(one.ranks) for one in view.blocked[_MAX_CALLS:])
    yield from _more(rest, "rank")
    if unread := view.more_blocked:
        text = f"  and {plural(unread, 'more rank')} with records that were not read"
        yield _line(text, _WARNING)


def answer_lines(answered: AnsweredView) -> Iterator[Line]:
    """Return the lines on one group of ranks that were asked: the odd ones first."""
    shown = answered.activities[:_MAX_ACTIVITIES]
    if shown:
        yield _line("ranks that are not blocked in a published call:", _HEADING)
    for text, ranks in shown:
        others = f"; the same: {ranks_text(ranks[1:])}" if len(ranks) > 1 else ""
        yield Line(f"  {text}{others}", "", 4)
    if more := sum(len(ranks) for _, ranks in answered.activities[_MAX_ACTIVITIES:]):
        yield _line(f"  and {more} more, which tracedstore stacks lists")
    if answered.silent_ranks:
        yield Line(f"no answer: {ranks_text(answered.silent_ranks)}", _WARNING, 2)


def _in_progress(view: JobView) -> Iterator[Line]:
    shown = view.in_progress[-_MAX_IN_PROGRESS:]
    if shown or view.more_in_progress:
        yield _line("barriers in progress:", _HEADING)
    if unread := view.more_in_progress:
        yield _line(f"  {plural(unread, 'older barrier')} not complete, not read")
    if rest := len(view.in_progress) - len(shown):
        yield _line(f"  {rest} more, not shown")
    yield from _incomplete(view, shown)


def _abandoned(view: JobView) -> Iterator[Line]:
    shown = view.abandoned[-_MAX_ABANDONED:]
    if shown:
        total = len(view.abandoned)
        yield _line(f"barriers abandoned{_last_of(total, len(shown))}:", _HEADING)
    yield from _incomplete(view, shown)


def _incomplete(view: JobView, barriers: Iterable[BarrierView]) -> Iterator[Line]:
    for barrier in barriers:
        of = "" if barrier.world_size is None else f" of {barrier.world_size}"
        since = ""
        if barrier.first is not None:
            since = f", the first {duration(view.time - barrier.first)} ago"
        noun = " agents" if barrier.of_agents else ""
        text = f"{barrier.arrived}{of}{noun} arrived{since}"
        yield _line(f"  {barrier.prefix}: {text}")
        if barrier.missing:
            yield _line(f"    {barrier.missing}", _WARNING)


def _calls(view: JobView) -> Iterator[Line]:
    # Most jobs serve no endpoint: that is no news.
    known = view.calls or view.idle_ranks
    if view.calls is None or not (known or view.unknown_calls.keys() - _NO_NEWS):
        return
    yield _line("calls in flight:", _HEADING)
    for one in view.calls[:_MAX_CALLS]:
        yield _line(f"  {ranks_text(one.ranks)}: {one.call} for {duration(one.waited)}")
    yield from _more(len(view.calls) - _MAX_CALLS, "call")
    if view.idle_ranks:
        yield _line(f"  in no call: {ranks_text(view.idle_ranks)}")
    unknown = list(view.unknown_calls.items())
    for reason, ranks in unknown[:_MAX_REASONS]:
        yield _line(f"  unknown: {ranks_text(ranks)} ({reason})")
    if rest := sum(len(ranks) for _, ranks in unknown[_MAX_REASONS:]):
        yield _line(f"  unknown: {plural(rest, 'more rank')}")


def _rendezvous(one: RendezvousView) -> Iterator[Line]:
    if not one.readable:
        yield _line(f"rendezvous {one.run_id}: its state cannot be read", _WARNING)
        return
    complete = "complete" if one.complete else "not complete"
    closed = ", closed" if one.closed else ""
    heading = f"rendezvous {one.run_id}: round {one.round}, {complete}{closed}"
    yield _line(heading, _HEADING)
    if one.worker_store is not None:
        yield _line(f"  worker store: {one.worker_store}")
        if one.problem:
            yield _line(f"    {one.problem}", _WARNING)
    elif one.problem:
        yield _line(f"  worker store: {one.problem}", _WARNING)
    for joined, label in ((True, "joined"), (False, "waiting for the next round")):
        if nodes := one.joined(joined=joined):
            yield _line(f"  {label}: {', '.join(node.name for node in nodes)}")
    for node in one.nodes:
        if node.is_silent:
            heard = f"no heartbeat for {duration(node.silent or 0.0)}"
            yield _line(f"  silent: {node.name}, {heard}", _WARNING)


def _finished(view: JobView) -> Iterator[Line]:
    shown = view.finished[-_MAX_FINISHED:]
    total = view.more_finished + len(view.finished)
    if shown:
        yield _line(f"barriers finished{_last_of(total, len(shown))}:", _HEADING)
    for barrier in shown:
        first, last = barrier.first, barrier.last
        parts = [f"{barrier.arrived} arrived"]
        if first is not None and last is not None:
            parts[0] += f" within {duration(last - first)}"
        if barrier.last_rank is not None:
            host = f" ({barrier.last_host})" if barrier.last_host else ""
            parts.append(f"last rank {barrier.last_rank}{host}")
        if last is not None:
            parts.append(f"{duration(view.time - last)} ago")
        yield _line(f"  {barrier.prefix}: {', '.join(parts)}")


def _last_of(total: int, shown: int) -> str:
    return f": {total}, the last {shown}" if total > shown else f": {total}"


def group_by_place(
    answers: Mapping[int, ProcessFacts], *, all_threads: bool
) -> list[dict[int, ProcessFacts]]:
    """Group ranks by the line of the program that they are in, the smallest first.

    Their stacks may differ in torch below that line.

    Args:
        answers: The answers with stacks.
        all_threads: Group them by the stacks of all threads instead.
    """
    groups: dict[Hashable, dict[int, ProcessFacts]] = {}
    for rank in sorted(answers):
        answer = answers[rank]
        # Ranks without stacks are grouped by what is known about them.
        state = "" if answer.stacks else f"{answer.state} {answer.detail}"
        stacks = tuple(answer.stacks.items())
        where: Hashable = answer.place or stacks[:1]
        key = state, answer.collective, stacks if all_threads else where
        groups.setdefault(key, {})[rank] = answer
    return sorted(groups.values(), key=len)


def stack_lines(answers: Answers, *, all_threads: bool) -> Iterator[Line]:
    """Return the lines for one group of a job."""
    for members in group_by_place(answers.answers, all_threads=all_threads):
        first = next(iter(members.values()))
        stacks = list(first.stacks.items())
        place = first.place or (str(stacks[0][1][0]) if stacks and stacks[0][1] else "")
        found = " at ".join(filter(None, (first.collective, place)))
        yield Line(ranks_text(members) + (f": {found}" if found else ""), "bold", 4)
        for rank, answer in list(members.items())[:_MAX_PROCESSES]:
            info = answers.registered.get(rank)
            yield Line(f"  {describe_answer(rank, answer, info)}", "", 4)
        if len(members) > _MAX_PROCESSES:
            yield Line(f"  and {len(members) - _MAX_PROCESSES} more")
        for thread, frames in stacks if all_threads else stacks[:1]:
            if all_threads:
                yield Line(f"  thread {thread}")
            for frame in frames:
                yield Line(f"    {frame}", "dim", None)
        yield Line("")
    if answers.silent_ranks:
        absent = [r for r in answers.silent_ranks if r not in answers.registered]
        text = f"no answer: {ranks_text(answers.silent_ranks)}"
        if absent:
            text += f"; never registered in this store: {fold(absent)}"
        yield Line(text, "bold red", 2)


def rank_lines(answers: Answers, rank: int) -> Iterator[str]:
    """Return what is known about one rank: its process, and all of its threads."""
    answer = answers.answers.get(rank)
    if answer is None:
        if rank < answers.world_size:
            yield f"no answer from rank {rank}, and no process of its host answers"
        return
    yield describe_answer(rank, answer, answers.registered.get(rank))
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
