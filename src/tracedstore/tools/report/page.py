"""Creates the page: one HTML file that loads nothing and runs no script."""

from functools import partial
from importlib.resources import files
from typing import Any

from tracedstore._version import __version__
from tracedstore.tools.report import tables
from tracedstore.tools.report.analysis import CLOCK_TOLERANCE, Analysis
from tracedstore.tools.report.arrival_plot import arrival_plot
from tracedstore.tools.report.headline import headline
from tracedstore.tools.report.incidents import (
    failure_groups,
    incident_view,
    process_name,
    process_names,
)
from tracedstore.tools.report.lateness_map import lateness_map, map_note
from tracedstore.tools.report.log_reader import ReadStats

_MAX_INCIDENTS = 30
_MAX_REPORT_GROUPS = 8


def page(analysis: Analysis, stats: ReadStats) -> str:
    """Return the page as HTML. Text from logs is escaped."""
    # Jinja2 is loaded only when a page is rendered.
    from tracedstore.tools.report.rendering import render  # noqa: PLC0415 - see above

    context = {
        "version": __version__,
        "css": (files("tracedstore.tools.report") / "page.css").read_text("utf-8"),
        "max_rows": tables.MAX_ROWS,
        "analysis": analysis,
        "records": analysis.records,
        "stats": stats,
        "format_time": analysis.format_time,
        "headline": headline(analysis),
        "tiles": tables.summary_tiles(analysis),
        "stalls": analysis.stalls,
        **_incidents(analysis),
        **_failures(analysis),
        **_plots(analysis),
        "slow_calls": tables.call_rows(analysis.records, tables.SLOW_CALLS),
        "contended_calls": tables.call_rows(analysis.records, tables.CONTENDED_CALLS),
        "other_events": list(tables.other_events(analysis.records)),
        "clock_offsets": tables.deviating_clocks(analysis),
        "clock_tolerance": CLOCK_TOLERANCE,
    }
    return render("page.html.j2", context)


def _incidents(analysis: Analysis) -> dict[str, Any]:
    unfinished = [each for each in analysis.incidents if not each.barrier.completed]
    late = analysis.incidents[len(unfinished) :]
    view = partial(incident_view, analysis)
    return {
        "unfinished": list(map(view, unfinished[:_MAX_INCIDENTS])),
        "unfinished_count": len(unfinished),
        "late": list(map(view, late[: tables.MAX_ROWS])),
        "late_count": len(late),
        "max_report_groups": _MAX_REPORT_GROUPS,
    }


def _failures(analysis: Analysis) -> dict[str, Any]:
    if not analysis.failures:
        return {"failures": []}
    process, _ = analysis.failures[0]
    host = analysis.records.host(process.rank) or process.host
    return {
        "failures": failure_groups(analysis),
        "first_clock_offset": analysis.clock_offset(host),
        "process_name": partial(process_name, analysis),
        "process_names": partial(process_names, analysis),
    }


def _plots(analysis: Analysis) -> dict[str, Any]:
    has_arrivals = any(barrier.ranks for barrier in analysis.barriers)
    has_map = has_arrivals and len(analysis.barriers) > 1
    return {
        "arrivals": arrival_plot(analysis) if has_arrivals else None,
        "lateness": lateness_map(analysis) if has_map else None,
        "map_note": map_note(analysis),
    }
