"""Reads a running job: its store, its worker stores, its endpoints, and its answers.

torchrun's agents meet in the store of ``--rdzv-endpoint``, which is the one that
people know. They make another store for their workers, where the ranks are.

Reading writes nothing, but for `ask_job`: it writes a question to the store, which is
deleted with its answers.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore

from tracedstore.common.errors import CommandError
from tracedstore.common.text import plural
from tracedstore.coordination.rank_registry import (
    RankInfo,
    latest_world_size,
    parse_entry,
    prefix_of,
    read_ranks,
    read_registry,
    without_numbers,
)
from tracedstore.diagnosis.ask.questions import ask
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.movement import StillRecord
from tracedstore.local.facts import ProcessFacts
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.child_process import Heartbeat
from tracedstore.tools.attach.job_state import (
    Group,
    JobState,
    is_worker_store_key,
    read_job_state,
    select_keys,
    worker_stores,
)
from tracedstore.tools.attach.local_ranks import ask_local
from tracedstore.tools.attach.rank_endpoints import Reply, query_ranks
from tracedstore.tools.attach.stall_records import (
    BlockedRank,
    Processes,
    StallRecord,
    find_doubt,
)
from tracedstore.tools.attach.store_snapshot import StoreSnapshot, connect
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.job_view import NOTHING_KNOWN, SILENT_AFTER, BarrierView

if TYPE_CHECKING:
    from tracedstore.rendezvous.state import Node, RendezvousState

# Maximum number of worker stores read. Each may take seconds to time out.
_MAX_WORKER_STORES = 8
# Seconds to wait for the answers of all ranks.
ANSWER_TIMEOUT = 5.0
# Seconds beyond the timeout of the answers, to connect and to read.
_SLACK = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the ranks of one group of a job answered.

    Attributes:
        world_size: The number of ranks.
        registered: The ranks that have registered.
        answers: What is known about ranks.
        asked_all: All ranks were asked, and not only those of this host.
    """

    world_size: int
    registered: dict[int, RankInfo]
    answers: dict[int, ProcessFacts]
    asked_all: bool = True

    @property
    def silent_ranks(self) -> list[int]:
        """The ranks in question about which nothing is known."""
        asked = range(self.world_size) if self.asked_all else ()
        return [rank for rank in asked if rank not in self.answers]


