"""The content of the page as plain text; the template in `handler` has the layout."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tracedstore.export.inflight_client import Reply, State
from tracedstore.export.process_status import ProcessStatus
from tracedstore.naming.decoders import Decoder, default_name, name_of
from tracedstore.naming.ranges import describe, fold
from tracedstore.recording.barrier_stats import StalledBarrier
from tracedstore.signals.inflight import InFlight

# Missing ranks whose calls are listed with the barrier; the table of ranks has all.
_MAX_CALLS_LISTED = 16

_STATE_TEXTS: dict[State, str] = {
    "answered": "answered",
    "silent": "did not answer",
    "without": "without this page",
    "absent": "never registered",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank, or several ranks with the same content.

    Attributes:
        ranks: The ranks, folded.
        host: Host and pid, as far as known.
        state: The state as short text.
        calls: The calls in flight, longest first.
        alarm: Needs attention.
    """

    ranks: str
    host: str = ""
    state: str
    calls: tuple[InFlight, ...] = ()
    alarm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingBarrier:
    """A barrier with missing ranks.

    Attributes:
        barrier: The family of its key prefix.
        arrived: The number of arrivals.
        missing: The missing ranks as text.
        reported_by: The ranks that report it, folded.
        missing_calls: What the missing ranks are in instead, one line per rank.
    """

    barrier: str
    arrived: int
    missing: str
    reported_by: str
    missing_calls: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The content of the page.

    Attributes:
        summary: How many ranks are in which state.
        store_error: Why the store could not be read; "" if it could.
        barriers: The stalled barriers.
        rows: The ranks.
    """

    summary: str
    store_error: str
    barriers: tuple[WaitingBarrier, ...]
    rows: tuple[Row, ...]

    def text(self) -> str:
        """Return the page as text."""
        lines = [self.summary, *([self.store_error] if self.store_error else [])]
        for waiting in self.barriers:
            lines.append(
                f"barrier {waiting.barrier}: {waiting.arrived} arrived,"
                f" {waiting.missing} (reported by {waiting.reported_by})"
            )
            lines += [f"    {line}" for line in waiting.missing_calls]
        for row in self.rows:
            lines.append(f"{row.ranks} {row.host}".rstrip() + f": {row.state}")
            lines += [f"    {_call_text(call)}" for call in row.calls]
        return "\n".join(lines) + "\n"


def view(replies: Mapping[int, Reply], store_error: str, roster: Decoder) -> View:
    """Build the page from the replies of the ranks.

    Args:
        replies: The reply of each rank.
        store_error: Why the store could not be read; "" if it could.
        roster: Names the hosts of ranks that have not registered.
    """
    counts = ", ".join(
        f"{count} {text}"
        for state, text in _STATE_TEXTS.items()
        if (count := sum(reply.state == state for reply in replies.values()))
    )
    return View(
        summary=f"{len(replies)} ranks: {counts}.",
        store_error=store_error,
        barriers=_barriers(replies),
        rows=(
            *_silent_rows(replies),
            *_unregistered_rows(replies, "absent", roster),
            *_unregistered_rows(replies, "without", roster),
            *_blocked_rows(replies),
            *_idle_rows(replies),
        ),
    )


def _silent_rows(replies: Mapping[int, Reply]) -> Iterable[Row]:
    """Yield a row for each rank that did not answer."""
    for rank, reply in sorted(replies.items()):
        if reply.state == "silent":
            yield Row(
                ranks=default_name(rank),
                host=_host_text(reply),
                state=f"did not answer: {reply.error}",
                alarm=True,
            )


def _unregistered_rows(
    replies: Mapping[int, Reply], state: State, roster: Decoder
) -> Iterable[Row]:
    """Yield a row for each host, and one for the ranks without a known host."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(rank for rank, r in replies.items() if r.state == state):
        name = name_of(roster, rank)
        hosts.setdefault("" if name == default_name(rank) else name, []).append(rank)
    text = {
        "absent": "never registered",
        "without": "runs torch's debug server without this page",
    }[state]
    for host, ranks in hosts.items():
        yield Row(
            ranks=_ranks_text(ranks), host=host, state=text, alarm=state == "absent"
        )


