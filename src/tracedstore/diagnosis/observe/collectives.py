"""Collectives of this process that do not end: which one, in which group, since when.

A collective pays nothing for it. The diagnosis thread reads the sequence number of each
process group once a second. Where a number has not moved for most of `stall_after`,
torch's recorder is read once (`flight_recorder`): its first entry that has not retired
is what this process waits in.

Not everything is recorded: not what gloo does from one rank to another, not
``monitored_barrier``, nothing while the communicator of a group is created, and nothing
at all before torch 2.11. That is known from the stack of the thread that is in torch:
it is in the same call of ``torch.distributed`` for so long, and no number moves. Of
that call's frame, which is torch's, the arguments ``group``, ``src`` and ``dst`` are
read, and nothing else.
"""

import math
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import tracedstore
from tracedstore import names
from tracedstore.diagnosis.observe import flight_recorder
from tracedstore.diagnosis.observe.blocked_record import (
    MAX_GROUPS,
    CollectivePosition,
)
from tracedstore.diagnosis.observe.flight_recorder import (
    Entry,
    GroupRecord,
    shown_description,
    shown_name,
)
from tracedstore.local.facts import describe_frame
from tracedstore.recording.recorder import RECORDER

# The share of `stall_after`, and of a group's own timeout, after which its numbers have
# not moved: as for Store calls (`blocked_calls`).
SHARE_OF_STALL: Final = 0.8
SHARE_OF_TIMEOUT: Final = 0.4
# Groups whose numbers are read in one look; with more, in turns.
_GROUPS_PER_LOOK: Final = 64
# Groups that are known, and threads whose stacks are examined.
_MAX_GROUPS: Final = 1024
_MAX_THREADS: Final = 64
_MAX_STACK: Final = 200
# Every so many looks, the stacks of all threads are examined, and not the main one's
# alone.
_ALL_THREADS_EVERY: Final = 4
# Seconds in which a process that was asked examines calls that have lasted this long.
_ASKED: Final = 10.0
_SOON: Final = 0.5
# Seconds between two reads of the recorder: at least, and while a call is stuck.
_SHORTEST_READ: Final = 1.0
_READ_WHILE_STUCK: Final = 5.0
_MODULE: Final = "torch.distributed.distributed_c10d"
# Calls of one rank to another.
_TO_PEER: Final = {
    "recv": ("src", "group_src"),
    "irecv": ("src", "group_src"),
    "send": ("dst", "group_dst"),
    "isend": ("dst", "group_dst"),
}
# The functions of `torch.distributed` in which a thread communicates. Others, such as
# new_group, wait in the store.
_COMMUNICATE: Final = frozenset(
    (
        *_TO_PEER,
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "gather",
        "monitored_barrier",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "scatter",
        "_all_gather_base",
        "_reduce_scatter_base",
    )
)
# Recorders have no entries of these, whatever the backend.
_UNRECORDED: Final = frozenset(("monitored_barrier", "batch_isend_irecv"))
_TORCH: Final = f"{Path(torch.__file__).parent}/"
_OWN: Final = f"{Path(tracedstore.__file__).parent}/"
_DEMO: Final = f"{_OWN}tools/demo/"
_LIBRARIES: Final = tuple(
    f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")
)


