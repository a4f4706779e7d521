"""Finds out whom a stalled job waits for: reads its store and asks its processes.

Everything here runs in the diagnosis thread, on a connection of its own. Reading is
bounded in requests; a store that does not respond is noticed by the watcher.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from tracedstore.common import procfs, validation
from tracedstore.common.causes import REMEDIES
from tracedstore.common.identity import process_identity, restart_count
from tracedstore.common.keys import fold
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import Finding
from tracedstore.coordination.rank_registry import Member, RankInfo
from tracedstore.coordination.store_access import absent_keys, read_key
from tracedstore.diagnosis.ask.questions import ask_ranks
from tracedstore.diagnosis.judgement.collective_waits import (
    Known,
    judge_waits,
    resolve,
)
from tracedstore.diagnosis.judgement.verdict import (
    MAX_AWAITED,
    Suspects,
    Verdict,
    describe_rank,
    describe_wait,
    find_suspects,
    remedy_of,
    still_waits,
)
from tracedstore.diagnosis.observe import incarnations, torch_keys
from tracedstore.diagnosis.observe.blocked_calls import find_awaited, learned_writers
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, read_blocked
from tracedstore.diagnosis.observe.collective_ledger import read_entered
from tracedstore.diagnosis.observe.torch_keys import meaning
from tracedstore.local.facts import LocalIdentity, ProcessFacts, WrittenFamily
from tracedstore.local.host_ranks import known_ranks
from tracedstore.local.sockets import ask_processes
from tracedstore.recording.operation import METHODS

_MAX_FAMILIES_ASKED = 16
# Of a rank without a registration.
_SEEN = "created its process group, and has not registered"
_AGENTS_REMEDY = "read the log of each awaited agent: agents are not asked"
_BLOCKING = frozenset(method.name for method in METHODS if method.blocks)
Answers = Mapping[int, ProcessFacts]
_MAX_COUNT = 2**63
# Groups that are created at the same time, and compared.
_MAX_GROUPS_READ = 16
# Ledgers of collectives that are read in one look.
_MAX_LEDGERS = 16
# Ranks of a job up to which all records are read, and records in one step of a larger
# one; and how many steps from rank to rank there are.
_MAX_RECORDS = 256
_MAX_STEPS = 4
# Looks without a verdict until a reason for that is left out.
_MAX_FRUITLESS: Final = 2
# Seconds for the processes of missing ranks to answer, on this host and elsewhere. The
# verdict of a barrier is due within 5 s of its timeout.
_HOST_TIMEOUT = 0.5
_ANSWER_TIMEOUT = 1.5
# The same for a verdict after which this process ends.
_CONFIRM_TIMEOUT: Final = 3.0


def inquire(
    connection: Any,
    member: Member,
    answer_timeout: float,
    *,
    call_connection: Any,
    own: BlockedRecord | None = None,
    describe: Callable[[], BlockedRecord | None],
    records_until: float,
    hurry: Callable[[], bool] = bool,
    fruitless: int = 0,
) -> Verdict | None:
    """Find out whom the job waits for; None if the caller shall look again.

    It shall if that changed meanwhile, or if a suspect is about to publish a record.

    Args:
        connection: A connection to the store in which the ranks registered.
        member: The rank of this process.
        answer_timeout: Seconds for the processes of awaited ranks to answer.
        call_connection: A connection to the store of the blocked call of this rank.
        own: The record of that call as of now, if the caller has just described it.
        describe: Returns the record of that call as of now; None if nothing keeps it.
        records_until: Until when suspects in a Store call may publish their records,
            since the epoch. A suspect that has not by then is in another store.
        hurry: Returns whether the call has ended: then the answers so far count.
        fruitless: The number of looks before this one without a verdict. What they may
            have failed for is left out then: first what was learned about the writers
            of keys, then that the records have to stay as they are.
    """
    started = time.time()
    own = own or describe()
    if own is None:
        return None
    world_size = member.world_size
    blocked = _blocked(connection, own, world_size)
    counted = find_excess(call_connection, connection, own, member)
    if (
        known := counted or _find_diverged(connection, blocked, world_size)
    ) is not None:
        return known
    suspects = find_suspects(blocked, world_size)
    suspected = suspects.all_ranks
    asked = [*suspected, *_doubtful(blocked, own.rank, suspects)]
    answers: Answers
    if member.agents is None:
        registered = _registered(connection, asked, own.attempt)
        answers = _ask(
            connection, registered, asked, member, blocked, answer_timeout, hurry
        )
        unknown = set(asked).difference(registered, answers)
        answers = {**answers, **_seen(call_connection, unknown, own.attempt)}
    else:
        registered = _agents(member.agents, world_size, time.time())
        answers = _examine_agents(member, asked)
    # Asking takes seconds. A rank that has arrived by now is not awaited any more.
    now = time.time()
    again = describe()
    if again is None:
        return None
    blocked = _blocked(connection, again, world_size)
    # A suspect that is blocked by now has arrived where the others wait, or waits for
    # another rank. Look again.
    is_last = fruitless >= 2 * _MAX_FRUITLESS
    if not (is_last or blocked.keys().isdisjoint(suspected)):
        return None
    blocked = {
        rank: one
        for rank, one in blocked.items()
        if still_waits(one, answers.get(rank), now)
    }
    blocked = _resolve(connection, blocked, own.rank, world_size, answers)
    if member.agents is None and fruitless < _MAX_FRUITLESS:
        blocked = _apply_learned(blocked, answers, world_size)
        blocked = _apply_rank_keys(call_connection, blocked, own.rank, world_size)
    suspects = find_suspects(blocked, world_size)
    # Some have not been asked.
    new = not (is_last or set(asked).issuperset(suspects.ranks))
    # The next look takes as long as this one.
    # A rank in a collective publishes that, now that it was asked.
    new |= any(_is_in_collective(answers.get(rank)) for rank in suspects.ranks)
    may_publish = now + (now - started) < records_until
    in_calls = any(_is_blocked(answers.get(rank)) for rank in suspects.ranks)
    if new or (may_publish and in_calls):
        return None
    verdict = judge_waits(
        blocked, suspects, world_size, answers, registered, member.host_of, now
    )
    verdict = _with_all_waiting(connection, verdict, again, world_size)
    if member.agents is not None:
        verdict = _of_agents(verdict)
    verdict = _with_replacements(connection, verdict)
    # What a rank has called is in its record: it may be something else.
    is_unread = not set(verdict.group_ranks).issubset(verdict.waiting_ranks)
    is_early = may_publish and verdict.cause == "all_entered" and is_unread
    is_idle = is_early or all(one.may_be_idle for one in blocked.values())
    return verdict if verdict.awaited_ranks or not is_idle else None


def _find_diverged(
    connection: Any, blocked: Mapping[int, BlockedRecord], world_size: int
) -> Verdict | None:
    """Return a verdict if ranks have created groups of one name, but not the same."""
    groups: dict[str, None] = {}
    ranks: set[int] = set()
    for rank, record in blocked.items():
        # The default group has all ranks.
        if record.creates and record.members is not None:
            groups[record.creates] = None
            ranks |= {rank, *record.members}
    if not groups:
        return None
    # A rank that is no member for the others may be one for itself.
    if world_size * len(groups) <= incarnations.MAX_STAMPS_READ:
        ranks = set(range(world_size))
    found = incarnations.find_diverged(
        connection, list(groups)[:_MAX_GROUPS_READ], ranks, blocked
    )
    if found is None:
        return None
    started = min(record.started for record in blocked.values())
    return replace(found, waited_seconds=max(0.0, found.time - started))


def still_holds(
    connection: Any, own: BlockedRecord, member: Member, verdict: Verdict
) -> bool:
    """Return whether all ranks that a verdict names are awaited now.

    Args:
        connection: A connection to the store in which the ranks registered.
        own: The record of the blocked call of this rank, as of now.
        member: The rank of this process.
        verdict: A verdict of `inquire`, on an earlier record of the call.
    """
    if own.awaits is not None and set(verdict.awaited_ranks).issubset(own.awaits):
        return True  # without the records of all ranks
    blocked = _blocked(connection, own, member.world_size)
    suspects = find_suspects(blocked, member.world_size)
    # A rank whose call has failed may be awaited, or what it waited for.
    awaited = {*suspects.all_ranks, *suspects.failed}
    causes = {verdict.cause, *(one.cause for one in verdict.awaited)}
    if causes.intersection(("mismatch", "diverged", "circular", "gone")):
        awaited |= blocked.keys()  # its ranks wait themselves, or ended in a wait
    return awaited.issuperset(verdict.awaited_ranks)


def is_confirmed(connection: Any, member: Member, verdict: Verdict) -> bool:
    """Return whether the processes at the head of a verdict answer that it is so.

    A record in the store may be anyone's. One of this rank itself needs no answer.

    Args:
        connection: A connection to the store in which the ranks registered.
        member: The rank of this process.
        verdict: A verdict of `inquire` in which ranks have ended, or wait themselves.
    """
    head = {one.rank for one in verdict.awaited if one.cause == verdict.cause}
    asked = sorted(head - {member.rank})
    registered = _registered(connection, asked, restart_count(os.environ))
    answers = ask_ranks(
        connection, registered, asked, member.world_size, _CONFIRM_TIMEOUT
    )
    if verdict.cause == "gone":
        return bool(head) and all(
            (answer := answers.get(rank)) is not None and answer.state == "gone"
            for rank in asked
        )
    return bool(head) and all(
        _is_blocked(answer := answers.get(rank)) or _is_in_collective(answer)
        for rank in asked
    )


def _is_in_collective(answer: ProcessFacts | None) -> bool:
    return answer is not None and answer.collective != ""


def _is_blocked(answer: ProcessFacts | None) -> bool:
    """Return whether a process answered that it is in a Store call that may block."""
    if answer is None or answer.state != "running":
        return False
    if answer.operation.partition(" ")[0] in _BLOCKING:
        return True
    # A helper thread that creates a process group.
    return any(
        call.operation in _BLOCKING and meaning(call.key) is not None
        for call in answer.in_flight
    )


def _doubtful(
    blocked: Mapping[int, BlockedRecord], own: int, suspects: Suspects
) -> list[int]:
    """Return blocked ranks that others wait for, or all if no other rank can act.

    The record of a process that was killed stays in the store, and so does that of a
    call that has failed.
    """
    awaited = {rank for record in blocked.values() for rank in record.awaits or ()}
    awaited |= suspects.failed
    doubtful = awaited & blocked.keys() if suspects.all_ranks else blocked.keys()
    return sorted(doubtful - {own})[:MAX_AWAITED]


def _blocked(
    connection: Any, own: BlockedRecord, world_size: int
) -> dict[int, BlockedRecord]:
    """Return the records of this attempt and stall."""
    few = _of_few(connection, own, world_size)
    records = read_blocked(connection, world_size) if few is None else few
    if own.group and own.awaits is not None:
        # All ranks of a group wait for the same keys, and these records are older.
        awaits = frozenset(own.awaits)
        for rank, record in records.items():
            if record.group == own.group and record.awaits is not None:
                still = tuple(one for one in record.awaits if one in awaits)
                records[rank] = replace(record, awaits=still)
    records[own.rank] = own
    current = {
        rank: record
        for rank, record in records.items()
        if record.attempt == own.attempt and record.is_of_stall(own.started)
    }
    return _resolve(connection, current, own.rank, world_size, {})


def _of_few(
    connection: Any, own: BlockedRecord, world_size: int
) -> dict[int, BlockedRecord] | None:
    """Return the records that matter in a large job; None to read all.

    The ledger of a collective has the ranks that are there, and with digests what they
    called. So the records of those that are not there are read, of the ranks that these
    wait for, and of one rank of each kind.
    """
    position = own.collective
    if world_size <= _MAX_RECORDS or position is None or own.awaits is None:
        return None
    there = read_entered(connection, position, own.attempt, world_size)
    if not there:
        return None  # a store without ledgers
    of_kind = {digest: rank for rank, digest in there.items()}
    wanted = {*own.awaits[:_MAX_RECORDS], *list(of_kind.values())[:_MAX_LEDGERS]}
    found = {own.rank: own}
    read = {own.rank}
    for _ in range(_MAX_STEPS):
        wanted -= read
        if not wanted:
            break
        found |= read_blocked(connection, world_size, wanted)
        read |= wanted
        resolved = _resolve(connection, found, own.rank, world_size, {})
        awaited = (rank for one in resolved.values() for rank in one.awaits or ())
        wanted = set(islice(awaited, _MAX_RECORDS))
    return found


def _with_all_waiting(
    connection: Any, verdict: Verdict, own: BlockedRecord, world_size: int
) -> Verdict:
    """Return a verdict with all ranks that wait in a collective of a large job."""
    position = own.collective
    if world_size <= _MAX_RECORDS or position is None:
        return verdict
    there = read_entered(connection, position, own.attempt, world_size)
    waiting = {*verdict.waiting_ranks, *there}.difference(verdict.awaited_ranks)
    return replace(verdict, waiting_ranks=tuple(sorted(waiting)))


def _resolve(
    connection: Any,
    blocked: Mapping[int, BlockedRecord],
    own: int,
    world_size: int,
    answers: Answers,
) -> dict[int, BlockedRecord]:
    """Find whom the collectives wait for, from the records, ledgers and answers."""
    entered: dict[tuple[str, int], Collection[int]] = {}
    # The own one first: not all ledgers are read.
    for record in sorted(blocked.values(), key=lambda one: one.rank != own):
        position = record.collective
        if position is None or position.number is None:
            continue
        key = position.group, position.number
        if key not in entered and len(entered) < _MAX_LEDGERS:
            entered[key] = read_entered(
                connection, position, record.attempt, world_size
            )
    known = Known(
        entered=entered,
        called={rank: answer.called for rank, answer in answers.items()},
        ended={rank for rank, answer in answers.items() if answer.state == "gone"},
    )
    return resolve(blocked, world_size, known)


def _registered(
    connection: Any, ranks: Sequence[int], attempt: int
) -> dict[int, RankInfo]:
    """Return the registrations of this attempt."""
    infos = rank_registry.read_ranks(connection, ranks)
    return {rank: info for rank, info in infos.items() if info.attempt == attempt}


def _seen(connection: Any, ranks: Iterable[int], attempt: int) -> Answers:
    """Return ranks without a registration that have written torch's keys.

    They have started. A program that only wraps its store has its rank from
    init_process_group, and registers a moment after it. A restart keeps the keys.
    """
    if attempt:
        return {}
    keys = {
        key: rank
        for rank in islice(ranks, MAX_AWAITED)
        for key in torch_keys.written_at_init(rank)
    }
    absent = set(absent_keys(connection, list(keys)))
    return {
        rank: ProcessFacts(rank=rank, host="", state="unresponsive", detail=_SEEN)
        for key, rank in keys.items()
        if key not in absent
    }


def _ask(
    connection: Any,
    registered: Mapping[int, RankInfo],
    ranks: Sequence[int],
    member: Member,
    blocked: Mapping[int, BlockedRecord],
    timeout: float,
    hurry: Callable[[], bool],
) -> Answers:
    # A rank that has never connected may have a process all the same. Those that have
    # connected come first: more than 64 are not asked.
    asked = [*registered, *(rank for rank in ranks if rank not in registered)]
    families = {fold(key) for record in _of_users(blocked) for key in record.keys}
    return ask_ranks(
        connection,
        registered,
        asked[:MAX_AWAITED],
        member.world_size,
        timeout,
        families=sorted(families)[:_MAX_FAMILIES_ASKED],
        hurry=hurry,
    )


def _of_users(blocked: Mapping[int, BlockedRecord]) -> list[BlockedRecord]:
    """Return the waits for keys that are not torch's."""
    return [
        record
        for record in blocked.values()
        if record.awaits is None and not record.protocol
    ]


