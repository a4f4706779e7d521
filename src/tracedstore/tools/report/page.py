"""Creates the page: one HTML file that loads nothing and runs no script."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common import text
from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import number, plural
from tracedstore.tools.report import flight_dumps, output_view
from tracedstore.tools.report.analysis import (
    CLOCK_TOLERANCE,
    Analysis,
    Incident,
    count_outcomes,
)
from tracedstore.tools.report.failures import certainty
from tracedstore.tools.report.headline import headline
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import (
    COMPLETED,
    FAILED,
    NO_RANK,
    TIMEOUT,
    WAITING,
    CallKey,
    CallStats,
    LoggedEvents,
    LoggedProcess,
)
from tracedstore.tools.report.plots import arrival_plot, lateness_map, map_note

if TYPE_CHECKING:
    from jinja2 import Environment

_MAX_ROWS = 50
_MAX_INCIDENTS = 30
_MAX_REPORT_GROUPS = 8
_MAX_HOSTS = 16
_OUTCOMES: Final = {
    COMPLETED: "completed",
    WAITING: "no end in the logs",
    TIMEOUT: "timed out",
    FAILED: "failed",
}
# Kinds of calls by event name, in the order of the table.
_SLOW_CALLS: Final = {
    names.OPERATION_FAILED: "failed",
    names.OPERATION_STALLED: "stalled",
    names.OPERATION_SLOW: "slow",
}
_CONTENDED_CALLS: Final = {
    names.CAS_CONTENDED: "lost compare-and-sets",
    names.RENDEZVOUS_CONFLICT: "lost rendezvous writes",
}


class SummaryTile(NamedTuple):
    """A number at the top of the page."""

    id: str
    label: str
    value: str
    is_failure: bool = False


class LastEvents(NamedTuple):
    """Ranks whose last event has the same name; the name is "" if they have none."""

    ranks: list[int]
    event: str
    first_time: float
    last_time: float


def page(analysis: Analysis, stats: ReadStats) -> str:
    """Return the page as HTML. Text from logs is escaped."""
    logged = analysis.logged
    context = {
        "version": __version__,
        "css": (files("tracedstore.tools.report") / "page.css").read_text("utf-8"),
        "max_rows": _MAX_ROWS,
        "analysis": analysis,
        "logged": logged,
        "stats": stats,
        "format_time": analysis.format_time,
        "headline": headline(analysis),
        "tiles": _summary_tiles(analysis),
        "stalls": analysis.stalls,
        "positions": flight_dumps.positions(analysis.output.dumps),
        **_incidents(analysis),
        **_failures(analysis),
        **_output(analysis),
        **_plots(analysis),
        "call_kinds": _SLOW_CALLS | _CONTENDED_CALLS,
        "slow_calls": _calls(logged, _SLOW_CALLS),
        "contended_calls": _calls(logged, _CONTENDED_CALLS),
        "other_events": [
            (event, subject, count)
            for event, subjects in logged.other_events.items()
            for subject, count in subjects.most_common(_MAX_ROWS)
        ],
        "clock_offsets": _deviating_clocks(analysis),
        "clock_tolerance": CLOCK_TOLERANCE,
    }
    return _environment().get_template("page.html.j2").render(context)


@cache
def _environment() -> "Environment":
    """Return the environment of the templates, which escapes every value."""
    # Imported when a page is rendered: nothing else of the report needs Jinja2.
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=PackageLoader("tracedstore.tools.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["plural"] = plural
    environment.filters.update(
        cut=text.shorten,
        duration=text.signed_duration,
        number=number,
        ranks=ranks_text,
        reporters=_reporters,
        timestamp=text.timestamp,
    )
    return environment


def _finalize(value: object) -> object:
    """Make text printable. Jinja2 calls this for each value before it escapes it."""
    # Markup is what templates made themselves; it is a string with this method.
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return text.printable(value)
    return value


def _reporters(items: Sequence[int]) -> str:
    """Format the ranks that reported an incident."""
    with_rank = [rank for rank in items if rank != NO_RANK]
    return ranks_text(with_rank) if with_rank else "a process without a rank"


def _summary_tiles(analysis: Analysis) -> Iterator[SummaryTile]:
    """Count ranks, hosts, failures, stalls, and barriers by outcome."""
    logged, outcomes = analysis.logged, count_outcomes(analysis.barriers)
    rank_count = number(len(analysis.ranks))
    if logged.world_size:
        rank_count += f" of {number(logged.world_size)}"
    if analysis.ranks:
        yield SummaryTile("ranks", "Ranks in the logs", rank_count)
    if hosts := set(logged.hosts.values()):
        yield SummaryTile("hosts", "Hosts", number(len(hosts)))
    if failed := sum(len(each.processes) for each in analysis.ended):
        yield SummaryTile("failures", "Processes that failed", number(failed), True)
    if stalls := analysis.stalls:
        yield SummaryTile("stalls", "Stalls", number(len(stalls)))
        count = len(analysis.open_stalls)
        label = "Stalls without an end"
        yield SummaryTile("open-stalls", label, number(count), count > 0)
    if not analysis.barriers:
        return
    completed = number(outcomes[COMPLETED])
    yield SummaryTile("completed", "Barriers completed", completed)
    if presumed := sum(each.presumed_completed for each in analysis.barriers):
        yield SummaryTile("guessed", "Presumed completed", number(presumed))
    for outcome, name, label in (
        (TIMEOUT, "timeouts", "Barriers timed out"),
        (FAILED, "failed", "Barriers failed"),
        (WAITING, "open", "Barriers without an end"),
    ):
        count = outcomes[outcome]
        yield SummaryTile(name, label, number(count), is_failure=count > 0)


def _incidents(analysis: Analysis) -> dict[str, Any]:
    unfinished = [each for each in analysis.incidents if not each.barrier.completed]
    late = analysis.incidents[len(unfinished) :]
    view = partial(_incident_view, analysis)
    return {
        "unfinished": list(map(view, unfinished[:_MAX_INCIDENTS])),
        "unfinished_count": len(unfinished),
        "late": list(map(view, late[:_MAX_ROWS])),
        "late_count": len(late),
        "max_report_groups": _MAX_REPORT_GROUPS,
    }


def _incident_view(analysis: Analysis, incident: Incident) -> dict[str, Any]:
    """Return an incident, with the texts that the page shows of it."""
    barrier = incident.barrier
    # The missing ranks, or the late ones if the barrier completed, by host.
    hosts: dict[str, list[int]] = {}
    for rank in incident.missing or incident.late:
        hosts.setdefault(analysis.logged.missing_name(rank), []).append(rank)
    return {
        "incident": incident,
        "job": barrier.id.run_id if len(analysis.jobs) > 1 else "",
        "outcome": _OUTCOMES[barrier.outcome],
        # Then the missing ranks never arrived.
        "timed_out": barrier.outcome == TIMEOUT,
        "hosts": list(hosts.items())[:_MAX_HOSTS],
        "more_hosts": max(0, len(hosts) - _MAX_HOSTS),
        "remarks": _remarks(incident),
        "agreement": _agreement(incident),
        "last_events": _last_events(analysis, incident.missing),
    }


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
    claims = {group.detail.claim for group in incident.groups}
    if len(claims) == 1 and len(warnings) <= 1:
        return f"{number(total)} ranks reported this, and their reports agree."
    return (
        f"{number(total)} ranks reported this, and their reports differ:"
        f" {plural(len(incident.groups), 'version')}."
    )


def _last_events(analysis: Analysis, items: Sequence[int]) -> list[LastEvents]:
    by_event: dict[str, list[int]] = {}
    for rank in items:
        _, event = analysis.logged.last_events.get(rank, (0.0, ""))
        by_event.setdefault(event, []).append(rank)
    last_events = []
    for event, of_event in by_event.items():
        times = [
            analysis.logged.last_events[rank][0] if event else 0.0 for rank in of_event
        ]
        last_events.append(LastEvents(of_event, event, min(times), max(times)))
    return last_events


def _failures(analysis: Analysis) -> dict[str, Any]:
    groups = analysis.failures
    if not groups:
        return {"failures": []}
    ended = analysis.ended
    first = groups[0].failure.process
    host = analysis.logged.host(first.rank) or first.host
    return {
        "failures": groups,
        "certainty": (
            certainty(ended, analysis.logged, analysis.output) if ended else []
        ),
        "first_clock_offset": analysis.clock_offset(host),
        "process_names": partial(_process_names, analysis),
    }


def _output(analysis: Analysis) -> dict[str, Any]:
    """Return what the ranks printed, if nothing tells why the job ended or waits."""
    explained = bool(analysis.stalls) or any(
        each.failure.kind.is_cause for each in analysis.ended
    )
    groups = [] if explained else output_view.last_lines(analysis.output)
    return {
        "last_lines": groups,
        "stacks": output_view.stacks(analysis.output),
        "idle_time": output_view.idle_time(analysis.output) if groups else None,
        "sources_text": partial(output_view.sources_text, analysis.output),
    }


def _process_names(analysis: Analysis, processes: Sequence[LoggedProcess]) -> str:
    """Format one process by name, several as ``3 processes: ranks 0-1, 1 ...``."""
    with_rank = [each.rank for each in processes if each.rank != NO_RANK]
    if len(processes) == 1:
        (process,) = processes
        if not with_rank:
            if process.source:
                return process.source
            return f"pid {process.pid} on {process.host or 'an unknown host'}"
        host = analysis.logged.host(process.rank) or process.host
        return f"rank {process.rank}{f' on {host}' if host else ''}"
    parts = [ranks_text(with_rank)] if with_rank else []
    if others := len(processes) - len(with_rank):
        parts.append(f"{number(others)} without a rank")
    return f"{plural(len(processes), 'process', 'es')}: {', '.join(parts)}"


def _plots(analysis: Analysis) -> dict[str, Any]:
    has_arrivals = any(barrier.ranks for barrier in analysis.barriers)
    has_map = has_arrivals and len(analysis.barriers) > 1
    return {
        "arrivals": arrival_plot(analysis) if has_arrivals else None,
        "lateness": lateness_map(analysis) if has_map else None,
        "map_note": map_note(analysis),
    }


def _calls(
    logged: LoggedEvents, kinds: Mapping[str, str]
) -> list[tuple[CallKey, CallStats]]:
    """Return calls of some kinds, ordered by kind and then by duration or losses."""
    order = list(kinds)
    selected = [item for item in logged.store_calls.items() if item[0][0] in kinds]
    selected.sort(key=lambda item: (order.index(item[0][0]), -item[1].maximum, item[0]))
    return selected


def _deviating_clocks(analysis: Analysis) -> list[tuple[str, float]]:
    """Return hosts and offsets beyond the tolerance, the largest first."""
    offsets = ((host, analysis.clock_offset(host)) for host in analysis.clock_offsets)
    deviating = [(host, offset) for host, offset in offsets if offset]
    return sorted(deviating, key=lambda item: -abs(item[1]))
