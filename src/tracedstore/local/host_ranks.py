"""What is known on this host about ranks: from their sockets, agents and /proc.

An agent of torchrun knows the pids and exit codes of its workers, also of those that
have not created their store yet. It tells them to processes of its host over its Unix
socket, and to others through the workers' store (`diagnosis.ask.responder`).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tracedstore.common import procfs
from tracedstore.common.identity import process_identity
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import LocalIdentity, ProcessFacts
from tracedstore.local.sockets import (
    LOCAL_SOCKET,
    LocalReply,
    ask_processes,
    local_processes,
)

ITS_AGENT: Final = "its agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker that this agent started."""

    rank: int
    local_rank: int
    pid: int
    start_ticks: int | None

    @property
    def state(self) -> procfs.ProcState | None:
        """Its state now, None if it cannot be known."""
        return procfs.process_state(self.pid, self.start_ticks, procfs.own_namespace())


class AgentWorkers:
    """The workers of this agent.

    Attributes:
        workers: The workers that it started last; empty if this process is no agent.
        environ: The variables of one of them.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the workers, as a forked child must: they are the parent's."""
        self.workers: tuple[Worker, ...] = ()
        self.environ: Mapping[str, str] = {}
        self._processes: Any = None

    def started(self, processes: Any) -> LocalIdentity | None:
        """Answer on this host for the workers that the agent has started last.

        Args:
            processes: torch's ``PContext`` of the workers.

        Returns:
            This agent in the job of its workers; None if nothing is new.
        """
        if not LOCAL_SOCKET.enabled or processes is self._processes:
            return None
        pids: Mapping[int, int] = processes.pids()
        environs: Mapping[int, Mapping[str, str]] = processes.envs
        self.workers = tuple(
            Worker(
                rank=int(environs[local_rank]["RANK"]),
                local_rank=local_rank,
                pid=pid,
                # The pid is not used again until the agent has waited for it.
                start_ticks=procfs.start_ticks(pid),
            )
            for local_rank, pid in pids.items()
        )
        self._processes = processes
        environ = {**os.environ, **next(iter(environs.values()))}
        self.environ = environ
        job = _job(environ)
        LOCAL_SOCKET.identity = lambda: job
        LOCAL_SOCKET.workers = self.answers
        LOCAL_SOCKET.start()
        return job

    def answers(self) -> list[ProcessFacts]:
        """Return what this agent knows about its workers."""
        states = {worker: worker.state for worker in self.workers}
        # A look at those that seem to execute nothing takes time.
        halted = [
            worker.pid
            for worker, state in states.items()
            if state in ("stopped", "disk_wait")
        ]
        activities = procfs.watch(halted)
        return [
            self._answer(worker, state, activities.get(worker.pid))
            for worker, state in states.items()
        ]

    def _answer(
        self,
        worker: Worker,
        state: procfs.ProcState | None,
        activity: procfs.Activity | None,
    ) -> ProcessFacts:
        answer = replace(
            _from_proc(worker.rank, worker.pid, state, activity, ITS_AGENT),
            registered=False,
        )
        code = _exit_code(self._processes, worker.local_rank)
        if code is not None:
            return replace(answer, state="gone", detail=procfs.describe_exit(code))
        return answer


def _job(environ: Mapping[str, str]) -> LocalIdentity:
    """Return the identity of this agent in the job of its workers."""
    workers = LocalIdentity.of_environment(environ, os.getpid())
    return replace(workers, rank=None, start_ticks=procfs.own_start_ticks())


def _exit_code(processes: Any, local_rank: int) -> int | None:
    """Return the exit code of a worker that the agent has waited for.

    It only reads what torch has found out: waiting for the process here would take its
    exit code from torch.
    """
    try:
        if hasattr(processes, "subprocess_handlers"):
            code = processes.subprocess_handlers[local_rank].proc.returncode
        else:
            process = processes._pc.processes[local_rank]  # noqa: SLF001 - torch has no public way that does not wait
            code = process._popen.returncode  # noqa: SLF001 - see above
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return code if type(code) is int else None


def ask_workers(
    workers: Iterable[Worker], kind: str, timeout: float
) -> dict[Worker, LocalReply | None]:
    """Ask workers over their sockets, all at once.

    The value is None for a worker without a reply. A worker that runs and does not
    listen is omitted: it may not be traced, or not have imported torch yet. One that is
    stopped or gone is not asked, so that the others need not wait for it.
    """
    pids = {worker: worker.pid for worker in workers}
    running = {
        pid for worker, pid in pids.items() if worker.state not in ("stopped", "gone")
    }
    replies = ask_processes(running, kind, timeout) if running else {}
    return {
        worker: replies.get(pid)
        for worker, pid in pids.items()
        if pid in replies or pid not in running
    }