def _apply_learned(
    blocked: Mapping[int, BlockedRecord], answers: Answers, world_size: int
) -> dict[int, BlockedRecord]:
    """Add the writers of users' keys, where ranks wrote keys of the same family."""
    written: dict[int, Sequence[WrittenFamily]] = {
        rank: record.wrote for rank, record in blocked.items()
    }
    written |= {rank: answer.wrote for rank, answer in answers.items()}
    refined = dict(blocked)
    for record in _of_users(blocked):
        writers = learned_writers(record.keys, written, world_size)
        # A rank does not wait for what it writes itself.
        if writers and record.rank not in writers:
            refined[record.rank] = replace(record, awaits=writers)
    return refined


def _apply_rank_keys(
    connection: Any, blocked: dict[int, BlockedRecord], own: int, world_size: int
) -> dict[int, BlockedRecord]:
    """Add the writers of this rank's keys, if every rank writes one."""
    if blocked[own] not in _of_users(blocked) or not blocked[own].keys:
        return blocked
    awaits = find_awaited(connection, blocked[own].keys[0], blocked, world_size)
    if awaits is None:
        return blocked
    return {**blocked, own: replace(blocked[own], awaits=awaits)}


def _agents(
    processes: Mapping[int, tuple[str, int]], world_size: int, now: float
) -> dict[int, RankInfo]:
    """Return the agents of a rendezvous as registrations."""
    return {
        rank: RankInfo(
            rank=rank, host=host, pid=pid, world_size=world_size, started=now
        )
        for rank, (host, pid) in processes.items()
    }


