"""Selects the most important finding, and formats it as a headline."""

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from tracedstore import names
from tracedstore.common.ranges import ranks_text, unfold
from tracedstore.common.text import duration, enumeration, number, plural, shorten
from tracedstore.tools.report import output_view
from tracedstore.tools.report.analysis import (
    Analysis,
    Incident,
    LoggedStall,
    main_stall,
)
from tracedstore.tools.report.failure_kinds import FailureKind
from tracedstore.tools.report.failures import TORCHRUN, FailureGroup, certainty
from tracedstore.tools.report.logged_events import FAILED, NO_RANK, TIMEOUT

_MAX_RANKS = 4
_MAX_RANGES = 12
_MAX_HOSTS = 3
_MAX_NAME_LENGTH = 60
_MAX_ERROR_LENGTH = 160
_MAX_SUBJECT_LENGTH = 160
_MAX_EVIDENCE = 4
# Ranks that are checked for whether they have logged an event.
_MAX_SILENT_RANKS = 100_000


class Headline(NamedTuple):
    """Plain text, not escaped for HTML.

    Attributes:
        text: The headline, without a full stop.
        details: Sentences on how and when it happened.
        is_failure: Whether something failed or did not complete.
    """

    text: str
    details: str = ""
    is_failure: bool = True


def headline(analysis: Analysis) -> Headline:
    """Return the most important finding.

    In this order: what ended a process and is no consequence of something else, a stall
    of the job without an end, a barrier that did not complete, the first failure, a
    stall that ended, a stalled call if there are no barriers, a barrier that completed
    late, what the ranks printed. The headline of a stall without an end has the next
    finding among its details, if that is a failure.
    """
    stall = main_stall(analysis.stalls)
    is_open = stall is not None and stall.resumed_at is None
    if stall is not None and is_open and not _precedes(analysis, stall):
        other = _finding(analysis)
        also = f" Also: {other.text}." if other.is_failure else ""
        return _stall(analysis, stall, also)
    finding = _finding(analysis)
    if stall is None or (finding.is_failure and not is_open):
        return finding
    if is_open:
        also = f" The job waited: {_stall(analysis, stall).text}."
        return finding._replace(details=finding.details + also)
    return _stall(analysis, stall)


def _ended_by(analysis: Analysis) -> FailureGroup | None:
    """Return what ended a process, if the logs have its cause."""
    group = next(iter(analysis.ended), None)
    if group is None or group.failure.is_event or not group.failure.kind.is_cause:
        return None
    return group


def _precedes(analysis: Analysis, stall: LoggedStall) -> bool:
    """Return whether a process ended before a stall, or is the one it waits for."""
    group = _ended_by(analysis)
    if group is None:
        return False
    awaited = set(unfold(stall.last.awaited_ranks))
    time = group.failure.time
    return not time or time <= stall.first_time or not awaited.isdisjoint(group.ranks)


def _finding(analysis: Analysis) -> Headline:
    """Return the most important finding that is not a stall of the job."""
    incidents = analysis.incidents
    unfinished = [each for each in incidents if not each.barrier.completed]
    if unfinished and _ended_by(analysis) is None:
        return _unfinished(analysis, unfinished)
    if analysis.ended:
        return _failure(analysis)
    # A stall of the job names whom these calls waited for.
    if not (analysis.barriers or analysis.stalls) and (
        stalled := _stalled_call(analysis)
    ):
        return stalled
    total = len(analysis.barriers)
    if not total and not analysis.logged.event_counts:
        text, details = output_view.summary(analysis.output)
        return Headline(text, details, is_failure=False)
    text = _completed(total) if total else "The logs contain no barrier"
    if presumed := sum(each.barrier.presumed_completed for each in incidents):
        text += f" ({number(presumed)} presumed)"
    if not incidents:
        return Headline(text, "No failure is logged.", is_failure=False)
    worst = max(incidents, key=lambda each: each.barrier.longest_wait)
    late = _ranks_and_hosts(analysis, worst.late) if worst.late else "an unknown rank"
    text += f", but {late} kept the others waiting at {_barrier(worst)}"
    open_end = " or longer" if worst.barrier.presumed_completed else ""
    facts = [f"For {duration(worst.barrier.longest_wait)}{open_end}."]
    if presumed:
        facts.append(f"The end of {plural(presumed, 'barrier')} is not in the logs.")
    return Headline(text, " ".join(facts), is_failure=False)


