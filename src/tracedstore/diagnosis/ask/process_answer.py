"""What is known about one process of the job: its own answer, or another's word."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from tracedstore.common import validation
from tracedstore.common.ranges import MAX_RANKS
from tracedstore.diagnosis.judgement.verdict import printable_text

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
_MAX_PID = 2**32
_MAX_LINE = 2**31
_MAX_POSITIONS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a Python stack; never values.

    Attributes:
        file: The file, its last two path components.
        line: The line.
        function: The function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


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

    family: str
    last_key: str
    writes: int = 1
    rank_positions: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, fields: Any) -> "WrittenFamily":
        """Return it with these JSON values; raises if one is not valid."""
        return cls(
            family=printable_text(fields["family"]),
            last_key=printable_text(fields["last_key"]),
            writes=validation.integer(fields["writes"], 2**63),
            rank_positions=_items(
                partial(validation.integer, below=_MAX_LINE),
                fields["rank_positions"],
                _MAX_POSITIONS,
            ),
        )


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

    rank: int
    host: str
    pid: int | None = None
    state: State = "silent"
    registered: bool = True
    idle_seconds: float | None = None
    operation: str = ""
    frames: tuple[Frame, ...] = ()
    wrote: tuple[WrittenFamily, ...] = ()
    stacks: Mapping[str, tuple[Frame, ...]] = field(default_factory=dict, hash=False)
    detail: str = ""
    source: str = ""

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def to_bytes(self) -> bytes:
        """Encode it for a store or a socket."""
        return json.dumps(self.to_fields()).encode()

    @classmethod
    def from_fields(cls, fields: Any) -> "ProcessAnswer":
        """Return the answer with these JSON values; ValueError if one is not valid."""
        try:
            return cls(
                rank=validation.integer(fields["rank"], MAX_RANKS),
                host=_text(fields["host"]),
                pid=_optional(_pid, fields["pid"]),
                state=_state(fields["state"]),
                registered=fields["registered"] is True,
                idle_seconds=_optional(validation.seconds, fields["idle_seconds"]),
                operation=_text(fields["operation"]),
                frames=_frames(fields["frames"], MAX_FRAMES),
                wrote=_items(WrittenFamily.from_fields, fields["wrote"], MAX_FAMILIES),
                stacks=_stacks(fields["stacks"]),
                detail=_text(fields["detail"]),
                source=_text(fields["source"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the answer of a process") from error

    @classmethod
    def from_bytes(cls, value: bytes) -> "ProcessAnswer | None":
        """Decode an answer; None if the value is malformed or too large."""
        try:
            return cls.from_fields(validation.load_json(value, MAX_ANSWER_BYTES))
        except ValueError:
            return None


def _optional(check: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else check(value)


def _pid(value: Any) -> int:
    return validation.integer(value, _MAX_PID)


def _text(value: Any) -> str:
    return printable_text(value) if value != "" else ""


def _state(value: Any) -> State:
    if value not in STATES:
        raise ValueError("not a state")
    state: State = value
    return state


def _items(parse: Callable[[Any], T], values: Any, limit: int) -> tuple[T, ...]:
    if type(values) is not list:
        raise ValueError("not a list")
    return tuple(map(parse, values[:limit]))


def _frames(values: Any, limit: int) -> tuple[Frame, ...]:
    return _items(_frame, values, limit)


def _frame(fields: Any) -> Frame:
    return Frame(
        file=_text(fields["file"]),
        line=validation.integer(fields["line"], _MAX_LINE),
        function=_text(fields["function"]),
    )


def _stacks(fields: Any) -> dict[str, tuple[Frame, ...]]:
    return {
        _text(name): _frames(frames, MAX_STACK_FRAMES)
        for name, frames in list(fields.items())[:MAX_THREADS]
    }