def _of_agents(verdict: Verdict) -> Verdict:
    """Return a verdict on agents, of which only those of this host are examined."""
    awaited = tuple(
        one
        if one.source
        else replace(one, doing="has joined the rendezvous", remedy=_AGENTS_REMEDY)
        for one in verdict.awaited
    )
    remedy = remedy_of(awaited) if awaited else verdict.remedy
    return replace(verdict, agents=True, awaited=awaited, remedy=remedy)


def _examine_agents(member: Member, ranks: Sequence[int]) -> Answers:
    """Return the agents of this host whose processes have ended."""
    processes = member.agents or {}
    own_host, _ = processes.get(member.rank, ("", 0))
    answers = {}
    for rank in ranks:
        host, pid = processes.get(rank, ("", 0))
        if host and host == own_host and procfs.is_absent(pid):
            answers[rank] = ProcessFacts(
                rank=rank, host=host, pid=pid, state="gone", source="/proc of its host"
            )
    return answers


def _with_replacements(connection: Any, verdict: Verdict) -> Verdict:
    """Add jobs that share the store, and ranks that were started twice."""
    replacements = incarnations.read_replacements(connection)
    jobs = incarnations.jobs_in(replacements, process_identity().run_id)
    if jobs:
        return incarnations.shared_store(verdict, jobs)
    duplicates = incarnations.duplicates_in(replacements)
    # Where a rank was started twice, others were not started.
    if not duplicates or verdict.cause not in ("not_started", "unknown"):
        return verdict
    return replace(
        verdict,
        cause="duplicate",
        evidence=(*duplicates[:MAX_AWAITED], *verdict.evidence),
        remedy=REMEDIES["duplicate"],
    )


