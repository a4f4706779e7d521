"""The dashboard "Job": the state of one run, and whom it waits for. For on-call."""

from typing import Any

from generator import config, coordination, panels
from generator.coordination import HOST, RANK, WHO
from generator.page import Row, page
from generator.panels import Column
from generator.targets import (
    age,
    annotation,
    now,
    over_time,
    recorded,
    series,
    series_about,
)
from generator.targets import rows as as_rows
from generator.variables import JOB_STATE
from tracedstore import names

# Panels of whole runs read recording rules, so that their cost does not grow with the
# number of ranks.
_STATE = recorded("job_run_id", JOB_STATE, "max")
_STALLED = recorded("job_run_id", names.JOB_STALLED_START, "min")
_MOVED = recorded("job_run_id", names.LAST_PROGRESS, "max")
_OLDEST = recorded("job_run_id_store_operation", names.OLDEST_START, "min")
_CALLS = recorded("job_run_id_store_operation", f"{names.SCOPE}_operations", "rate5m")
_RANKS_UP = f"sum({recorded('job_run_id', 'up', 'sum')})"
_RANKS_DOWN = f"sum({recorded('job_run_id', 'up_zero', 'count')})"


def build() -> Any:
    """Build the dashboard."""
    return page(
        config.JOB,
        "Job",
        "One run: its state, whom it waits for and what to do, its progress, its ranks."
        " Panels of the whole run are not filtered by host, rank and instance.",
        _progress(),
        _ranks(),
        coordination.barriers(),
        coordination.stragglers(),
        coordination.rendezvous(),
        coordination.logs_and_traces(),
        first=_verdict(),
        annotations=_annotations(),
        one_run=True,
    )


def _verdict() -> list[Any]:
    # An ended run has no series any more, but had some in the time range.
    ended = f"0 * max(last_over_time({_STATE}[$__range]))"
    verdict = (
        f"min by (awaited, phase, cause, remedy) ({series(names.JOB_STALLED_START)})"
    )
    return [
        panels.rows(
            "Whom the job waits for, and what to do",
            "The verdict of the ranks that wait: whom they wait for and what these do,"
            " what the others execute, why, and the remedy. The runbook has a section"
            " for each cause.",
            {
                "awaited": Column("Waits for"),
                "cause": Column("Cause", width=110),
                "remedy": Column("What to do"),
                "phase": Column("The others are in", width=200),
                "Value": Column("Since", unit="dateTimeAsLocal", width=170),
            },
            as_rows(f"1000 * {verdict}"),
            empty="The job waits for nobody.",
            width=24,
            height=6,
        ),
        panels.state(
            "State",
            "Stalled: ranks wait for others, see below. Waits for busy ranks: it may go"
            " on by itself. Nothing moves: all ranks compute, or hang unseen. Without a"
            " color there is no telemetry, which is no good sign.",
            now(f"max({_STATE}) or {ended}"),
        ),
        panels.number(
            "Stalled for",
            "How long ranks have been blocked. The text below says whom they wait for.",
            now(f"time() - min({_STALLED})"),
            unit="dtdurations",
            bad=0,
            empty="not stalled",
        ),
        panels.number(
            "Last progress",
            "Time since a Store call or a collective ended in any rank. A run without a"
            " process group has none.",
            now(f"time() - max({_MOVED})"),
            unit="dtdurations",
            bad=300,
            empty="no process group yet",
            color="orange",
        ),
        panels.number(
            "Ranks",
            "Ranks that answer, and ranks that do not: their processes or hosts have"
            " failed, are stopped or hold the GIL.",
            now(_RANKS_UP, "up"),
            now(f"{_RANKS_DOWN} > 0", "lost"),
            bad=None,
            colors={"up": "blue", "lost": "red"},
        ),
    ]