def _blocked_rows(replies: Mapping[int, Reply]) -> Iterable[Row]:
    """Yield a row for each rank that is in a call, the longest call first."""
    blocked = [
        (rank, reply, reply.status)
        for rank, reply in replies.items()
        if reply.status is not None and reply.status.calls
    ]
    blocked.sort(key=lambda entry: (-entry[2].calls[0].waited_seconds, entry[0]))
    for rank, reply, status in blocked:
        yield Row(
            ranks=default_name(rank),
            host=_host_text(reply),
            state=f"in {_call_count(status)}",
            calls=status.calls,
        )


def _idle_rows(replies: Mapping[int, Reply]) -> Iterable[Row]:
    """Yield one row for the ranks in no call, and one for those that do not record."""
    idle = [
        (rank, reply.status.recording)
        for rank, reply in replies.items()
        if reply.status is not None and not reply.status.calls
    ]
    for recording, text in (
        (True, "in no Store call"),
        (False, "in no recorded Store call: recording is off"),
    ):
        ranks = [rank for rank, recorded in idle if recorded is recording]
        if ranks:
            yield Row(ranks=_ranks_text(ranks), state=text)


def _barriers(replies: Mapping[int, Reply]) -> tuple[WaitingBarrier, ...]:
    # The ranks that watch one barrier mostly report the same.
    reports: dict[tuple[object, ...], tuple[StalledBarrier, list[int]]] = {}
    for rank, reply in sorted(replies.items()):
        for stalled in reply.status.barriers if reply.status is not None else ():
            key = stalled.family, stalled.arrived, *sorted(stalled.missing.items())
            reports.setdefault(key, (stalled, []))[1].append(rank)
    return tuple(
        WaitingBarrier(
            barrier=stalled.family,
            arrived=stalled.arrived,
            missing=_missing_text(stalled, replies),
            reported_by=_ranks_text(reporters),
            missing_calls=tuple(
                f"rank {rank}: {_activity(replies.get(rank))}"
                for rank in sorted(stalled.missing)[:_MAX_CALLS_LISTED]
            ),
        )
        for stalled, reporters in reports.values()
    )


def _missing_text(stalled: StalledBarrier, replies: Mapping[int, Reply]) -> str:
    if not stalled.missing:
        return f"missing {stalled.possible}, some arrivals unidentified"

    def host(rank: int) -> str:
        # The reporting rank may not know the host; the missing rank may have
        # registered it.
        name, reply = stalled.missing[rank], replies.get(rank)
        if name == default_name(rank) and reply is not None and reply.info is not None:
            return reply.info.host
        return name

    total = stalled.arrived + len(stalled.missing)
    return describe(stalled.missing, total, host)


def _activity(reply: Reply | None) -> str:
    """Describe what a rank does: its oldest call, or its state."""
    if reply is None:
        return "not a rank of this job"
    if reply.status is None:
        return _STATE_TEXTS[reply.state]
    if not reply.status.calls:
        return "in no Store call"
    return _call_text(reply.status.calls[0])


def _call_text(call: InFlight) -> str:
    """Describe a call: ``wait for 12.3 s, tcp_store h:1, key k``."""
    parts = [
        f"{call.operation} for {call.waited_seconds:.1f} s",
        f"{call.store} {call.server}".rstrip(),
        *([f"key {call.key}"] if call.key else []),
        *([f"and {call.key_count - 1} more"] if call.key_count > 1 else []),
    ]
    return ", ".join(parts)


def _call_count(status: ProcessStatus) -> str:
    count = len(status.calls) + status.more_calls
    return "a Store call" if count == 1 else f"{count} Store calls"


def _host_text(reply: Reply) -> str:
    info = reply.info
    return f"{info.host}, pid {info.pid}" if info is not None else ""


def _ranks_text(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {fold(ranks)}"
