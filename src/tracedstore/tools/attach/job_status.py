"""The status of a job: its verdict, and everything about it as JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracedstore.common.text import plural
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.tools.attach.confirmation import Processes, find_doubt
from tracedstore.tools.attach.inflight_client import Reply
from tracedstore.tools.attach.job_state import BarrierState, Group, JobState
from tracedstore.tools.attach.stalled_ranks import BlockedRank, Stall

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import Node, RendezvousState
    from tracedstore.tools.attach.asking import Answers

# Seconds. torch removes a node from the rendezvous that has missed three heartbeats of
# 5 s, and the state has no trace of it from then on: so it is reported before.
SILENT_AFTER = 10.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of a job, and the replies of its ranks.

    Attributes:
        store: The URL of the store.
        now: The time of the reading, in seconds since the epoch.
        job: The state that the store records.
        replies: The reply of each registered rank.
        after: Seconds a barrier may take before its absent ranks count as missing, and
            a rank may be blocked.
        answers: What the ranks answered, a group each; empty if they were not asked.
    """

    store: str
    now: float
    job: JobState
    replies: Mapping[RankInfo, Reply]
    after: float = 0.0
    answers: "Sequence[Answers]" = ()

    def missing(self) -> list[str]:
        """Return what is missing, a short text each; an empty list if nothing is."""
        late = [one for one in self.job.in_progress if self.is_late(one)]
        texts = []
        if stalls := self.fresh_stalls():
            texts.append(f"{plural(len(stalls), 'stall')} reported")
        blocked = (one for one in self.blocked() if self.waited(one) >= self.after)
        if number := sum(1 for _ in blocked):
            texts.append(f"{plural(number, 'rank')} blocked")
        if late:
            texts.append(f"{plural(len(late), 'barrier')} not complete")
        if absent := sum(map(self._absent_ranks, self.job.groups)):
            texts.append(f"{plural(absent, 'rank')} not registered")
        for run_id, state in self.job.rendezvous.items():
            if state is None or state.closed:
                continue
            if not state.complete:
                texts.append(f"rendezvous {run_id} not complete")
            if silent := self.silent_nodes(state):
                texts.append(f"{plural(len(silent), 'node')} of {run_id} silent")
        return texts

    def fresh_stalls(self) -> list[tuple[Verdict, Stall]]:
        """Return the fresh verdicts that are confirmed, those of agents last."""
        return [(verdict, stall) for verdict, stall, doubt in self._fresh if not doubt]

    def claims(self) -> list[tuple[Verdict, str]]:
        """Return the fresh verdicts that are not confirmed, and why each is not."""
        return [(verdict, doubt) for verdict, _, doubt in self._fresh if doubt]

    @cached_property
    def _fresh(self) -> list[tuple[Verdict, Stall, str]]:
        fresh = [
            (verdict, stall, find_doubt(stall, verdict, self._processes(stall.prefix)))
            for stall in self.job.stalls
            if (verdict := stall.fresh_verdict(self.now)) is not None
        ]
        return sorted(fresh, key=lambda one: (one[0].agents, -one[0].time))

    def _processes(self, prefix: str) -> Processes:
        groups = [group for group in self.job.groups if group.prefix == prefix]
        return Processes(
            world_size=max((group.world_size for group in groups), default=0),
            registered={info.rank: info for group in groups for info in group.ranks},
            replies=self.replies,
        )

    def blocked(self) -> list[BlockedRank]:
        """Return the blocked ranks, the longest wait first."""
        ranks = (one for stall in self.job.stalls for one in stall.blocked)
        return sorted(ranks, key=lambda one: (one.started, one.rank))

    def waited(self, blocked: BlockedRank) -> float:
        """Return for how many seconds a rank has been blocked."""
        return max(0.0, self.now - blocked.started)

    def _absent_ranks(self, group: Group) -> int:
        """Count the unregistered ranks of a group that is older than `after`."""
        first = min(info.started for info in group.ranks)
        if self.now - first < self.after:
            return 0
        return group.world_size - len(group.hosts)

    def is_late(self, barrier: BarrierState) -> bool:
        """Return whether a barrier waits for ranks, for longer than `after`."""
        # A barrier of unknown age is late.
        first = barrier.first_arrival
        young = first is not None and self.now - first < self.after
        return barrier.awaits_ranks and not young

    def silent_nodes(self, state: "RendezvousState") -> "dict[Node, float]":
        """Return the nodes without a recent heartbeat, with its age in seconds."""
        ages = {
            node: state.silent_seconds(node, self.now) for node in sorted(state.present)
        }
        return {
            node: age
            for node, age in ages.items()
            if age is not None and age > SILENT_AFTER
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything as one JSON object; ranks are listed one by one."""
        job = self.job
        return {
            "store": self.store,
            "time": self.now,
            "healthy": not self.missing(),
            "missing": self.missing(),
            "verdict": self._verdicts()[0] if self.fresh_stalls() else None,
            "other_verdicts": self._verdicts()[1:],
            "claimed_verdicts": [
                _verdict(verdict) | {"confirmed": False, "doubt": doubt}
                for verdict, doubt in self.claims()
            ],
            "blocked": [
                asdict(one) | {"waited_seconds": self.waited(one)}
                for one in self.blocked()
            ],
            "answers": [
                answers.answers[rank].to_fields()
                for answers in self.answers
                for rank in sorted(answers.answers)
            ],
            "invalid_records": job.invalid_records,
            "unread_records": job.unread_records,
            "groups": [
                {
                    "prefix": group.prefix,
                    "world_size": group.world_size,
                    "ranks": [asdict(info) for info in group.ranks],
                }
                for group in job.groups
            ],
            "invalid_entries": job.invalid_entries,
            "invalid_keys": list(job.invalid_keys),
            "barriers_in_progress": [self._barrier(one) for one in job.in_progress],
            "more_barriers_in_progress": job.unread_in_progress,
            "barriers_abandoned": [self._barrier(one) for one in job.abandoned],
            "barriers_unreadable": list(job.unreadable_barriers),
            "barriers_over_limit": job.unread_ledgers,
            "barriers_finished": [self._barrier(one) for one in job.finished],
            "more_barriers_finished": job.unread_finished,
            "rendezvous": [
                {
                    "run_id": run_id,
                    "workers_store": job.worker_stores.get(run_id),
                    **self._rendezvous(state),
                }
                for run_id, state in job.rendezvous.items()
            ],
            "replies": [_reply(*one) for one in self.replies.items()],
        }

    def _verdicts(self) -> list[dict[str, Any]]:
        return [
            _verdict(verdict)
            | {"confirmed": True, "still_waiting": stall.still_waiting()}
            for verdict, stall in self.fresh_stalls()
        ]

    def _barrier(self, barrier: BarrierState) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "barrier": barrier.prefix,
            "arrived_count": barrier.arrived,
            "world_size": barrier.world_size,
            "first_arrival": barrier.first_arrival,
            "last_arrival": barrier.last_arrival,
        }
        if barrier.complete:
            last = {"last_rank": barrier.last_rank, "last_host": barrier.last_host}
            return facts | last
        first, report = barrier.first_arrival, barrier.missing_report
        waited = None if first is None else max(0.0, self.now - first)
        missing = {} if report is None else report.event_fields()
        return missing | facts | {"waited_seconds": waited}

    def _rendezvous(self, state: "RendezvousState | None") -> dict[str, Any]:
        if state is None:
            return {"readable": False}

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
            "silent": nodes(self.silent_nodes(state)),
        }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return verdict.event_fields() | {"agents": verdict.agents, "time": verdict.time}


def _reply(info: RankInfo, reply: Reply) -> dict[str, Any]:
    rank = {"rank": info.rank, "host": info.host, "pid": info.pid}
    if reply.status is None:
        return rank | {"answered": False, "error": no_answer_reason(reply)}
    calls = [asdict(call) for call in reply.status.in_flight]
    return rank | {"answered": True, "in_flight": calls}


def no_answer_reason(reply: Reply) -> str:
    """Return why a rank has no answer."""
    return "no endpoint" if reply.state == "absent" else reply.error
