"""The dashboard "Job coordination": what a job waits for. For the person on call."""

from typing import Any

from generator import config, panels, targets
from generator.page import Row, page
from generator.targets import (
    age,
    now,
    over_time,
    rate,
    recorded,
    series,
    series_about,
)
from generator.targets import rows as as_rows
from tracedstore import names

# Panels of whole runs read recording rules, so that their cost does not grow with the
# number of ranks.
_BARRIER = "job_run_id_barrier"
_WHO = "run_id, host, rank"
# The first two ranks that arrived report these, each with its last reading.
_MISSING = recorded(_BARRIER, names.BARRIER_MISSING, "max")
_ARRIVED = recorded(_BARRIER, names.BARRIER_ARRIVED, "max")
# A few ranks report these. The count is 0 if the awaited ranks are unknown.
_AWAITED = recorded("job_run_id", names.JOB_AWAITED, "max")
_OLDEST = recorded("job_run_id_store_operation", names.OLDEST_START, "min")
_BARRIER_RESULTS = recorded(
    f"{_BARRIER}_result", f"{names.BARRIER_DURATION.name}_count", "rate5m"
)
_BARRIER_TIMES = recorded(
    f"{_BARRIER}_le", f"{names.BARRIER_DURATION.name}_bucket", "rate5m"
)
_RANKS_UP = recorded("job_run_id", "up", "sum")
_RANKS_DOWN = f"sum({recorded('job_run_id', 'up_zero', 'count')}) or vector(0)"


def build() -> Any:
    """Build the dashboard."""
    return page(
        config.COORDINATION,
        "Job coordination",
        "Stalled jobs, barriers and rendezvous, and the ranks that they wait for, with"
        " their hosts. Panels without ranks are of whole runs: host, rank and instance"
        " above do not filter them.",
        _now(),
        _stalled_job(),
        _barriers(),
        _stragglers(),
        _rendezvous(),
        _logs_and_traces(),
    )


def _now() -> Row:
    return Row(
        "Now",
        [
            panels.number(
                "Barriers stalled",
                "Barriers that are waiting for ranks. If it is not 0, find the missing"
                " ranks in the table below, and check their hosts first.",
                now(f"count({_MISSING}) or vector(0)"),
            ),
            panels.number(
                "Ranks missing",
                "Ranks that stalled barriers wait for. All ranks of one host: check the"
                " host. One rank: check its process.",
                now(f"sum({_MISSING}) or vector(0)"),
            ),
            panels.number(
                "Oldest wait",
                "The age of the oldest Store call in flight. Minutes, with no barrier"
                " stalled: find the rank in 'Waiting now', and read the key on its"
                " /inflight page.",
                now(f"max(time() - {_OLDEST}) or vector(0)"),
                unit="s",
                bad=300,
            ),
            panels.number(
                "Ranks not scraped",
                "Ranks that Prometheus or their agent cannot read. If other ranks are"
                " up, these processes or their hosts have failed: check them.",
                now(_RANKS_DOWN),
            ),
        ],
    )


def _stalled_job() -> Row:
    awaited = series_about("awaited_", names.JOB_RANK_AWAITED)
    unknown = f"{series(names.JOB_AWAITED)} == 0"
    return Row(
        "Stalled job",
        [
            panels.number(
                "Jobs stalled",
                "Jobs whose ranks have been blocked in Store calls for stall_after. If"
                " it is not 0, the table has the ranks that they wait for and the"
                " cause. The runbook has a section for each cause.",
                now(f"count({_AWAITED}) or vector(0)"),
            ),
            panels.number(
                "Ranks awaited",
                "Ranks that stalled jobs wait for. 0 while a job is stalled: the ranks"
                " are unknown; read `evidence` of job.stalled in the logs below.",
                now(f"sum({_AWAITED}) or vector(0)"),
            ),
            panels.rows(
                "Who the job waits for",
                "The ranks that stalled jobs wait for, with their hosts and the cause,"
                " at most 64 per job. A row without a rank: the cause is all that is"
                " known. Host and rank above select awaited ranks here.",
                {
                    "run_id": "Run",
                    "awaited_host": "Host",
                    "awaited_rank": "Rank",
                    "cause": "Cause",
                    "Value": "Awaited",
                },
                as_rows(
                    f"max by (run_id, awaited_host, awaited_rank, cause) ({awaited})"
                    f" or max by (run_id, cause) ({unknown})"
                ),
            ),
        ],
    )


