"""Facts about one process of the job: its own answer, or another's word.

There is one object, `ProcessFacts`, and one encoder. The Unix socket, the page
``/inflight`` and the answers through the store read and write it. `LocalIdentity` says
which process of which job it is, as processes of one host tell them apart. `own_facts`
collects the facts about this process: its calls in flight, when its last one ended, the
key families that it wrote, and the stacks of its threads.
"""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final, Literal

import tracedstore
from tracedstore import names
from tracedstore.common import codec, keys, procfs, ranges, validation
from tracedstore.common.codec import (
    Kind,
    Large,
    Pid,
    Printable,
    Rank,
    Seconds,
    Small,
    UpTo,
    Words,
)
from tracedstore.common.identity import (
    ProcessIdentity,
    StoreIdentity,
    bottom_of,
    identify,
    process_identity,
    restart_count,
)
from tracedstore.common.keys import shown
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import StalledBarrier
from tracedstore.local.rank_threads import rank_threads
from tracedstore.naming.decoders import by_host
from tracedstore.recording.counters import BUCKETS, StoreState, handle_of, thread_names
from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import RECORDER, Recorder
from tracedstore.signals.inflight import InFlight, in_flight

State = Literal["running", "stopped", "unresponsive", "gone", "silent"]

MAX_FRAMES: Final = 8
# Of a process, if all stacks are asked for.
MAX_THREADS: Final = 64
MAX_STACK_FRAMES: Final = 64
MAX_FAMILIES: Final = 16
# Process groups whose numbers are listed.
MAX_GROUPS: Final = 64
# Characters of a file, a function and the name of a thread.
MAX_NAME: Final = 200
MAX_ANSWER_BYTES: Final = 4 << 20
_MAX_LINE = 2**31
_MAX_POSITIONS = 16
# Calls listed. A thread has one call in flight, and the oldest ones describe a process
# with more threads well enough.
MAX_CALLS: Final = 64
# Missing ranks in the facts that are parsed. A few bytes may stand for any number.
_MAX_MISSING_RANKS: Final = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a Python stack; never values.

    Attributes:
        file: The file, its last two path components.
        line: The line.
        function: The function.
    """

    file: Words
    line: Annotated[int, codec.below(_MAX_LINE)]
    function: Words

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


Stack = Annotated[tuple[Frame, ...], UpTo(MAX_STACK_FRAMES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFamily:
    """A key family that a process wrote.

    Attributes:
        family: The family, as `keys.fold_numbers` returns it.
        last_key: The key of the last write that was recorded.
        writes: The number of recorded writes. Ordinary writes are recorded within the
            span budget only.
        rank_positions: The variable parts of the family, from 0, that had the rank of
            the process in every recorded write.
    """

    family: Printable
    last_key: Printable
    writes: Large = 1
    rank_positions: Annotated[
        tuple[Annotated[int, codec.below(_MAX_LINE)], ...], UpTo(_MAX_POSITIONS)
    ] = ()


def _read_called(found: Any, _ranks: int) -> dict[str, int]:
    if type(found) is not dict:
        raise ValueError("not an object")
    return {
        codec.printable_text(name): validation.integer(number, 2**63)
        for name, number in islice(found.items(), MAX_GROUPS)
    }


# Numbers of collectives, by process group.
Called = Annotated[Mapping[str, int], Kind(_read_called, dict)]


def _read_barriers(found: Any, _ranks: int) -> tuple[StalledBarrier, ...]:
    """Return stalled barriers; the missing ranks of all of them are bounded."""
    barriers = []
    remaining = _MAX_MISSING_RANKS
    try:
        for barrier in found:
            missing: dict[int, str] = {}
            for host, folded in barrier["missing"].items():
                ranks = ranges.unfold(folded, remaining)
                remaining -= len(ranks)
                missing |= dict.fromkeys(ranks, codec.words(host))
            barriers.append(
                StalledBarrier(
                    family=codec.words(barrier["barrier"]),
                    arrived=validation.integer(barrier["arrived_count"], 2**63),
                    missing=missing,
                    possible=validation.integer(
                        barrier["possibly_missing_count"], 2**63
                    ),
                )
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("not a list of stalled barriers") from error
    return tuple(barriers)


def _write_barriers(barriers: Iterable[StalledBarrier]) -> list[dict[str, Any]]:
    """Return stalled barriers as JSON; missing ranks are folded: they may be many."""
    return [
        {
            "barrier": stalled.family,
            "arrived_count": stalled.arrived,
            "missing": {
                host: ranges.fold(ranks)
                for host, ranks in by_host(
                    stalled.missing, stalled.missing.__getitem__
                ).items()
            },
            "possibly_missing_count": stalled.possible,
        }
        for stalled in barriers
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What is known about one process.

    Attributes:
        rank: The rank, None for a process without one.
        host: Its host.
        pid: Its process id, None if it is unknown.
        state: ``running``: it answered itself, or its host reports that it runs;
            ``stopped``: it executes nothing, as /proc shows on its host;
            ``unresponsive``: alive, but it did not answer; ``gone``: it has ended;
            ``silent``: no process of its host answered, and its agent is silent.
        registered: It has created its store.
        idle_seconds: Seconds since its last Store call ended; None if it made none or
            did not answer. Of a silent one, since the last heartbeat of its agent.
        operation: The Store call that it is in, with its key; "" without one.
        recording: It answered itself, and records calls.
        in_flight: Its Store calls in flight, oldest first.
        more_in_flight: The number of further calls in flight.
        barriers: Its stalled barriers.
        collective: The collective that it waits in: ``all_reduce 7 of group 0``; ""
            without one.
        called: The last collective that it has called, by process group.
        frames: The innermost frames of its main thread, innermost first.
        place: The innermost line of the program in its main thread, and what of torch
            it calls: ``train.py:12 main, in torch: new_group``.
        wrote: Those of the key families in question that it wrote.
        stacks: The frames of all threads, by their names, if they were asked for.
        detail: Further words for people: ``stopped by a signal (T)``, ``exited with
            code 0``, ``blocked in the kernel (D)``.
        source: Where this is from: ``itself``, ``its agent``, ``/proc of its host``.
    """

    rank: Rank | None = None
    host: Words
    pid: Pid | None = None
    state: State = "silent"
    registered: bool = True
    idle_seconds: Seconds | None = None
    operation: Words = ""
    recording: bool = False
    in_flight: Annotated[tuple[InFlight, ...], UpTo(MAX_CALLS)] = ()
    more_in_flight: Large = 0
    barriers: Annotated[
        tuple[StalledBarrier, ...], Kind(_read_barriers, _write_barriers)
    ] = field(default=(), hash=False)
    collective: Annotated[Words, codec.LATER] = ""
    called: Annotated[Called, codec.LATER] = field(default_factory=dict, hash=False)
    frames: Annotated[tuple[Frame, ...], UpTo(MAX_FRAMES)] = ()
    place: Annotated[Words, codec.LATER] = ""
    wrote: Annotated[tuple[WrittenFamily, ...], UpTo(MAX_FAMILIES)] = ()
    stacks: Annotated[Mapping[Words, Stack], UpTo(MAX_THREADS)] = field(
        default_factory=dict, hash=False
    )
    detail: Words = ""
    source: Words = ""

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return codec.to_fields(self)

    def to_bytes(self) -> bytes:
        """Encode it for a store or a socket."""
        return codec.encode(self)

    @classmethod
    def from_bytes(cls, value: bytes) -> "ProcessFacts | None":
        """Decode an answer; None if the value is malformed or too large."""
        return codec.decode(cls, value, MAX_ANSWER_BYTES)

    @classmethod
    def from_page(cls, value: bytes) -> "ProcessFacts":
        """Decode the page ``/inflight``; ValueError if it is malformed or too large."""
        return codec.from_fields(cls, validation.load_json(value, MAX_ANSWER_BYTES))

    @classmethod
    def of_worker(cls, value: bytes, agent: int, rank: int) -> "ProcessFacts | None":
        """Decode the facts about a worker on the page of its agent; None without any.

        Raises:
            ValueError: It is not the page of this agent, or the facts are malformed.
        """
        page = validation.load_json(value, MAX_ANSWER_BYTES)
        if codec.from_fields(cls, page).pid != agent:
            raise ValueError("another process responds at the address of its agent")
        workers = page.get("workers")
        if type(workers) is not dict:
            raise ValueError("not the page of an agent with workers")
        worker = workers.get(str(rank))
        return None if worker is None else codec.from_fields(cls, worker)


