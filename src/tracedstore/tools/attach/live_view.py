"""Makes the view of a job from one reading of the running job."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import plural, shorten
from tracedstore.coordination.arrivals import BarrierKeys
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import (
    Verdict,
    describe_answer,
    describe_rank,
)
from tracedstore.diagnosis.observe.blocked_record import COLLECTIVE
from tracedstore.diagnosis.observe.movement import StillRecord
from tracedstore.export.discovery import invalid_entries
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.job_reading import Answers, JobReading
from tracedstore.tools.attach.job_state import Group
from tracedstore.tools.attach.local_ranks import Usage
from tracedstore.tools.attach.process_groups import process_groups
from tracedstore.tools.attach.stall_records import BlockedRank, StallRecord
from tracedstore.tools.attach.store_snapshot import MAX_LEDGER_BYTES
from tracedstore.tools.job_view import (
    AnsweredView,
    BarrierView,
    BlockedView,
    CallView,
    JobView,
    NodeView,
    RankGroup,
    RankName,
    RankState,
    RankStates,
    RankView,
    Rates,
    RendezvousView,
    StallView,
    StillView,
    awaited_state,
)

# Ranks that have not registered and are shown one by one. Any client of the store can
# write a world size of a million.
MAX_ABSENT = 65_536
# Arrivals of all barriers that are in the view: 12 bytes each.
_MAX_ARRIVALS = 1_000_000
# Seconds. Shorter calls are ordinary.
_LONG_CALL = 1.0
# Characters of one note, and of the ranks in a text.
_MAX_LENGTH = 1000
_MAX_RANKS_LENGTH = 100
_MAX_CLAIMS = 4
_MAX_LISTED = 4

_LAST_MEMBER = BarrierKeys("").last_member


def view_of(
    reading: JobReading,
    rates: Rates | None = None,
    used: Mapping[tuple[str, int], Usage] | None = None,
) -> JobView:
    """Return the view of a reading.

    Args:
        reading: The reading.
        rates: The Store calls of the ranks, if they were requested.
        used: What processes of this host use, by host and pid.
    """
    job = reading.job
    late = [replace(one, late=reading.is_late(one)) for one in job.in_progress]
    ranks = _LiveRanks(reading, late)
    ranks.add_usage(used or {})
    budget = _MAX_ARRIVALS

    def shown(barriers: Iterable[BarrierView]) -> tuple[BarrierView, ...]:
        nonlocal budget
        views = []
        # The newest first, as long as the budget lasts.
        for one in reversed(tuple(barriers)):
            view = replace(one, group=ranks.group_of(one.group), report=None)
            if len(one.ranks) > budget:
                view = replace(view, ranks=array("I"), times=array("d"))
            budget -= len(view.ranks)
            views.append(view)
        return tuple(reversed(views))

    calls, idle, unknown = _calls(reading)
    view = JobView(
        source=reading.store,
        time=reading.now,
        missing=tuple(reading.missing()),
        notes=tuple(_notes(reading)),
        incomplete=bool(job.unreadable_stores or job.unread_ledgers),
        ranks=ranks.states.ranks(),
        groups=tuple(
            RankGroup(prefix=one.prefix, world_size=one.world_size, hosts=one.hosts)
            for one in job.groups
        ),
        stalls=tuple(
            _stall(verdict, stall, reading.now)
            for verdict, stall in reading.fresh_stalls()
        ),
        blocked=tuple(_blocked(reading)),
        calls=calls if reading.replies else None,
        idle_ranks=idle,
        unknown_calls=unknown,
        answered=tuple(_answered(reading)),
        still=tuple(_still(reading)),
        process_groups=process_groups(
            reading.blocked(),
            reading.answers,
            {one.group: one.awaited_ranks for one, _ in reading.fresh_stalls()},
            min(MAX_ABSENT, max((one.world_size for one in job.groups), default=0)),
        ),
        in_progress=shown(late),
        abandoned=shown(job.abandoned),
        finished=shown(job.finished),
        more_in_progress=job.unread_in_progress,
        more_finished=job.unread_finished,
        more_blocked=job.unread_records,
        rendezvous=tuple(_rendezvous(reading)),
        rates=rates,
    )
    return view.with_headline()


def _notes(reading: JobReading) -> Iterator[str]:
    """Yield what could not be confirmed or read, or not completely."""
    job = reading.job
    claims = reading.claims()
    for verdict, doubt in claims[:_MAX_CLAIMS]:
        text = f"claimed, not confirmed: {doubt}. The store has the verdict:"
        yield shorten(f"{text} {verdict.describe(reading.now)}", _MAX_LENGTH)
    if rest := len(claims[_MAX_CLAIMS:]):
        yield f"and {plural(rest, 'more claim')}"
    if job.invalid_entries:
        yield invalid_entries(job.invalid_entries)
    if number := job.invalid_records:
        records = "record of a stall is" if number == 1 else "records of stalls are"
        yield f"{number} {records} not valid"
    for heading, items, reason in (
        ("barriers that cannot be read", job.unreadable_barriers, "cannot be read"),
        ("keys that are not valid", job.invalid_keys, "no Store has written it"),
    ):
        if items:
            last = f", the last {_MAX_LISTED}" if len(items) > _MAX_LISTED else ""
            yield f"{heading}: {len(items)}{last}:"
        yield from (f"  {one}: {reason}" for one in items[-_MAX_LISTED:])
    if number := job.unread_ledgers:
        limit = f"{MAX_LEDGER_BYTES >> 20} MiB"
        text = f"{plural(number, 'barrier')} not read: the ledgers of newer ones have"
        yield f"{text} {limit} together"


def _stall(verdict: Verdict, stall: StallRecord, now: float) -> StallView:
    noun = "agent" if verdict.agents else "rank"
    return StallView(
        phase=verdict.phase,
        awaited=verdict.describe_awaited(now),
        named=bool(verdict.awaited_ranks),
        cause=verdict.cause,
        evidence=verdict.evidence,
        remedy=verdict.remedy,
        start=verdict.time - verdict.waited_seconds,
        reported=verdict.time,
        waiting=ranks_text(verdict.waiting_ranks, noun),
        waits=stall.still_waiting(),
        reporters=tuple(sorted({one.rank for one in stall.covered()})),
        fields=verdict.event_fields(verdict.time),
    )


def _blocked(reading: JobReading) -> Iterator[BlockedView]:
    # Ranks in the same phase wait for different keys: those of different peers.
    groups: dict[tuple[str, str], list[BlockedRank]] = {}
    for one in reading.blocked():
        groups.setdefault((one.phase, _awaited_by(one)), []).append(one)
    for (phase, awaited), ranks in groups.items():
        yield BlockedView(
            ranks=tuple(one.rank for one in ranks),
            phase=phase,
            awaited=awaited,
            waited=reading.waited(ranks[0]),
            call=_call_of(ranks[0]),
        )


def _still(reading: JobReading) -> Iterator[StillView]:
    by_place: dict[str, list[StillRecord]] = {}
    for one in reading.still():
        by_place.setdefault(one.place, []).append(one)
    for place, records in by_place.items():
        yield StillView(
            ranks=tuple(sorted(one.rank for one in records)),
            place=place,
            since=max(one.since for one in records),
        )


def _call_of(blocked: BlockedRank) -> str:
    if not blocked.key or blocked.key in blocked.phase:
        return ""
    return f"{blocked.operation} {blocked.key}"


def _awaited_by(blocked: BlockedRank) -> str:
    """Return the ranks that a blocked rank waits for: ``rank 2``, ``one of ...``."""
    if blocked.protocol == COLLECTIVE and blocked.awaits == "":
        return "no rank that is late"
    for folded, text in ((blocked.awaits, "{}"), (blocked.members, "one of {}")):
        if folded:
            noun = "rank" if folded.isdecimal() else "ranks"
            return text.format(f"{noun} {shorten(folded, _MAX_RANKS_LENGTH)}")
    # In a large group, few ranks look for those that are absent.
    return (
        "an unknown rank" if blocked.protocol != COLLECTIVE else "a rank of the group"
    )


def _calls(
    reading: JobReading,
) -> tuple[tuple[CallView, ...], tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return calls in flight, ranks that are in none, and ranks by why unknown."""
    by_call: dict[str, list[tuple[float, int]]] = {}
    idle: list[int] = []
    unknown: dict[str, tuple[int, ...]] = {}
    for info, reply in reading.replies.items():
        if reply.status is None:
            unknown[reply.reason] = (*unknown.get(reply.reason, ()), info.rank)
        elif not reply.status.in_flight:
            idle.append(info.rank)
        else:
            for call in reply.status.in_flight:
                caller = call.waited_seconds, info.rank
                by_call.setdefault(f"{call.operation} {call.key}", []).append(caller)
    calls = [
        CallView(
            ranks=tuple(rank for _, rank in callers),
            call=call,
            waited=max(waited for waited, _ in callers),
        )
        for call, callers in by_call.items()
    ]
    calls.sort(key=lambda one: -one.waited)
    return tuple(calls), tuple(idle), unknown


