"""The dashboard "Telemetry health": whether the other dashboards are reliable."""

from typing import Any

from generator import config, panels, targets
from generator.page import Row, page
from generator.panels import Column
from generator.targets import grown, now, over_time, rate, series
from generator.targets import rows as as_rows
from tracedstore import names

# Prometheus has such series of all that it scrapes: the processes of a job have a run.
_OURS = 'run_id!=""'
_UP = series("up", _OURS)


def build() -> Any:
    """Build the dashboard."""
    return page(
        config.HEALTH,
        "Telemetry health",
        "Failures and cost of the telemetry itself.",
        _now(),
        _scraping(),
        _logs(),
    )


def _now() -> Row:
    return Row(
        "Now",
        [
            panels.number(
                "Parts that failed",
                "Parts of the telemetry that raised and are switched off, over all"
                " processes. The job is not affected; signals are missing. Search the"
                " logs for telemetry.disabled, and restart or call configure() again.",
                now(
                    # A part has no series before its first failure.
                    f"sum({series(names.TELEMETRY_FAILURES)} > bool 0)"
                    f" or 0 * count({series(names.BUILD_INFO)})"
                ),
                empty="No process is scraped.",
            ),
            panels.number(
                "Processes not scraped",
                "Targets that Prometheus cannot scrape, and workers that do not answer"
                " their agent. If the processes run, check TRACEDSTORE_HTTP_HOST,"
                " firewalls and credentials.",
                now(f"sum(({_UP} or {series(names.WORKER_UP)}) == bool 0)"),
                empty="No process is scraped.",
            ),
            panels.number(
                "Versions in use",
                "More than one: hosts run different versions. Install the same version"
                " before you compare them.",
                now(
                    "count(count by (version, torch, core)"
                    f" ({series(names.BUILD_INFO)}))"
                ),
                bad=2,
                empty="No process is scraped.",
            ),
            panels.number(
                "Slowest scrape",
                "The response time of the slowest target. Seconds: the process is short"
                " of CPU, or a thread of it or of a worker of its node holds the GIL.",
                now(f"max({series('scrape_duration_seconds', _OURS)})"),
                unit="s",
                bad=5,
                empty="No process is scraped.",
            ),
        ],
    )


def _scraping() -> Row:
    return Row(
        "Over time",
        [
            panels.lines(
                "Failures of the telemetry",
                "By the part that failed. An observer that failed is off; any other"
                " part is tried again. telemetry.disabled in the logs has the error.",
                "short",
                over_time(
                    f"sum by (observer) ({grown(names.TELEMETRY_FAILURES)})",
                    "{{observer}}",
                ),
                width=8,
            ),
            panels.lines(
                "Exports to a collector",
                "Of the exporters that tracedstore sets up, by their result, and the"
                " spans and log records that were lost. `failed`: the collector is"
                " down, or refuses them; telemetry.export_failed in the logs has the"
                " reason. No data: the application exports, or nothing does.",
                "short",
                over_time(
                    "sum by (signal, result)"
                    f" (increase({series(names.EXPORTS)}[$__rate_interval]))",
                    "{{signal}}: {{result}}",
                ),
                over_time(
                    "sum by (signal)"
                    f" (increase({series(names.EXPORT_DROPPED)}[$__rate_interval]))",
                    "{{signal}}: lost",
                ),
                width=8,
            ),
            panels.lines(
                "Calls without a span",
                "`budget`: calls beyond the span budget; raise TRACEDSTORE_SPAN_RATE"
                " for more spans. `suppressed`: the caller suppressed instrumentation.",
                "ops",
                over_time(
                    f"sum by (reason) ({rate(names.SPANS_SUPPRESSED)})", "{{reason}}"
                ),
                width=8,
            ),
            panels.lines(
                "Events dropped",
                "Events that were not written since a process began, because its log"
                " blocked and its queue was full. Check what reads the job's standard"
                " error. `C++ calls`: calls of threads unknown to Python without span"
                " or event, because too many came at once. Empty is good.",
                "short",
                over_time(
                    f"sum by (run_id, host) ({series(names.EVENTS_DROPPED)})",
                    "{{run_id}} {{host}}",
                ),
                over_time(
                    f"sum by (run_id, host) ({series(names.OPERATIONS_DROPPED)})",
                    "{{run_id}} {{host}}, C++ calls",
                ),
                width=12,
            ),
            panels.lines(
                "Scrape duration",
                "The slowest targets. One that is slower than the others is short of"
                " CPU. An agent waits 2 s for a worker that does not answer.",
                "s",
                over_time(
                    "topk(10, max by (run_id, host, instance)"
                    f" ({series('scrape_duration_seconds', _OURS)}))",
                    "{{instance}} on {{host}}",
                ),
                width=12,
            ),
            panels.lines(
                "Series per target",
                "The largest number of series of one target: a process, or a node with"
                " its ranks. Hundreds per rank: many kinds of stores, many families of"
                " barrier names, or TRACEDSTORE_METRICS=full; all have limits.",
                "short",
                over_time(
                    f"max by (job, run_id) ({series('scrape_samples_scraped', _OURS)})",
                    "{{job}} {{run_id}}",
                ),
                width=12,
            ),
            panels.rows(
                "Versions",
                "The number of processes per version.",
                {
                    "Value": Column("Processes", width=110),
                    "version": Column("tracedstore"),
                    "torch": Column("torch"),
                    "core": Column("Core"),
                },
                as_rows(
                    f"count by (version, torch, core) ({series(names.BUILD_INFO)})"
                ),
                empty="No process is scraped.",
                width=12,
            ),
        ],
    )


def _logs() -> Row:
    return Row(
        "Logs",
        [
            panels.log_lines(
                "Events",
                "Failures of the telemetry itself, with the error, and the addresses of"
                " the HTTP endpoints. Report errors to the maintainers of tracedstore.",
                targets.events(
                    names.TELEMETRY_DISABLED,
                    names.TELEMETRY_SERVING,
                    names.EXPORT_FAILED,
                    names.EXPORT_RESUMED,
                ),
            ),
        ],
    )