_MAX_STORES = 16
_MAX_NAME = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIdentity:
    """The identity of a process of this host.

    Attributes:
        rank: Its rank, None for an agent.
        world_size: The number of ranks.
        run_id: The run id of its job, if known.
        attempt: The attempt of torchrun that it belongs to.
        pid: Its process id.
        start_ticks: When it started, in ticks since the boot.
        master: ``MASTER_ADDR:MASTER_PORT`` of its environment, "" without them.
        registered: It has registered in a store.
        stores: The stores in which it has registered, as processes of one host can
            compare them.
        urls: Their addresses, as ``tracedstore status --store`` takes them.
    """

    rank: Rank | None
    world_size: Annotated[int, codec.below(MAX_RANKS + 1)] | None
    run_id: Printable | None
    attempt: Small
    pid: Pid
    start_ticks: Large | None
    master: Words
    registered: bool
    stores: Annotated[tuple[Printable, ...], UpTo(_MAX_STORES)] = ()
    urls: Annotated[tuple[Printable, ...], UpTo(_MAX_STORES)] = ()

    @classmethod
    def own(cls) -> "LocalIdentity":
        """Return the identity of this process, as far as it is known now."""
        registered = [
            _store_of(handle) for handle, _ in rank_registry.registered_stores()
        ]
        names = {name for store in registered if (name := _store_name(store))}
        urls = {store.url for store in registered if store.url}
        return replace(
            cls._of(process_identity(), os.environ, os.getpid()),
            start_ticks=procfs.own_start_ticks(),
            registered=bool(registered),
            stores=tuple(sorted(names)[:_MAX_STORES]),
            urls=tuple(sorted(urls)[:_MAX_STORES]),
        )

    @classmethod
    def of_process(cls, pid: int) -> "LocalIdentity | None":
        """Return the identity of a process that does not answer, from /proc.

        None if its environment cannot be read. Variables that it set after its start
        are not known, and neither is whether it has registered.
        """
        environ = procfs.read_environ(pid)
        stat = procfs.read_stat(pid)
        if not environ or stat is None:
            return None
        return replace(cls.of_environment(environ, pid), start_ticks=stat.start_ticks)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], pid: int) -> "LocalIdentity":
        """Return the identity of a process with these variables."""
        return cls._of(ProcessIdentity.from_environment(environ), environ, pid)

    @classmethod
    def _of(
        cls, identity: ProcessIdentity, environ: Mapping[str, str], pid: int
    ) -> "LocalIdentity":
        address = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
        return cls(
            rank=identity.rank,
            world_size=identity.world_size,
            run_id=identity.run_id,
            attempt=restart_count(environ),
            pid=pid,
            start_ticks=None,
            master=f"{address[0]}:{address[1]}" if all(address) else "",
            registered=False,
        )

    def same_job(self, other: "LocalIdentity") -> bool:
        """Return whether two processes belong to the same attempt of the same job.

        Two jobs may have the same environment. Processes that have registered in
        stores, but in no common one, belong to different jobs.
        """
        if self.stores and other.stores and set(self.stores).isdisjoint(other.stores):
            return False
        return (
            self.world_size == other.world_size
            and self.run_id == other.run_id
            and self.attempt == other.attempt
            and self.master == other.master
        )


