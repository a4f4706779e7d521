"""The dashboard "Store internals": rate, errors, duration. For tuning a job."""

from collections.abc import Callable
from typing import Any

from opentelemetry.semconv.attributes import db_attributes as db

from generator import config, panels, targets
from generator.page import Row, page
from generator.targets import age, grown, over_time, quantile, rate, series
from tracedstore import names

_CALL = "store, operation"
_LEGEND = "{{store}} {{operation}}"


def _ended(by: str, *matchers: str, count: Callable[..., str] = rate) -> str:
    """Return the rate of calls that ended, by operation and other labels.

    A blocking operation is in the histogram of waits, with `full` in both: `or` takes
    the first.
    """
    return " or ".join(
        f"sum by ({by}) ({count(metric, *matchers, suffix='_count')})"
        for metric in names.CALL_DURATIONS
    )


_CALLS = f"({_ended(_CALL)})"
_BYTES = f"sum by ({_CALL}) ({rate(names.VALUE_BYTES)})"


def build() -> Any:
    """Build the dashboard."""
    return page(
        config.INTERNALS,
        "Store internals",
        "Rate, errors and duration of Store calls, waits, and contention.",
        _red(),
        _waits(),
        _swaps(),
        _volume(),
        _etcd(),
        _logs_and_traces(),
    )


