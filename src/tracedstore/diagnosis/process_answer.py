"""What is known about one process of the job: its own answer, or another's word."""

from dataclasses import dataclass
from typing import Literal

State = Literal["running", "stopped", "gone", "silent"]


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
class ProcessAnswer:
    """The state of the process of a rank.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process id, None if it is unknown.
        state: ``running``: it answered itself; ``stopped``: alive, but it does not
            answer; ``gone``: it has ended; ``silent``: no process of its host answered.
        registered: It has created its store.
        idle_seconds: Seconds since its last Store call ended; None if it made none or
            did not answer.
        operation: The Store call that it is in, with its key; "" without one.
        frames: The innermost frames of its main thread, innermost first.
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
    detail: str = ""
    source: str = ""
