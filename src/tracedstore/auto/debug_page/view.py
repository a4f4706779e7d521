"""What the page says, in plain text; how it looks is for the template."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tracedstore.coordination.decoders import Decoder, name_of, nameless
from tracedstore.coordination.ranges import describe, fold
from tracedstore.core.barrier_stats import StalledBarrier
from tracedstore.export.inflight_client import Reply, State
from tracedstore.export.process_status import ProcessStatus
from tracedstore.signals.inflight import InFlight

# Of more missing ranks than this, what they are doing is read in the table below.
_MOST_EXPLAINED = 16

_COUNTED: dict[State, str] = {
    "answered": "answered",
    "silent": "did not answer",
    "without": "without this page",
    "absent": "never registered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank, or several of which there is the same to say.

    Attributes:
        ranks: Which, folded.
        where: Host and process, as far as known.
        state: How it is, in a few words.
        calls: The calls it is in, longest first.
        alarm: Somebody should look at this.
    """

    ranks: str
    where: str = ""
    state: str
    calls: tuple[InFlight, ...] = ()
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingBarrier:
    """A barrier that ranks are missing from.

    Attributes:
        barrier: The family of its key prefix.
        arrived: How many arrived.
        missing: Who did not.
        told_by: The ranks that found that, folded.
        doing: What the missing ranks do instead, one a line.
    """

    barrier: str
    arrived: int
    missing: str
    told_by: str
    doing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything the page says."""

    summary: str
    trouble: str
    barriers: tuple[WaitingBarrier, ...]
    rows: tuple[Row, ...]

    def text(self) -> str:
        """Write it for a file."""
        lines = [self.summary, *([self.trouble] if self.trouble else [])]
        for waiting in self.barriers:
            lines.append(
                f"barrier {waiting.barrier}: {waiting.arrived} arrived,"
                f" {waiting.missing} (told by {waiting.told_by})"
            )
            lines += [f"    {line}" for line in waiting.doing]
        for row in self.rows:
            lines.append(f"{row.ranks} {row.where}".rstrip() + f": {row.state}")
            lines += [f"    {_line(call)}" for call in row.calls]
        return "\n".join(lines) + "\n"


def view(replies: Mapping[int, Reply], trouble: str, roster: Decoder) -> View:
    """Put together what the ranks said; the roster names those that said nothing."""
    counts = ", ".join(
        f"{count} {words}"
        for state, words in _COUNTED.items()
        if (count := sum(reply.state == state for reply in replies.values()))
    )
    return View(
        summary=f"{len(replies)} ranks: {counts}.",
        trouble=trouble,
        barriers=_barriers(replies),
        rows=(
            *_silent(replies),
            *_unknown(replies, "absent", roster),
            *_unknown(replies, "without", roster),
            *_blocked(replies),
            *_idle(replies),
        ),
    )


def _silent(replies: Mapping[int, Reply]) -> Iterable[Row]:
    for rank, reply in sorted(replies.items()):
        if reply.state == "silent":
            yield Row(
                ranks=nameless(rank),
                where=_where(reply),
                state=f"did not answer: {reply.why}",
                alarm=True,
            )


def _unknown(
    replies: Mapping[int, Reply], state: State, roster: Decoder
) -> Iterable[Row]:
    """Give a row for each host that such ranks are on, and one for the homeless."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(rank for rank, r in replies.items() if r.state == state):
        name = name_of(roster, rank)
        hosts.setdefault("" if name == nameless(rank) else name, []).append(rank)
    words = {
        "absent": "never registered",
        "without": "runs torch's debug server without this page",
    }[state]
    for host, ranks in hosts.items():
        yield Row(ranks=_named(ranks), where=host, state=words, alarm=state == "absent")


def _blocked(replies: Mapping[int, Reply]) -> Iterable[Row]:
    """Give a row for each rank that is in a call, longest first."""
    blocked = [
        (rank, reply, reply.answer)
        for rank, reply in replies.items()
        if reply.answer is not None and reply.answer.calls
    ]
    blocked.sort(key=lambda found: (-found[2].calls[0].waited_seconds, found[0]))
    for rank, reply, answer in blocked:
        yield Row(
            ranks=nameless(rank),
            where=_where(reply),
            state=f"in {_calls(answer)}",
            calls=answer.calls,
        )


def _idle(replies: Mapping[int, Reply]) -> Iterable[Row]:
    """Give one row for all ranks that are in no call, and one for the unrecorded."""
    idle = [
        (rank, reply.answer.recording)
        for rank, reply in replies.items()
        if reply.answer is not None and not reply.answer.calls
    ]
    for recording, words in (
        (True, "in no Store call"),
        (False, "in no Store call that is recorded: recording is off there"),
    ):
        ranks = [rank for rank, recorded in idle if recorded is recording]
        if ranks:
            yield Row(ranks=_named(ranks), state=words)


def _barriers(replies: Mapping[int, Reply]) -> tuple[WaitingBarrier, ...]:
    # Those that look at one barrier mostly find the same.
    found: dict[tuple[object, ...], tuple[StalledBarrier, list[int]]] = {}
    for rank, reply in sorted(replies.items()):
        for stalled in reply.answer.barriers if reply.answer is not None else ():
            key = stalled.family, stalled.arrived, *sorted(stalled.missing.items())
            found.setdefault(key, (stalled, []))[1].append(rank)
    return tuple(
        WaitingBarrier(
            barrier=stalled.family,
            arrived=stalled.arrived,
            missing=_missing(stalled, replies),
            told_by=_named(told_by),
            doing=tuple(
                f"rank {rank}: {_doing(replies.get(rank))}"
                for rank in sorted(stalled.missing)[:_MOST_EXPLAINED]
            ),
        )
        for stalled, told_by in found.values()
    )


def _missing(stalled: StalledBarrier, replies: Mapping[int, Reply]) -> str:
    if not stalled.missing:
        return f"missing {stalled.possible}, some arrived without a name"

    def named(rank: int) -> str:
        # Who found it missing may not know its host; here it may have registered.
        found, reply = stalled.missing[rank], replies.get(rank)
        if found == nameless(rank) and reply is not None and reply.info is not None:
            return reply.info.host
        return found

    total = stalled.arrived + len(stalled.missing)
    return describe(stalled.missing, total, named)


def _doing(reply: Reply | None) -> str:
    if reply is None:
        return "is none of this job's"
    if reply.answer is None:
        return _COUNTED[reply.state]
    if not reply.answer.calls:
        return "in no Store call"
    return _line(reply.answer.calls[0])


def _line(call: InFlight) -> str:
    """Say what a call is and waits for: ``wait for 12.3 s, tcp_store h:1, key k``."""
    parts = [
        f"{call.operation} for {call.waited_seconds:.1f} s",
        f"{call.store} {call.server}".rstrip(),
        *([f"key {call.key}"] if call.key else []),
        *([f"and {call.key_count - 1} more"] if call.key_count > 1 else []),
    ]
    return ", ".join(parts)


def _calls(answer: ProcessStatus) -> str:
    count = len(answer.calls) + answer.more_calls
    return "a Store call" if count == 1 else f"{count} Store calls"


def _where(reply: Reply) -> str:
    info = reply.info
    return f"{info.host}, pid {info.pid}" if info is not None else ""


def _named(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {fold(ranks)}"