def find_excess(
    connection: Any, registry: Any, own: BlockedRecord, member: Member
) -> Verdict | None:
    """Return a verdict if more ranks arrived than there are.

    Args:
        connection: A connection to the store of the blocked call.
        registry: A connection to the store in which the ranks registered.
        own: The record of that call.
        member: The rank of this process.
    """
    known = meaning(own.keys[0]) if own.keys else None
    if known is None or known.counter is None:
        return None
    if known.group_name and torch_keys.members_of(known.group_name) is None:
        return None
    size = member.world_size if own.members is None else len(own.members)
    count = _read_count(connection, known.counter)
    if count <= size:
        return None
    waiting = {
        rank
        for rank, record in read_blocked(registry, member.world_size).items()
        if (record.phase, record.attempt, record.failed)
        == (own.phase, own.attempt, None)
    }
    launches = incarnations.launches_in(incarnations.read_replacements(registry))
    return Verdict(
        phase=own.phase,
        cause="too_many",
        known=f"{count} arrivals were counted for {size} ranks",
        waiting_ranks=tuple(sorted({own.rank, *waiting})),
        key=own.keys[0],
        waited_seconds=max(0.0, time.time() - own.started),
        evidence=(
            f"{known.counter} is {count}",
            *(f"registered: {launch}" for launch in launches),
        ),
        remedy=REMEDIES["too_many"],
        time=time.time(),
    )


