"""The summary of the demo, computed from the outputs of its ranks."""

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from tracedstore import names
from tracedstore.common.errors import CommandError
from tracedstore.common.ranges import fold
from tracedstore.tools.demo.output_folder import OutputFolder
from tracedstore.tools.demo.outputs import Event, ExportedSpan, RankOutputs
from tracedstore.tools.demo.rank import CHECKPOINT

_MAX_WAITS = 3
_MAX_LAST_RANKS = 4
# The start of the phase in which a rank is busy elsewhere.
_NEW_GROUP = "new_group"


def totals(outputs: RankOutputs) -> dict[str, Any]:
    """Return the sums of the metrics of all ranks."""
    every = outputs.metrics.values()
    failed, cas, barriers = Counter[str](), Counter[str](), Counter[str]()
    for metrics in every:
        failed += metrics.failed
        cas += metrics.cas
        barriers += metrics.barriers
    return {
        "calls": sum(metrics.calls for metrics in every),
        "failed_calls": dict(failed),
        "cas_won": cas[names.WON],
        "cas_lost": cas[names.LOST],
        "barrier_calls": dict(barriers),
        "last_arrivals": {
            rank: metrics.last_arrivals
            for rank, metrics in outputs.metrics.items()
            if metrics.last_arrivals
        },
    }


def slowest_waits(spans: Sequence[ExportedSpan]) -> list[dict[str, Any]]:
    """Return the three slowest calls and barriers, each by its slowest rank."""
    by_name: dict[str, ExportedSpan] = {}
    for span in sorted(spans, key=lambda span: span.seconds):
        by_name[span.name] = span
    slowest = sorted(by_name.values(), key=lambda span: -span.seconds)[:_MAX_WAITS]
    return [
        {
            "what": span.name,
            "rank": span.rank,
            "seconds": round(span.seconds, 3),
            "result": span.attributes.get(names.BARRIER_RESULT, ""),
        }
        for span in slowest
    ]


