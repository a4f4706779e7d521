"""Questions to the processes of a job: over sockets of this host, or in the store.

=============================== ===================================================
``tracedstore/QUESTIONS``       the number of questions so far
``tracedstore/QUESTION/<slot>`` a question; its slot is its number modulo 8
``tracedstore/ANSWER/<slot>/<rank>`` the answer about a rank
``tracedstore/ANSWERED/<slot>`` the ranks with an answer, if the store can append
=============================== ===================================================

The asking process deletes question and answers. On an EtcdStore, which cannot delete,
the next question in the same slot overwrites them, so they stay bounded. Everything
that is read may have been written by any client, and is validated.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges, validation
from tracedstore.common.codec import Kind, Seconds, UpTo, Words
from tracedstore.common.identity import process_identity
from tracedstore.common.keys import key_text
from tracedstore.common.threads import pause, run_with_timeout
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.coordination.store_access import etcd_contents, find_absent, read_items
from tracedstore.local.facts import (
    MAX_ANSWER_BYTES,
    MAX_FAMILIES,
    ProcessFacts,
)
from tracedstore.local.host_ranks import ask_host
from tracedstore.local.sockets import KINDS
from tracedstore.recording.recorder import RECORDER

QUESTIONS: Final = "tracedstore/QUESTIONS"
_QUESTION: Final = "tracedstore/QUESTION"
_ANSWER: Final = "tracedstore/ANSWER"
_ANSWERED: Final = "tracedstore/ANSWERED"
# A value that no key has.
_ABSENT: Final = "tracedstore: absent"
# More than there are questions at a time: two ranks diagnose, and operators ask.
SLOTS: Final = 8
_MAX_NUMBER: Final = 2**53
# Bytes of a question, of an answer without stacks, and of the ledger of answers in any
# job. Each rank adds some to a question, and more to a ledger: several processes of its
# host may answer for it.
_MAX_QUESTION_BYTES: Final = 64 * 1024
_MAX_STATUS_BYTES: Final = 256 * 1024
_MAX_ANSWERED_BYTES: Final = 64 * 1024
_BYTES_OF_RANK, _ANSWERED_BYTES_OF_RANK = 8, 32
# Seconds between two reads of the answers: at first, and at most.
_FIRST_READ, _LONGEST_READ = 0.05, 0.5
# Requests per second for questions, of a whole job between two questions.
_MAX_REQUESTS_PER_SECOND: Final = 500
_SHORTEST_INTERVAL: Final = 1.0
# Up to this world size every rank reads questions itself.
MAX_POLLING_RANKS: Final = 64
# Seconds that may be spent at once, by a process that has spent nothing for so long.
_BURST: Final = 16.0
# Seconds after which it reads again, however much it has spent.
_LONGEST_PAUSE: Final = 30.0
# Bytes that are read in one second: in any job, and for each rank of a large one.
_BYTES_PER_SECOND: Final = 64 * 1024
_READ_BYTES_OF_RANK: Final = 16
# Seconds for the processes of this host, and the share of the timeout at most.
_HOST_TIMEOUT, _HOST_SHARE = 2.0, 0.5
# Seconds that the store gets after the timeout, to delete what was asked.
_STORE_GRACE = 1.0


def _unfold(value: Any, world_size: int) -> frozenset[int]:
    return frozenset(ranges.unfold_below(validation.any_text(value), world_size))


_Family = Annotated[str, Kind(lambda value, _: key_text(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question to processes of the job.

    Attributes:
        number: Its number, from 1.
        kind: ``status`` or ``stacks``.
        ranks: The ranks in question.
        families: The key families of which ranks report what they wrote.
        asked_by: The asking process, for people.
        time: When it was asked, in seconds since the epoch.
    """

    number: Annotated[int, codec.below(_MAX_NUMBER)]
    kind: Annotated[str, codec.one_of(KINDS)] = "status"
    ranks: Annotated[frozenset[int], Kind(_unfold, ranges.fold)]
    families: Annotated[tuple[_Family, ...], UpTo(MAX_FAMILIES)] = ()
    asked_by: Words = ""
    time: Seconds = 0.0

    def to_bytes(self) -> bytes:
        """Encode it for the store."""
        return codec.encode(self)

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "Question | None":
        """Decode a question; None if it is malformed or too large.

        Ranks that the job does not have are omitted.
        """
        max_bytes = _MAX_QUESTION_BYTES + _BYTES_OF_RANK * world_size
        return codec.decode(cls, value, max_bytes, world_size)


