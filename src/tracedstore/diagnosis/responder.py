"""Answers the questions that other processes of the job wrote into the store."""

from collections import OrderedDict
from typing import Any, Final

from tracedstore.coordination.rank_registry import read_ranks
from tracedstore.diagnosis.last_call import LAST_CALL
from tracedstore.diagnosis.local_client import local_processes
from tracedstore.diagnosis.local_identity import LocalIdentity
from tracedstore.diagnosis.local_ranks import known_ranks, ranks_of_host
from tracedstore.diagnosis.questions import (
    MAX_POLLING_RANKS,
    Question,
    answered_ranks,
    read_number,
    read_question,
    write_answer,
)
from tracedstore.diagnosis.stacks import own_answer

# The newest questions that are answered; earlier ones are over.
_MAX_QUESTIONS: Final = 4
# Reads of a question that is counted but not there: it is not written yet, or over.
_MAX_READS: Final = 3
# Seconds for the processes of this host to answer.
_HOST_TIMEOUT: Final = 2.0
# Ranks of one question whose registry entries are read to find those of this host.
_MAX_REGISTRY_READS: Final = 64


class Responder:
    """Answers questions for this process, and for others of its host.

    Up to 64 ranks every rank answers for itself. What has no answer at the next poll is
    answered by the other processes of its host, from its socket, its agent and /proc.
    In larger jobs one process a host polls, and answers for all of them at once.

    Args:
        rank: The rank of this process; None for an agent.
        world_size: The number of ranks.
        job: The job; that of this process by default.
    """

    def __init__(
        self,
        rank: int | None,
        world_size: int,
        job: LocalIdentity | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._job = job
        self._at_once = world_size > MAX_POLLING_RANKS
        self._last_number = 0
        # Questions that are not there yet, with the number of reads so far.
        self._unread: OrderedDict[int, int] = OrderedDict()
        # Questions that are answered, except for ranks that may answer themselves.
        self._open: list[Question] = []

    def poll(self, connection: Any) -> None:
        """Answer new questions: one request if there is none.

        Raises what the store raises.

        Args:
            connection: A bare store that no other thread uses. It is not kept: it may
                be the job's own.
        """
        LAST_CALL.sample()
        late, self._open = self._open, []
        for question in late:
            # It is deleted when its answers are not awaited any more.
            if read_question(connection, question.number) is not None:
                self._answer_for_host(connection, question)
        for question in self._new_questions(connection):
            if self._rank is not None and self._rank in question.ranks:
                self._answer_for_self(connection, question, self._rank)
            if self._at_once:
                self._answer_for_host(connection, question)
            else:
                self._open.append(question)

    def _new_questions(self, connection: Any) -> list[Question]:
        last = read_number(connection)
        # A counter that went back is that of another store server.
        first = self._last_number + 1 if last >= self._last_number else 1
        for number in range(max(first, last - _MAX_QUESTIONS + 1), last + 1):
            self._unread[number] = 0
        self._last_number = last
        while len(self._unread) > _MAX_QUESTIONS:
            self._unread.popitem(last=False)
        questions = []
        for number in list(self._unread):
            question = read_question(connection, number)
            self._unread[number] += 1
            if question is not None:
                questions.append(question)
            if question is not None or self._unread[number] >= _MAX_READS:
                del self._unread[number]
        return questions

    def _answer_for_self(self, connection: Any, question: Question, rank: int) -> None:
        with_stacks = question.kind == "stacks"
        answer = own_answer(rank, question.families, with_stacks=with_stacks)
        write_answer(connection, question, answer)

    def _answer_for_host(self, connection: Any, question: Question) -> None:
        """Answer for the ranks of this host that have no answer."""
        named = {rank for rank in question.ranks if rank < self._world_size}
        named.discard(-1 if self._rank is None else self._rank)
        if not self._at_once:
            named -= answered_ranks(connection, question, named)
        if not named:
            return
        replies = local_processes(_HOST_TIMEOUT, question.kind, question.families)
        job = self._job or LocalIdentity.own()
        if len(named) > _MAX_REGISTRY_READS:
            # Every host would read the entries of all ranks of the job.
            named &= ranks_of_host(replies, job)
        infos = read_ranks(connection, sorted(named)) if named else {}
        answers = known_ranks(replies, infos, named, job, _HOST_TIMEOUT)
        # Those that answered by themselves in the meantime know more.
        late = answered_ranks(connection, question, answers)
        for rank in sorted(answers.keys() - late):
            write_answer(connection, question, answers[rank])