def straggler(outputs: RankOutputs, prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the rank that was last most often at some barriers, and its delay.

    The source are the spans: a barrier is one trace, in which the span of each rank
    starts at its arrival.

    Raises:
        CommandError: No barrier has spans of its last rank and of another one.
    """
    delays: dict[int, list[float]] = {}
    for prefix in prefixes:
        spans = [span for span in outputs.spans if _prefix_of(span) == prefix]
        last = [
            span
            for span in spans
            if span.attributes.get(names.BARRIER_LAST_RANK) == span.rank
        ]
        others = [span.start for span in spans if span not in last]
        if last and others:
            delay = last[0].start - max(others)
            delays.setdefault(last[0].rank, []).append(delay)
    if not delays:
        raise CommandError("the traces have no barrier at which all ranks arrived")
    rank = max(delays, key=lambda rank: len(delays[rank]))
    return {
        "rank": rank,
        "host": hosts(outputs).get(rank, f"rank {rank}"),
        "times": len(delays[rank]),
        "of": len(prefixes),
        "late_seconds": round(median(delays[rank]), 3),
    }


def _prefix_of(span: ExportedSpan) -> str | None:
    prefix: str | None = span.attributes.get(names.BARRIER_PREFIX)
    return prefix


def hosts(outputs: RankOutputs) -> dict[int, str]:
    """Return the hosts of the ranks that events reported as missing."""
    by_rank: dict[int, str] = {}
    for event in outputs.events:
        pairs = zip(
            event.get("missing_ranks", ()), event.get("missing_names", ()), strict=True
        )
        by_rank |= dict(pairs)
    return by_rank


def stalled(outputs: RankOutputs) -> dict[str, Any]:
    """Return whom the ranks waited for in ``new_group``, from the events.

    ``agree`` is true if every rank that reported the stall named the same ranks and the
    same cause, and reported its end.
    """
    events = [e for e in outputs.events if e.get("phase", "").startswith(_NEW_GROUP)]
    reports = [e for e in events if e["event"] == names.JOB_STALLED]
    resumed = {e["rank"] for e in events if e["event"] == names.JOB_RESUMED}
    verdicts = {(tuple(e["awaited_ranks"]), e["cause"]) for e in reports}
    first = reports[0] if reports else {}
    reporters = sorted({e["rank"] for e in reports})
    return {
        "ranks": first.get("awaited_ranks", []),
        "cause": first.get("cause", ""),
        "awaited": first.get("awaited", ""),
        "phase": first.get("phase", ""),
        "waiting_ranks": first.get("waiting_ranks", ""),
        "waited_seconds": first.get("waited_seconds"),
        "reported_by": reporters,
        "agree": len(verdicts) == 1 and sorted(resumed) == reporters,
    }


def missing(outputs: RankOutputs, folder: OutputFolder) -> dict[str, Any]:
    """Compare the missing ranks of the checkpoint in all sources.

    ``agree`` is true if every source has the same ranks, and the log, exception and
    trace of every survivor has them.
    """
    survivors = [rank for rank, status in outputs.statuses.items() if status]
    events = [e for e in outputs.events if e.get("barrier") == CHECKPOINT]
    warnings = [e for e in events if e["event"] == names.BARRIER_WAITING]
    by_source: dict[str, dict[int, list[int]]] = {
        "warning": {e["rank"]: e["missing_ranks"] for e in warnings},
        "log": {
            e["rank"]: e["missing_ranks"]
            for e in events
            if e["event"] == names.BARRIER_TIMEOUT
        },
        "exception": {
            rank: json.loads(folder.error(rank).read_text("utf-8"))["missing_ranks"]
            for rank in survivors
            if folder.error(rank).exists()
        },
        "metric": {
            rank: sorted(hosts_by_rank)
            for family, by_rank in outputs.missing.items()
            if family == _family(events)
            for rank, hosts_by_rank in by_rank.items()
        },
        "trace": {
            span.rank: list(span.attributes.get(names.BARRIER_MISSING_RANKS, ()))
            for span in outputs.spans
            if _prefix_of(span) == CHECKPOINT
        },
    }
    lists = {tuple(ranks) for source in by_source.values() for ranks in source.values()}
    complete = all(
        sorted(by_source[source]) == survivors
        for source in ("log", "exception", "trace")
    )
    ranks = list(lists.pop()) if len(lists) == 1 else []
    known_hosts = hosts(outputs)
    traces = {s.trace_id for s in outputs.spans if _prefix_of(s) == CHECKPOINT}
    return {
        "ranks": ranks,
        "hosts": [known_hosts[rank] for rank in ranks],
        "survivors": survivors,
        "warned_after_seconds": min(
            (round(e["waited_seconds"], 3) for e in warnings), default=None
        ),
        "missing_by_source": by_source,
        "agree": bool(ranks) and complete and all(by_source.values()),
        "traces": len(traces),
    }


def _family(events: Sequence[Event]) -> str:
    return str(events[0]["barrier_family"]) if events else ""


def table(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary as labels and texts."""
    failed = ", ".join(f"{n:,} {kind}" for kind, n in summary["failed_calls"].items())
    cas, lost = summary["cas_won"] + summary["cas_lost"], summary["cas_lost"]
    ordered = sorted(summary["last_arrivals"].items(), key=lambda item: -item[1])
    last = [f"rank {rank}: {n}x" for rank, n in ordered[:_MAX_LAST_RANKS]]
    if others := sum(n for _, n in ordered[_MAX_LAST_RANKS:]):
        last.append(f"others: {others}x")
    gone, late = summary["missing"], summary["straggler"]
    stall = summary["stalled"]
    awaited = f"rank {fold(stall['ranks'])}, {stall['cause']}"
    waits = [
        f"{wait['seconds']:.2f} s  {wait['what']}, by rank {wait['rank']}"
        + (", timed out" if wait["result"] == "timeout" else "")
        for wait in summary["slowest_waits"]
    ]
    delay = f"{late['late_seconds']:.2f} s late, {late['times']} times of {late['of']}"
    return [
        ("calls", f"{summary['calls']:,}, failed: {failed or 'none'}"),
        ("CAS", f"{cas:,} made, {lost:,} lost to another writer"),
        *zip(["slowest waits", *[""] * len(waits)], waits, strict=False),
        ("arrived last", ", ".join(last)),
        ("straggler", f"rank {late['rank']} on {late['host']}, {delay}"),
        (
            "awaited",
            f"{awaited}, in {stall['phase']} by ranks {stall['waiting_ranks']}",
        ),
        ("missing", f"ranks {fold(gone['ranks'])} on {', '.join(gone['hosts'])}"),
        ("", f"by log, exception, metric and trace of {len(gone['survivors'])} ranks"),
    ]