def _answered(reading: JobReading) -> Iterator[AnsweredView]:
    known = {one.rank for one in reading.blocked()}
    for answers in reading.answers:
        if not answers.asked_all:
            # The verdict has what they do.
            for verdict, _ in reading.fresh_stalls():
                known.update(one.rank for one in verdict.awaited)
        found = answered(answers, known)
        if found.activities or found.silent_ranks:
            yield found


def answered(answers: Answers, blocked: Iterable[int] = ()) -> AnsweredView:
    """Return what ranks answered, but for those that are known to be blocked."""
    groups: dict[str, dict[int, ProcessFacts]] = {}
    for rank in sorted(answers.answers.keys() - set(blocked)):
        answer = answers.answers[rank]
        place = answer.place or (f"{answer.frames[0]}" if answer.frames else "")
        what = f"{answer.state} {answer.operation} {place} {answer.detail}"
        groups.setdefault(what, {})[rank] = answer
    activities = []
    for members in sorted(groups.values(), key=len):
        first = next(iter(members))
        info = answers.registered.get(first)
        text = describe_answer(first, members[first], info)
        activities.append((text, tuple(members)))
    return AnsweredView(
        activities=tuple(activities), silent_ranks=tuple(answers.silent_ranks)
    )


def _rendezvous(reading: JobReading) -> Iterator[RendezvousView]:
    for run_id, state in reading.job.rendezvous.items():
        if state is None:
            yield RendezvousView(run_id=run_id, readable=False)
            continue
        stores = reading.job.worker_stores
        url = stores.get(run_id)
        problem = reading.job.unreadable_stores.get(url or "", "")
        if url is None and run_id in stores:
            problem = "its MASTER_ADDR and MASTER_PORT are not a host and a port"
        joined = sorted(state.participants, key=state.participants.__getitem__)
        yield RendezvousView(
            run_id=run_id,
            round=state.round,
            complete=state.complete,
            closed=state.closed,
            worker_store=url,
            problem=problem,
            nodes=tuple(
                NodeView(
                    name=str(node),
                    joined=node in state.participants,
                    silent=state.silent_seconds(node, reading.now),
                )
                for node in (*joined, *sorted(state.wait_list))
            ),
        )