def _barriers() -> Row:
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
                    "run_id": "Run",
                    "barrier": "Barrier",
                    "missing_host": "Host",
                    "missing_rank": "Rank",
                    "Value": "Missing",
                },
                as_rows(
                    f"max by (run_id, barrier, missing_host, missing_rank) ({missing})"
                ),
            ),
            panels.rows(
                "Arrived and missing",
                "The arrived and the missing ranks of each stalled barrier, at the last"
                " reading. Empty if no barrier stalls. The same ranks missing in every"
                " barrier: check them. Nearly all missing: check the ranks that"
                " arrived.",
                {
                    "run_id": "Run",
                    "barrier": "Barrier",
                    "Value #A": "Arrived",
                    "Value #B": "Missing",
                },
                as_rows(_ARRIVED),
                as_rows(_MISSING),
            ),
            panels.lines(
                "Arrived over expected",
                "The fraction of ranks that have arrived at a stalled barrier. It is"
                " read after 30 seconds and each time the wait has doubled. If it does"
                " not grow, the missing ranks need help.",
                "percentunit",
                over_time(
                    f"{_ARRIVED} / ({_ARRIVED} + {_MISSING})", "{{run_id}} {{barrier}}"
                ),
            ),
            panels.lines(
                "Barriers by result",
                "Completed, timed out and failed barriers per second, summed over"
                " ranks. Timeouts and failures are never normal: search the logs below"
                " for barrier.timeout.",
                "ops",
                over_time(
                    f"sum by (barrier, result) ({_BARRIER_RESULTS})",
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
    )


def _barrier_time(q: float) -> str:
    return f"histogram_quantile({q}, sum by (barrier, le) ({_BARRIER_TIMES}))"


def _stragglers() -> Row:
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
                    f"topk(16, sum by ({_WHO}) ({last}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.rows(
                "Waiting now",
                "Store calls in flight, the oldest of each rank and operation. A"
                " missing rank that is not listed here does not wait for the store:"
                " check for a collective, the data loader or a checkpoint.",
                {
                    "run_id": "Run",
                    "host": "Host",
                    "rank": "Rank",
                    "store": "Store",
                    "operation": "Operation",
                    "Value": "Waits for",
                },
                as_rows(
                    f"topk(32, max by ({_WHO}, store, operation)"
                    f" ({age(names.OLDEST_START)}))"
                ),
                unit="s",
            ),
            panels.lines(
                "Oldest wait by rank",
                "The ranks with the oldest Store calls. A line that rises and does not"
                " fall is a stuck rank. If all lines rise together, the ranks wait for"
                " one that is not shown.",
                "s",
                over_time(
                    f"topk(10, max by ({_WHO}) ({age(names.OLDEST_START)}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.lines(
                "Ranks scraped",
                "Ranks that answer Prometheus or their agent, and ranks that do not. A"
                " step down is a rank that has exited or a host that has failed.",
                "short",
                over_time(f"sum by (run_id) ({_RANKS_UP})", "up {{run_id}}"),
                over_time(_RANKS_DOWN, "not scraped"),
            ),
        ],
    )


def _rendezvous() -> Row:
    def seen(metric: names.Metric) -> str:
        return f"max by (run_id, backend) ({series(metric)})"

    return Row(
        "Rendezvous",
        [
            panels.states(
                "Round complete",
                "Whether the nodes have completed a round, as torchrun's agents last"
                " read it. Not complete for minutes: a node has not joined, or its"
                " agent cannot reach the endpoint.",
                over_time(seen(names.RENDEZVOUS_COMPLETE), "{{run_id}} {{backend}}"),
                "complete",
                "not complete",
            ),
            panels.lines(
                "Participants and wait list",
                "Nodes that have joined the round, and nodes that wait for the next"
                " one. Below its minimum the job cannot start. A wait list that remains"
                " means that the job is at its maximum or does not restart.",
                "short",
                over_time(seen(names.RENDEZVOUS_PARTICIPANTS), "joined {{run_id}}"),
                over_time(seen(names.RENDEZVOUS_WAIT_LIST), "waiting {{run_id}}"),
                over_time(seen(names.RENDEZVOUS_ROUND), "round {{run_id}}"),
            ),
            panels.lines(
                "Oldest heartbeat",
                "Seconds since the oldest last heartbeat of a node. Agents write one"
                " every few seconds: more than 15 means that a node or its connection"
                " to the backend has failed.",
                "s",
                over_time(
                    "max by (run_id, backend)"
                    f" ({age(names.RENDEZVOUS_OLDEST_HEARTBEAT)})",
                    "{{run_id}} {{backend}}",
                ),
            ),
            panels.lines(
                "Joining, by result",
                "Rendezvous that completed, timed out or failed, per second. Timeouts:"
                " rendezvous.waiting and rendezvous.timeout in the logs list the nodes"
                " that have joined.",
                "ops",
                over_time(
                    "sum by (backend, result)"
                    f" ({rate(names.RENDEZVOUS_DURATION, suffix='_count')})",
                    "{{backend}} {{result}}",
                ),
            ),
        ],
    )


def _logs_and_traces() -> Row:
    unfinished = (
        f'{{ {targets.OF_RUN} && (span.{names.BARRIER_RESULT} =~ "timeout|failed"'
        ' || (name =~ "barrier .*" && duration > 10s)) }'
    )
    return Row(
        "Logs and traces",
        [
            panels.log_lines(
                "Events",
                "The events of stalled jobs, barriers, rendezvous and calls. `awaited`"
                " and `missing` have the hosts and ranks; `trace_id` links to the"
                " trace.",
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
    )
