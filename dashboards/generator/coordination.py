"""The rows of the dashboard "Job" about how its ranks meet. They are closed."""

from generator import panels, targets
from generator.page import Row
from generator.panels import Column
from generator.targets import age, grown, now, over_time, recorded, series, series_about
from generator.targets import rows as as_rows
from tracedstore import names

_BARRIER = "job_run_id_barrier"
# The first two ranks that arrived report these, each with its last reading. Recorded
# series differ in their names, which a table would show: so they are aggregated away.
_MISSING = f"max by (barrier) ({recorded(_BARRIER, names.BARRIER_MISSING, 'max')})"
_ARRIVED = f"max by (barrier) ({recorded(_BARRIER, names.BARRIER_ARRIVED, 'max')})"
_BARRIER_RESULTS = recorded(
    f"{_BARRIER}_result", f"{names.BARRIER_DURATION.name}_count", "rate5m"
)
_BARRIER_TIMES = recorded(
    f"{_BARRIER}_le", f"{names.BARRIER_DURATION.name}_bucket", "rate5m"
)
# Columns of tables about ranks.
RANK = Column("Rank", width=70)
HOST = Column("Host")
WHO = "host, rank"


def barriers() -> Row:
    """Barriers, and who is missing."""
    missing = series_about("missing_", names.BARRIER_RANK_MISSING)
    return Row(
        "Barriers",
        [
            panels.rows(
                "Who is missing",
                "The ranks that stalled barriers wait for, with their hosts, at most"
                " 64 per barrier. Log in to the host: check that the process runs, and"
                " what it does. Host and rank above select missing ranks here.",
                {
                    "missing_rank": RANK,
                    "missing_host": HOST,
                    "cause": Column("Cause"),
                    "barrier": Column("Barrier"),
                },
                as_rows(
                    f"max by (barrier, missing_host, missing_rank, cause) ({missing})"
                ),
                empty="No barrier is stalled.",
            ),
            panels.rows(
                "Arrived and missing",
                "The arrived and the missing ranks of each stalled barrier, at the last"
                " reading. The same ranks missing in every barrier: check them. Nearly"
                " all missing: check the ranks that arrived.",
                {
                    "Value #B": Column("Missing", width=90),
                    "Value #A": Column("Arrived", width=90),
                    "barrier": Column("Barrier"),
                },
                as_rows(_ARRIVED),
                as_rows(_MISSING),
                empty="No barrier is stalled.",
            ),
            panels.lines(
                "Arrived over expected",
                "The fraction of ranks that have arrived at a stalled barrier. It is"
                " read after 30 seconds and each time the wait has doubled. If it does"
                " not grow, the missing ranks need help.",
                "percentunit",
                over_time(f"{_ARRIVED} / ({_ARRIVED} + {_MISSING})", "{{barrier}}"),
            ),
            panels.lines(
                "Barriers by result",
                "Completed, timed out and failed barriers per minute, summed over"
                " ranks. Timeouts and failures are never normal: search the logs below"
                " for barrier.timeout.",
                "cpm",
                over_time(
                    f"60 * sum by (barrier, result) ({_BARRIER_RESULTS})",
                    "{{barrier}} {{result}}",
                ),
            ),
            panels.lines(
                "Time spent in barriers",
                "How long ranks wait for each other. Rising p50: the whole job is"
                " slower. Rising p99 alone: a rank arrives late, see the stragglers.",
                "s",
                over_time(_barrier_time(0.5), "p50 {{barrier}}"),
                over_time(_barrier_time(0.99), "p99 {{barrier}}"),
                width=24,
            ),
        ],
        closed=True,
    )


def _barrier_time(q: float) -> str:
    return f"histogram_quantile({q}, sum by (barrier, le) ({_BARRIER_TIMES}))"


def stragglers() -> Row:
    """Ranks that arrive last."""
    last = f"increase({series(names.BARRIER_LAST_ARRIVALS)}[$__range])"
    return Row(
        "Stragglers",
        [
            panels.bars(
                "Last arrivals by rank",
                "How often each rank arrived last in the time range. Evenly spread is"
                " normal. A rank far above the others is the straggler: compare its"
                " host with the others (clocks, disk, GPU).",
                "short",
                now(
                    f"topk(16, round(sum by ({WHO}) ({last})))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
        ],
        closed=True,
    )


def rendezvous() -> Row:
    """The rendezvous of the nodes."""

    def seen(metric: names.Metric) -> str:
        return f"max by (backend) ({series(metric)})"

    return Row(
        "Rendezvous",
        [
            panels.yes_or_no(
                "Round complete",
                "Whether the nodes have completed a round, as torchrun's agents last"
                " read it. Not complete for minutes: a node has not joined, or its"
                " agent cannot reach the endpoint.",
                over_time(seen(names.RENDEZVOUS_COMPLETE), "{{backend}}"),
                "complete",
                "not complete",
            ),
            panels.lines(
                "Participants and wait list",
                "Nodes that have joined the round, and nodes that wait for the next"
                " one. Below its minimum the job cannot start. A wait list that remains"
                " means that the job is at its maximum or does not restart.",
                "short",
                over_time(seen(names.RENDEZVOUS_PARTICIPANTS), "joined"),
                over_time(seen(names.RENDEZVOUS_WAIT_LIST), "waiting"),
                over_time(seen(names.RENDEZVOUS_ROUND), "round"),
            ),
            panels.lines(
                "Oldest heartbeat",
                "Seconds since the oldest last heartbeat of a node. Agents write one"
                " every few seconds: more than 15 means that a node or its connection"
                " to the backend has failed.",
                "s",
                over_time(
                    f"max by (backend) ({age(names.RENDEZVOUS_OLDEST_HEARTBEAT)})",
                    "{{backend}}",
                ),
            ),
            panels.lines(
                "Joining, by result",
                "Rendezvous that completed, timed out or failed. Timeouts:"
                " rendezvous.waiting and rendezvous.timeout in the logs list the nodes"
                " that have joined.",
                "short",
                over_time(
                    "sum by (backend, result)"
                    f" ({grown(names.RENDEZVOUS_DURATION, suffix='_count')})",
                    "{{backend}} {{result}}",
                ),
            ),
        ],
        closed=True,
    )


def logs_and_traces() -> Row:
    """Events as sentences, and traces of barriers."""
    unfinished = (
        f'{{ {targets.OF_RUN} && (span.{names.BARRIER_RESULT} =~ "timeout|failed"'
        ' || (name =~ "barrier .*" && duration > 10s)) }'
    )
    return Row(
        "Logs and traces",
        [
            panels.log_lines(
                "Events",
                "The events of stalled jobs, barriers, rendezvous and calls, one line"
                " each. Open a line for its fields; `trace_id` links to the trace.",
                targets.events(
                    names.JOB_STALLED,
                    names.JOB_RESUMED,
                    names.JOB_ABORTED,
                    names.STORE_STALE,
                    names.BARRIER_WAITING,
                    names.BARRIER_TIMEOUT,
                    names.BARRIER_FAILED,
                    names.BARRIER_STALE_KEY,
                    names.RENDEZVOUS_CONFLICT,
                    names.RENDEZVOUS_WAITING,
                    names.RENDEZVOUS_TIMEOUT,
                    names.RENDEZVOUS_FAILED,
                    names.OPERATION_STALLED,
                ),
            ),
            panels.traces(
                "Slow and failed barriers",
                "One trace per barrier, with all ranks. In a trace, the last span to"
                " begin is the straggler's.",
                targets.traces(unfinished),
            ),
        ],
        closed=True,
    )