class _LiveRanks:
    """Collects what one reading has about each rank.

    Attributes:
        states: The states of the ranks.
    """

    def __init__(self, reading: JobReading, barriers: Iterable[BarrierView]) -> None:
        self._reading = reading
        self.states = RankStates()
        groups = sorted(reading.job.groups, key=lambda group: -len(group.ranks))
        self.states.default_group = groups[0].prefix if groups else ""
        self._add_registered(groups)
        self._add_absent(groups)
        self._groups: dict[str, str] = {}
        for (prefix, _), (shown, _) in self.states.shown_as.items():
            self._groups[prefix] = min(shown, self._groups.get(prefix, shown))
        self._add_replies()
        for barrier in barriers:
            if barrier.awaits_ranks and not barrier.of_agents:
                self.states.add_barrier(barrier, reading.now)
        for blocked in reading.blocked():
            self._add_blocked(blocked)
        for verdict, stall in reading.fresh_stalls():
            if not verdict.agents:  # which have ranks of their own
                self._add_verdict(stall.prefix, verdict, waits=stall.still_waiting())
        self._add_answers()
        self._add_movement()

    def add_usage(self, used: Mapping[tuple[str, int], Usage]) -> None:
        """Add what processes of this host use."""
        for rank in self.states.ranks():
            if one := used.get((rank.host, rank.pid or 0)):
                self.states.note(rank, cpu=one.cpu, memory=one.memory, log=one.log)

    def group_of(self, prefix: str | None) -> str:
        """Return the group under which the ranks of a prefix are shown."""
        return self._groups.get(prefix or "", self.states.default_group)

    def _add_registered(self, groups: Iterable[Group]) -> None:
        shown: dict[tuple[int, str, int], RankName] = {}
        for group in groups:
            for info in group.ranks:
                name = group.prefix, info.rank
                process = info.rank, info.host, info.pid
                if shown.setdefault(process, name) == name:
                    self.states.add(_registered(info, group.prefix))
                self.states.shown_as[name] = shown[process]

    def _add_absent(self, groups: Iterable[Group]) -> None:
        left, names = MAX_ABSENT, self.states.shown_as
        # The ranks of a world, by its size: it may have several prefixes.
        worlds: dict[int, dict[int, RankName]] = {}
        for group in groups:
            world = worlds.setdefault(group.world_size, {})
            for info in group.ranks:
                world.setdefault(info.rank, names[group.prefix, info.rank])
        for group in groups:
            world, present = worlds[group.world_size], group.hosts
            for number in range(group.world_size):
                if not left:
                    return
                if number in present:
                    continue
                name = group.prefix, number
                if number not in world:
                    left -= 1
                    self.states.add(
                        RankView(
                            rank=number,
                            host="",
                            state=RankState.NOT_STARTED,
                            doing="has not registered in the store",
                            group=group.prefix,
                        )
                    )
                names[name] = world.setdefault(number, name)

    def _add_replies(self) -> None:
        replies = self._reading.replies
        # An endpoint may listen on loopback only, or behind a firewall. So silence
        # counts only where another rank of the host answers.
        reached = {info.host for info, one in replies.items() if one.status}
        by_process = {(one.rank, one.host, one.pid): one for one in replies}
        for rank in self.states.ranks():
            info = by_process.get((rank.rank, rank.host, rank.pid or -1))
            if info is None:
                continue
            reply = replies[info]
            if reply.status is not None:
                calls = [c for c in reply.status.in_flight if c.operation]
                longest = max(calls, key=lambda c: c.waited_seconds, default=None)
                if longest is not None and longest.waited_seconds >= _LONG_CALL:
                    doing = _call_text(longest.operation, longest.key)
                    waited = longest.waited_seconds
                    self.states.worsen(rank, RankState.WAITING, doing, waited)
            elif info.host in reached and _is_silent(reply.error):
                doing = f"its endpoint does not answer: {reply.error}"
                self.states.worsen(rank, RankState.NO_ANSWER, doing, None)

    def _add_blocked(self, blocked: BlockedRank) -> None:
        process = blocked.host, blocked.pid
        for group in self._reading.job.groups:
            rank = self.states.get(group.prefix, blocked.rank)
            if rank and (rank.host, rank.pid) == process:
                doing = f"{blocked.phase}: waits for {_awaited_by(blocked)}"
                if call := _call_of(blocked):
                    doing += f" ({call})"
                waited = self._reading.waited(blocked)
                self.states.worsen(rank, RankState.WAITING, doing, waited)
                return

    def _add_verdict(self, prefix: str, verdict: Verdict, *, waits: bool) -> None:
        age = max(0.0, self._reading.now - verdict.time)
        waited = verdict.waited_seconds + age
        named = {one.rank: one for one in verdict.awaited}
        for number in verdict.awaited_ranks:
            rank = self.states.get(prefix, number)
            if rank is None:
                continue
            one = named.get(number)
            if waits and one is not None and one.pid and one.cause == "late":
                self.states.found(rank, one.host, one.pid)
            state = awaited_state("" if one is None else one.cause)
            # A process that has ended stays so after the wait.
            ended = state is RankState.GONE and one is not None and one.pid == rank.pid
            if waits or ended:
                doing = "" if one is None else one.activity(self._reading.now)
                doing = doing or rank.doing
                self.states.worsen(rank, state, doing, waited if waits else rank.waited)

    def _add_answers(self) -> None:
        now = self._reading.now
        for answers in self._reading.answers:
            for number, answer in answers.answers.items():
                for group in self._reading.job.groups:
                    rank = self.states.get(group.prefix, number)
                    if rank is None or rank.pid not in (None, answer.pid):
                        continue
                    info = answers.registered.get(number)
                    if answer.state == "running" and answer.pid:
                        self.states.found(rank, answer.host, answer.pid)
                        rank = self.states.get(group.prefix, number) or rank
                    doing = describe_rank(
                        number, answer, info, rank.host, now
                    ).activity(now)
                    if rank.state is RankState.WAITING or answer.state == "silent":
                        doing = rank.doing
                    state = rank.state
                    if answer.state in ("gone", "stopped"):
                        state = min(state, awaited_state(answer.state))
                    self.states.worsen(rank, state, doing, rank.waited)

    def _add_movement(self) -> None:
        """Add when something moved last in ranks in which nothing moves."""
        still = {(one.host, one.pid): one for one in self._reading.job.still}
        for rank in self.states.ranks():
            if one := still.get((rank.host, rank.pid or 0)):
                place = f"in {one.place}" if one.place else ""
                self.states.note(rank, moved=one.since, doing=rank.doing or place)


def _registered(info: RankInfo, group: str) -> RankView:
    return RankView(
        rank=info.rank,
        host=info.host,
        state=RankState.RUNNING,
        pid=info.pid,
        run_id=info.run_id,
        local_rank=info.local_rank,
        attempt=info.attempt,
        registered=info.started,
        endpoint=info.metrics,
        group=group,
    )


def _is_silent(error: str) -> bool:
    """Return whether a reply means that nothing serves the endpoint."""
    return not error.startswith(("responded", "token not sent", "the response"))


def _call_text(operation: str, key: str) -> str:
    if operation == "wait" and key.endswith(_LAST_MEMBER):
        return f"at barrier {key.removesuffix(_LAST_MEMBER)}"
    return f"in {operation} {key}".rstrip()
