"""Facts about one process of the job: its own answer, or another's word.

There is one object and one encoder. The Unix socket, the page ``/inflight`` and the
answers through the store read and write it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from tracedstore.common import codec, ranges, validation
from tracedstore.common.codec import (
    Kind,
    Large,
    Pid,
    Printable,
    Rank,
    Seconds,
    UpTo,
    Words,
)
from tracedstore.coordination.missing_report import StalledBarrier
from tracedstore.naming.decoders import by_host
from tracedstore.signals.inflight import InFlight

State = Literal["running", "stopped", "gone", "silent"]
STATES: Final[tuple[State, ...]] = get_args(State)

# How the detail of a process begins that runs and does not answer.
NO_ANSWER: Final = "did not answer within"

MAX_FRAMES: Final = 8
# Of a process, if all stacks are asked for.
MAX_THREADS: Final = 64
MAX_STACK_FRAMES: Final = 64
MAX_FAMILIES: Final = 16
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
        family: The family, as `core.keys.fold` returns it.
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
            ``stopped``: alive, but it does not answer; ``gone``: it has ended;
            ``silent``: no process of its host answered.
        registered: It has created its store.
        idle_seconds: Seconds since its last Store call ended; None if it made none or
            did not answer.
        operation: The Store call that it is in, with its key; "" without one.
        recording: It answered itself, and records calls.
        in_flight: Its Store calls in flight, oldest first.
        more_in_flight: The number of further calls in flight.
        barriers: Its stalled barriers.
        frames: The innermost frames of its main thread, innermost first.
        wrote: Those of the key families in question that it wrote.
        stacks: The frames of all threads, by their names, if they were asked for.
        detail: Further words for people: ``stopped by a signal (T)``, ``exited with
            code 0``, ``in disk wait (D)``.
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
    frames: Annotated[tuple[Frame, ...], UpTo(MAX_FRAMES)] = ()
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