class Allowance:
    """Seconds of a process for reading and answering, one each second.

    A store has no request for the length of a value, so a long one is known as such
    only when it has been read. Then nothing is read for as long as it would have taken
    at `_BYTES_PER_SECOND`.

    Args:
        world_size: The number of ranks.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._rate = max(_BYTES_PER_SECOND, _READ_BYTES_OF_RANK * world_size)
        # When everything that was spent is earned again.
        self._due = clock()

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be read now."""
        return self._due - self._clock() > _BURST

    def spend(self, seconds: float) -> None:
        """Take off the seconds that something is worth."""
        now = self._clock()
        due = max(self._due, now) + seconds
        self._due = min(due, now + _BURST + _LONGEST_PAUSE)

    def spend_bytes(self, number: int) -> None:
        """Take off what it costs to read so many bytes."""
        self.spend(number / self._rate)


def poll_interval(_world_size: int, pollers: int) -> float:
    """Return the seconds between two reads of questions by one process.

    A read is one request. All processes together make at most 500 a second.
    """
    return max(_SHORTEST_INTERVAL, pollers / _MAX_REQUESTS_PER_SECOND)


def polling_interval_of_rank(
    world_size: int,
    local_rank: int | None,
    local_world_size: int | None,
    *,
    has_agent: bool,
) -> float | None:
    """Return how often a rank reads questions; None if another process does for it.

    Up to 64 ranks each reads for itself. In larger jobs one process a host does: the
    agent of torchrun, else local rank 0.

    Args:
        world_size: The number of ranks.
        local_rank: The rank on its host, if known.
        local_world_size: The number of ranks on its host, if known.
        has_agent: An agent on this host reads questions.
    """
    if world_size <= MAX_POLLING_RANKS:
        return poll_interval(world_size, world_size)
    if has_agent or local_rank:
        return None
    # Without a local rank it cannot be known which process reads; then all do.
    a_host = (local_world_size or 1) if local_rank is not None else 1
    return poll_interval(world_size, -(-world_size // a_host))


def question_key(number: int) -> str:
    """Return the key of a question."""
    return f"{_QUESTION}/{number % SLOTS}"


def answer_key(number: int, rank: int) -> str:
    """Return the key of the answer about a rank."""
    return f"{_ANSWER}/{number % SLOTS}/{rank}"


def peek(connection: Any, key: str) -> bytes | None:
    """Read a key without waiting for it; None if it does not exist.

    It takes one round trip on torch's stores. ``get`` after ``check`` takes three on a
    TCPStore, and waits for its timeout if the key is deleted in between.
    """
    contents = etcd_contents(connection)
    in_etcd = None if contents is None else contents.items
    if in_etcd is not None:
        return in_etcd.get(key)
    try:
        # Neither changes the key nor creates it: a missing one has not this value.
        value: bytes = connection.compare_set(key, _ABSENT, _ABSENT)
    except Exception:  # a custom store without compare_set
        value = connection.get(key) if connection.check([key]) else _ABSENT.encode()
    return None if value == _ABSENT.encode() else value


def read_number(connection: Any, allowance: Allowance | None = None) -> int:
    """Return the number of the last question, 0 without one."""
    value = peek(connection, QUESTIONS) or b"0"
    if allowance is not None:
        allowance.spend_bytes(len(value))
    try:
        return validation.digits(value, _MAX_NUMBER)
    except ValueError:
        return 0


def read_question(
    connection: Any,
    number: int,
    world_size: int = ranges.MAX_RANKS,
    allowance: Allowance | None = None,
) -> Question | None:
    """Read a question; None if it is not written yet, or over.

    Args:
        connection: A bare store that no other thread uses.
        number: Its number.
        world_size: The number of ranks of the job.
        allowance: What the read is taken off.

    Raises:
        ValueError: It is malformed, or too large.
    """
    value = peek(connection, question_key(number))
    if value is None:
        return None
    if allowance is not None:
        allowance.spend_bytes(len(value))
    question = Question.from_bytes(value, world_size)
    if question is None:
        raise ValueError(f"question {number} is malformed, or too large")
    return question if question.number == number else None


def write_answer(connection: Any, question: Question, answer: ProcessFacts) -> None:
    """Write the answer about a rank."""
    if answer.rank is None:
        return
    value = _encoded(question, answer)
    if len(value) > _max_answer_bytes(question):
        # Many names of missing ranks, or long keys. The rest of the facts is short.
        calls = len(answer.in_flight) + answer.more_in_flight
        value = _encoded(
            question, replace(answer, in_flight=(), more_in_flight=calls, barriers=())
        )
    if len(value) > _max_answer_bytes(question):
        return
    connection.set(answer_key(question.number, answer.rank), value)
    if connection.has_extended_api():
        connection.append(_answered_key(question.number), f"{answer.rank},")


def _encoded(question: Question, answer: ProcessFacts) -> bytes:
    fields = {"question": question.number, **answer.to_fields()}
    return json.dumps(fields).encode()


def answered_ranks(
    connection: Any,
    question: Question,
    ranks: Iterable[int],
    allowance: Allowance | None = None,
) -> set[int]:
    """Return those of these ranks that have an answer already; waits for nothing."""
    ranks = set(ranks)
    contents = etcd_contents(connection)
    in_etcd = None if contents is None else contents.items
    if in_etcd is not None:
        return ranks & _parsed(in_etcd.values(), question).keys()
    if connection.has_extended_api():
        listed = _listed_ranks(connection, question, allowance)
        if listed is not None:
            return ranks & listed
    absent = find_absent(
        lambda some: bool(
            connection.check([answer_key(question.number, rank) for rank in some])
        ),
        sorted(ranks),
    )
    return ranks.difference(absent)


def ask(
    connection: Any,
    kind: str,
    ranks: Iterable[int],
    timeout: float,
    *,
    families: Iterable[str] = (),
    asked_by: str = "",
    answers: dict[int, ProcessFacts] | None = None,
    hurry: Callable[[], bool] = bool,
) -> dict[int, ProcessFacts]:
    """Ask ranks through the store; return the answers that arrived in time.

    It returns when all of the named ranks have answered, or after the timeout. Store
    calls that hang are not bounded; `ask_ranks` bounds them.

    Args:
        connection: A bare store that no other thread uses.
        kind: ``status`` or ``stacks``.
        ranks: The ranks in question.
        timeout: Seconds to wait for answers.
        families: The key families in question.
        asked_by: The asking process, for people.
        answers: Where to collect the answers, for a caller that may not wait.
        hurry: Returns whether the answers so far are enough.
    """
    answers = {} if answers is None else answers
    named = frozenset(ranks)
    deadline = time.monotonic() + timeout
    question = Question(
        number=connection.add(QUESTIONS, 1),
        kind=kind,
        ranks=named,
        families=tuple(families)[:MAX_FAMILIES],
        asked_by=asked_by,
        time=time.time(),
    )
    # An earlier question may have left its answers in this slot.
    _delete(connection, [_answered_key(question.number)])
    connection.set(question_key(question.number), question.to_bytes())
    delay = _FIRST_READ
    reader = _AnswerReader(connection, question)
    try:
        while missing := named - answers.keys():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or hurry() or not pause(min(delay, remaining)):
                break
            delay = min(2 * delay, _LONGEST_READ)
            answers |= reader.read(missing)
    finally:
        with suppress(Exception):  # the server may be gone
            _delete(
                connection,
                [
                    question_key(question.number),
                    _answered_key(question.number),
                    *(answer_key(question.number, rank) for rank in answers),
                ],
            )
    return answers


def _answered_key(number: int) -> str:
    return f"{_ANSWERED}/{number % SLOTS}"


class _AnswerReader:
    """Reads the answers to a question; a value that is too large is read once."""

    def __init__(self, connection: Any, question: Question) -> None:
        self._connection = connection
        self._question = question
        self._has_ledger: bool = connection.has_extended_api()
        # Keys whose values are no answers.
        self._refused: set[str] = set()

    def read(self, ranks: frozenset[int]) -> dict[int, ProcessFacts]:
        """Read the answers about these ranks that exist."""
        contents = etcd_contents(self._connection)
        in_etcd = None if contents is None else contents.items
        if in_etcd is not None:
            found = _parsed(in_etcd.values(), self._question)
        else:
            found = _parsed(self._values(ranks), self._question)
        return {rank: answer for rank, answer in found.items() if rank in ranks}

    def _values(self, ranks: frozenset[int]) -> Iterable[bytes]:
        if self._has_ledger:
            listed = _listed_ranks(self._connection, self._question)
            self._has_ledger = listed is not None
            ranks = ranks if listed is None else ranks & listed
        keys = [answer_key(self._question.number, rank) for rank in sorted(ranks)]
        keys = [key for key in keys if key not in self._refused]
        items = read_items(self._connection, keys) if keys else {}
        max_bytes = _max_answer_bytes(self._question)
        self._refused |= {key for key, one in items.items() if len(one) > max_bytes}
        return items.values()


def _listed_ranks(
    connection: Any, question: Question, allowance: Allowance | None = None
) -> set[int] | None:
    """Return the ranks in the ledger of answers; None if it is none of this job."""
    value = peek(connection, _answered_key(question.number)) or b""
    if allowance is not None:
        allowance.spend_bytes(len(value))
    for_ranks = _ANSWERED_BYTES_OF_RANK * len(question.ranks)
    if len(value) > _MAX_ANSWERED_BYTES + for_ranks:
        return None
    return {
        int(rank)
        for rank in value.split(b",")
        if rank.isdigit() and len(rank) < len(str(ranges.MAX_RANKS))
    }


def _max_answer_bytes(question: Question) -> int:
    return MAX_ANSWER_BYTES if question.kind == "stacks" else _MAX_STATUS_BYTES


def _parsed(values: Iterable[bytes], question: Question) -> dict[int, ProcessFacts]:
    """Decode answers; those malformed or to an earlier question are omitted."""
    answers: dict[int, ProcessFacts] = {}
    for value in values:
        with suppress(ValueError):
            fields = validation.load_json(value, _max_answer_bytes(question))
            if type(fields) is dict and fields.get("question") == question.number:
                answer = codec.from_fields(ProcessFacts, fields)
                if answer.rank is not None:
                    answers[answer.rank] = answer
    return answers


def _delete(connection: Any, keys: Iterable[str]) -> None:
    for key in keys:
        try:
            connection.delete_key(key)
        except Exception:  # EtcdStore cannot delete; the next question overwrites it
            return


def ask_ranks(
    connection: Any,
    infos: Mapping[int, RankInfo],
    ranks: Iterable[int],
    world_size: int,
    timeout: float,
    *,
    kind: str = "status",
    families: Iterable[str] = (),
    hurry: Callable[[], bool] = bool,
) -> dict[int, ProcessFacts]:
    """Return what is known about these ranks; those without any answer are omitted.

    It never raises, and takes at most a second longer than the timeout. A store that
    does not respond costs no more than that.

    Args:
        connection: A bare store that no other thread uses. If it hangs, the thread
            that uses it is abandoned, so the caller must not use it any more.
        infos: The ranks that have registered.
        ranks: The ranks in question.
        world_size: The number of ranks.
        timeout: Seconds for all of it.
        kind: ``status`` or ``stacks``.
        families: The key families in question.
        hurry: Returns whether the answers so far are enough.
    """
    deadline = time.monotonic() + timeout
    wanted = {rank for rank in ranks if 0 <= rank < world_size}
    families = tuple(families)
    if not wanted:
        return {}
    answers: dict[int, ProcessFacts] = {}
    with suppress(OSError, ValueError):
        host_timeout = min(_HOST_TIMEOUT, _HOST_SHARE * timeout)
        answers = ask_host(infos, wanted, host_timeout, kind=kind, families=families)
    elsewhere = {
        rank
        for rank in wanted
        if rank not in answers or answers[rank].state == "silent"
    }
    remaining = deadline - time.monotonic()
    if elsewhere and remaining > 0:
        through_store: dict[int, ProcessFacts] = {}
        with suppress(Exception):  # whatever a store raises: nothing more is known
            run_with_timeout(
                remaining + _STORE_GRACE,
                partial(
                    _ask_unrecorded,
                    connection,
                    kind,
                    elsewhere,
                    remaining,
                    families=families,
                    asked_by=_own_name(),
                    answers=through_store,
                    hurry=hurry,
                ),
            )
        answers |= dict(through_store)
    return answers


def _ask_unrecorded(*args: Any, **kwargs: Any) -> None:
    # In a thread of its own, whose calls are the telemetry's.
    with RECORDER.unrecorded():
        ask(*args, **kwargs)


def _own_name() -> str:
    identity = process_identity()
    rank = "" if identity.rank is None else f"rank {identity.rank} on "
    return f"{rank}{identity.host} (pid {os.getpid()})"