def store_url(handle: Any) -> str:
    """Return a store's address as ``--store`` takes it; "" without one, or freed."""
    return "" if handle is None else _store_of(handle).url


def _store_of(handle: Any) -> StoreIdentity:
    bottom = handle_of(bottom_of(handle))
    return bottom.identity if isinstance(bottom, StoreState) else identify(bottom)


def _store_name(found: StoreIdentity) -> str:
    """Return what processes of one host call the same store; "" if they share none."""
    if found.in_process or not (found.port or found.address):
        return ""
    # Processes may use different names of a host, and different paths to a file.
    where = found.port or os.path.realpath(found.address)
    return f"{found.kind} {where} {found.namespace}"[:_MAX_NAME].strip()


_WRITES: Final = frozenset(
    ("set", "add", "append", "compare_set", "multi_set", "queue_push")
)


@dataclass(slots=True)
class _Learned:
    """What is learned about one family.

    Attributes:
        last_key: The key of the last write.
        numbers: The number at each variable part; None for one that changes.
        writes: The number of writes.
    """

    last_key: str
    numbers: list[int | None]
    writes: int = 1

    def add(self, key: str, numbers: list[int | None]) -> None:
        self.last_key = key
        self.writes += 1
        for position, number in enumerate(numbers):
            if self.numbers[position] != number:
                self.numbers[position] = None


