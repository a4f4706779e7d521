"""What is known about one process of the job: its own answer, or another's word."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

from tracedstore.common import codec
from tracedstore.common.codec import Large, Pid, Printable, Rank, Seconds, UpTo, Words

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswer:
    """The state of the process of a rank.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id, None if it is unknown.
        state: ``running``: it answered itself, or its host reports that it runs;
            ``stopped``: alive, but it does not answer; ``gone``: it has ended;
            ``silent``: no process of its host answered.
        registered: It has created its store.
        idle_seconds: Seconds since its last Store call ended; None if it made none or
            did not answer.
        operation: The Store call that it is in, with its key; "" without one.
        frames: The innermost frames of its main thread, innermost first.
        wrote: Those of the key families in question that it wrote.
        stacks: The frames of all threads, by their names, if they were asked for.
        detail: Further words for people: ``stopped by a signal (T)``, ``exited with
            code 0``, ``in disk wait (D)``.
        source: Where this is from: ``itself``, ``its agent``, ``/proc of its host``.
    """

    rank: Rank
    host: Words
    pid: Pid | None = None
    state: State = "silent"
    registered: bool = True
    idle_seconds: Seconds | None = None
    operation: Words = ""
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
    def from_bytes(cls, value: bytes) -> "ProcessAnswer | None":
        """Decode an answer; None if the value is malformed or too large."""
        return codec.decode(cls, value, MAX_ANSWER_BYTES)