@dataclass(slots=True, eq=False)
class WatchedGroup:
    """A process group of this process.

    Attributes:
        name: Its name in torch, which all of its ranks share.
        description: Its description; "" without one.
        members: The ranks of the job, in the order of the group's own ranks.
        timeout: Seconds after which its collectives fail; 0 if that is unknown.
        backends: The names of its backends.
        number: Its sequence number, None if its backend has none. Point-to-point
            operations are counted too, so that those of two ranks may differ.
        moved_at: When that changed, by ``time.monotonic``.
        seen: When it was seen first, in seconds since the epoch.
        examined: The number at which the recorder was read; None before.
    """

    name: str
    description: str
    members: tuple[int, ...]
    timeout: float = 0.0
    backends: frozenset[str] = frozenset()
    number: int | None = None
    moved_at: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.time)
    examined: int | None = None

    def still_seconds(self, now: float) -> float:
        """Return for how long its number has not moved."""
        return now - self.moved_at

    def patience(self, stall_after: float) -> float:
        """Return the seconds after which it is examined."""
        after = stall_after * SHARE_OF_STALL
        return min(after, self.timeout * SHARE_OF_TIMEOUT) if self.timeout else after


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckCall:
    """A collective or a point-to-point operation that does not end.

    Attributes:
        position: What is published about it.
        members: The ranks of its group.
        peers: The ranks that it waits for, of a point-to-point operation; None for a
            collective.
        started: When it was called, in seconds since the epoch.
        timeout: Seconds after which it fails; 0 if that is unknown.
        sequence: The sequence number of its group.
        thread_id: The thread that called it.
        is_synchronous: That thread is in the call.
    """

    position: CollectivePosition
    members: tuple[int, ...]
    peers: tuple[int, ...] | None = None
    started: float
    timeout: float = 0.0
    sequence: int | None = None
    thread_id: int = 0
    is_synchronous: bool = True

    @property
    def identity(self) -> tuple[str, float, str, int | None]:
        """What tells two calls apart."""
        position = self.position
        number = position.number if position.number is not None else self.sequence
        return position.group, position.since, position.operation, number


@dataclass(slots=True, eq=False)
class _InTorch:
    """The call of ``torch.distributed`` in which a thread is.

    Attributes:
        frame: The identity of its frame.
        line: The line in torch.
        function: The function of torch.
        group: The name of its group; "" if it is unknown.
        peer: Its other rank.
        place: The line of the program that called it.
        number: The sequence number of its group then; None if it is unknown.
        since: When it was seen first, by ``time.monotonic``.
    """

    frame: int
    line: int
    function: str
    group: str
    peer: int | None
    place: str
    number: int | None
    since: float

    def is_same(self, frame: FrameType, groups: Mapping[str, WatchedGroup]) -> bool:
        """Return whether a thread is still in this call.

        A later call may have a frame of the same identity.
        """
        group = groups.get(self.group)
        number = None if group is None else group.number
        return (self.frame, self.line, self.number) == (
            id(frame),
            frame.f_lineno,
            number,
        )