@dataclass(frozen=True, kw_only=True)
class JobReading:
    """The state of a job, and the replies of its ranks.

    Attributes:
        store: The URL of the store.
        now: The time of the reading, in seconds since the epoch.
        job: The state that the store records.
        replies: The reply of each registered rank.
        after: Seconds a barrier may take before its absent ranks count as missing, and
            a rank may be blocked.
        answers: What the ranks answered, a group each: all ranks, or those of this
            host while something does not move; empty if none was asked.
    """

    store: str
    now: float
    job: JobState
    replies: Mapping[RankInfo, Reply]
    after: float = 0.0
    answers: Sequence[Answers] = ()

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

    def unknown(self) -> str:
        """Return why nothing is known about the job; "" if something is."""
        job = self.job
        if job.groups or job.stalls or any(job.rendezvous.values()):
            return ""
        if job.in_progress or job.unread_in_progress or job.abandoned or job.finished:
            return ""
        reasons = [f"{url}: {reason}" for url, reason in job.unreadable_stores.items()]
        reasons += [f"{prefix} cannot be read" for prefix in job.unreadable_barriers]
        reasons += [
            f"the state of {run_id} cannot be read" for run_id in job.rendezvous
        ]
        return "; ".join(reasons) or NOTHING_KNOWN

    def still(self) -> tuple[StillRecord, ...]:
        """Return the records of all registered ranks, if nothing moves in any of them.

        Empty if something moves somewhere, or has moved within the last `after`
        seconds.
        """
        still = self.job.still
        processes = {
            (info.host, info.pid) for group in self.job.groups for info in group.ranks
        }
        moving = processes - {(one.host, one.pid) for one in still}
        if not still or moving:
            return ()
        latest = max(one.since for one in still)
        return still if self.now - latest >= self.after else ()

    def fresh_stalls(self) -> list[tuple[Verdict, StallRecord]]:
        """Return the fresh verdicts that are confirmed, those of agents last."""
        return [(verdict, stall) for verdict, stall, doubt in self._fresh if not doubt]

    def claims(self) -> list[tuple[Verdict, str]]:
        """Return the fresh verdicts that are not confirmed, and why each is not."""
        return [(verdict, doubt) for verdict, _, doubt in self._fresh if doubt]

    @cached_property
    def _fresh(self) -> list[tuple[Verdict, StallRecord, str]]:
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

    def is_late(self, barrier: BarrierView) -> bool:
        """Return whether a barrier waits for ranks, for longer than `after`."""
        # The agents whose workers have ended wait for the others, as they should.
        if barrier.of_agents:
            return False
        # A barrier of unknown age is late.
        first = barrier.first
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
            "healthy": not (self.missing() or self.unknown() or self.still()),
            "unknown": self.unknown(),
            "missing": self.missing(),
            "verdict": self._verdicts()[0] if self.fresh_stalls() else None,
            "other_verdicts": self._verdicts()[1:],
            "still": [asdict(one) for one in self.still()],
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

    def _barrier(self, barrier: BarrierView) -> dict[str, Any]:
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
        first, report = barrier.first, barrier.report
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
        return rank | {"answered": False, "error": reply.reason}
    calls = [asdict(call) for call in reply.status.in_flight]
    return rank | {"answered": True, "in_flight": calls}


def read_job(
    address: Address,
    tokens: TokenPolicy,
    *,
    run_id: str | None = None,
    after: float = 0.0,
    ask: bool = False,
) -> JobReading:
    """Read a job once.

    Args:
        address: The job's store.
        tokens: The token of the ranks' endpoints.
        run_id: Only this job; None for everything in the store.
        after: Seconds a barrier may take, or a rank may be blocked, before it counts
            as missing.
        ask: Ask all ranks through the store, which writes to it.

    Raises:
        CommandError: The store cannot be read.
    """
    job, now = _collect(address, run_id), time.time()
    infos = [info for group in job.groups for info in group.ranks]
    replies = query_ranks(infos, tokens)
    answers: Sequence[Answers] = ()
    # A job without registered ranks cannot be asked.
    if ask and infos:
        answers = ask_job(address, "status", run_id, ANSWER_TIMEOUT)
    reading = JobReading(
        store=address.url,
        now=now,
        job=job,
        replies=replies,
        after=after,
        answers=answers,
    )
    # A rank that is asked publishes where it is, so that a healthy job is left alone.
    if not ask and (job.stalls or job.still or reading.missing()):
        reading = replace(reading, answers=tuple(_answers_of_host(job)))
    return reading


def _answers_of_host(job: JobState) -> Iterator[Answers]:
    """Ask the ranks of this host over their sockets, which writes to no store."""
    for group in job.groups:
        infos = {info.rank: info for info in group.ranks}
        if answers := ask_local(infos, group.world_size):
            yield Answers(
                world_size=group.world_size,
                registered=infos,
                answers=answers,
                asked_all=False,
            )


def _collect(address: Address, run_id: str | None) -> JobState:
    """Read the state of one job, or of everything in the store, with its workers.

    Raises:
        CommandError: The store cannot be read. A worker store that cannot be read is
            in `JobState.unreadable_stores` instead.
    """
    job = read_job_state(address.read_snapshot(select_keys), run_id)
    for url in _followed(job.running_worker_stores(), address):
        try:
            workers = read_job_state(Address(url).read_snapshot(select_keys), run_id)
        except CommandError as error:
            unreadable = {**job.unreadable_stores, url: str(error)}
            job = replace(job, unreadable_stores=unreadable)
        else:
            job = job.merge(workers)
    return job


