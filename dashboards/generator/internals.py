"""Store internals: for whoever tunes what the ranks do with the store."""

from typing import Any

from opentelemetry.semconv.attributes import db_attributes as db

from generator import config, panels, targets
from generator.page import Row, page
from generator.targets import age, over_time, quantile, rate, series
from tracedstore import names

_CALL = "store, operation"
_LEGEND = "{{store}} {{operation}}"
_CALLS = f"sum by ({_CALL}) ({rate(names.OPERATION_DURATION, suffix='_count')})"
_BYTES = f"sum by ({_CALL}) ({rate(names.VALUE_BYTES)})"


def build() -> Any:
    """Make the dashboard."""
    return page(
        config.INTERNALS,
        "Store internals",
        "Rate, errors and duration of Store calls, and what they contend for.",
        _red(),
        _waits(),
        _swaps(),
        _volume(),
        _told(),
    )


def _red() -> Row:
    errors = rate(names.OPERATION_DURATION, 'error_type!=""', suffix="_count")
    every = rate(names.OPERATION_DURATION, suffix="_count")
    slowest = quantile(0.99, names.OPERATION_DURATION, "store", "operation")
    usual = quantile(0.5, names.OPERATION_DURATION, "store", "operation")
    return Row(
        "Rate, errors, duration",
        [
            panels.lines(
                "Calls",
                "Store calls a second, over all ranks. A storm of one operation is"
                " usually a loop that polls: use wait instead of check.",
                "ops",
                over_time(_CALLS, _LEGEND),
            ),
            panels.lines(
                "Share of calls that fail",
                "Failed calls over all calls. Timeouts of waits may be meant by the"
                " job; anything else is not: see the error types.",
                "percentunit",
                over_time(
                    f"sum by ({_CALL}) ({errors}) / sum by ({_CALL}) ({every})", _LEGEND
                ),
            ),
            panels.lines(
                "Failures by type",
                "timeout: the key never came. DistNetworkError and its like: the"
                " server is gone or unreachable; look at its host.",
                "ops",
                over_time(
                    f"sum by (store, operation, error_type) ({errors})",
                    "{{store}} {{operation}} {{error_type}}",
                ),
            ),
            panels.lines(
                "Duration, p99",
                "What the slowest calls take; the dots are traces, click one to open"
                " it. If quick operations (set, add, check) are slow, the server is"
                " overloaded, or they queue behind a wait on the same connection.",
                "s",
                over_time(slowest, _LEGEND, exemplars=True),
            ),
            panels.lines(
                "Duration, p50",
                "What calls usually take: tens of microseconds on one host, a network"
                " round trip otherwise. If all of it rises, look at the network or the"
                " server's CPU.",
                "s",
                over_time(usual, _LEGEND),
                width=24,
            ),
        ],
    )


def _waits() -> Row:
    in_flight = f"sum by ({_CALL}) ({series(names.IN_FLIGHT)})"
    oldest = f"max by ({_CALL}) ({age(names.OLDEST_START)})"
    return Row(
        "Waits",
        [
            panels.heat(
                "Waits that ended",
                "How long blocking calls took; the dots are traces. A second band far"
                " above the first is a group of ranks that waits for another one.",
                targets.buckets(names.WAIT_DURATION),
            ),
            panels.lines(
                "In flight",
                "Calls that have not returned. As many waits as ranks: a barrier."
                " Quick operations in flight all the time: the server is slow.",
                "short",
                over_time(in_flight, _LEGEND),
            ),
            panels.lines(
                "Oldest in flight",
                "How long the oldest of these has been in flight. The waits that hang"
                " show here and not above, which knows only those that ended.",
                "s",
                over_time(oldest, _LEGEND),
            ),
        ],
    )


def _swaps() -> Row:
    lost = rate(names.CAS_ATTEMPTS, f'result="{names.LOST}"')
    return Row(
        "Compare-and-set",
        [
            panels.lines(
                "Won and lost",
                "Compare-and-sets a second. Losing now and then is how it works.",
                "ops",
                over_time(
                    f"sum by ({_CALL}, result) ({rate(names.CAS_ATTEMPTS)})",
                    _LEGEND + " {{result}}",
                ),
            ),
            panels.lines(
                "Share lost",
                "Above one half, writers mostly get in each other's way: fewer"
                " writers, a key each, or a random pause before trying again.",
                "percentunit",
                over_time(
                    f"sum by ({_CALL}) ({lost})"
                    f" / sum by ({_CALL}) ({rate(names.CAS_ATTEMPTS)})",
                    _LEGEND,
                ),
            ),
            panels.lines(
                "Retries",
                "Repeats inside EtcdStore.add and of rendezvous writes, each with a"
                " pause: they are why such a call is slow. Spread the adds over keys.",
                "ops",
                over_time(f"sum by ({_CALL}) ({rate(names.CAS_RETRIES)})", _LEGEND),
            ),
            panels.lines(
                "Writes of the rendezvous state",
                "Conflicts rise with the number of nodes. Many of them while nodes"
                " join: start nodes in waves, or raise the join timeout.",
                "ops",
                over_time(
                    f"sum by (backend, result) ({rate(names.RENDEZVOUS_WRITES)})",
                    "{{backend}} {{result}}",
                ),
            ),
        ],
    )


def _volume() -> Row:
    return Row(
        "Bytes",
        [
            panels.lines(
                "Bytes of value",
                "What is written and read a second. A store is for addresses and"
                " counts: move megabytes another way.",
                "Bps",
                over_time(_BYTES, _LEGEND),
            ),
            panels.lines(
                "Bytes a call",
                "The mean size of values. One that grows with every step is a key that"
                " is appended to and never deleted.",
                "bytes",
                over_time(f"{_BYTES} / {_CALLS}", _LEGEND),
            ),
            panels.lines(
                "Size of the rendezvous state",
                "Grows with the number of nodes. One that grows without them comes"
                " from nodes that left and are still in it.",
                "bytes",
                over_time(
                    "max by (run_id, backend)"
                    f" ({series(names.RENDEZVOUS_STATE_BYTES)})",
                    "{{run_id}} {{backend}}",
                ),
                width=24,
            ),
        ],
    )


def _told() -> Row:
    return Row(
        "Logs and traces",
        [
            panels.lines_of_log(
                "Slow, failed and contended calls",
                "One line each, with key and server, at most one in 10 seconds of the"
                " same kind; `suppressed_count` says how many more there were.",
                targets.events(
                    names.OPERATION_SLOW, names.OPERATION_FAILED, names.CAS_CONTENDED
                ),
            ),
            panels.traces(
                "Slow calls",
                "Traces of Store calls over 100 ms, failed ones included. Open one to"
                " see its key and what its caller was doing.",
                targets.traces(
                    f"{{ {targets.OF_RUN} && span.{db.DB_OPERATION_NAME} != nil"
                    " && duration > 100ms }"
                ),
            ),
        ],
    )