def _read_count(connection: Any, counter: str) -> int:
    """Return the count; 0 if there is none, or the value is no number."""
    if not connection.check([counter]):
        return 0
    try:
        return validation.digits(read_key(connection, counter), _MAX_COUNT)
    except ValueError:
        return 0


def find_causes(
    store: Any, ranks: Sequence[int], world_size: int
) -> dict[int, Finding]:
    """Return why the first 64 of these ranks do not arrive, as far as it is known.

    Args:
        store: A connection that no other thread uses.
        ranks: Ranks that did not arrive.
        world_size: The number of ranks.
    """
    if rank_registry.agent_in(store) is not None:
        return {}  # agents do not register
    first = list(ranks[:MAX_AWAITED])
    attempt = restart_count(os.environ)
    registered = {
        rank: info
        for rank, info in rank_registry.read_ranks(store, first).items()
        if info.attempt == attempt
    }
    # Only ranks that have registered: one that does not answer must not delay the
    # verdict, and any process of this host may be one that has not registered.
    pids = [info.pid for info in registered.values()]
    replies = ask_processes(pids, "status", _HOST_TIMEOUT) if pids else {}
    answers = known_ranks(
        replies, registered, registered, LocalIdentity.own(), _HOST_TIMEOUT
    )
    elsewhere = registered.keys() - answers.keys()
    if elsewhere:
        answers |= ask_ranks(store, registered, elsewhere, world_size, _ANSWER_TIMEOUT)
    now = time.time()
    current = {
        rank: record
        for rank, record in read_blocked(store, world_size).items()
        if record.attempt == attempt
        and record.is_of_stall(now)
        and still_waits(record, answers.get(rank), now)
    }
    return {
        rank: _finding(
            rank, answers.get(rank), registered.get(rank), current.get(rank), now
        )
        for rank in first
    }


def _finding(
    rank: int,
    answer: ProcessFacts | None,
    info: RankInfo | None,
    record: BlockedRecord | None,
    now: float,
) -> Finding:
    is_of_process = record is not None and (
        (info is None or info.pid == record.pid)
        and (answer is None or answer.state not in ("stopped", "unresponsive"))
    )
    if record is not None and is_of_process:
        return Finding("diverged", describe_wait(record), "its blocked call")
    awaited = describe_rank(rank, answer, info, "", now)
    if answer is None:
        # A rank that is not traced does not register: without an answer there is
        # nothing to add to its name.
        source = "it has registered" if info else "it has not registered"
        return Finding(awaited.cause, "", f"{source}, and no process answers for it")
    doing = awaited.activity(now)
    return Finding(awaited.cause, doing, f"its state from {answer.source}")