# One a process: a process is one agent.
AGENT_WORKERS: Final = AgentWorkers()


FROM_PROC: Final = "/proc of its host"
# By pid; None for a process that listens and did not answer.
Replies = Mapping[int, LocalReply | None]


def ask_host(
    infos: Mapping[int, RankInfo],
    ranks: Iterable[int],
    timeout: float,
    *,
    kind: str = "status",
    families: Iterable[str] = (),
) -> dict[int, ProcessFacts]:
    """Ask the processes of this host, and return what is known about these ranks.

    Args:
        infos: The ranks that have registered.
        ranks: The ranks in question; those about which nothing is known are omitted.
            A rank of another host is ``silent`` if its agent is.
        timeout: Seconds for all processes of this host to answer.
        kind: ``status`` or ``stacks``.
        families: The key families in question.
    """
    replies = local_processes(timeout, kind, families)
    job, wanted = LocalIdentity.own(), set(ranks)
    answers = known_ranks(replies, infos, wanted, job, timeout)
    return _on_silent_nodes(replies, infos, wanted, job) | answers


def _on_silent_nodes(
    replies: Replies,
    infos: Mapping[int, RankInfo],
    ranks: Iterable[int],
    job: LocalIdentity,
) -> dict[int, ProcessFacts]:
    """Return the ranks whose agents send no heartbeats, as the agent of this host saw.

    They may answer all the same.
    """
    silent = {
        agent.rank: agent
        for reply in replies.values()
        if reply is not None and reply.identity.same_job(job)
        for agent in reply.silent_agents
    }
    return {
        rank: ProcessFacts(
            rank=rank,
            host=infos[rank].host,
            pid=infos[rank].pid,
            idle_seconds=silent[infos[rank].node].idle_seconds,
            source="heartbeats of its agent",
        )
        for rank in set(ranks) & infos.keys()
        if infos[rank].node is not None and infos[rank].node in silent
    }


def ranks_of_host(replies: Replies, job: LocalIdentity) -> set[int]:
    """Return the ranks of a job whose processes or agents listen on this host."""
    found: set[int] = set()
    for pid, reply in replies.items():
        identity = LocalIdentity.of_process(pid) if reply is None else reply.identity
        if identity is None or not identity.same_job(job):
            continue
        workers = reply.workers if reply else ()
        found.update(one.rank for one in workers if one.rank is not None)
        if identity.rank is not None:
            found.add(identity.rank)
    return found


def known_ranks(
    replies: Replies,
    infos: Mapping[int, RankInfo],
    ranks: Iterable[int],
    job: LocalIdentity,
    timeout: float,
) -> dict[int, ProcessFacts]:
    """Return what is known on this host about these ranks; the others are omitted.

    A process that has not registered is taken for a rank only if it belongs to the
    same attempt of the same job.

    Args:
        replies: The replies of the processes of this host.
        infos: The ranks that have registered.
        ranks: The ranks in question.
        job: The job.
        timeout: Seconds that the processes had to answer.
    """
    wanted = set(ranks)
    host = _Host(replies, infos, wanted, timeout)
    registered = _registered(infos, wanted, host)
    claimed = _claimed(wanted, job, infos, host)
    by_agents = {
        worker.rank: replace(worker, registered=_has_registered(worker, infos))
        for reply in replies.values()
        if reply is not None and reply.identity.same_job(job)
        for worker in reply.workers
        if worker.rank in wanted
    }
    answers: dict[int, ProcessFacts] = {}
    for rank in wanted:
        found = registered.get(rank)
        # The process of an earlier attempt is gone, and the next one is on its way.
        if (found is None or found.state == "gone") and rank in claimed:
            found = claimed[rank]
        answers |= _best(rank, found, by_agents.get(rank))
    return answers


def _has_registered(worker: ProcessFacts, infos: Mapping[int, RankInfo]) -> bool:
    info = None if worker.rank is None else infos.get(worker.rank)
    return info is not None and info.pid == worker.pid


def _best(
    rank: int, found: ProcessFacts | None, by_agent: ProcessFacts | None
) -> dict[int, ProcessFacts]:
    if by_agent is None:
        return {} if found is None else {rank: found}
    if found is None:
        return {rank: by_agent}
    if found.state == "gone" and (
        by_agent.state != "gone" or by_agent.pid == found.pid
    ):
        # The agent has the exit code, or has started another process since.
        return {rank: by_agent}
    return {rank: found}


