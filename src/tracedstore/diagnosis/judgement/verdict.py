"""The verdict on a hung job: whom it waits for, why, and how that is known."""

from dataclasses import dataclass
from typing import Annotated, Any, Final

from tracedstore.common import codec, ranges
from tracedstore.common.causes import Cause
from tracedstore.common.codec import Pid, Printable, Rank, Ranks, Seconds, UpTo, Words

# Ranks that are named one by one in a text; the others are counted.
_MAX_AWAITED_IN_TEXT = 8
MAX_AWAITED: Final = 64
_MAX_EVIDENCE = 16
_MAX_VERDICT_BYTES = 256 * 1024


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

    rank: Rank
    host: Words = ""
    pid: Pid | None = None
    cause: Cause = "unknown"
    doing: Words = ""

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

    phase: Printable
    cause: Cause
    awaited: Annotated[tuple[AwaitedRank, ...], UpTo(MAX_AWAITED)] = ()
    awaited_ranks: Ranks = ()
    known: Words = ""
    waiting_ranks: Ranks = ()
    key: Words = ""
    waited_seconds: Seconds = 0.0
    evidence: Annotated[tuple[Words, ...], UpTo(_MAX_EVIDENCE)] = ()
    remedy: Words = ""
    agents: bool = False
    time: Seconds = 0.0

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
        return codec.encode(self)

    @classmethod
    def from_bytes(
        cls, value: bytes, world_size: int = ranges.MAX_RANKS
    ) -> "Verdict | None":
        """Decode a verdict; None if the value is malformed or too large.

        So it is if it has a rank that the job has not.
        """
        return codec.decode(cls, value, _MAX_VERDICT_BYTES, world_size)