class KeyWriters:
    """Observes writes, and remembers the first 64 families of their keys.

    An ordinary write is observed only within the span budget; without a tracer provider
    that is one call in 50 ms. A write right after another call may be missed, so
    absence proves nothing.
    """

    name = names.DIAGNOSIS

    def __init__(self, limit: int = keys.MAX_FAMILIES) -> None:
        self._limit = limit
        self._families: dict[str, _Learned] = {}

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._families = {}

    def observe(self, operation: Operation) -> None:
        """Learn from one call."""
        if operation.method.name not in _WRITES or operation.error is not None:
            return
        if operation.method.swapped is not None and not operation.swapped:
            return  # a compare-and-set that wrote nothing
        for key in operation.keys:
            if keys.OWN_KEYS not in key:
                self._learn(key)

    def _learn(self, key: str) -> None:
        family, numbers = keys.fold_numbers(key)
        learned = self._families.get(family)
        if learned is not None:
            learned.add(key, numbers)
        # Two threads may both pass this test: one family too many does no harm.
        elif len(self._families) < self._limit:
            self._families[family] = _Learned(key, numbers)

    def wrote(self, family: str) -> WrittenFamily | None:
        """Return what this process wrote to a family; None if nothing is known."""
        learned = self._families.get(family)
        if learned is None:
            return None
        rank = process_identity().rank
        return WrittenFamily(
            family=family,
            last_key=learned.last_key,
            writes=learned.writes,
            rank_positions=tuple(
                position
                for position, number in enumerate(learned.numbers)
                if number is not None and number == rank
            ),
        )


# One a process, like the recorder whose calls it observes.
KEY_WRITERS: Final = KeyWriters()


def ended_calls(recorder: Recorder) -> int:
    """Return the number of Store calls of this process that have ended."""
    sums = recorder.counters.sums().values()
    return sum(sum(counts[BUCKETS:]) for counts in sums)


