"""Answers of a torchrun agent for its workers, through the workers' store."""

import atexit
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from tracedstore import names
from tracedstore.common import timeouts
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.threads import DaemonThread
from tracedstore.diagnosis.ask.allowance import Allowance
from tracedstore.diagnosis.ask.questions import MAX_POLLING_RANKS, poll_interval
from tracedstore.diagnosis.ask.responder import Responder
from tracedstore.local.agent_workers import AGENT_WORKERS, AgentWorkers
from tracedstore.local.local_identity import LocalIdentity
from tracedstore.recording.recorder import RECORDER

# Seconds to connect to the workers' store, and for one of its calls.
_CONNECT_TIMEOUT = 1.0
_STORE_TIMEOUT = 5.0
# Seconds between two attempts to connect: at first, and at most.
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0


class AgentResponder:
    """The thread that answers for the workers of this agent.

    Attributes:
        workers: The workers.
    """

    def __init__(self, workers: AgentWorkers) -> None:
        self.workers = workers
        self._hook_set = False
        self._stopping = threading.Event()

    def reset(self) -> None:
        """Forget workers and thread, as a forked child must: they are the parent's."""
        self.workers.reset()
        self._stopping = threading.Event()

    def started(self, processes: Any) -> None:
        """Answer for the workers that the agent has started, instead of earlier ones.

        Args:
            processes: torch's ``PContext`` of the workers.
        """
        job = self.workers.started(processes)
        if job is None:
            return
        self._stopping.set()
        self._stopping = threading.Event()
        thread = DaemonThread(
            _respond,
            self.workers.environ,
            job,
            self._stopping,
            name="tracedstore-agent-answers",
        )
        thread.start()
        timeouts.track(thread)
        if not self._hook_set:
            # After the telemetry's own hook, so it runs before that one.
            atexit.register(self.stop)
            self._hook_set = True

    def stop(self) -> None:
        """Let the thread end; the exit hook waits for it."""
        self._stopping.set()


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
AGENT_RESPONDER: Final = AgentResponder(AGENT_WORKERS)
