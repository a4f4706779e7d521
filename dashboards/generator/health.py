"""Telemetry health: whether what the other dashboards show can be believed."""

from typing import Any

from generator import config, panels, targets
from generator.page import Row, page
from generator.targets import now, over_time, rate, series
from generator.targets import rows as as_rows
from tracedstore import names


def build() -> Any:
    """Make the dashboard."""
    return page(
        config.HEALTH,
        "Telemetry health",
        "Whether the telemetry itself works, and what it costs.",
        _now(),
        _scraping(),
        _told(),
    )


def _now() -> Row:
    return Row(
        "Now",
        [
            panels.number(
                "Parts that failed",
                "Parts of the telemetry that raised and are switched off, over all"
                " processes. The job is not affected; signals are missing. Search the"
                " logs for telemetry.disabled, and restart or configure() anew.",
                now(f"sum({series(names.TELEMETRY_FAILURES)} > bool 0)"),
            ),
            panels.number(
                "Processes not scraped",
                "Targets that Prometheus cannot reach. If the processes live, look at"
                " TRACEDSTORE_HTTP_HOST, firewalls and credentials.",
                now(f"count({series('up')} == 0) or vector(0)"),
            ),
            panels.number(
                "Versions in use",
                "More than one: hosts run different builds. Make them the same before"
                " comparing them.",
                now(
                    "count(count by (version, torch, core)"
                    f" ({series(names.BUILD_INFO)}))"
                ),
                bad=2,
            ),
            panels.number(
                "Slowest scrape",
                "How long the slowest process takes to answer. Seconds: it is starved"
                " of CPU, or holds the GIL.",
                now(f"max({series('scrape_duration_seconds')})"),
                unit="s",
                bad=5,
            ),
        ],
    )


def _scraping() -> Row:
    return Row(
        "Over time",
        [
            panels.lines(
                "Failures of the telemetry",
                "By the part that failed. What failed is switched off, so a step and"
                " then nothing is what it looks like: telemetry.disabled says why.",
                "short",
                over_time(
                    "sum by (observer)"
                    f" (increase({series(names.TELEMETRY_FAILURES)}"
                    "[$__rate_interval]))",
                    "{{observer}}",
                ),
            ),
            panels.lines(
                "Calls without a span",
                "`budget`: more ordinary calls than spans are made for; raise"
                " TRACEDSTORE_SPAN_RATE to see more. `suppressed`: the caller asked"
                " for none.",
                "ops",
                over_time(
                    f"sum by (reason) ({rate(names.SPANS_SUPPRESSED)})", "{{reason}}"
                ),
            ),
            panels.lines(
                "Scrape duration",
                "The slowest processes. A rank that is slower than the others is short"
                " of CPU.",
                "s",
                over_time(
                    "topk(10, max by (run_id, host, rank)"
                    f" ({series('scrape_duration_seconds')}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.lines(
                "Series a process",
                "The most series that one process exports. Hundreds: stores of many"
                " kinds, or barriers with many families of names; both have limits.",
                "short",
                over_time(
                    f"max by (job, run_id) ({series('scrape_samples_scraped')})",
                    "{{job}} {{run_id}}",
                ),
            ),
            panels.rows(
                "What runs",
                "How many processes run which versions.",
                {
                    "version": "tracedstore",
                    "torch": "torch",
                    "core": "Core",
                    "Value": "Processes",
                },
                as_rows(
                    f"count by (version, torch, core) ({series(names.BUILD_INFO)})"
                ),
                width=24,
            ),
        ],
    )


def _told() -> Row:
    return Row(
        "Logs",
        [
            panels.lines_of_log(
                "What was told",
                "Parts that were switched off, with the error, and where processes"
                " serve. Send the error to whoever maintains tracedstore.",
                targets.events(names.TELEMETRY_DISABLED, names.TELEMETRY_SERVING),
            ),
        ],
    )