class LastCall:
    """Estimates when the last Store call ended.

    There are two sources. As an observer it gets the calls within the span budget: with
    ``spans=budget`` the last of them ended at most 50 ms before the last call of all
    (``1 / span_rate``; without a tracer provider the interval at which spans check for
    one). Without that budget, `sample` compares the number of ended calls with that of
    the sample before. The result is then a lower bound, and low by at most the time
    between two samples.
    """

    name = names.DIAGNOSIS

    def __init__(
        self, recorder: Recorder, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder = recorder
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._observed: float | None = None
        self._count = 0
        self._sampled: float | None = None
        # Of the last sample with more calls than the one before, and of that one.
        self._changed: float | None = None
        self._before: float | None = None

    def observe(self, _operation: Operation) -> None:
        """Note the end of a call within the span budget."""
        self._observed = self._monotonic()

    def sample(self) -> None:
        """Compare the number of ended calls with that of the last sample."""
        now = self._monotonic()
        count = ended_calls(self._recorder)
        if count != self._count:
            self._changed, self._before = now, self._sampled
            self._count = count
        self._sampled = now

    def idle_seconds(self) -> float | None:
        """Return the seconds since the last call ended.

        None if there was no call, or if this is the first sample and no call was
        observed.
        """
        self.sample()
        if not self._count or self._changed is None:
            return None
        now = self._monotonic()
        observed, before = self._observed, self._before
        if observed is not None and (before is None or observed > before):
            return now - observed
        # Calls before the first sample may have ended at any time.
        if before is None and self._changed == self._sampled:
            return None
        return now - self._changed


# One a process, like the recorder that it reads.
LAST_CALL: Final = LastCall(RECORDER)


class CollectiveAnswers:
    """What this process waits in, as the diagnosis above this package knows it.

    Attributes:
        answer: Returns the collective, "" without one, and the last one of each group.
            None without a diagnosis.
    """

    def __init__(self) -> None:
        self.answer: Callable[[], tuple[str, Mapping[str, int]]] | None = None

    def facts(self) -> tuple[str, Mapping[str, int]]:
        """Return both; nothing without a diagnosis, or if it fails."""
        found = RECORDER.failures.guarded(names.DIAGNOSIS, self.answer or _no_answer)
        return found or _no_answer()


def _no_answer() -> tuple[str, Mapping[str, int]]:
    return "", {}


# One a process, as its groups are.
COLLECTIVES: Final = CollectiveAnswers()

ITSELF = "itself"
_PACKAGE = f"{Path(tracedstore.__file__).parent}/"
# The demo is a job, not a part of the wrapper.
_DEMO = f"{_PACKAGE}tools/demo/"
# Where the standard library is, and what is installed inside of it.
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = tuple(f"{_STANDARD}{name}/" for name in ("site-packages", "dist-packages"))
# Frames of one stack that are looked at.
_MAX_DEPTH: Final = 1000


def own_facts(
    rank: int | None, families: Iterable[str] = (), *, with_stacks: bool = False
) -> ProcessFacts:
    """Return the facts about this process.

    Args:
        rank: Its rank, None for a process without one.
        families: The key families of which it reports what it wrote.
        with_stacks: Add the stacks of all threads.
    """
    identity = process_identity()
    calls = in_flight(RECORDER)
    collective, called = COLLECTIVES.facts()
    known = [KEY_WRITERS.wrote(family) for family in list(families)[:MAX_FAMILIES]]
    return ProcessFacts(
        rank=rank,
        host=identity.host,
        pid=identity.fields()["pid"],
        state="running",
        registered=bool(rank_registry.registered_stores()),
        idle_seconds=LAST_CALL.idle_seconds(),
        operation=_operation(),
        recording=RECORDER.on,
        in_flight=tuple(calls[:MAX_CALLS]),
        more_in_flight=max(0, len(calls) - MAX_CALLS),
        barriers=tuple(RECORDER.cold.states(StalledBarrier)),
        collective=collective,
        called=called,
        frames=_main_frames(),
        place=_main_place(),
        wrote=tuple(written for written in known if written is not None),
        stacks=all_stacks() if with_stacks else {},
        source=ITSELF,
    )


def all_stacks() -> dict[str, tuple[Frame, ...]]:
    """Return the innermost frames of every thread, by thread name, main thread first.

    At most 64 threads have at most 64 frames each. Threads of torch's C++ have frames
    only while they are in Python code.
    """
    names = thread_names()
    main = threading.main_thread().ident
    stacks: dict[str, tuple[Frame, ...]] = {}
    current = sys._current_frames()  # noqa: SLF001 - the only way; public by its documentation
    try:
        for ident in sorted(current, key=lambda ident: ident != main)[:MAX_THREADS]:
            name = names.get(ident, f"native-{ident}")[:MAX_NAME]
            # Threads may share a name.
            key = name if name not in stacks else f"{name} ({ident})"
            stacks[key] = _frames(current[ident], MAX_STACK_FRAMES)
    finally:
        # It contains the frame of this function, and so itself. Until the next garbage
        # collection it would keep the variables of all threads, process groups too.
        current.clear()
    return stacks


def is_own_code(file: str) -> bool:
    """Return whether a file is of the wrapper, and not of the job."""
    return file.startswith(_PACKAGE) and not file.startswith(_DEMO)


def _main_frames() -> tuple[Frame, ...]:
    main = threading.main_thread().ident or 0
    # Not in a variable, which would make a cycle; see above.
    return _frames(sys._current_frames().get(main), MAX_FRAMES)  # noqa: SLF001


def _main_place() -> str:
    main = threading.main_thread().ident or 0
    return place_of(sys._current_frames().get(main))  # noqa: SLF001 - see above


def place_of(innermost: FrameType | None) -> str:
    """Return the innermost line of the program, and what of torch it calls.

    The innermost line of all is often one of torch or of the standard library, and the
    same for many programs. It is returned if there is no other.
    """
    # Looked up now: this may run before torch is imported, and must not import it.
    torch = getattr(sys.modules.get("torch"), "__file__", None) or ""
    of_torch = f"{os.path.dirname(torch)}/" if torch else "\0"  # noqa: PTH120 - no Path is needed
    frame, called, depth = innermost, "", 0
    while frame is not None and depth < _MAX_DEPTH:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if file.startswith(of_torch):
            # Without the functions of its decorators.
            called = called if "<locals>" in function else function
        elif not (is_own_code(file) or _is_standard(file)):
            where = str(describe_frame(frame))
            return f"{where}, in torch: {called[:MAX_NAME]}" if called else where
        frame, depth = frame.f_back, depth + 1
    frames = _frames(innermost, 1)
    return str(frames[0]) if frames else ""


def _is_standard(file: str) -> bool:
    if file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD) and not file.startswith(_INSTALLED)


def _frames(innermost: FrameType | None, limit: int) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    frame = innermost
    while frame is not None and len(frames) < limit:
        # The wrapper's own frames are between those of the job.
        if not is_own_code(frame.f_code.co_filename):
            frames.append(describe_frame(frame))
        frame = frame.f_back
    return tuple(frames)


def describe_frame(frame: FrameType) -> Frame:
    """Return file, line and function of a frame."""
    code = frame.f_code
    return Frame(
        file="/".join(code.co_filename.split("/")[-2:])[-MAX_NAME:],
        # None between two lines of some instructions
        line=frame.f_lineno or 0,
        function=code.co_qualname[:MAX_NAME],
    )


def _operation() -> str:
    """Return the Store call that the rank is in; not those of helper threads."""
    threads = rank_threads()
    calls = sorted(
        (one for one in RECORDER.counters.calls() if one.thread_id in threads),
        key=lambda active: threads[active.thread_id],
    )
    if not calls:
        return ""
    keys, count = calls[0].method.keys_of(calls[0].args)
    first = shown(keys)[:1]
    more = f" and {count - 1} more" if count > 1 else ""
    return " ".join([calls[0].method.name, *first]) + more