def _followed(urls: Iterable[str | None], address: Address) -> list[str]:
    others = {url for url in urls if url is not None and url != address.url}
    return sorted(others)[:_MAX_WORKER_STORES]


def _stores_of_ranks(address: Address) -> list[tuple[Address, StoreSnapshot]]:
    """Read the registrations in the store and in its worker stores.

    Raises:
        CommandError: The store cannot be read.
    """
    snapshot = address.read_snapshot(_select_rank_keys)
    stores = [(address, snapshot)]
    for url in _followed(worker_stores(snapshot).values(), address):
        # The job has ended, or its worker store is unreachable from here.
        with suppress(CommandError):
            workers = Address(url)
            stores.append((workers, workers.read_snapshot(_select_rank_keys)))
    return stores


def _select_rank_keys(keys: Sequence[str]) -> list[str]:
    return [
        key for key in keys if prefix_of(key) is not None or is_worker_store_key(key)
    ]


def registered_ranks(address: Address) -> tuple[list[RankInfo], int]:
    """Return the ranks that registered, and the number of entries that are not valid.

    Raises:
        CommandError: The store cannot be read.
    """
    registries = [read_registry(snapshot) for _, snapshot in _stores_of_ranks(address)]
    infos = [info for registry in registries for info in registry.ranks()]
    return infos, sum(registry.invalid_count for registry in registries)


def ask_job(
    address: Address, kind: str, run_id: str | None, timeout: float
) -> list[Answers]:
    """Ask all ranks of a job, and those in its worker stores, what they are doing.

    Args:
        address: The job's store.
        kind: ``status`` or ``stacks``.
        run_id: Only ranks of this job.
        timeout: Seconds to wait for answers, for each store.

    Raises:
        CommandError: The store cannot be read, or no rank has registered in it.
    """
    groups = [
        _ask(store, prefix, latest_world_size(infos), kind, timeout)
        for store, snapshot in _stores_of_ranks(address)
        for prefix, infos in _latest_groups(snapshot, run_id)
    ]
    if not groups:
        raise CommandError(
            f"no rank has registered in the store at {address.url}; is it traced?"
        )
    return groups


def _latest_groups(
    snapshot: StoreSnapshot, run_id: str | None
) -> Iterator[tuple[str, list[RankInfo]]]:
    """Yield the prefixes under which ranks registered last, with the ranks.

    A job registers again after each restart, and its prefix may have another number
    then.
    """
    by_prefix: dict[str, list[RankInfo]] = {}
    for key in snapshot.list_keys():
        prefix = prefix_of(key)
        info = None if prefix is None else parse_entry(snapshot.get(key))
        if prefix is None or info is None:
            continue
        # Ranks without a run id may belong to any job.
        if run_id is None or info.run_id in (None, run_id):
            by_prefix.setdefault(prefix, []).append(info)

    def registered_last(prefix: str) -> float:
        return max(info.started for info in by_prefix[prefix])

    latest = {
        without_numbers(prefix): prefix
        for prefix in sorted(by_prefix, key=registered_last)
    }
    for prefix in latest.values():
        yield prefix, by_prefix[prefix]


def _ask(
    address: Address, prefix: str, world_size: int, kind: str, timeout: float
) -> Answers:
    def work(heartbeat: Heartbeat) -> Answers:
        with connect(address, for_writing=True) as store:
            connection: Any = store
            if prefix:
                connection = PrefixStore(prefix.removesuffix("/"), store)
            heartbeat()
            ranks: Iterable[int] = range(world_size)
            registered = read_ranks(connection, ranks)
            answers = ask(
                connection, kind, ranks, timeout, asked_by=f"tracedstore {kind}"
            )
            return Answers(
                world_size=world_size, registered=registered, answers=answers
            )

    return address.run(timeout + _SLACK, work, timeout + _SLACK)
