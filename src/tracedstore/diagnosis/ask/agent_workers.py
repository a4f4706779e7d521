"""Answers of a torchrun agent for its workers.

An agent knows the pids and exit codes of its workers, also of those that have not
created their store yet. It tells them to processes of its host over its Unix socket,
and to others through the workers' store.
"""

import atexit
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from tracedstore import names
from tracedstore.common import procfs, timeouts
from tracedstore.common.identity import process_identity
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis.ask.allowance import Allowance
from tracedstore.diagnosis.ask.local_identity import LocalIdentity
from tracedstore.diagnosis.ask.local_socket import LOCAL_SOCKET
from tracedstore.diagnosis.ask.process_answer import ProcessAnswer
from tracedstore.diagnosis.ask.questions import MAX_POLLING_RANKS, poll_interval
from tracedstore.diagnosis.ask.responder import Responder
from tracedstore.recording.recorder import RECORDER

ITS_AGENT: Final = "its agent"
# Seconds to connect to the workers' store, and for one of its calls.
_CONNECT_TIMEOUT = 1.0
_STORE_TIMEOUT = 5.0
# Seconds between two attempts to connect: at first, and at most.
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0


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
    """The workers of this agent, and the thread that answers for them.

    Attributes:
        workers: The workers that it started last; empty if this process is no agent.
        environ: The variables of one of them.
    """

    def __init__(self) -> None:
        self._hook_set = False
        self.reset()

    def reset(self) -> None:
        """Forget the workers, as a forked child must: they are the parent's."""
        self.workers: tuple[Worker, ...] = ()
        self.environ: Mapping[str, str] = {}
        self._processes: Any = None
        self._stopping = threading.Event()

    def started(self, processes: Any) -> None:
        """Answer for the workers that the agent has started, instead of earlier ones.

        Args:
            processes: torch's ``PContext`` of the workers.
        """
        if not LOCAL_SOCKET.enabled or processes is self._processes:
            return
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
        self._start_thread(environ, job)

    def answers(self) -> list[ProcessAnswer]:
        """Return what this agent knows about its workers."""
        return [self._answer(worker) for worker in self.workers]

    def stop(self) -> None:
        """Let the thread end; the exit hook waits for it."""
        self._stopping.set()

    def _start_thread(self, environ: Mapping[str, str], job: LocalIdentity) -> None:
        self._stopping.set()
        self._stopping = threading.Event()
        thread = DaemonThread(
            _respond, environ, job, self._stopping, name="tracedstore-agent-answers"
        )
        thread.start()
        timeouts.track(thread)
        if not self._hook_set:
            # After the telemetry's own hook, so it runs before that one.
            atexit.register(self.stop)
            self._hook_set = True

    def _answer(self, worker: Worker) -> ProcessAnswer:
        answer = ProcessAnswer(
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


def _respond(
    environ: Mapping[str, str], job: LocalIdentity, stopping: threading.Event
) -> None:
    """Answer questions in the workers' store until the workers are replaced."""
    world_size = min(job.world_size or 0, MAX_RANKS)
    agents = environ.get("GROUP_WORLD_SIZE", "")
    pollers = int(agents) if agents.isdecimal() else world_size
    if world_size <= MAX_POLLING_RANKS:
        pollers += world_size
    interval = poll_interval(world_size, pollers)
    responder: Responder | None = None
    allowance = Allowance(world_size)
    delay = _FIRST_RETRY
    while not stopping.wait(interval if responder else delay):
        try:
            if responder is None:
                connection = connect(environ)
                responder = Responder(None, world_size, job, allowance)
            responder.poll(connection)
            delay = _FIRST_RETRY
        except OSError:  # the store is not served yet
            delay = min(2 * delay, _LONGEST_RETRY)
        except Exception as error:
            # The store's server has ended, mostly; the job has its own errors for that.
            responder = None
            delay = min(2 * delay, _LONGEST_RETRY)
            if not _is_store_error(error):
                RECORDER.failures.add(names.DIAGNOSIS, error)
                return


def connect(environ: Mapping[str, str]) -> Any:
    """Connect to the workers' store, as a worker's variables have it.

    Without a world size: a client with one counts as a rank that has joined.
    """
    from torch.distributed import TCPStore  # noqa: PLC0415 - only agents need it

    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # torch logs a warning for each attempt to connect to a port without a server.
    socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    return TCPStore(
        host,
        port,
        None,
        is_master=False,
        timeout=timedelta(seconds=_STORE_TIMEOUT),
        wait_for_workers=False,
    )


def _is_store_error(error: Exception) -> bool:
    from torch.distributed import DistError  # noqa: PLC0415 - see above

    return isinstance(error, DistError)


# One a process: a process is one agent.
AGENT_WORKERS: Final = AgentWorkers()
