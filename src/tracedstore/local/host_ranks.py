"""What the processes of this host tell about ranks: their sockets, agents and /proc."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from tracedstore.common import procfs
from tracedstore.common.identity import process_identity
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local.facts import NO_ANSWER, ProcessFacts
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.local.socket_client import LocalReply, local_processes

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
        timeout: Seconds for all processes of this host to answer.
        kind: ``status`` or ``stacks``.
        families: The key families in question.
    """
    replies = local_processes(timeout, kind, families)
    return known_ranks(replies, infos, ranks, LocalIdentity.own(), timeout)


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
    registered = _registered(infos, wanted, replies, timeout)
    claimed = _claimed(replies, wanted, job, infos, timeout)
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


def _registered(
    infos: Mapping[int, RankInfo], wanted: set[int], replies: Replies, timeout: float
) -> dict[int, ProcessFacts]:
    """Return the answers of registered ranks whose processes are on this host."""
    answers: dict[int, ProcessFacts] = {}
    namespace = procfs.own_namespace()
    for rank in wanted & infos.keys():
        info = infos[rank]
        if info.namespace != namespace:
            continue
        state = procfs.process_state(info.pid, info.start_ticks, info.namespace)
        if state is None:
            continue
        reply = replies.get(info.pid)
        if state != "gone" and reply is not None and reply.answer is not None:
            answers[rank] = replace(reply.answer, rank=rank, registered=True)
            continue
        answers[rank] = _from_proc(
            rank, info.pid, state, listens=info.pid in replies, timeout=timeout
        )
    return answers


def _claimed(
    replies: Replies,
    wanted: set[int],
    job: LocalIdentity,
    infos: Mapping[int, RankInfo],
    timeout: float,
) -> dict[int, ProcessFacts]:
    """Return the answers of processes that have a rank and have not registered it."""
    candidates: dict[int, list[LocalIdentity]] = {}
    for pid, reply in replies.items():
        found = LocalIdentity.of_process(pid) if reply is None else reply.identity
        if found is None or found.rank not in wanted or not found.same_job(job):
            continue
        info = infos.get(found.rank)
        if info is None or info.pid != found.pid:
            candidates.setdefault(found.rank, []).append(found)
    answers: dict[int, ProcessFacts] = {}
    for rank, claimants in candidates.items():
        pid = _eldest(claimants).pid
        reply = replies[pid]
        if reply is not None and reply.answer is not None:
            answers[rank] = reply.answer
            continue
        state = procfs.process_state(
            pid, procfs.start_ticks(pid), procfs.own_namespace()
        )
        if state is not None:
            answer = _from_proc(rank, pid, state, listens=True, timeout=timeout)
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
    rank: int, pid: int, state: procfs.ProcState, *, listens: bool, timeout: float
) -> ProcessFacts:
    """Return what /proc has about a process that did not answer itself."""
    answer = ProcessFacts(
        rank=rank, host=process_identity().host, pid=pid, source=FROM_PROC
    )
    if state == "gone":
        code = procfs.zombie_exit(pid)
        detail = "" if code is None else procfs.describe_exit(code)
        return replace(answer, state="gone", detail=detail)
    if state != "running":
        return replace(answer, state="stopped", detail=procfs.describe_state(pid))
    if listens and pid != os.getpid():
        return replace(
            answer,
            state="stopped",
            detail=f"{NO_ANSWER} {timeout:g} s: it holds the GIL, or gets no CPU time",
        )
    return replace(answer, state="running", detail="it does not listen for questions")