def _stall(analysis: Analysis, stall: LoggedStall, also: str = "") -> Headline:
    last, text = stall.last, stall.view().past_sentence()
    facts = [f"Cause: {shorten(last.cause, _MAX_NAME_LENGTH)}"]
    facts += [
        shorten(each, _MAX_ERROR_LENGTH) for each in last.evidence[:_MAX_EVIDENCE]
    ]
    if last.remedy:
        facts.append(f"Remedy: {shorten(last.remedy, _MAX_ERROR_LENGTH)}")
    details = " ".join(f"{_capitalized(fact.rstrip('.'))}." for fact in facts)
    if stall.resumed_at is None:
        when = analysis.format_time(last.time)
        end = f"Last reported after {duration(stall.duration)}, at {when} UTC."
    else:
        when = analysis.format_time(stall.resumed_at)
        end = f"It resumed after {duration(stall.duration)}, at {when} UTC."
    is_failure = stall.resumed_at is None
    return Headline(text, f"{details} {end}{also}", is_failure)


def _completed(total: int) -> str:
    barriers = "The only barrier" if total == 1 else f"All {number(total)} barriers"
    return f"{barriers} completed"


def _unfinished(analysis: Analysis, unfinished: Sequence[Incident]) -> Headline:
    incident = unfinished[0]
    outcome, missing = incident.barrier.outcome, incident.missing
    barrier, named = _barrier(incident), _ranks_and_hosts(analysis, missing)
    if outcome == FAILED:
        text = f"The store failed at {barrier}"
        if missing:
            text += f" while {named} {'was' if len(missing) == 1 else 'were'} missing"
    elif not missing:
        end = "timed out" if outcome == TIMEOUT else "has no end in the logs"
        text = f"{_capitalized(barrier)} {end}, and the missing ranks are not known"
    elif outcome == TIMEOUT:
        text = f"{_capitalized(named)} never arrived at {barrier}"
    else:
        at = (
            "at the last warning"
            if incident.barrier.continued
            else "at the end of the logs"
        )
        text = f"{_capitalized(named)} had not arrived at {barrier} {at}"
    details = [_end(analysis, incident)]
    others = Counter(each.barrier.continued for each in unfinished[1:])
    if others[False]:
        details.append(f"{plural(others[False], 'more barrier')} did not complete.")
    if others[True]:
        details.append(
            f"{plural(others[True], 'more barrier')} may not have completed."
        )
    return Headline(text, " ".join(details))


def _end(analysis: Analysis, incident: Incident) -> str:
    barrier = incident.barrier
    reports = [each for each in barrier.reports if each.outcome == barrier.outcome]
    waited = duration(max(report.waited for report in reports))
    last = analysis.format_time(max(report.time for report in reports))
    if barrier.outcome == FAILED:
        first = min(reports, key=lambda report: report.time)
        return _error_at(analysis, first.detail.text, first.time)
    if barrier.outcome == TIMEOUT:
        return (
            f"{number(len(reports))} of {plural(barrier.world_size, 'rank')} timed out"
            f" after {waited}, the last at {last} UTC."
        )
    but = ", but a waiting process arrived at another barrier later"
    return (
        f"{plural(len(reports), 'rank')} had waited for up to {waited} at the last"
        f" warning, at {last} UTC. No end is logged{but if barrier.continued else ''}."
    )


_VERBS: Final = {
    FailureKind.DISCONNECTED: "lost a connection",
    FailureKind.TIMEOUT: "timed out",
}