class _Host:
    """What the processes of this host replied, and what /proc has about the others.

    Args:
        replies: The replies.
        infos: The ranks that have registered.
        wanted: The ranks in question.
        timeout: Seconds that the processes had to answer.
    """

    def __init__(
        self,
        replies: Replies,
        infos: Mapping[int, RankInfo],
        wanted: set[int],
        timeout: float,
    ) -> None:
        self.replies = replies
        self.namespace = procfs.own_namespace()
        self._timeout = timeout
        registered = {
            infos[rank].pid
            for rank in wanted & infos.keys()
            if infos[rank].namespace == self.namespace
        }
        answered = {pid for pid, reply in replies.items() if reply is not None}
        # One look for all of them.
        self._activities = procfs.watch((registered | replies.keys()) - answered)

    def unanswered(self, rank: int, pid: int, state: procfs.ProcState) -> ProcessFacts:
        """Return what /proc has about a process that did not answer itself."""
        activity = self._activities.get(pid)
        answer = _from_proc(rank, pid, state, activity, FROM_PROC)
        if answer.state != "running":
            return answer
        if pid in self.replies and pid != os.getpid():
            seen = "" if activity is None else f" ({activity})"
            return replace(
                answer,
                state="unresponsive",
                detail=f"did not answer within {self._timeout:.2g} s{seen}",
            )
        return replace(answer, detail="it does not listen for questions")


def _registered(
    infos: Mapping[int, RankInfo], wanted: set[int], host: _Host
) -> dict[int, ProcessFacts]:
    """Return the answers of registered ranks whose processes are on this host."""
    answers: dict[int, ProcessFacts] = {}
    for rank in wanted & infos.keys():
        info = infos[rank]
        if info.namespace != host.namespace:
            continue
        state = procfs.process_state(info.pid, info.start_ticks, info.namespace)
        if state is None:
            continue
        reply = host.replies.get(info.pid)
        if state != "gone" and reply is not None and reply.answer is not None:
            answers[rank] = replace(reply.answer, rank=rank, registered=True)
            continue
        answers[rank] = host.unanswered(rank, info.pid, state)
    return answers


def _claimed(
    wanted: set[int], job: LocalIdentity, infos: Mapping[int, RankInfo], host: _Host
) -> dict[int, ProcessFacts]:
    """Return the answers of processes that have a rank and have not registered it."""
    candidates: dict[int, list[LocalIdentity]] = {}
    for pid, reply in host.replies.items():
        found = LocalIdentity.of_process(pid) if reply is None else reply.identity
        if found is None or found.rank not in wanted or not found.same_job(job):
            continue
        info = infos.get(found.rank)
        if info is None or info.pid != found.pid:
            candidates.setdefault(found.rank, []).append(found)
    answers: dict[int, ProcessFacts] = {}
    for rank, claimants in candidates.items():
        pid = _eldest(claimants).pid
        reply = host.replies[pid]
        if reply is not None and reply.answer is not None:
            answers[rank] = reply.answer
            continue
        state = procfs.process_state(pid, procfs.start_ticks(pid), host.namespace)
        if state is not None:
            answer = host.unanswered(rank, pid, state)
            answers[rank] = replace(answer, registered=False)
    return answers


def _eldest(claimants: list[LocalIdentity]) -> LocalIdentity:
    """Return the process of the rank; the others inherited its environment.

    Processes that a rank starts, such as compilers, have its variables too.
    """
    pids = {claimant.pid for claimant in claimants}
    outermost = [
        claimant
        for claimant in claimants
        if pids.isdisjoint(procfs.ancestors(claimant.pid))
    ]
    return min(outermost or claimants, key=lambda found: found.start_ticks or 0)


def _from_proc(
    rank: int,
    pid: int,
    state: procfs.ProcState | None,
    activity: procfs.Activity | None,
    source: str,
) -> ProcessFacts:
    """Return whether a process runs, is stopped or gone, as far as /proc has that."""
    facts = ProcessFacts(
        rank=rank, host=process_identity().host, pid=pid, state="running", source=source
    )
    code = procfs.zombie_exit(pid)
    if code is not None or state == "gone":
        detail = "" if code is None else procfs.describe_exit(code)
        return replace(facts, state="gone", detail=detail)
    if activity is not None and activity.halt:
        return replace(facts, state="stopped", detail=activity.halt)
    return facts
