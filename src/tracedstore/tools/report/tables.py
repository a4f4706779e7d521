"""Prepares the rows of the smaller tables for the templates."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tracedstore import names
from tracedstore.common.text import number
from tracedstore.tools.report.analysis import Analysis, count_outcomes
from tracedstore.tools.report.record_types import (
    COMPLETED,
    FAILED,
    TIMEOUT,
    WAITING,
    CallStats,
)
from tracedstore.tools.report.records import Records

MAX_ROWS: Final = 50

# Kinds of calls by event name, in the order of the table.
SLOW_CALLS: Final = {
    names.OPERATION_FAILED: "failed",
    names.OPERATION_STALLED: "stalled",
    names.OPERATION_SLOW: "slow",
}
CONTENDED_CALLS: Final = {
    names.CAS_CONTENDED: "lost compare-and-sets",
    names.RENDEZVOUS_CONFLICT: "lost rendezvous writes",
}


class SummaryTile(NamedTuple):
    """A number at the top of the page."""

    id: str
    label: str
    value: str
    is_failure: bool = False


class CallRow(NamedTuple):
    """Store calls of one kind, key family, operation and store."""

    kind: str
    family: str
    operation: str
    store: str
    stats: CallStats


class EventRow(NamedTuple):
    """Events with the same name and subject."""

    event: str
    subject: str
    event_count: int


def summary_tiles(analysis: Analysis) -> Iterator[SummaryTile]:
    """Count ranks, hosts and barriers by outcome."""
    records, outcomes = analysis.records, count_outcomes(analysis.barriers)
    rank_count = number(len(analysis.ranks))
    if records.world_size:
        rank_count += f" of {number(records.world_size)}"
    yield SummaryTile("ranks", "Ranks with events", rank_count)
    yield SummaryTile("hosts", "Hosts", number(len(set(records.hosts.values()))))
    completed = number(outcomes[COMPLETED])
    yield SummaryTile("completed", "Barriers completed", completed)
    if presumed := sum(each.presumed_completed for each in analysis.barriers):
        yield SummaryTile("guessed", "Presumed completed", number(presumed))
    if stalls := analysis.stalls:
        open_ended = any(stall.resumed_at is None for stall in stalls)
        yield SummaryTile("stalls", "Stalls", number(len(stalls)), open_ended)
    for outcome, name, text in (
        (TIMEOUT, "timeouts", "Timed out"),
        (FAILED, "failed", "Failed"),
        (WAITING, "open", "No end in the logs"),
    ):
        count = outcomes[outcome]
        yield SummaryTile(name, text, number(count), is_failure=count > 0)


def call_rows(records: Records, kinds: Mapping[str, str]) -> list[CallRow]:
    """Return calls of some kinds, ordered by kind and then by duration or losses."""
    order = list(kinds)
    selected = [item for item in records.store_calls.items() if item[0][0] in kinds]
    selected.sort(key=lambda item: (order.index(item[0][0]), -item[1].maximum, item[0]))
    return [
        CallRow(kinds[event], family, operation, store, stats)
        for (event, family, operation, store), stats in selected
    ]


def other_events(records: Records) -> Iterator[EventRow]:
    """Count stale keys of barriers and stores, and disabled observers."""
    for barrier_id, count in records.stale_keys.most_common(MAX_ROWS):
        yield EventRow(names.BARRIER_STALE_KEY, barrier_id.prefix, count)
    for message, count in records.stale_stores.most_common(MAX_ROWS):
        yield EventRow(names.STORE_STALE, message, count)
    for (observer, error), count in records.disabled_observers.most_common(MAX_ROWS):
        yield EventRow(names.TELEMETRY_DISABLED, f"{observer} {error}", count)


def deviating_clocks(analysis: Analysis) -> list[tuple[str, float]]:
    """Return hosts and offsets beyond the tolerance, the largest first."""
    offsets = ((host, analysis.clock_offset(host)) for host in analysis.clock_offsets)
    deviating = [(host, offset) for host, offset in offsets if offset]
    return sorted(deviating, key=lambda item: -abs(item[1]))