def _failure(analysis: Analysis) -> Headline:
    """Name the first cause, else the first failure, and say how sure that is."""
    group = analysis.ended[0]
    failure, ranks = group.failure, group.ranks
    process = failure.process
    if ranks:
        named = _capitalized(_ranks_and_hosts(analysis, sorted(ranks)))
        if " on " not in named and len(ranks) == 1 and process.host:
            named += f" on {_name(process.host)}"
    else:
        named = _name(process.source) or f"Pid {process.pid}"
        named += f" on {_name(process.host)}" if process.host else ""
    subject = shorten(failure.subject, _MAX_SUBJECT_LENGTH)
    if failure.kind is FailureKind.STOPPED:
        verb = "was" if len(group.processes) == 1 else "were"
        # torchrun's agent is none of the ranks.
        named = named if ranks else f"The job ({named})"
        text = f"{named} {verb} stopped by {subject}"
        text += ", and no failure is logged"
    elif failure.evidence == TORCHRUN:
        text = f"{named} ended with {subject}"
    elif failure.is_event:
        text = f"{named} failed: {_name(failure.subject)}"
    else:
        text = f"{named} {_VERBS.get(failure.kind, 'failed')}: {subject}"
    is_stopped = failure.kind is FailureKind.STOPPED
    error = "" if is_stopped else failure.error.strip().rstrip(".")
    facts = [shorten(error, _MAX_ERROR_LENGTH)]
    if failure.time:
        facts.append(f"at {analysis.format_time(failure.time)} UTC")
    details = ", ".join(filter(None, facts))
    if not failure.is_event:
        details = _capitalized(details)
    sentences = [f"{details}."] if details else []
    if group.exits and failure.evidence != TORCHRUN:
        subject = "The process" if len(group.processes) == 1 else "The processes"
        sentences.append(f"{subject} ended with {enumeration(list(group.exits))}.")
    sentences += certainty(analysis.failures, analysis.logged, analysis.output)
    if is_stopped:
        sentences += output_view.details(analysis.output)
    return Headline(text, " ".join(sentences))


def _error_at(analysis: Analysis, error: str, time: float) -> str:
    text = shorten(error.strip().rstrip("."), _MAX_ERROR_LENGTH)
    return f"{text}, at {analysis.format_time(time)} UTC."


def _stalled_call(analysis: Analysis) -> Headline | None:
    """Name the ranks of the longest stalled call, and the ranks without any event."""
    logged = analysis.logged
    stalled = {
        key: stats
        for key, stats in logged.store_calls.items()
        if key[0] == names.OPERATION_STALLED and stats.ranks - {NO_RANK}
    }
    if not stalled:
        return None
    (_, _, operation, _), stats = max(stalled.items(), key=lambda item: item[1].maximum)
    blocked = sorted(stats.ranks - {NO_RANK})
    named = _capitalized(_ranks_and_hosts(analysis, blocked))
    verb = "was" if len(blocked) == 1 else "were"
    text = f"{named} {verb} blocked in {operation} {_name(stats.maximum_key)}"
    details = f"For {duration(stats.maximum)} or longer."
    expected = range(min(logged.world_size, _MAX_SILENT_RANKS))
    if silent := sorted(set(expected) - set(logged.last_events)):
        details += f" No event of {_ranks_and_hosts(analysis, silent)} is logged."
    return Headline(text, details)


def _ranks_and_hosts(analysis: Analysis, items: Sequence[int]) -> str:
    """Format as ``ranks 0 and 5 on node1 and node3``."""
    if 0 < len(items) <= _MAX_RANKS:
        listed = enumeration(list(map(str, items)))
        text = f"rank{'s' if len(items) > 1 else ''} {listed}"
    else:
        text = ranks_text(items, max_ranges=_MAX_RANGES)
    hosts = dict.fromkeys(filter(None, map(analysis.logged.missing_name, items)))
    if not hosts:
        return text
    if len(hosts) > _MAX_HOSTS:
        return f"{text} on {number(len(hosts))} hosts"
    return f"{text} on {enumeration(list(map(_name, hosts)))}"


def _barrier(incident: Incident) -> str:
    return f"barrier {_name(incident.barrier.id.prefix)}"


def _name(text: str) -> str:
    return shorten(text, _MAX_NAME_LENGTH)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
