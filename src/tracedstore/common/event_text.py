"""Events as sentences, for a terminal.

The fields of an event are made for queries. On a terminal eighteen of them wrap over
five lines, between the lines of the job. So an event is one line of words there.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from tracedstore import names
from tracedstore.common.text import duration, escape, plural

Fields = Mapping[str, Any]

# Escape sequences of ANSI, by level.
_COLORS: Final = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_PLAIN: Final = "\x1b[0m"
# Missing ranks of a barrier whose activity is in the line.
_MAX_DOING: Final = 2


def terminal_line(line: Fields, *, colors: bool) -> str:
    """Return an event as one line of text.

    Args:
        line: The fields of the event, with its name and level.
        colors: Whether the terminal shows colors.
    """
    event, level = str(line["event"]), str(line["level"])
    describe = _SENTENCES.get(event)
    text = event if describe is None else describe(line)
    rank = line.get("rank")
    of_rank = "" if rank is None else f" rank {rank}"
    # Keys, host names and texts of exceptions are not ours.
    text = escape(f"tracedstore {time.strftime('%H:%M:%S')}{of_rank}: {text}")
    color = _COLORS.get(level, "") if colors else ""
    return f"{color}{text}{_PLAIN}" if color else text


def _call(fields: Fields) -> str:
    """Return ``get 'epoch/3' of tcp_store node1:29400``."""
    key = f" {fields['key']!r}" if fields.get("key") else ""
    more = int(fields.get("key_count") or 0) - 1
    others = f" and {plural(more, 'other key')}" if key and more > 0 else ""
    server = f" {fields['server']}" if fields.get("server") else ""
    return f"{fields.get('operation')}{key}{others} of {fields.get('store')}{server}"


def _seconds(fields: Fields, name: str) -> str:
    return duration(float(fields.get(name) or 0))


def _suppressed(fields: Fields) -> str:
    count = int(fields.get("suppressed_count") or 0)
    return (
        f" ({plural(count, 'more event')} of this kind since the last)" if count else ""
    )


def _awaited(fields: Fields) -> str:
    awaited = fields.get("awaited")
    if not awaited:
        return ""
    noun = "waiting for " if fields.get("awaited_ranks") else ""
    return f": in {fields.get('phase')}, {noun}{awaited}"


def _slow(fields: Fields) -> str:
    took = _seconds(fields, "duration_seconds")
    return f"{_call(fields)} took {took}{_awaited(fields)}{_suppressed(fields)}"


def _error(fields: Fields) -> str:
    text = f": {fields['error']}" if fields.get("error") else ""
    return f"{fields.get('error_type')}{text}"


def _failed(fields: Fields) -> str:
    after = _seconds(fields, "duration_seconds")
    return (
        f"{_call(fields)} failed after {after}: {_error(fields)}{_awaited(fields)}"
        f"{_suppressed(fields)}"
    )


def _stalled_call(fields: Fields) -> str:
    waited = _seconds(fields, "waited_seconds")
    return f"{_call(fields)} has not returned for {waited}{_awaited(fields)}"


def _contended(fields: Fields) -> str:
    losses = plural(int(fields.get("losses_in_a_row") or 0), "compare-and-set")
    return f"{_call(fields)} lost {losses} in a row to other writers" + _suppressed(
        fields
    )


def _barrier(fields: Fields) -> str:
    return f"barrier {fields.get('barrier')}"


def _missing(fields: Fields) -> str:
    """Return who is missing, and what these ranks do, as far as it is known."""
    doing = [str(text) for text in fields.get("missing_doing") or () if text]
    activity = "; ".join(dict.fromkeys(doing[:_MAX_DOING]))
    return f"missing {fields.get('missing')}{f': {activity}' if activity else ''}"


def _barrier_waiting(fields: Fields) -> str:
    waited = _seconds(fields, "waited_seconds")
    return f"{_barrier(fields)} stalled {waited}: {_missing(fields)}"


def _barrier_completed(fields: Fields) -> str:
    return f"{_barrier(fields)} completed; rank {fields.get('last_rank')} came last"


def _barrier_timeout(fields: Fields) -> str:
    after = _seconds(fields, "timeout_seconds")
    return f"{_barrier(fields)} timed out after {after}: {_missing(fields)}"


def _barrier_failed(fields: Fields) -> str:
    return f"{_barrier(fields)} failed: {_error(fields)}"


def _stale_barrier(fields: Fields) -> str:
    arrived = plural(int(fields.get("arrived_count") or 0), "arrival")
    return (
        f"{_barrier(fields)} uses a key prefix that was used before: {arrived} of"
        f" {plural(int(fields.get('world_size') or 0), 'rank')}; use a new prefix"
    )


def _message(fields: Fields) -> str:
    remedy = f"; {fields['remedy']}" if fields.get("remedy") else ""
    return f"{fields.get('message')}{remedy}"


def _verdict(fields: Fields) -> str:
    noun = "waiting for " if fields.get("awaited_ranks") else ""
    return f"in {fields.get('phase')}: {noun}{fields.get('awaited')}"


def _stalled(fields: Fields) -> str:
    waited = _seconds(fields, "waited_seconds")
    # A store in memory has no address.
    url = fields.get("store_url")
    store = f" --store {url}" if url else ""
    return f"stalled {waited} {_verdict(fields)}. See: tracedstore status{store}"


def _resumed(fields: Fields) -> str:
    return f"resumed after {_seconds(fields, 'waited_seconds')} {_verdict(fields)}"


def _aborted(fields: Fields) -> str:
    waited = _seconds(fields, "waited_seconds")
    return f"ends this process, stalled {waited} {_verdict(fields)}"


def _disabled(fields: Fields) -> str:
    where = fields.get("error_location")
    at = f", in {where}" if where else ""
    return (
        f"a part of the telemetry failed ({fields.get('observer')}): {_error(fields)}"
        f"{at}; the job is not affected"
    )


def _serving(fields: Fields) -> str:
    return f"serving metrics at {fields.get('url')}"


def _export_failed(fields: Fields) -> str:
    return (
        f"{fields.get('signal')} do not reach the collector: {fields.get('error')};"
        " check OTEL_EXPORTER_OTLP_ENDPOINT; the job is not affected"
    )


def _export_resumed(fields: Fields) -> str:
    failed = plural(int(fields.get("failed_exports") or 0), "export")
    return (
        f"{fields.get('signal')} reach the collector again, after"
        f" {_seconds(fields, 'failed_seconds')} and {failed} that failed"
    )


_SENTENCES: Final[Mapping[str, Callable[[Fields], str]]] = {
    names.OPERATION_SLOW: _slow,
    names.OPERATION_FAILED: _failed,
    names.OPERATION_STALLED: _stalled_call,
    names.CAS_CONTENDED: _contended,
    names.BARRIER_WAITING: _barrier_waiting,
    names.BARRIER_COMPLETED: _barrier_completed,
    names.BARRIER_TIMEOUT: _barrier_timeout,
    names.BARRIER_FAILED: _barrier_failed,
    names.BARRIER_STALE_KEY: _stale_barrier,
    names.RENDEZVOUS_CONFLICT: _contended,
    names.RENDEZVOUS_WAITING: _message,
    names.RENDEZVOUS_TIMEOUT: _message,
    names.RENDEZVOUS_FAILED: _message,
    names.JOB_STALLED: _stalled,
    names.JOB_RESUMED: _resumed,
    names.JOB_ABORTED: _aborted,
    names.STORE_STALE: _message,
    names.TELEMETRY_DISABLED: _disabled,
    names.TELEMETRY_SERVING: _serving,
    names.EXPORT_FAILED: _export_failed,
    names.EXPORT_RESUMED: _export_resumed,
}
