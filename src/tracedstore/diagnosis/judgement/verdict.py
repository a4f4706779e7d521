"""The verdict on a hung job: whom it waits for, why, and how that is known."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

from tracedstore.common import ranges, validation

Cause = Literal[
    "not_started",
    "gone",
    "busy",
    "stopped",
    "diverged",
    "circular",
    "stale",
    "duplicate",
    "too_many",
    "server_gone",
    "server_unreachable",
    "address",
    "unknown",
]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

# What to do about each cause. A verdict with a better remedy has its own.
REMEDIES: Final[Mapping[Cause, str]] = {
    "not_started": "check that the launcher started each awaited rank, and read its"
    " log",
    "gone": "read the log of each awaited rank: it ended before the others",
    "busy": "look at what each awaited rank executes: it is alive, but elsewhere",
    "stopped": "resume or kill each awaited process: it does not run Python code",
    "diverged": "make all ranks create the same groups in the same order",
    "circular": "change the order in which these ranks write and wait",
    "stale": "start with a new store, port or prefix: values of an earlier attempt"
    " are in this one",
    "duplicate": "start each rank once: check the launcher's ranks and node ranks",
    "too_many": "use a new key prefix, or a store for each job",
    "server_gone": "read the log of the process that served the store",
    "server_unreachable": "check the network and the process that serves the store",
    "address": "correct the address",
    "unknown": "run tracedstore stacks to see what every rank executes",
}

# Ranks that are named one by one in a text; the others are counted.
_MAX_AWAITED_IN_TEXT = 8
MAX_AWAITED: Final = 64
_MAX_EVIDENCE = 16
_MAX_VERDICT_BYTES = 256 * 1024
_MAX_SENTENCE = 1024
_MAX_PID = 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitedRank:
    """A rank that the job waits for.

    Attributes:
        rank: The global rank; of an agent, its group rank.
        host: Its host, "" if it is unknown.
        pid: Its process id, None if it is unknown.
        cause: Why it does not arrive.
        doing: What it does instead, for people: ``alive, no store call for 612 s, in
            data.py:88 load_dataset``.
    """

    rank: int
    host: str = ""
    pid: int | None = None
    cause: Cause = "unknown"
    doing: str = ""

    def describe(self, noun: str = "rank") -> str:
        """Return ``rank 2 on node4 (pid 812): alive, ...``."""
        host = f" on {self.host}" if self.host else ""
        pid = "" if self.pid is None else f" (pid {self.pid})"
        doing = f": {self.doing}" if self.doing else ""
        return f"{noun} {self.rank}{host}{pid}{doing}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whom a stalled job waits for.

    Attributes:
        phase: What the waiting ranks execute: ``init_process_group``, ``new_group 1``,
            ``key epoch/3/go``.
        cause: Why the awaited ranks do not arrive; of several causes the first one in
            the order of `CAUSES`.
        awaited: The first 64 awaited ranks; empty if they are unknown.
        awaited_ranks: All awaited ranks.
        known: What is known where no rank is named.
        waiting_ranks: The ranks that wait.
        key: A key that one of them waits for.
        waited_seconds: How long the longest of these waits has lasted.
        evidence: How this is known, in short sentences.
        remedy: What to do.
        agents: The ranks are those of torchrun's agents.
        time: When it was found, in seconds since the epoch.
    """

    phase: str
    cause: Cause
    awaited: tuple[AwaitedRank, ...] = ()
    awaited_ranks: tuple[int, ...] = ()
    known: str = ""
    waiting_ranks: tuple[int, ...] = ()
    key: str = ""
    waited_seconds: float = 0.0
    evidence: tuple[str, ...] = ()
    remedy: str = ""
    agents: bool = False
    time: float = 0.0

    def describe_awaited(self) -> str:
        """Describe the awaited ranks in one line; what is known without any."""
        if not self.awaited_ranks:
            return self.known or "the awaited ranks are unknown"
        noun = "agent" if self.agents else "rank"
        shown = self.awaited[:_MAX_AWAITED_IN_TEXT]
        texts = [awaited.describe(noun) for awaited in shown]
        named = {awaited.rank for awaited in shown}
        if rest := [rank for rank in self.awaited_ranks if rank not in named]:
            texts.append(f"and {ranges.ranks_text(rest, noun)}")
        return "; ".join(texts)

    def describe(self) -> str:
        """Describe the verdict in one line: for notes, status and report."""
        text = f"waiting in {self.phase} for {self.describe_awaited()}"
        if not self.awaited_ranks:
            text = f"waiting in {self.phase}: {self.describe_awaited()}"
        if self.evidence:
            text += f" [{self.cause}: {'; '.join(self.evidence)}]"
        return f"{text}; {self.remedy}" if self.remedy else text

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of `job.stalled` and `job.resumed`."""
        return {
            "awaited": self.describe_awaited(),
            "awaited_ranks": list(self.awaited_ranks),
            "cause": self.cause,
            "phase": self.phase,
            "waiting_ranks": ranges.fold(self.waiting_ranks),
            "waiting_count": len(self.waiting_ranks),
            "key": self.key,
            "waited_seconds": round(self.waited_seconds, 3),
            "evidence": list(self.evidence),
            "remedy": self.remedy,
        }

    def to_bytes(self) -> bytes:
        """Encode the verdict for the store."""
        fields = asdict(self)
        for name in ("awaited_ranks", "waiting_ranks"):
            fields[name] = ranges.fold(fields[name])
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "Verdict | None":
        """Decode a verdict; None if the value is malformed or too large.

        So it is if it has a rank that the job has not.
        """
        try:
            fields = validation.load_json(value, _MAX_VERDICT_BYTES)
            return cls(
                phase=printable_text(fields["phase"]),
                cause=_cause(fields["cause"]),
                awaited=tuple(
                    _awaited(one, world_size) for one in fields["awaited"][:MAX_AWAITED]
                ),
                awaited_ranks=_ranks(fields["awaited_ranks"], world_size),
                known=_sentence(fields["known"]),
                waiting_ranks=_ranks(fields["waiting_ranks"], world_size),
                key=_sentence(fields["key"]),
                waited_seconds=validation.seconds(fields["waited_seconds"]),
                evidence=tuple(map(_sentence, fields["evidence"][:_MAX_EVIDENCE])),
                remedy=_sentence(fields["remedy"]),
                agents=fields["agents"] is True,
                time=validation.seconds(fields["time"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def worst(causes: Iterable[Cause]) -> Cause:
    """Return the first of these causes in the order of `CAUSES`."""
    return min(causes, key=CAUSES.index, default="unknown")


def _awaited(fields: Any, world_size: int) -> AwaitedRank:
    pid = fields["pid"]
    return AwaitedRank(
        rank=validation.integer(fields["rank"], world_size),
        host=_sentence(fields["host"]),
        pid=None if pid is None else validation.integer(pid, _MAX_PID),
        cause=_cause(fields["cause"]),
        doing=_sentence(fields["doing"]),
    )


def _cause(value: Any) -> Cause:
    if value not in CAUSES:
        raise ValueError("not a cause")
    cause: Cause = value
    return cause


def _sentence(value: Any) -> str:
    return printable_text(value) if value != "" else ""


_ranks: Callable[[Any, int], tuple[int, ...]] = ranges.unfold_all_below
_text: Callable[[Any], str] = partial(validation.text, max_length=_MAX_SENTENCE)


def printable_text(value: Any) -> str:
    """Return a text without control characters; ValueError if it is no text."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in _text(value)
    )