class Collectives:
    """Watches the process groups of this process.

    Args:
        stall_after: Seconds after which a wait is reported; 0 for never.
        monotonic: The clock, for tests.
    """

    def __init__(
        self, stall_after: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._stall_after = stall_after
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Forget the parent's groups, as a forked child must."""
        self._lock = threading.RLock()
        # When another process asked that may wait for this one; and the seconds after
        # which a call counts as one that does not end, if that is sooner.
        self._asked_at: float | None = None
        self._soon = math.inf
        self.groups: dict[str, WatchedGroup] = {}
        # When a number last moved, or a group was created, by the clock and since the
        # epoch; None without a group.
        self.moved: tuple[float, float] | None = None
        self._records: Mapping[str, GroupRecord] = {}
        self._read_at = 0.0
        self._in_torch: dict[int, _InTorch] = {}
        self._turn = self._looks = 0
        # Where the threads were when the recorder was read that have a stuck call.
        self._places: dict[int, str] = {}

    @property
    def is_on(self) -> bool:
        """Whether groups are watched."""
        return self._stall_after > 0

    def moved_at(self) -> float:
        """Return when a number last moved, by the clock; 0 without a group."""
        return self.moved[0] if self.moved is not None else 0.0

    def look(self) -> list[StuckCall]:
        """Read the numbers; return the calls that do not end, the most telling first.

        Runs in the diagnosis thread, about once a second.
        """
        if not self._stall_after:
            return []
        with self._lock:
            now = self._monotonic()
            asked = self._asked_at is not None and now - self._asked_at < _ASKED
            self._soon = _SOON if asked else math.inf
            return self._look(now)

    def _look(self, now: float) -> list[StuckCall]:
        world = _world()
        if world is None or not world.pg_map:
            self.groups.clear()
            self._records, self._in_torch = {}, {}
            return []
        self._read_numbers(world, now)
        self._looks += 1
        self._look_at_threads(world, now)
        del world
        if self._is_read_due(now):
            self._read_recorder(now)
        return self._stuck(now)

    def lasts(self, call: StuckCall) -> bool:
        """Return whether a call that `look` returned has not ended yet."""
        with self._lock:
            stuck = self._look(self._monotonic())
            return any(one.identity == call.identity for one in stuck)

    def answer(self) -> tuple[str, dict[str, int]]:
        """Return what this process waits in, and the last collective of each group.

        For an answer to another process, which may wait for this one: so a collective
        that has lasted for a moment counts, and this rank publishes it now.
        """
        if not self._stall_after:
            return "", {}
        with self._lock:
            now = self._monotonic()
            self._soon = _SOON
            stuck = self._look(now)
            if stuck:
                self._asked_at = now
            return (stuck[0].position.phase if stuck else ""), self._called()

    # Movement.

    def _read_numbers(self, world: Any, now: float) -> None:
        present = list(world.pg_names.items())[:_MAX_GROUPS]
        found = {shown_name(str(name)) for _, name in present}
        for name in self.groups.keys() - found:
            del self.groups[name]
        if self._turn >= len(present):
            self._turn = 0
        some = present[self._turn : self._turn + _GROUPS_PER_LOOK]
        self._turn += _GROUPS_PER_LOOK
        # A group that the job destroys meanwhile is freed when this returns.
        del present
        for process_group, name in some:
            self._read_number(world, process_group, shown_name(str(name)), now)

    def _read_number(
        self, world: Any, process_group: Any, name: str, now: float
    ) -> None:
        group = self.groups.get(name)
        if group is None or group.members != _members(world, process_group):
            group = _group(world, process_group, name)
            group.moved_at = now
            self.groups[name] = group
            self.moved = now, time.time()
        try:
            number: int | None = process_group._get_sequence_number_for_group()  # noqa: SLF001 - has no public name
        except Exception:  # a backend without numbers, or one that failed
            return
        if number != group.number:
            group.number, group.moved_at, group.examined = number, now, None
            self.moved = now, time.time()

    def _patience(self, group: WatchedGroup) -> float:
        return min(group.patience(self._stall_after), self._soon)

    # What is recorded.

    def _is_read_due(self, now: float) -> bool:
        if now - self._read_at < _SHORTEST_READ:
            return False
        if any(self._is_due(group, now) for group in self.groups.values()):
            return True
        if not any(record.pending for record in self._records.values()):
            return False
        # Whether a call has ended shows in the recorder alone, if no other follows.
        went_on = any(
            self._place_of(thread) != place for thread, place in self._places.items()
        )
        return went_on or now - self._read_at >= _READ_WHILE_STUCK

    def _is_due(self, group: WatchedGroup, now: float) -> bool:
        return (
            group.number is not None
            and group.number > 0
            and len(group.members) > 1
            and group.examined != group.number
            and group.still_seconds(now) >= self._patience(group)
        )

    def _read_recorder(self, now: float) -> None:
        self._read_at = now
        numbers = {name: group.number for name, group in self.groups.items()}
        hangs = all(
            group.still_seconds(now) >= self._patience(group)
            for group in self.groups.values()
        )
        backends = {one for group in self.groups.values() for one in group.backends}
        self._records = flight_recorder.read(nccl=hangs, backends=backends)
        for name, group in self.groups.items():
            # Of a number that has just moved, the next look says more.
            if group.still_seconds(now) >= self._patience(group):
                group.examined = numbers[name]
        pending = (one.pending for one in self._records.values())
        threads = {one.thread_id for one in pending if one is not None}
        self._places = {thread: self._place_of(thread) for thread in threads}

    # What threads do.

    def _look_at_threads(self, world: Any, now: float) -> None:
        main = threading.main_thread().ident
        everyone = self._looks % _ALL_THREADS_EVERY == 0
        frames = sys._current_frames()  # noqa: SLF001 - the only way
        found: dict[int, _InTorch] = {}
        try:
            for thread in list(frames)[:_MAX_THREADS]:
                known = self._in_torch.get(thread)
                if thread != main and not everyone and known is None:
                    continue
                frame = _communicating(frames[thread])
                if frame is None:
                    continue
                if known is None or not known.is_same(frame, self.groups):
                    known = self._describe(world, frame, now)
                found[thread] = known
                del frame
        finally:
            # It contains the frame of this function, and so itself.
            frames.clear()
        self._in_torch = found

    def _describe(self, world: Any, frame: FrameType, now: float) -> _InTorch:
        function = frame.f_code.co_name
        # Of a frame of torch, and these names alone.
        found = frame.f_locals
        process_group = found.get("group")
        if process_group is None or process_group not in world.pg_names:
            name = _default_name(world) if process_group is None else ""
        else:
            name = shown_name(str(world.pg_names[process_group]))
        peer = None
        if function in _TO_PEER:
            peer = next(
                (
                    found[one]
                    for one in _TO_PEER[function][:1]
                    if _is_rank(found.get(one))
                ),
                None,
            )
            in_group = found.get(_TO_PEER[function][1])
            if peer is None and _is_rank(in_group) and process_group is not None:
                peer = next(
                    iter(_global_ranks(_members(world, process_group), in_group)), None
                )
        del found, process_group
        group = self.groups.get(name)
        return _InTorch(
            frame=id(frame),
            line=frame.f_lineno or 0,
            function=function,
            group=name,
            peer=peer,
            place=place_of(frame),
            number=None if group is None else group.number,
            since=now,
        )

    def _place_of(self, thread: int) -> str:
        known = self._in_torch.get(thread)
        return "" if known is None else f"{known.frame} {known.line}"

    # Both together.

    def _stuck(self, now: float) -> list[StuckCall]:
        main = threading.main_thread().ident
        found: list[tuple[tuple[bool, float], StuckCall]] = []
        recorded: set[str] = set()
        for record in self._records.values():
            group, entry = self.groups.get(record.name), record.pending
            if group is None or entry is None or group.number != group.examined:
                continue
            recorded.add(record.name)
            waited = time.time() - entry.created
            if waited >= self._patience(group):
                order = entry.thread_id != main, entry.created
                found.append((order, self._of_entry(group, record, entry)))
        for thread, call in self._in_torch.items():
            group = self.groups.get(call.group)
            if group is None or call.group in recorded or len(group.members) < 2:  # noqa: PLR2004 - alone it waits for nobody
                continue
            # A backend whose numbers are unknown has not moved for as long as the call.
            still = min(now - call.since, group.still_seconds(now))
            if group.number is None:
                still = now - call.since
            if still >= self._patience(group):
                order = thread != main, call.since
                found.append((order, self._of_thread(group, thread, call, still)))
        found.sort(key=lambda one: one[0])
        return [call for _, call in found]

    def _called(self) -> dict[str, int]:
        """Return the last collective of each group, of those that moved last."""
        records = sorted(
            self._records.values(),
            key=lambda one: one.recent[-1].created if one.recent else 0.0,
        )
        return {one.name: one.last_called for one in records[-MAX_GROUPS:]}

    def _of_entry(
        self, group: WatchedGroup, record: GroupRecord, entry: Entry
    ) -> StuckCall:
        thread = self._in_torch.get(entry.thread_id)
        place = "" if thread is None else thread.place
        peers = _global_ranks(group.members, entry.peer) if entry.is_p2p else None
        return StuckCall(
            position=record.position_of(
                entry,
                description=group.description,
                place=place or _place_of_thread(entry.thread_id),
                since=group.seen,
                called=self._called(),
            ),
            members=group.members,
            peers=peers,
            started=entry.created,
            timeout=group.timeout,
            sequence=group.number,
            thread_id=entry.thread_id,
            is_synchronous=thread is not None and thread.group == group.name,
        )

    def _of_thread(
        self, group: WatchedGroup, thread: int, call: _InTorch, still: float
    ) -> StuckCall:
        record = self._records.get(group.name)
        is_recorded = record is not None and call.function not in _UNRECORDED
        peers: tuple[int, ...] | None = None
        number: int | None = None
        if call.function in _TO_PEER:
            peers = () if call.peer is None else (call.peer,)
        elif record is not None and is_recorded:
            # Its entry is written when its communicator exists.
            number = record.last_number + 1
        return StuckCall(
            position=CollectivePosition(
                group=group.name,
                description=group.description,
                number=number,
                operation=flight_recorder.operation_of(call.function),
                recent=() if record is None else record.recent_calls(),
                place=call.place,
                since=group.seen,
                called=self._called(),
            ),
            members=group.members,
            peers=peers,
            started=time.time() - still,
            timeout=group.timeout,
            sequence=group.number,
            thread_id=thread,
        )


def _world() -> Any:
    """Return torch's table of groups; None before torch.distributed is used."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    world = getattr(module, "_world", None)
    if world is None:
        RECORDER.failures.add_missing(
            names.DIAGNOSIS,
            "distributed_c10d._world",
            "hung collectives are not found",
        )
    return world


def _members(world: Any, process_group: Any) -> tuple[int, ...]:
    ranks = world.pg_group_ranks.get(process_group) or {}
    return tuple(sorted(ranks, key=ranks.__getitem__))


def _group(world: Any, process_group: Any, name: str) -> WatchedGroup:
    description = str(getattr(process_group, "group_desc", "") or "")
    return WatchedGroup(
        name=name,
        description=shown_description(description),
        members=_members(world, process_group),
        timeout=_timeout_of(process_group),
        backends=_backends_of(process_group),
    )


def _backends_of(process_group: Any) -> frozenset[str]:
    with suppress(Exception):
        return frozenset(
            shown_name(process_group._get_backend(device).name())  # noqa: SLF001 - has no public name
            for device in process_group._device_types  # noqa: SLF001
        )
    return frozenset()


def _timeout_of(process_group: Any) -> float:
    """Return the timeout of a group in seconds; 0 if it is unknown."""
    with suppress(Exception):
        for device in process_group._device_types:  # noqa: SLF001 - has no public name
            options = process_group._get_backend(device).options  # noqa: SLF001
            found = options._timeout  # noqa: SLF001
            if isinstance(found, timedelta):
                return found.total_seconds()
    return 0.0


def _stack(innermost: FrameType | None) -> Iterator[FrameType]:
    frame, left = innermost, _MAX_STACK
    while frame is not None and left:
        yield frame
        frame, left = frame.f_back, left - 1


def _communicating(innermost: FrameType | None) -> FrameType | None:
    """Return the innermost frame of ``distributed_c10d.py``, if it communicates."""
    for frame in _stack(innermost):
        if frame.f_globals.get("__name__") == _MODULE:
            return frame if frame.f_code.co_name in _COMMUNICATE else None
    return None


def _default_name(world: Any) -> str:
    default = getattr(world, "default_pg", None)
    return "" if default is None else shown_name(str(world.pg_names.get(default, "")))


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 0


def _global_ranks(members: Sequence[int], group_rank: int | None) -> tuple[int, ...]:
    if group_rank is None or group_rank >= len(members):
        return ()
    return (members[group_rank],)


def _place_of_thread(thread: int) -> str:
    """Return where a thread of the program is that called something asynchronously."""
    # Not in a variable, which would make a cycle.
    return place_of(sys._current_frames().get(thread))  # noqa: SLF001


def place_of(innermost: FrameType | None) -> str:
    """Return the line of the program: the innermost one outside of libraries.

    Without one, that of the library that called torch.
    """
    library = ""
    for frame in _stack(innermost):
        file = frame.f_code.co_filename
        if file.startswith((_TORCH, "<frozen")):
            continue
        if file.startswith(_OWN) and not file.startswith(_DEMO):
            continue
        if not file.startswith(_LIBRARIES):
            return str(describe_frame(frame))
        library = library or str(describe_frame(frame))
    return library
