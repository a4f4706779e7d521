"""How the state of a job is shown: as text for people, as JSON for programs."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tracedstore.attach.collect import BarrierState, Group, JobState
from tracedstore.coordination.ranges import by_host, fold
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.export.inflight_client import Reply

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import Node, RendezvousState

_MOST_WAITING = 16
_MOST_ABANDONED = 4
_MOST_COMPLETE = 8
_MOST_HOSTS = 32
_MOST_CALLS = 24
# Seconds. torch takes a node off the rendezvous that missed three heartbeats of 5 s,
# and then nothing tells of it: so it is told before.
SILENT_AFTER = 10.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything that was found out about a job.

    Attributes:
        store: Where.
        now: When, in seconds since the epoch.
        survey: What the store says.
        replies: What the ranks say.
        after: How many seconds a barrier may take.
    """

    store: str
    now: float
    survey: JobState
    replies: Mapping[RankInfo, Reply]
    after: float = 0.0

    def missing(self) -> list[str]:
        """Say what is missing, in a few words each; nothing where all is well."""
        short = [one for one in self.survey.waiting if self._late(one)]
        said = []
        if short:
            said.append(f"{_count(len(short), 'barrier')} not complete")
        if absent := sum(map(self._absent, self.survey.groups)):
            said.append(f"{_count(absent, 'rank')} not registered")
        for run_id, state in self.survey.rendezvous.items():
            if state is None or state.closed:
                continue
            if not state.complete:
                said.append(f"rendezvous {run_id} not complete")
            if silent := self._silent(state):
                said.append(f"{_count(len(silent), 'node')} of {run_id} silent")
        return said

    def _absent(self, group: Group) -> int:
        """Count the ranks of a job of which nothing is known, if it is not young."""
        first = min(info.started for info in group.ranks)
        if self.now - first < self.after:
            return 0
        return group.world_size - len(group.hosts)

    def _late(self, barrier: BarrierState) -> bool:
        # Of one whose age nobody wrote down it cannot be said that it is young.
        young = barrier.first is not None and self.now - barrier.first < self.after
        return barrier.short and not young

    def _silent(self, state: "RendezvousState") -> "dict[Node, float]":
        ages = {
            node: state.silent_seconds(node, self.now) for node in sorted(state.present)
        }
        return {
            node: age
            for node, age in ages.items()
            if age is not None and age > SILENT_AFTER
        }

    def text(self, width: int) -> str:
        """Write it for people, in lines of so many characters."""
        missing = self.missing()
        verdict = f"missing: {', '.join(missing)}" if missing else self._well()
        sections = [
            [verdict, f"store: {self.store}"],
            *map(self._ranks, self.survey.groups),
            list(self._waiting()),
            list(self._blocked()),
            *(list(self._rendezvous(*one)) for one in self.survey.rendezvous.items()),
            list(self._abandoned()),
            list(self._complete()),
        ]
        if not self.survey.groups:
            sections.insert(1, ["ranks: none registered"])
        return "\n\n".join(
            "\n".join(_line(line, width) for line in part) for part in sections if part
        )

    def _well(self) -> str:
        """Say that nothing is missing, or that nobody can know."""
        survey = self.survey
        if survey.unread:
            return "nothing is missing, as far as can be read from here"
        there = (survey.groups, survey.waiting, survey.complete, survey.rendezvous)
        if not any(there):
            return "nothing is known: no rank, no barrier and no rendezvous is here"
        return "nothing is missing"

    def _ranks(self, group: Group) -> list[str]:
        there = group.hosts
        where = f" under {group.prefix}" if group.prefix else ""
        lines = [f"ranks{where}: {len(there)} of {group.world_size} registered"]
        hosts = by_host(there, there.__getitem__)
        said = [f"  {host}: {_ranks(some)}" for host, some in hosts.items()]
        lines += said[:_MOST_HOSTS]
        if rest := len(said[_MOST_HOSTS:]):
            lines.append(f"  and {_count(rest, 'more host')}")
        if absent := set(range(group.world_size)) - there.keys():
            lines.append(f"  not registered: {_ranks(absent)}")
        return lines

    def _waiting(self) -> Iterator[str]:
        shown = self.survey.waiting[-_MOST_WAITING:]
        more = len(self.survey.waiting) - len(shown)
        if shown or self.survey.more_waiting:
            yield "barriers in progress:"
        if unread := self.survey.more_waiting:
            yield f"  {_count(unread, 'older one')} without an end, not looked at"
        if more:
            yield f"  {more} more before these"
        yield from self._unfinished(shown)

    def _abandoned(self) -> Iterator[str]:
        shown = self.survey.abandoned[-_MOST_ABANDONED:]
        if shown:
            total = len(self.survey.abandoned)
            yield f"barriers abandoned{_last_of(total, len(shown))}:"
        yield from self._unfinished(shown)

    def _unfinished(self, barriers: Iterable[BarrierState]) -> Iterator[str]:
        for barrier in barriers:
            of = "" if barrier.world_size is None else f" of {barrier.world_size}"
            since = ""
            if barrier.first is not None:
                since = f", the first {_ago(self.now - barrier.first)} ago"
            yield f"  {barrier.prefix}: {barrier.arrived}{of} arrived{since}"
            if barrier.finding is not None and barrier.short:
                yield f"    {barrier.finding.describe()}"

    def _complete(self) -> Iterator[str]:
        shown = self.survey.complete[-_MOST_COMPLETE:]
        total = self.survey.more_complete + len(self.survey.complete)
        if shown:
            yield f"barriers finished{_last_of(total, len(shown))}:"
        for barrier in shown:
            parts = [f"{barrier.arrived} arrived"]
            if barrier.first is not None and barrier.last is not None:
                parts[0] += f" within {_ago(barrier.last - barrier.first)}"
            if barrier.last_rank is not None:
                where = f" ({barrier.last_host})" if barrier.last_host else ""
                parts.append(f"last rank {barrier.last_rank}{where}")
            if barrier.last is not None:
                parts.append(f"{_ago(self.now - barrier.last)} ago")
            yield f"  {barrier.prefix}: {', '.join(parts)}"

    def _rendezvous(
        self, run_id: str, state: "RendezvousState | None"
    ) -> Iterator[str]:
        if state is None:
            yield f"rendezvous {run_id}: its state cannot be read"
            return
        how = "complete" if state.complete else "not complete"
        closed = ", closed" if state.closed else ""
        yield f"rendezvous {run_id}: round {state.round}, {how}{closed}"
        if run_id in self.survey.workers:
            url = self.survey.workers[run_id]
            yield f"  its workers meet in {url}"
            if url in self.survey.unread:
                yield f"    {self.survey.unread[url]}"
        for what, nodes in (
            ("joined", sorted(state.participants, key=state.participants.__getitem__)),
            ("waiting for the next round", sorted(state.wait_list)),
        ):
            if nodes:
                yield f"  {what}: {', '.join(map(str, nodes))}"
        for node, age in self._silent(state).items():
            yield f"  silent: {node}, for {_ago(age)}"

    def _blocked(self) -> Iterator[str]:
        if not self.replies:
            return
        yield "blocked now:"
        found: dict[tuple[str, str], list[tuple[float, RankInfo]]] = {}
        idle: list[RankInfo] = []
        unknown: dict[str, list[RankInfo]] = {}
        for info, reply in self.replies.items():
            if reply.answer is None:
                unknown.setdefault(_why(reply), []).append(info)
            elif not reply.answer.calls:
                idle.append(info)
            else:
                for call in reply.answer.calls:
                    what = call.operation, call.key
                    found.setdefault(what, []).append((call.waited_seconds, info))
        calls = sorted(found.items(), key=lambda one: -max(w for w, _ in one[1]))
        for (operation, key), callers in calls[:_MOST_CALLS]:
            longest = max(waited for waited, _ in callers)
            who = _ranks(info.rank for _, info in callers)
            yield f"  {who}: {operation} {key} for {_ago(longest)}"
        if rest := len(calls) - len(calls[:_MOST_CALLS]):
            yield f"  and {_count(rest, 'more call')}"
        if idle:
            yield f"  in no call: {_ranks(info.rank for info in idle)}"
        for why, infos in unknown.items():
            yield f"  not known: {_ranks(info.rank for info in infos)} ({why})"

    def to_json(self) -> dict[str, Any]:
        """Give everything, for programs; ranks are not folded there."""
        survey = self.survey
        return {
            "store": self.store,
            "time": self.now,
            "healthy": not self.missing(),
            "missing": self.missing(),
            "groups": [
                {
                    "prefix": group.prefix,
                    "world_size": group.world_size,
                    "ranks": [asdict(info) for info in group.ranks],
                }
                for group in survey.groups
            ],
            "barriers_in_progress": [self._barrier(one) for one in survey.waiting],
            "more_barriers_in_progress": survey.more_waiting,
            "barriers_abandoned": [self._barrier(one) for one in survey.abandoned],
            "barriers_finished": [self._barrier(one) for one in survey.complete],
            "more_barriers_finished": survey.more_complete,
            "rendezvous": [
                {
                    "run_id": run_id,
                    "workers_store": survey.workers.get(run_id),
                    **self._state(state),
                }
                for run_id, state in survey.rendezvous.items()
            ],
            "blocked": [_reply(*one) for one in self.replies.items()],
        }

    def _barrier(self, barrier: BarrierState) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "barrier": barrier.prefix,
            "arrived_count": barrier.arrived,
            "world_size": barrier.world_size,
            "first_arrival": barrier.first,
            "last_arrival": barrier.last,
        }
        if barrier.complete:
            last = {"last_rank": barrier.last_rank, "last_host": barrier.last_host}
            return facts | last
        waited = None if barrier.first is None else max(0.0, self.now - barrier.first)
        found = {} if barrier.finding is None else barrier.finding.event_fields()
        return found | facts | {"waited_seconds": waited}

    def _state(self, state: "RendezvousState | None") -> dict[str, Any]:
        if state is None:
            return {"readable": False}
        silent = self._silent(state)

        def nodes(some: "Iterable[Node]") -> list[dict[str, Any]]:
            return [
                asdict(node) | {"silent_seconds": state.silent_seconds(node, self.now)}
                for node in some
            ]

        return {
            "readable": True,
            "round": state.round,
            "complete": state.complete,
            "closed": state.closed,
            "participants": nodes(state.participants),
            "wait_list": nodes(sorted(state.wait_list)),
            "silent": nodes(silent),
        }


