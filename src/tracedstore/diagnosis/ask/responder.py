"""Answers the questions that other processes of the job wrote into the store.

A rank answers in its own store, from the thread of its diagnosis. torchrun's agent
answers for its workers in their store, from a thread of its own.
"""

import atexit
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal

from tracedstore import names
from tracedstore.common import threads
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.common.threads import DaemonThread
from tracedstore.coordination.rank_registry import read_entries
from tracedstore.diagnosis.ask.questions import (
    MAX_POLLING_RANKS,
    Allowance,
    Question,
    answered_ranks,
    poll_interval,
    read_number,
    read_question,
    write_answer,
)
from tracedstore.local.facts import LAST_CALL, LocalIdentity, own_facts
from tracedstore.local.host_ranks import (
    AGENT_WORKERS,
    AgentWorkers,
    known_ranks,
    ranks_of_host,
)
from tracedstore.local.sockets import local_processes
from tracedstore.recording.recorder import RECORDER

# The newest questions that are answered; earlier ones are over.
_MAX_QUESTIONS: Final = 4
# Reads of a question that is counted but not there: it is not written yet, or over.
_MAX_READS: Final = 3
# Seconds for the processes of this host to answer. The asking process waits 3 s, and
# the question is read up to a second after it was asked, and again a second later.
_HOST_TIMEOUT: Final = 1.0
# Seconds that a question is worth, and a read that finds none. A job asks less than one
# a second: two ranks diagnose, and operators watch.
_COST_OF_QUESTION, _COST_OF_READ = 1.0, 0.5
# Ranks of one question whose registry entries are read to find those of this host.
_MAX_REGISTRY_READS: Final = 64
# Seconds to connect to the workers' store, and for one of its calls.
_CONNECT_TIMEOUT = 1.0
_STORE_TIMEOUT = 5.0
# Seconds between two attempts to connect: at first, and at most.
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 30.0


class Responder:
    """Answers questions for this process, and for others of its host.

    Up to 64 ranks every rank answers for itself. What has no answer at the next poll is
    answered by the other processes of its host, from its socket, its agent and /proc.
    In larger jobs one process a host polls, and answers for all of them at once.

    Any client of the store can ask. More questions than a job asks, or longer values
    than it writes, are not read until the allowance of this process admits it.

    Args:
        rank: The rank of this process; None for an agent.
        world_size: The number of ranks.
        job: The job; that of this process by default.
        allowance: What reading and answering is taken off; a new one by default.
    """

    def __init__(
        self,
        rank: int | None,
        world_size: int,
        job: LocalIdentity | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._job = job
        self._allowance = allowance or Allowance(world_size)
        self._at_once = world_size > MAX_POLLING_RANKS
        self._last_number = 0
        # Questions that are not there yet, with the number of reads so far.
        self._unread: OrderedDict[int, int] = OrderedDict()
        # Questions that are answered, except for ranks that may answer themselves.
        self._open: list[Question] = []

    def poll(self, connection: Any) -> None:
        """Answer new questions: one request if there is none.

        It is none while the allowance is spent. Raises what the store raises.

        Args:
            connection: A bare store that no other thread uses. It is not kept: it may
                be the job's own.
        """
        LAST_CALL.sample()
        if self._allowance.is_spent:
            return
        late, self._open = self._open, []
        for question in late:
            # It is deleted when its answers are not awaited any more.
            if isinstance(self._read(connection, question.number), Question):
                self._answer_for_host(connection, question)
        for question in self._new_questions(connection):
            if self._rank is not None and self._rank in question.ranks:
                self._answer_for_self(connection, question, self._rank)
            if self._at_once:
                self._answer_for_host(connection, question)
            else:
                self._open.append(question)

    def _new_questions(self, connection: Any) -> list[Question]:
        last = read_number(connection, self._allowance)
        # A counter that went back is that of another store server.
        first = self._last_number + 1 if last >= self._last_number else 1
        for number in range(max(first, last - _MAX_QUESTIONS + 1), last + 1):
            self._unread[number] = 0
        self._last_number = last
        while len(self._unread) > _MAX_QUESTIONS:
            self._unread.popitem(last=False)
        questions = []
        for number in list(self._unread):
            if self._allowance.is_spent:
                break
            reads = self._unread.pop(number) + 1
            question = self._read(connection, number)
            if isinstance(question, Question):
                self._allowance.spend(_COST_OF_QUESTION)
                questions.append(question)
                continue
            self._allowance.spend(_COST_OF_READ)
            if question == "absent" and reads < _MAX_READS:
                self._unread[number] = reads
        return questions

    def _read(
        self, connection: Any, number: int
    ) -> Question | Literal["absent", "malformed"]:
        try:
            found = read_question(connection, number, self._world_size, self._allowance)
        except ValueError:
            return "malformed"
        return "absent" if found is None else found

    def _answer_for_self(self, connection: Any, question: Question, rank: int) -> None:
        with_stacks = question.kind == "stacks"
        answer = own_facts(rank, question.families, with_stacks=with_stacks)
        write_answer(connection, question, answer)

    def _answer_for_host(self, connection: Any, question: Question) -> None:
        """Answer for the ranks of this host that have no answer."""
        if self._allowance.is_spent:
            return
        named = set(question.ranks)
        named.discard(-1 if self._rank is None else self._rank)
        if not self._at_once:
            named -= answered_ranks(connection, question, named, self._allowance)
        if not named:
            return
        replies = local_processes(_HOST_TIMEOUT, question.kind, question.families)
        job = self._job or LocalIdentity.own()
        if len(named) > _MAX_REGISTRY_READS:
            # Every host would read the entries of all ranks of the job.
            named &= ranks_of_host(replies, job)
        entries = read_entries(connection, sorted(named))
        self._allowance.spend_bytes(entries.byte_count)
        infos = {info.rank: info for info in entries.ranks()}
        answers = known_ranks(replies, infos, named, job, _HOST_TIMEOUT)
        # Those that answered by themselves in the meantime know more.
        late = set()
        if not self._allowance.is_spent:
            late = answered_ranks(connection, question, answers, self._allowance)
        for rank in sorted(answers.keys() - late):
            write_answer(connection, question, answers[rank])


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
        threads.track(thread)
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
                connection = connect_to_workers(environ)
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


def connect_to_workers(environ: Mapping[str, str]) -> Any:
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