def _red() -> Row:
    slowest = quantile(0.99, names.OPERATION_DURATION, "store", "operation")
    usual = quantile(0.5, names.OPERATION_DURATION, "store", "operation")
    waits = quantile(0.5, names.WAIT_DURATION, "store", "operation")
    return Row(
        "Rate, errors, duration",
        [
            panels.lines(
                "Calls",
                "Store calls per second, over all ranks. A very high rate of one"
                " operation is usually a polling loop: use wait instead of check.",
                "ops",
                over_time(_CALLS, _LEGEND),
            ),
            panels.lines(
                "Share of calls that fail",
                "Failed calls over all calls. A job may intend timeouts of waits, but"
                " no other errors: see the error types.",
                "percentunit",
                over_time(
                    f"sum by (store) ({rate(names.OPERATION_ERRORS)})"
                    f" / sum by (store) {_CALLS}",
                    "{{store}}",
                ),
            ),
            panels.lines(
                "Failures by type",
                "timeout: the key was not set in time. DistNetworkError and similar:"
                " the server has exited or is unreachable; check its host.",
                "short",
                over_time(
                    _ended(f"{_CALL}, error_type", 'error_type!=""', count=grown),
                    "{{store}} {{operation}} {{error_type}}",
                ),
            ),
            panels.lines(
                "Duration, p99",
                "The duration of the slowest calls that do not block. The dots are"
                " exemplars, which link to traces. If quick operations (set, add,"
                " check) are slow, the server is overloaded, or they queue behind a"
                " wait on the same connection.",
                "s",
                over_time(slowest, _LEGEND, exemplars=True),
            ),
            panels.lines(
                "Duration, p50",
                "The usual duration of a call: tens of microseconds on one host, a"
                " network round trip otherwise. If all operations are slower, check the"
                " network and the server's CPU. A wait takes as long as what it waits"
                " for.",
                "s",
                over_time(usual, _LEGEND),
                over_time(waits, _LEGEND + ", waits"),
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
                "The duration of blocking calls; the dots are exemplars. A second band"
                " far above the first is a group of ranks that waits for another one.",
                targets.buckets(names.WAIT_DURATION),
            ),
            panels.lines(
                "In flight",
                "Calls that have not returned. As many waits as ranks: a barrier."
                " Quick operations always in flight: the server is slow.",
                "short",
                over_time(in_flight, _LEGEND),
            ),
            panels.lines(
                "Oldest in flight",
                "The age of the oldest call in flight. A wait that hangs is shown here,"
                " and not above, where only completed waits are counted.",
                "s",
                over_time(oldest, _LEGEND),
            ),
            panels.lines(
                "Ended by TRACEDSTORE_ON_STALL",
                "Processes that ended because their job could not go on. Such a process"
                " is scraped once more at best: its event job.aborted is in the log.",
                "short",
                over_time(
                    f"sum by (run_id, cause) ({series(names.JOB_ABORTS)})", "{{cause}}"
                ),
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
                "Compare-and-sets per second. Occasional losses are normal.",
                "ops",
                over_time(
                    f"sum by ({_CALL}, result) ({rate(names.CAS_ATTEMPTS)})",
                    _LEGEND + " {{result}}",
                ),
            ),
            panels.lines(
                "Share lost",
                "Above one half, most writers conflict: use fewer writers, one key per"
                " writer, or a random delay before each retry.",
                "percentunit",
                over_time(
                    f"sum by ({_CALL}) ({lost})"
                    f" / sum by ({_CALL}) ({rate(names.CAS_ATTEMPTS)})",
                    _LEGEND,
                ),
            ),
            panels.lines(
                "Retries",
                "Retries inside EtcdStore.add and of rendezvous writes. Each has a"
                " delay, which makes the call slow. Use several keys for the adds.",
                "short",
                over_time(f"sum by ({_CALL}) ({grown(names.CAS_RETRIES)})", _LEGEND),
            ),
            panels.lines(
                "Writes of the rendezvous state",
                "Conflicts rise with the number of nodes. Many conflicts while nodes"
                " join: start the nodes in groups, or raise the join timeout.",
                "short",
                over_time(
                    f"sum by (backend, result) ({grown(names.RENDEZVOUS_WRITES)})",
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
                "Bytes written and read per second. A store is for addresses and"
                " counters: transfer megabytes by other means.",
                "Bps",
                over_time(_BYTES, _LEGEND),
            ),
            panels.lines(
                "Bytes per call",
                "The mean size of values. A size that grows with every step is a key"
                " that is appended to and never deleted.",
                "bytes",
                over_time(f"{_BYTES} / {_CALLS}", _LEGEND),
            ),
            panels.lines(
                "Size of the rendezvous state",
                "Grows with the number of nodes. If it grows without new nodes, it"
                " still contains nodes that have left.",
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


def _etcd() -> Row:
    failed = grown(names.ETCD_REQUESTS_MADE, 'result!="ok"')
    return Row(
        "etcd, v3 API",
        [
            panels.lines(
                "Requests",
                "Requests of EtcdV3Store and traced-etcd per second. A watch counts"
                " when it ends.",
                "ops",
                over_time(
                    f"sum by (method) ({rate(names.ETCD_REQUESTS_MADE)})", "{{method}}"
                ),
            ),
            panels.lines(
                "Failed requests",
                "failed: not applied. unknown: the answer was lost, and a write may"
                " have been applied. Check the members of etcd and their leader.",
                "short",
                over_time(
                    f"sum by (method, result) ({failed})", "{{method}} {{result}}"
                ),
            ),
            panels.lines(
                "Recoveries",
                "What the clients did about failures. Many failovers: a member is down,"
                " or its network is. Log-ins: tokens expire between calls.",
                "short",
                over_time(
                    f"sum by (kind) ({grown(names.ETCD_RECOVERIES_MADE)})", "{{kind}}"
                ),
            ),
            panels.lines(
                "Bytes",
                "Bytes of requests and answers per second, without headers.",
                "Bps",
                over_time(
                    f"sum by (direction) ({rate(names.ETCD_BYTES)})", "{{direction}}"
                ),
            ),
        ],
    )


def _logs_and_traces() -> Row:
    return Row(
        "Logs and traces",
        [
            panels.log_lines(
                "Slow, failed and contended calls",
                "One line per call, with key and server, at most one in 10 seconds of"
                " the same kind. `suppressed_count` is the number of omitted lines.",
                targets.events(
                    names.OPERATION_SLOW, names.OPERATION_FAILED, names.CAS_CONTENDED
                ),
            ),
            panels.traces(
                "Slow calls",
                "Traces of Store calls over 100 ms, including failed calls. A trace has"
                " the key and the spans of the caller.",
                targets.traces(
                    f"{{ {targets.OF_RUN} && span.{db.DB_OPERATION_NAME} != nil"
                    " && duration > 100ms }"
                ),
            ),
        ],
    )