def _reply(info: RankInfo, reply: Reply) -> dict[str, Any]:
    who = {"rank": info.rank, "host": info.host, "pid": info.pid}
    if reply.answer is None:
        return who | {"answered": False, "why": _why(reply)}
    calls = [asdict(call) for call in reply.answer.calls]
    return who | {"answered": True, "in_flight": calls}


def _why(reply: Reply) -> str:
    return "no endpoint" if reply.state == "absent" else reply.why


def _ranks(ranks: Iterable[int]) -> str:
    some: Sequence[int] = sorted(set(ranks))
    return f"rank{'s' if len(some) > 1 else ''} {fold(some)}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _last_of(total: int, shown: int) -> str:
    return f": {total}, the last {shown}" if total > shown else f": {total}"


def _ago(seconds: float) -> str:
    """Write a time that people can take in; clocks of two hosts may differ."""
    seconds = max(0.0, seconds)
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _line(text: str, width: int) -> str:
    """Break a line, and take out what a terminal would obey: keys are anybody's."""
    plain = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    indent = " " * (len(plain) - len(plain.lstrip()) + 4)
    room = max(width - len(indent), 12)
    # The ends tell more than the middle: what it is, and which number it has.
    short = re.sub(rf"\S{{{room + 1},}}", lambda long: _ends(long[0], room), plain)
    return "\n".join(
        textwrap.wrap(
            short,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _ends(word: str, room: int) -> str:
    half = (room - 3) // 2
    return f"{word[:half]}...{word[-half:]}"
