"""The state of each rank, from everything that one reading has about it."""

from collections.abc import Iterable
from dataclasses import replace

from tracedstore.common.causes import Cause
from tracedstore.coordination.arrivals import BarrierKeys
from tracedstore.diagnosis.judgement.judge import describe_rank
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.tools.attach.job_state import BarrierState, Group
from tracedstore.tools.attach.job_status import Status
from tracedstore.tools.attach.stalled_ranks import BlockedRank
from tracedstore.tools.attach.status_text import awaited_by
from tracedstore.tools.top.model import Rank, State

# Ranks that have not registered and are shown one by one. Any client of the store can
# write a world size of a million.
MAX_ABSENT = 65_536
# Seconds. Shorter calls are ordinary.
_LONG_CALL = 1.0
# Key prefix and rank.
Name = tuple[str, int]

_LAST_MEMBER = BarrierKeys("").last_member
_STATES: dict[Cause, State] = {
    "gone": State.GONE,
    "stopped": State.STOPPED,
    "not_started": State.NOT_STARTED,
}


class FleetStates:
    """Collects what is known about ranks; of several states the worst counts."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._ranks: dict[Name, Rank] = {}
        # A process may register under several prefixes. It is shown once.
        self._names: dict[Name, Name] = {}
        groups = sorted(status.job.groups, key=lambda group: -len(group.ranks))
        self._default = groups[0].prefix if groups else ""
        self._add_registered(groups)
        self._add_absent(groups)
        self._groups: dict[str, str] = {}
        for (prefix, _), (shown, _) in self._names.items():
            self._groups[prefix] = min(shown, self._groups.get(prefix, shown))
        self._add_replies()
        for barrier in status.job.in_progress:
            self._add_barrier(barrier)
        for blocked in status.blocked():
            self._add_blocked(blocked)
        for verdict, stall in status.fresh_stalls():
            if not verdict.agents:  # which have ranks of their own
                waits = stall.still_waiting()
                self._add_verdict(stall.prefix, verdict, waits=waits)
        self._add_answers()

    def ranks(self) -> tuple[Rank, ...]:
        """Return all ranks, by group and number."""
        return tuple(self._ranks[name] for name in sorted(self._ranks))

    def group_of(self, prefix: str | None) -> str:
        """Return the group under which the ranks of a prefix are shown."""
        return self._groups.get(prefix or "", self._default)

    def _get(self, prefix: str | None, number: int) -> Rank | None:
        name = prefix or "", number
        if name not in self._names:
            name = self._default, number
        return self._ranks.get(self._names.get(name, name))

    def _add_registered(self, groups: Iterable[Group]) -> None:
        shown: dict[tuple[int, str, int], Name] = {}
        for group in groups:
            for info in group.ranks:
                name = group.prefix, info.rank
                process = info.rank, info.host, info.pid
                self._names[name] = shown.setdefault(process, name)
                if self._names[name] != name:
                    continue
                self._ranks[name] = Rank(
                    rank=info.rank,
                    host=info.host,
                    state=State.RUNNING,
                    pid=info.pid,
                    run_id=info.run_id,
                    local_rank=info.local_rank,
                    attempt=info.attempt,
                    registered=info.started,
                    endpoint=info.metrics,
                    group=group.prefix,
                )

    def _add_absent(self, groups: Iterable[Group]) -> None:
        left = MAX_ABSENT
        # The ranks of a world, by its size: it may have several prefixes.
        worlds: dict[int, dict[int, Name]] = {}
        for group in groups:
            world = worlds.setdefault(group.world_size, {})
            for info in group.ranks:
                world.setdefault(info.rank, self._names[group.prefix, info.rank])
        for group in groups:
            world, present = worlds[group.world_size], group.hosts
            for number in range(group.world_size):
                if not left:
                    return
                name = group.prefix, number
                if number in present:
                    continue
                if number not in world:
                    left -= 1
                    self._ranks[name] = Rank(
                        rank=number,
                        host="",
                        state=State.NOT_STARTED,
                        doing="has not registered in the store",
                        group=group.prefix,
                    )
                self._names[name] = world.setdefault(number, name)

    def _add_replies(self) -> None:
        replies = self._status.replies
        # An endpoint may listen on loopback only, or behind a firewall. So silence
        # counts only where another rank of the host answers.
        reached = {info.host for info, one in replies.items() if one.status}
        by_process = {(one.rank, one.host, one.pid): one for one in replies}
        for rank in list(self._ranks.values()):
            info = by_process.get((rank.rank, rank.host, rank.pid or -1))
            if info is None:
                continue
            reply = replies[info]
            if reply.status is not None:
                calls = [c for c in reply.status.in_flight if c.operation]
                longest = max(calls, key=lambda c: c.waited_seconds, default=None)
                if longest is not None and longest.waited_seconds >= _LONG_CALL:
                    doing = _call_text(longest.operation, longest.key)
                    self._worsen(rank, State.WAITING, doing, longest.waited_seconds)
            elif info.host in reached and _is_silent(reply.error):
                doing = f"its endpoint does not answer: {reply.error}"
                self._worsen(rank, State.NO_ANSWER, doing, None)

    def _add_barrier(self, barrier: BarrierState) -> None:
        if not barrier.awaits_ranks:
            return
        now = self._status.now
        at = f"at barrier {barrier.prefix}"
        times = dict(zip(barrier.ledger.ranks(), barrier.ledger.times(), strict=False))
        report = barrier.missing_report
        arrived: Iterable[int] = times
        if not times and report is not None and not report.unidentified_count:
            arrived = report.arrived_ranks
        for number in arrived:
            rank = self._get(barrier.group, number)
            if rank is not None and number in barrier.timed_out:
                self._worsen(rank, State.RUNNING, f"timed out {at}", None)
            elif rank is not None:
                since = times.get(number)
                waited = None if since is None else max(0.0, now - since)
                self._worsen(rank, State.WAITING, at, waited)
        first = barrier.first_arrival
        age = None if first is None else max(0.0, now - first)
        if report is None or (age is not None and age < self._status.after):
            return
        for number in report.missing_ranks:
            rank = self._get(barrier.group, number)
            if rank is None:
                continue
            state = State.AWAITED if rank.registered else State.NOT_STARTED
            before = f"; {rank.doing}" if rank.doing else ""
            missing = f"missing {at}{before}"
            self._ranks[rank.name] = replace(
                rank, state=min(state, rank.state), doing=missing, waited=age
            )

    def _add_blocked(self, blocked: BlockedRank) -> None:
        rank = self._find(blocked)
        if rank is None:
            return
        doing = f"{blocked.phase}: waits for {awaited_by(blocked)}"
        if blocked.key and blocked.key not in blocked.phase:
            doing += f" ({blocked.operation} {blocked.key})"
        self._worsen(rank, State.WAITING, doing, self._status.waited(blocked))

    def _find(self, blocked: BlockedRank) -> Rank | None:
        for group in self._status.job.groups:
            rank = self._get(group.prefix, blocked.rank)
            if rank and (rank.host, rank.pid) == (blocked.host, blocked.pid):
                return rank
        return None

    def _add_verdict(self, prefix: str, verdict: Verdict, *, waits: bool) -> None:
        age = max(0.0, self._status.now - verdict.time)
        waited = verdict.waited_seconds + age
        named = {one.rank: one for one in verdict.awaited}
        for number in verdict.awaited_ranks:
            rank = self._get(prefix, number)
            if rank is None:
                continue
            one = named.get(number)
            state = State.AWAITED
            if one is not None:
                state = _STATES.get(one.cause, State.AWAITED)
            # A process that has ended stays so after the wait.
            ended = state is State.GONE and one is not None and one.pid == rank.pid
            if waits or ended:
                doing = one.doing if one is not None and one.doing else rank.doing
                self._worsen(rank, state, doing, waited if waits else rank.waited)

    def _add_answers(self) -> None:
        for answers in self._status.answers:
            for number, answer in answers.answers.items():
                for group in self._status.job.groups:
                    rank = self._get(group.prefix, number)
                    if rank is None or rank.pid not in (None, answer.pid):
                        continue
                    info = answers.registered.get(number)
                    found = describe_rank(number, answer, info, rank.host)
                    state = {"gone": State.GONE, "stopped": State.STOPPED}.get(
                        answer.state, rank.state
                    )
                    doing = found.doing
                    if rank.state is State.WAITING or answer.state == "silent":
                        doing = rank.doing
                    self._ranks[rank.name] = replace(
                        rank, state=min(state, rank.state), doing=doing
                    )

    def _worsen(
        self, rank: Rank, state: State, doing: str, waited: float | None
    ) -> None:
        """Set a state, unless the rank has a worse one."""
        rank = self._ranks[rank.name]
        # An unregistered rank that is awaited has not started.
        if rank.registered is None and state is State.AWAITED:
            state = State.NOT_STARTED
        if state <= rank.state:
            self._ranks[rank.name] = replace(
                rank, state=state, doing=doing, waited=waited
            )


def _is_silent(error: str) -> bool:
    """Return whether a reply means that nothing serves the endpoint."""
    return not error.startswith(("responded", "token not sent", "the response"))


def _call_text(operation: str, key: str) -> str:
    if operation == "wait" and key.endswith(_LAST_MEMBER):
        return f"at barrier {key.removesuffix(_LAST_MEMBER)}"
    return f"in {operation} {key}".rstrip()
