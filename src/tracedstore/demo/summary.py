"""What the demo has to say at its end, all of it out of the ranks' own signals."""

import json
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from tracedstore import names
from tracedstore.coordination.ranges import fold
from tracedstore.core.errors import CommandError
from tracedstore.demo.outputs import ExportedSpan, Signals
from tracedstore.demo.rank import CHECKPOINT, Folder

_MOST_WAITS = 3
_MOST_LAST = 4


def totals(signals: Signals) -> dict[str, Any]:
    """Add up what the ranks counted."""
    every = signals.metrics.values()
    failed, cas, visits = Counter[str](), Counter[str](), Counter[str]()
    for metrics in every:
        failed += metrics.failed
        cas += metrics.cas
        visits += metrics.visits
    return {
        "calls": sum(metrics.calls for metrics in every),
        "failed_calls": dict(failed),
        "cas_won": cas[names.WON],
        "cas_lost": cas[names.LOST],
        "barrier_visits": dict(visits),
        "record_last_arrival": {
            rank: metrics.record_last_arrival
            for rank, metrics in signals.metrics.items()
            if metrics.record_last_arrival
        },
    }


def slowest_waits(spans: Sequence[ExportedSpan]) -> list[dict[str, Any]]:
    """Find what took longest, and which rank waited for it longest."""
    longest: dict[str, ExportedSpan] = {}
    for span in sorted(spans, key=lambda span: span.seconds):
        longest[span.name] = span
    first = sorted(longest.values(), key=lambda span: -span.seconds)[:_MOST_WAITS]
    return [
        {
            "what": span.name,
            "rank": span.rank,
            "seconds": round(span.seconds, 3),
            "result": span.attributes.get(names.BARRIER_RESULT, ""),
        }
        for span in first
    ]


def straggler(signals: Signals, prefixes: Sequence[str]) -> dict[str, Any]:
    """Find who was last most often at some barriers, and how late that was.

    By the spans: a barrier is one trace, in which each rank's begins when it arrived.
    """
    late: dict[int, list[float]] = {}
    for prefix in prefixes:
        visits = [s for s in signals.spans if _prefix_of(s) == prefix]
        last = [
            s for s in visits if s.attributes.get(names.BARRIER_LAST_RANK) == s.rank
        ]
        before = [s.start for s in visits if s not in last]
        if last and before:
            late.setdefault(last[0].rank, []).append(last[0].start - max(before))
    if not late:
        raise CommandError("the traces have no barrier that all ranks came to")
    rank = max(late, key=lambda rank: len(late[rank]))
    return {
        "rank": rank,
        "host": hosts(signals).get(rank, f"rank {rank}"),
        "times": len(late[rank]),
        "of": len(prefixes),
        "late_seconds": round(median(late[rank]), 3),
    }


def _prefix_of(span: ExportedSpan) -> str | None:
    prefix: str | None = span.attributes.get(names.BARRIER_PREFIX)
    return prefix


def hosts(signals: Signals) -> dict[int, str]:
    """Give the hosts that the events named."""
    found: dict[int, str] = {}
    for event in signals.events:
        pairs = zip(
            event.get("missing_ranks", ()), event.get("missing_names", ()), strict=True
        )
        found |= dict(pairs)
    return found


def missing(signals: Signals, folder: Folder) -> dict[str, Any]:
    """Hold against each other what all sources say of who was missing at the end."""
    survivors = [rank for rank, answer in signals.answers.items() if answer]
    told = [e for e in signals.events if e.get("barrier") == CHECKPOINT]
    warnings = [e for e in told if e["event"] == names.BARRIER_WAITING]
    told_by: dict[str, dict[int, list[int]]] = {
        "warning": {e["rank"]: e["missing_ranks"] for e in warnings},
        "log": {
            e["rank"]: e["missing_ranks"]
            for e in told
            if e["event"] == names.BARRIER_TIMEOUT
        },
        "exception": {
            rank: json.loads(folder.error(rank).read_text("utf-8"))["missing_ranks"]
            for rank in survivors
            if folder.error(rank).exists()
        },
        "metric": {
            rank: sorted(found)
            for family, by_rank in signals.waiting.items()
            if family == _family(told)
            for rank, found in by_rank.items()
        },
        "trace": {
            span.rank: list(span.attributes.get(names.BARRIER_MISSING_RANKS, ()))
            for span in signals.spans
            if _prefix_of(span) == CHECKPOINT
        },
    }
    lists = {tuple(ranks) for source in told_by.values() for ranks in source.values()}
    complete = all(
        sorted(told_by[source]) == survivors for source in ("log", "exception", "trace")
    )
    ranks = list(lists.pop()) if len(lists) == 1 else []
    known = hosts(signals)
    traces = {s.trace_id for s in signals.spans if _prefix_of(s) == CHECKPOINT}
    return {
        "ranks": ranks,
        "hosts": [known[rank] for rank in ranks],
        "survivors": survivors,
        "warned_after_seconds": min(
            (round(e["waited_seconds"], 3) for e in warnings), default=None
        ),
        "told_by": told_by,
        "agree": bool(ranks) and complete and all(told_by.values()),
        "traces": len(traces),
    }


def _family(events: Sequence[dict[str, Any]]) -> str:
    return str(events[0]["barrier_family"]) if events else ""


def lines(summary: dict[str, Any]) -> list[str]:
    """Say it, each thing with its name in front."""
    failed = ", ".join(f"{n:,} {kind}" for kind, n in summary["failed_calls"].items())
    made, lost = summary["cas_won"] + summary["cas_lost"], summary["cas_lost"]
    last = sorted(summary["record_last_arrival"].items(), key=lambda found: -found[1])
    record_last_arrival = [f"rank {rank}: {n}x" for rank, n in last[:_MOST_LAST]]
    if others := sum(n for _, n in last[_MOST_LAST:]):
        record_last_arrival.append(f"others: {others}x")
    gone, late = summary["missing"], summary["straggler"]
    waits = [
        f"{wait['seconds']:.2f} s  {wait['what']}, by rank {wait['rank']}"
        + (", timed out" if wait["result"] == "timeout" else "")
        for wait in summary["slowest_waits"]
    ]
    how = f"{late['late_seconds']:.2f} s late, {late['times']} times of {late['of']}"
    said = [
        ("calls", f"{summary['calls']:,}, failed: {failed or 'none'}"),
        ("CAS", f"{made:,} made, {lost:,} lost to another writer"),
        *zip(["slowest waits", *[""] * len(waits)], waits, strict=False),
        ("came last", ", ".join(record_last_arrival)),
        ("straggler", f"rank {late['rank']} on {late['host']}, {how}"),
        ("missing", f"ranks {fold(gone['ranks'])} on {', '.join(gone['hosts'])}"),
        ("", f"by log, exception, metric and trace of {len(gone['survivors'])} ranks"),
    ]
    return [f"  {name:13}  {what}" for name, what in said]
