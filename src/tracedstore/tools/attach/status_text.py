"""The text of ``tracedstore status``, in sections of lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import duration, plural, shorten
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.discovery import invalid_entries
from tracedstore.naming.decoders import by_host
from tracedstore.tools.attach.answers_text import answer_lines
from tracedstore.tools.attach.job_state import BarrierState, Group, JobState
from tracedstore.tools.attach.job_status import Status, no_answer_reason
from tracedstore.tools.attach.stalled_ranks import BlockedRank
from tracedstore.tools.attach.store_contents import MAX_LEDGER_BYTES
from tracedstore.tools.terminal import Line

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import RendezvousState

_MAX_IN_PROGRESS = 16
_MAX_ABANDONED = 4
_MAX_UNREADABLE = 4
_MAX_INVALID_KEYS = 4
_MAX_FINISHED = 8
_MAX_HOSTS = 32
_MAX_CALLS = 24
_MAX_REASONS = 16
_MAX_STALLS = 4
_MAX_EVIDENCE = 8
# Characters of one fact, and of the ranks in it.
_MAX_LENGTH = 1000
_MAX_RANKS_LENGTH = 100
_HEADING, _WARNING = "bold", "yellow"


def status_lines(status: Status) -> list[Line]:
    """Return the lines to print: stalls and what is missing, then the details."""
    job = status.job
    sections: list[Iterable[Line]] = [
        [
            *_stalled(status),
            _missing(status),
            *claim_lines(status),
            _line(f"store: {status.store}"),
        ],
        *map(_ranks, job.groups),
        _blocked(status),
        *(answer_lines(one, _blocked_ranks(status)) for one in status.answers),
        _in_progress(status),
        _in_flight(status),
        *(_rendezvous(status, *one) for one in job.rendezvous.items()),
        _abandoned(status),
        _unreadable(status),
        _over_limit(status),
        _finished(status),
        _invalid_keys(status),
    ]
    if not job.groups:
        sections.insert(1, [_line("ranks: none registered")])
    invalid = list(_invalid(job))
    sections.insert(1 + max(1, len(job.groups)), invalid)
    lines: list[Line] = []
    for section in map(list, sections):
        if lines and section:
            lines.append(Line(""))
        lines += section
    return lines


def problem_lines(status: Status) -> Iterator[Line]:
    """Return the lines on what could not be read or confirmed, or not completely."""
    yield from claim_lines(status)
    yield from _invalid(status.job)
    yield from _unreadable(status)
    yield from _over_limit(status)
    yield from _invalid_keys(status)


def _line(text: str, style: str = "") -> Line:
    """Indent continuation lines by four more columns than the line."""
    return Line(text, style, indent=len(text) - len(text.lstrip()) + 4)


def _stalled(status: Status) -> Iterator[Line]:
    stalls = status.fresh_stalls()
    for verdict, stall in stalls[:_MAX_STALLS]:
        awaited = verdict.describe_awaited()
        if verdict.awaited_ranks:
            awaited = f"waiting for {awaited}"
        yield _line(_shorten(f"stalled in {verdict.phase}: {awaited}"), "bold red")
        yield _line(f"  cause: {verdict.cause}")
        for sentence in verdict.evidence[:_MAX_EVIDENCE]:
            yield _line(_shorten(f"  evidence: {sentence}"))
        if verdict.remedy:
            yield _line(_shorten(f"  remedy: {verdict.remedy}"))
        waiting = ranks_text(verdict.waiting_ranks)
        if verdict.agents:
            waiting = waiting.replace("rank", "agent", 1)
        yield _line(
            f"  waiting: {waiting}, for {duration(verdict.waited_seconds)} when it was"
            f" reported {duration(status.now - verdict.time)} ago"
        )
        if not stall.still_waiting():
            text = "  none of them is blocked in this call now: it may have ended"
            yield _line(text, _WARNING)
    if rest := len(stalls[_MAX_STALLS:]):
        yield _line(f"and {plural(rest, 'more stall')}", "bold red")


def claim_lines(status: Status) -> Iterator[Line]:
    """Return the lines on verdicts that are not confirmed."""
    claims = status.claims()
    for verdict, doubt in claims[:_MAX_STALLS]:
        text = f"claimed, not confirmed: {doubt}. The store has the verdict:"
        yield _line(_shorten(f"{text} {verdict.describe()}"), _WARNING)
    if rest := len(claims[_MAX_STALLS:]):
        yield _line(f"and {plural(rest, 'more claim')}", _WARNING)


def _missing(status: Status) -> Line:
    job = status.job
    if missing := status.missing():
        return _line(f"missing: {', '.join(missing)}", "bold red")
    if job.unreadable_stores or job.unread_ledgers:
        text = "nothing is missing, as far as can be read from here"
        return _line(text, "bold yellow")
    if not (job.groups or job.in_progress or job.finished or job.rendezvous):
        text = "nothing is known: the store has no rank, no barrier and no rendezvous"
        return _line(text, "bold yellow")
    return _line("nothing is missing", "bold green")


def _ranks(group: Group) -> Iterator[Line]:
    hosts = group.hosts
    under = f" under {group.prefix}" if group.prefix else ""
    heading = f"ranks{under}: {len(hosts)} of {group.world_size} registered"
    yield _line(heading, _HEADING)
    by_name = list(by_host(hosts, hosts.__getitem__).items())
    for host, ranks in by_name[:_MAX_HOSTS]:
        yield _line(f"  {host}: {ranks_text(ranks)}")
    if rest := len(by_name[_MAX_HOSTS:]):
        yield _line(f"  and {plural(rest, 'more host')}")
    if absent := set(range(group.world_size)) - hosts.keys():
        yield _line(f"  not registered: {ranks_text(absent)}", _WARNING)


def _invalid(job: JobState) -> Iterator[Line]:
    if job.invalid_entries:
        yield _line(invalid_entries(job.invalid_entries), _WARNING)
    if number := job.invalid_records:
        records = "record of a stall is" if number == 1 else "records of stalls are"
        yield _line(f"{number} {records} not valid", _WARNING)


def _in_progress(status: Status) -> Iterator[Line]:
    job = status.job
    shown = job.in_progress[-_MAX_IN_PROGRESS:]
    if shown or job.unread_in_progress:
        yield _line("barriers in progress:", _HEADING)
    if unread := job.unread_in_progress:
        yield _line(f"  {plural(unread, 'older barrier')} not complete, not read")
    if rest := len(job.in_progress) - len(shown):
        yield _line(f"  {rest} more, not shown")
    yield from _incomplete(status, shown)


def _abandoned(status: Status) -> Iterator[Line]:
    shown = status.job.abandoned[-_MAX_ABANDONED:]
    if shown:
        total = len(status.job.abandoned)
        yield _line(f"barriers abandoned{_last_of(total, len(shown))}:", _HEADING)
    yield from _incomplete(status, shown)


def _incomplete(status: Status, barriers: Iterable[BarrierState]) -> Iterator[Line]:
    for barrier in barriers:
        of = "" if barrier.world_size is None else f" of {barrier.world_size}"
        since = ""
        if barrier.first_arrival is not None:
            since = f", the first {duration(status.now - barrier.first_arrival)} ago"
        yield _line(f"  {barrier.prefix}: {barrier.arrived}{of} arrived{since}")
        if barrier.missing_report is not None and barrier.awaits_ranks:
            yield _line(f"    {barrier.missing_report.describe()}", _WARNING)


def _unreadable(status: Status) -> Iterator[Line]:
    barriers = status.job.unreadable_barriers
    if barriers:
        shown = min(len(barriers), _MAX_UNREADABLE)
        heading = f"barriers that cannot be read{_last_of(len(barriers), shown)}:"
        yield _line(heading, _WARNING)
    for prefix in barriers[-_MAX_UNREADABLE:]:
        yield _line(f"  {prefix}: cannot be read")


def _over_limit(status: Status) -> Iterator[Line]:
    if number := status.job.unread_ledgers:
        limit = f"{MAX_LEDGER_BYTES >> 20} MiB"
        yield _line(
            f"{plural(number, 'barrier')} not read: the ledgers of newer ones have"
            f" {limit} together",
            _WARNING,
        )


def _invalid_keys(status: Status) -> Iterator[Line]:
    keys = status.job.invalid_keys
    if keys:
        shown = min(len(keys), _MAX_INVALID_KEYS)
        heading = f"keys that are not valid{_last_of(len(keys), shown)}:"
        yield _line(heading, _WARNING)
    for key in keys[-_MAX_INVALID_KEYS:]:
        yield _line(f"  {key}: no Store has written it")


def _finished(status: Status) -> Iterator[Line]:
    shown = status.job.finished[-_MAX_FINISHED:]
    total = status.job.unread_finished + len(status.job.finished)
    if shown:
        yield _line(f"barriers finished{_last_of(total, len(shown))}:", _HEADING)
    for barrier in shown:
        first, last = barrier.first_arrival, barrier.last_arrival
        parts = [f"{barrier.arrived} arrived"]
        if first is not None and last is not None:
            parts[0] += f" within {duration(last - first)}"
        if barrier.last_rank is not None:
            host = f" ({barrier.last_host})" if barrier.last_host else ""
            parts.append(f"last rank {barrier.last_rank}{host}")
        if last is not None:
            parts.append(f"{duration(status.now - last)} ago")
        yield _line(f"  {barrier.prefix}: {', '.join(parts)}")


def _rendezvous(
    status: Status, run_id: str, state: "RendezvousState | None"
) -> Iterator[Line]:
    if state is None:
        yield _line(f"rendezvous {run_id}: its state cannot be read", _WARNING)
        return
    complete = "complete" if state.complete else "not complete"
    closed = ", closed" if state.closed else ""
    heading = f"rendezvous {run_id}: round {state.round}, {complete}{closed}"
    yield _line(heading, _HEADING)
    url = status.job.worker_stores.get(run_id)
    if url is None and run_id in status.job.worker_stores:
        text = "its MASTER_ADDR and MASTER_PORT are not a host and a port"
        yield _line(f"  worker store: {text}", _WARNING)
    elif url is not None:
        yield _line(f"  worker store: {url}")
        if reason := status.job.unreadable_stores.get(url):
            yield _line(f"    {reason}", _WARNING)
    for label, nodes in (
        ("joined", sorted(state.participants, key=state.participants.__getitem__)),
        ("waiting for the next round", sorted(state.wait_list)),
    ):
        if nodes:
            yield _line(f"  {label}: {', '.join(map(str, nodes))}")
    for node, age in status.silent_nodes(state).items():
        yield _line(f"  silent: {node}, no heartbeat for {duration(age)}", _WARNING)


def _blocked(status: Status) -> Iterator[Line]:
    # Ranks in the same phase wait for different keys: those of different peers.
    groups: dict[tuple[str, str], list[BlockedRank]] = {}
    for one in status.blocked():
        groups.setdefault((one.phase, awaited_by(one)), []).append(one)
    if not groups and not status.job.unread_records:
        return
    yield _line("blocked ranks:", _HEADING)
    shown = list(groups.items())[:_MAX_CALLS]
    for (phase, awaited), ranks in shown:
        # The first one has waited for longest.
        first = ranks[0]
        text = f"{ranks_text(one.rank for one in ranks)}: {phase}"
        text += f", waiting {duration(status.waited(first))} for {awaited}"
        if first.key and first.key not in phase:
            text += f" ({first.operation} {first.key})"
        yield _line(_shorten(f"  {text}"))
    if rest := sum(map(len, list(groups.values())[_MAX_CALLS:])):
        yield _line(f"  and {plural(rest, 'more rank')}")
    if unread := status.job.unread_records:
        text = f"  and {plural(unread, 'more rank')} with records that were not read"
        yield _line(text, _WARNING)


def _blocked_ranks(status: Status) -> set[int]:
    return {one.rank for one in status.blocked()}


def awaited_by(blocked: BlockedRank) -> str:
    """Return the ranks that a blocked rank waits for: ``rank 2``, ``one of ...``."""
    for ranks, text in (("awaits", "{}"), ("members", "one of {}")):
        if folded := getattr(blocked, ranks):
            noun = "rank" if folded.isdecimal() else "ranks"
            return text.format(f"{noun} {shorten(folded, _MAX_RANKS_LENGTH)}")
    return "an unknown rank"


def _in_flight(status: Status) -> Iterator[Line]:
    if not status.replies:
        return
    yield _line("calls in flight:", _HEADING)
    by_call: dict[tuple[str, str], list[tuple[float, RankInfo]]] = {}
    idle: list[RankInfo] = []
    unknown: dict[str, list[RankInfo]] = {}
    for info, reply in status.replies.items():
        if reply.status is None:
            unknown.setdefault(no_answer_reason(reply), []).append(info)
        elif not reply.status.in_flight:
            idle.append(info)
        else:
            for call in reply.status.in_flight:
                caller = (call.waited_seconds, info)
                by_call.setdefault((call.operation, call.key), []).append(caller)
    calls = sorted(by_call.items(), key=lambda one: -max(w for w, _ in one[1]))
    for (operation, key), callers in calls[:_MAX_CALLS]:
        longest = max(waited for waited, _ in callers)
        ranks = ranks_text(info.rank for _, info in callers)
        yield _line(f"  {ranks}: {operation} {key} for {duration(longest)}")
    if rest := len(calls[_MAX_CALLS:]):
        yield _line(f"  and {plural(rest, 'more call')}")
    if idle:
        yield _line(f"  in no call: {ranks_text(info.rank for info in idle)}")
    yield from _unknown(unknown)


def _unknown(ranks_by_reason: Mapping[str, Sequence[RankInfo]]) -> Iterator[Line]:
    reasons = list(ranks_by_reason.items())
    for reason, infos in reasons[:_MAX_REASONS]:
        ranks = ranks_text(info.rank for info in infos)
        yield _line(f"  unknown: {ranks} ({reason})")
    if rest := sum(len(infos) for _, infos in reasons[_MAX_REASONS:]):
        yield _line(f"  unknown: {plural(rest, 'more rank')}")


def _shorten(text: str) -> str:
    return shorten(text, _MAX_LENGTH)


def _last_of(total: int, shown: int) -> str:
    return f": {total}, the last {shown}" if total > shown else f": {total}"
