"""Judges what the ranks of a case reported."""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from hangs.cases import Case
from tracedstore import names
from tracedstore.common.causes import REMEDIES

# Exactly the victims, with their causes and remedies; not all of them, or another cause
# or remedy; a rank that is no victim, or a report of a healthy job; nothing. Or the
# machine was too busy for the case.
Result = Literal["right", "partly", "wrong", "silent", "not made"]
# A rank that a note says something of. One that is only awaited by it has no host.
_ACCUSED = re.compile(r"(?:for|;) rank (\d+)(?: on [^:;]*)?: ")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a case led to.

    Attributes:
        case: The case.
        result: How right the reports are.
        seconds: From the hang to the first right name.
        reporters: The number of ranks that reported.
        errors: How each survivor that raised ended: ``type``, ``message``, ``args``,
            ``notes`` and ``pickled``, by the number of its process.
        why: Why the result is not right.
        events: The events of all processes.
    """

    case: Case
    result: Result = "silent"
    seconds: float | None = None
    reporters: int = 0
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    why: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stalls(self) -> list[dict[str, Any]]:
        """The events `job.stalled`, in the order of their times."""
        stalls = [one for one in self.events if one.get("event") == "job.stalled"]
        return sorted(stalls, key=lambda event: str(event["timestamp"]))

    @property
    def with_note(self) -> int:
        """The number of exceptions with a note."""
        return sum(map(has_note, self.errors.values()))

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "scenario": self.case.scenario.name,
            "case": str(self.case),
            "victims": self.case.victims,
            "survivors": self.case.survivors,
            "result": self.result,
            "why": self.why,
            "seconds": self.seconds,
            "reporters": self.reporters,
            "errors": self.errors,
            "stalls": self.stalls,
        }


def has_note(error: dict[str, Any], text: str = "") -> bool:
    """Return whether an exception has a note of tracedstore that contains a text."""
    return any(
        note.startswith("tracedstore:") and text in note for note in error["notes"]
    )


def judge(case: Case, directory: Path, hung_at: float) -> Outcome:
    """Judge a case by the files that its processes wrote.

    Args:
        case: The case.
        directory: The folder of these files.
        hung_at: When the victims hung, in seconds since the epoch.
    """
    outcome = Outcome(case=case)
    for seat in range(case.world_size):
        events = _events(directory / f"log.{seat}")
        # A launcher's log is that of several ranks.
        stalls = (one for one in events if one.get("event") == "job.stalled")
        outcome.reporters += len({one.get("rank") for one in stalls})
        outcome.events += events
        ended = directory / f"outcome.{seat}"
        if ended.exists() and seat in case.survivors:
            fields = json.loads(ended.read_text())
            if fields["type"]:
                outcome.errors[seat] = fields
    if case.scenario.harmless:
        _judge_reports(outcome, hung_at)
    elif case.kind == "server_killed":
        _judge_notes(outcome)
    else:
        _judge_stalls(outcome, hung_at)
    wanted = case.scenario.event
    if wanted and all(one.get("event") != wanted for one in outcome.events):
        outcome.result, outcome.why = "partly", f"no {wanted}"
    return outcome


def _judge_reports(outcome: Outcome, started_at: float) -> None:
    """Judge a healthy job: every warning is wrong, except of calls that fail.

    A rank or node that starts late on a busy machine may be reported before.
    """
    reports = [
        one
        for one in outcome.events
        if one.get("level") in ("warning", "error")
        and one.get("event") != names.OPERATION_FAILED
        and _time_of(one) >= started_at
    ]
    outcome.result = "wrong" if reports else "right"
    outcome.why = "; ".join(
        f"{one.get('event')}: {one.get('awaited') or one.get('message')}"
        for one in reports
    )


def _judge_notes(outcome: Outcome) -> None:
    """Judge a case whose calls fail at once: there is no stall to report."""
    missing = [
        seat
        for seat in outcome.case.survivors
        if not has_note(outcome.errors.get(seat, {"notes": []}), "server_gone")
    ]
    if outcome.stalls:
        outcome.result, outcome.why = "wrong", "job.stalled"
    elif missing:
        outcome.why = f"no note in processes {missing}"
    else:
        outcome.result = "right"


def _judge_stalls(outcome: Outcome, hung_at: float) -> None:
    case = outcome.case
    for event in outcome.stalls:
        named = tuple(event["awaited_ranks"])
        if case.kind == "restarted" and set(named) >= set(case.victims):
            # A rank that fails at once reads keys of attempt 0 of further ranks, which
            # start a moment later.
            named = case.victims
        if not set(named) <= set(case.victims):
            outcome.result, outcome.why = "wrong", f"named {named}"
            return
        if flaw := _flaw(case, event, named):
            outcome.why = flaw
            if outcome.result == "silent":
                outcome.result = "partly"
        elif outcome.result != "right":
            outcome.seconds = _time_of(event) - hung_at
            outcome.result = "right"
    accused = {
        int(rank)
        for error in outcome.errors.values()
        for note in error["notes"]
        for rank in _ACCUSED.findall(note.partition("\n")[0])
    }
    # The ranks of attempt 0 as above.
    if case.kind != "restarted" and not accused <= set(case.victims):
        outcome.result, outcome.why = "wrong", f"a note names {sorted(accused)}"


def _flaw(case: Case, event: dict[str, Any], named: tuple[int, ...]) -> str:
    """Return what is not right about an event without innocents; "" if nothing is."""
    cause = event["cause"]
    if case.kind == "second_stopped" and (named, cause) == ((), "server_unreachable"):
        return ""
    if named != case.awaited:
        return f"named {named}, cause {cause}"
    if case.causes:
        return "" if cause in case.causes else f"cause {cause}"
    causes = dict(zip(event["awaited_ranks"], event["awaited_causes"], strict=False))
    for rank in case.victims:
        if causes.get(rank) != case.cause_of(rank):
            return f"cause of rank {rank}: {causes.get(rank)}"
        if REMEDIES[causes[rank]] not in event["remedy"]:
            return f"remedy of rank {rank}: {event['remedy']}"
    return ""


def _time_of(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _events(log: Path) -> list[dict[str, Any]]:
    events = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if line.startswith("{"):
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events
