"""Job coordination: for whoever is on call and asks what the job waits for."""

from typing import Any

from generator import config, panels, targets
from generator.page import Row, page
from generator.targets import age, now, over_time, quantile, rate, series
from generator.targets import rows as as_rows
from tracedstore import names

_BARRIER = "job, run_id, barrier"
_WHO = "run_id, host, rank"
# Each is told by the first two that arrived, with what each of them last saw.
_MISSING = f"max by ({_BARRIER}) ({series(names.BARRIER_MISSING)})"
_ARRIVED = f"max by ({_BARRIER}) ({series(names.BARRIER_ARRIVED)})"
_UP = series("up", 'rank!=""')
_RANKS_DOWN = f"count({_UP} == 0) or vector(0)"


def build() -> Any:
    """Make the dashboard."""
    return page(
        config.COORDINATION,
        "Job coordination",
        "Is anything stalled, where, and who is missing.",
        _now(),
        _barriers(),
        _stragglers(),
        _rendezvous(),
        _told(),
    )


def _now() -> Row:
    return Row(
        "Now",
        [
            panels.number(
                "Barriers stalled",
                "Barriers that wait for ranks right now. If it is not 0, read who is"
                " missing in the table below and look at that host first.",
                now(f"count({_MISSING}) or vector(0)"),
            ),
            panels.number(
                "Ranks missing",
                "Ranks that stalled barriers wait for. All ranks of one host: look at"
                " the host. One rank: look at its process.",
                now(f"sum({_MISSING}) or vector(0)"),
            ),
            panels.number(
                "Oldest wait",
                "How long the Store call that waits for longest has been waiting."
                " Minutes, with no barrier stalled: find the rank in 'Waiting now'"
                " and ask its /inflight page for the key.",
                now(f"max({age(names.OLDEST_START)}) or vector(0)"),
                unit="s",
                bad=300,
            ),
            panels.number(
                "Ranks not scraped",
                "Ranks whose metrics Prometheus cannot get. While others go on, these"
                " processes or their hosts are gone: look there.",
                now(_RANKS_DOWN),
            ),
        ],
    )


def _barriers() -> Row:
    missing = series(names.BARRIER_RANK_MISSING).replace(
        targets.CHOSEN, targets.CHOSEN_MISSING
    )
    return Row(
        "Barriers",
        [
            panels.rows(
                "Who is missing",
                "The ranks that stalled barriers wait for, with their hosts, at most"
                " 64 a barrier. Log in to the host: is the process there, and what is"
                " it in? Host and rank above choose among the missing here.",
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
                "How many ranks of each stalled barrier came and how many did not, as"
                " last looked. Empty is good. Some missing in every barrier: suspect"
                " those ranks; nearly all missing: suspect those that came.",
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
                "The share of its ranks that a stalled barrier has. Looked at after 30"
                " seconds and each time the wait has doubled. If it does not grow, the"
                " rest will not come by itself.",
                "percentunit",
                over_time(
                    f"{_ARRIVED} / ({_ARRIVED} + {_MISSING})", "{{run_id}} {{barrier}}"
                ),
            ),
            panels.lines(
                "Barriers by result",
                "Barriers that ended, a second and rank. Timeouts and failures are"
                " never normal: search the logs below for barrier.timeout.",
                "ops",
                over_time(
                    "sum by (barrier, result)"
                    f" ({rate(names.BARRIER_DURATION, suffix='_count')})",
                    "{{barrier}} {{result}}",
                ),
            ),
            panels.lines(
                "Time spent in barriers",
                "How long ranks wait for each other. Rising p50: the job is slower as"
                " a whole. Rising p99 alone: someone comes late, see the stragglers.",
                "s",
                over_time(
                    quantile(0.5, names.BARRIER_DURATION, "barrier"), "p50 {{barrier}}"
                ),
                over_time(
                    quantile(0.99, names.BARRIER_DURATION, "barrier"), "p99 {{barrier}}"
                ),
                width=24,
            ),
        ],
    )


def _stragglers() -> Row:
    last = f"increase({series(names.BARRIER_LAST_ARRIVALS)}[$__range])"
    return Row(
        "Stragglers",
        [
            panels.bars(
                "Last arrivals by rank",
                "How often each rank was the one that the others waited for, in the"
                " time shown. Evenly spread is normal. One that stands out is the"
                " straggler: compare its host with the others (clocks, disk, GPU).",
                "short",
                now(
                    f"topk(16, sum by ({_WHO}) ({last}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.rows(
                "Waiting now",
                "Store calls in flight, the oldest of each rank and operation. Who is"
                " missing above and not here does not wait for the store: look for a"
                " collective, the data loader or a checkpoint.",
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
                "Ranks that have waited for longest. A line that climbs and does not"
                " fall is stuck. All of them climbing together wait for one that is"
                " not shown.",
                "s",
                over_time(
                    f"topk(10, max by ({_WHO}) ({age(names.OLDEST_START)}))",
                    "rank {{rank}} on {{host}}",
                ),
            ),
            panels.lines(
                "Ranks scraped",
                "Ranks whose metrics Prometheus gets, and those whose it does not. A"
                " step down is a rank that ended or a host that went.",
                "short",
                over_time(f"sum by (run_id) ({_UP})", "up {{run_id}}"),
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
                "Whether the nodes agreed on a round, as torchrun's agents last saw"
                " it. Not complete for minutes: a node did not come, or its agent"
                " cannot reach the endpoint.",
                over_time(seen(names.RENDEZVOUS_COMPLETE), "{{run_id}} {{backend}}"),
                "complete",
                "not complete",
            ),
            panels.lines(
                "Participants and wait list",
                "Nodes that joined the round, and nodes that wait for the next one."
                " Below the job's minimum it cannot start; a wait list that stays"
                " means that the job has no room or does not re-form.",
                "short",
                over_time(seen(names.RENDEZVOUS_PARTICIPANTS), "joined {{run_id}}"),
                over_time(seen(names.RENDEZVOUS_WAIT_LIST), "waiting {{run_id}}"),
                over_time(seen(names.RENDEZVOUS_ROUND), "round {{run_id}}"),
            ),
            panels.lines(
                "Silence of the quietest node",
                "Seconds since the node that has been silent for longest was heard of."
                " Agents speak every few seconds: more than 15 means that a node or"
                " the way to the backend is in trouble.",
                "s",
                over_time(
                    "max by (run_id, backend)"
                    f" ({age(names.RENDEZVOUS_OLDEST_HEARTBEAT)})",
                    "{{run_id}} {{backend}}",
                ),
            ),
            panels.lines(
                "Joining, by result",
                "Rendezvous that nodes joined or gave up, a second. Timeouts: read"
                " rendezvous.waiting and rendezvous.timeout in the logs for who came.",
                "ops",
                over_time(
                    "sum by (backend, result)"
                    f" ({rate(names.RENDEZVOUS_DURATION, suffix='_count')})",
                    "{{backend}} {{result}}",
                ),
            ),
        ],
    )


def _told() -> Row:
    unfinished = (
        f'{{ {targets.OF_RUN} && (span.{names.BARRIER_RESULT} =~ "timeout|failed"'
        ' || (name =~ "barrier .*" && duration > 10s)) }'
    )
    return Row(
        "Logs and traces",
        [
            panels.lines_of_log(
                "What was told",
                "Barriers, rendezvous and stalled calls, in the job's own words."
                " `missing` names hosts and ranks; `trace_id` opens the trace.",
                targets.events(
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
                "One trace a barrier, with all ranks in it. Open one: the last span to"
                " begin is the straggler.",
                targets.traces(unfinished),
            ),
        ],
    )