def _annotations() -> list[Any]:
    verdict = f"max by (phase, awaited, cause) ({series(names.JOB_STALLED_START)})"
    rounds = f"max by (run_id) ({series(names.RENDEZVOUS_ROUND)}"
    return [
        annotation("Stalled", verdict, "{{cause}} in {{phase}}: {{awaited}}", "red"),
        annotation(
            "Restart",
            f"{rounds}) > {rounds} offset 1m)",
            "a new round of nodes",
            "blue",
        ),
    ]


def _progress() -> Row:
    def number(which: str) -> str:
        level = "job_run_id_group"
        metric = recorded(level, names.COLLECTIVE_SEQUENCE, which)
        return f"{which} by (group) ({metric})"

    return Row(
        "Progress",
        [
            panels.state_over_time(
                "State over time",
                "What the run was at each time. Gaps are times without telemetry.",
                over_time(f"max({_STATE})", "run"),
            ),
            panels.lines(
                "Collectives",
                "The number of the last collective of each process group, in the rank"
                " that is ahead and in the one behind. Lines that stop rising: all"
                " compute, or hang.",
                "short",
                over_time(number("max"), "{{group}}"),
                over_time(number("min"), "{{group}}, the rank behind"),
            ),
            panels.lines(
                "Store calls",
                "Store calls per second over all ranks, by operation. Waits count when"
                " they end.",
                "ops",
                over_time(f"sum by (operation) ({_CALLS})", "{{operation}}"),
            ),
            panels.lines(
                "Time without progress",
                "Time since something moved in any rank, and the age of the oldest"
                " Store call in flight. Both rise while a job hangs.",
                "s",
                over_time(f"time() - max({_MOVED})", "since the last progress"),
                over_time(f"time() - min({_OLDEST})", "oldest Store call"),
            ),
            panels.lines(
                "Ranks scraped",
                "Ranks that answer Prometheus or their agent, and ranks that do not. A"
                " step down is a rank that has exited or a host that has failed.",
                "short",
                over_time(_RANKS_UP, "up"),
                over_time(_RANKS_DOWN, "not scraped"),
            ),
        ],
    )


def _ranks() -> Row:
    awaited = series_about("awaited_", names.JOB_RANK_AWAITED)
    return Row(
        "Ranks and hosts",
        [
            panels.rows(
                "Who the job waits for",
                "The ranks that the stalled job waits for, with their hosts and the"
                " cause, at most 64. Host and rank above select awaited ranks here.",
                {
                    "awaited_rank": RANK,
                    "awaited_host": HOST,
                    "cause": Column("Cause"),
                },
                as_rows(f"max by (awaited_host, awaited_rank, cause) ({awaited})"),
                empty="No rank is awaited, or none is certain to be.",
            ),
            panels.rows(
                "Waiting now",
                "Store calls in flight, the oldest of each rank and operation. A"
                " missing rank that is not listed here does not wait for the store:"
                " check for a collective, the data loader or a checkpoint.",
                {
                    "Value": Column("Waits for", unit="s", width=110),
                    "rank": RANK,
                    "host": HOST,
                    "operation": Column("Operation"),
                    "store": Column("Store"),
                },
                as_rows(
                    f"topk(32, max by ({WHO}, store, operation)"
                    f" ({age(names.OLDEST_START)}))"
                ),
                empty="No Store call is in flight.",
            ),
            panels.lines(
                "Ranks without progress",
                "The ranks in which nothing has moved for longest: no Store call, no"
                " barrier, no collective.",
                "s",
                over_time(
                    f"topk(10, max by ({WHO}) ({age(names.LAST_PROGRESS)}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.lines(
                "Oldest wait by rank",
                "The ranks with the oldest Store calls. A line that rises and does not"
                " fall is a stuck rank. If all lines rise together, the ranks wait for"
                " one that is not shown.",
                "s",
                over_time(
                    f"topk(10, max by ({WHO}) ({age(names.OLDEST_START)}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
        ],
    )
