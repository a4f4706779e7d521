"""The workers of a torchrun agent: what it knows about them, and what they reply.

An agent knows the pids and exit codes of its workers, also of those that have not
created their store yet. It tells them to processes of its host over its Unix socket,
and to others through the workers' store (`diagnosis.ask.agent_responder`).
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tracedstore.common import procfs
from tracedstore.common.identity import process_identity
from tracedstore.local.facts import ProcessFacts
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.local.socket_client import LocalReply, ask_processes
from tracedstore.local.socket_server import LOCAL_SOCKET

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
        return [self._answer(worker) for worker in self.workers]

    def _answer(self, worker: Worker) -> ProcessFacts:
        answer = ProcessFacts(
            rank=worker.rank,
            host=process_identity().host,
            pid=worker.pid,
            state="running",
            registered=False,
            source=ITS_AGENT,
        )
        code = _exit_code(self._processes, worker.local_rank)
        if code is None:
            code = procfs.zombie_exit(worker.pid)
        if code is not None:
            return replace(answer, state="gone", detail=procfs.describe_exit(code))
        state = worker.state
        if state == "gone":
            return replace(answer, state="gone")
        if state in ("stopped", "disk_wait"):
            detail = procfs.describe_state(worker.pid)
            return replace(answer, state="stopped", detail=detail)
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
