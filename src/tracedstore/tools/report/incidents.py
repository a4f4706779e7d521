"""Prepares incidents and failures for the templates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import number, plural
from tracedstore.tools.report.analysis import Analysis, Incident
from tracedstore.tools.report.event_fields import NO_RANK
from tracedstore.tools.report.record_types import (
    COMPLETED,
    FAILED,
    TIMEOUT,
    WAITING,
    FirstFailure,
    LoggedProcess,
)

_OUTCOMES: Final = {
    COMPLETED: "completed",
    WAITING: "no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}
_MAX_HOSTS = 16


class HostRanks(NamedTuple):
    """Ranks of one host; the host is "" if it is not known."""

    ranks: list[int]
    host: str


class LastEvents(NamedTuple):
    """Ranks whose last event has the same name; the name is "" if they have none."""

    ranks: list[int]
    event: str
    first_time: float
    last_time: float


class FailureGroup(NamedTuple):
    """First failures with the same content, of all processes that have it."""

    failure: FirstFailure
    processes: list[LoggedProcess]


@dataclass(frozen=True, slots=True)
class IncidentView:
    """An incident with the texts that the page shows of it.

    Attributes:
        incident: The incident.
        job: Run id of the job; "" if all logs are of one job.
        outcome: How the barrier ended.
        timed_out: Whether it timed out, so that the missing ranks never arrived.
        hosts: The missing ranks, or the late ones if the barrier completed, of the
            first hosts.
        more_hosts: Number of hosts that are not in ``hosts``.
        remarks: Sentences on what the logs do not show.
        agreement: A sentence on whether the reports agree.
        last_events: The last events of the missing ranks.
    """

    incident: Incident
    job: str
    outcome: str
    timed_out: bool
    hosts: list[HostRanks]
    more_hosts: int
    remarks: list[str]
    agreement: str
    last_events: list[LastEvents]


def incident_view(analysis: Analysis, incident: Incident) -> IncidentView:
    """Prepare an incident."""
    barrier = incident.barrier
    hosts = _by_host(analysis, incident.missing or incident.late)
    return IncidentView(
        incident=incident,
        job=barrier.id.run_id if len(analysis.jobs) > 1 else "",
        outcome=_OUTCOMES[barrier.outcome],
        timed_out=barrier.outcome == TIMEOUT,
        hosts=hosts[:_MAX_HOSTS],
        more_hosts=max(0, len(hosts) - _MAX_HOSTS),
        remarks=_remarks(incident),
        agreement=_agreement(incident),
        last_events=_last_events(analysis, incident.missing),
    )


def _by_host(analysis: Analysis, items: Sequence[int]) -> list[HostRanks]:
    hosts: dict[str, list[int]] = {}
    for rank in items:
        hosts.setdefault(analysis.records.missing_name(rank), []).append(rank)
    return [HostRanks(of_host, host) for host, of_host in hosts.items()]


def _remarks(incident: Incident) -> list[str]:
    barrier = incident.barrier
    known = incident.missing or incident.late
    if barrier.outcome == FAILED and not known:
        return ["The store failed, so the missing ranks are not known."]
    remarks = []
    if not known:
        remarks.append("The missing ranks are not known.")
    if barrier.outcome == FAILED:
        remarks.append(
            "Then the store failed, and no rank could read the arrivals again."
        )
    if barrier.outcome == WAITING:
        remarks.append(
            "No end is logged: no rank reported a timeout, a failure or a completion."
            " This is the case if all ranks are killed at once."
        )
    if barrier.continued:
        remarks.append(
            "But a process that had waited arrived at another barrier later, in the"
            " same thread or in another one: this barrier may have completed."
        )
    return remarks


def _agreement(incident: Incident) -> str:
    total = sum(len(group.reports) for group in incident.groups)
    if total == 1:
        return "One rank reported this."
    # A rank without a warning does not contradict the warnings of others.
    warnings = {group.warning.missing for group in incident.groups} - {""}
    details = {group.detail.content for group in incident.groups}
    if len(details) == 1 and len(warnings) <= 1:
        return f"{number(total)} ranks reported this, and their reports agree."
    return (
        f"{number(total)} ranks reported this, and their reports differ:"
        f" {plural(len(incident.groups), 'version')}."
    )


def _last_events(analysis: Analysis, items: Sequence[int]) -> list[LastEvents]:
    by_event: dict[str, list[int]] = {}
    for rank in items:
        _, event = analysis.records.last_events.get(rank, (0.0, ""))
        by_event.setdefault(event, []).append(rank)
    last_events = []
    for event, of_event in by_event.items():
        times = [
            analysis.records.last_events[rank][0] if event else 0.0 for rank in of_event
        ]
        last_events.append(LastEvents(of_event, event, min(times), max(times)))
    return last_events


def reporters(items: Sequence[int]) -> str:
    """Format the ranks that reported an incident."""
    with_rank = [rank for rank in items if rank != NO_RANK]
    return ranks_text(with_rank) if with_rank else "a process without a rank"


def failure_groups(analysis: Analysis) -> list[FailureGroup]:
    """Group the first failures by content, ordered by the earliest of each group."""
    groups: dict[tuple[str, str, str], FailureGroup] = {}
    for process, failure in analysis.failures:
        key = failure.event, failure.subject, failure.error
        groups.setdefault(key, FailureGroup(failure, [])).processes.append(process)
    return list(groups.values())


def process_name(analysis: Analysis, process: LoggedProcess) -> str:
    """Format as ``rank 3 on node1``, or ``pid 7 on node1`` without a rank."""
    if process.rank == NO_RANK:
        return f"pid {process.pid} on {process.host or 'an unknown host'}"
    host = analysis.records.host(process.rank)
    return f"rank {process.rank}{f' on {host}' if host else ''}"


def process_names(analysis: Analysis, processes: Sequence[LoggedProcess]) -> str:
    """Format one process by name, several as ``3 processes: ranks 0-1, 1 ...``."""
    if len(processes) == 1:
        return process_name(analysis, processes[0])
    with_rank = [each.rank for each in processes if each.rank != NO_RANK]
    parts = [ranks_text(with_rank)] if with_rank else []
    if others := len(processes) - len(with_rank):
        parts.append(f"{number(others)} without a rank")
    return f"{plural(len(processes), 'process', 'es')}: {', '.join(parts)}"
