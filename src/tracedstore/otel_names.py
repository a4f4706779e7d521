"""The OpenTelemetry name, unit and attributes of every metric of `names`.

Names are those of the semantic conventions where these have one; units are UCUM's.
scripts/update_docs.py fills a table in docs/otlp.md from this module.
"""

from dataclasses import dataclass
from typing import Final

from opentelemetry.semconv.attributes import db_attributes, error_attributes
from opentelemetry.semconv.metrics import db_metrics

from tracedstore import names

# The version of the conventions whose names are used; all of them are stable there.
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.36.0"

# The conventions have `db.system.name`, which is the same for all that is in etcd.
STORE: Final = "tracedstore.store"
SYSTEM: Final = db_attributes.DB_SYSTEM_NAME
# The attribute of each label. A label that is empty has none.
ATTRIBUTES: Final = {
    "store": STORE,
    "operation": db_attributes.DB_OPERATION_NAME,
    "error_type": error_attributes.ERROR_TYPE,
    "result": "tracedstore.result",
    "barrier": "tracedstore.barrier.family",
    "missing_rank": "tracedstore.missing.rank",
    "missing_host": "tracedstore.missing.host",
    "backend": "tracedstore.rendezvous.backend",
    "cause": "tracedstore.stall.cause",
    "awaited_rank": "tracedstore.awaited.rank",
    "awaited_host": "tracedstore.awaited.host",
    "reason": "tracedstore.reason",
    "method": "tracedstore.etcd.method",
    "kind": "tracedstore.etcd.recovery",
    "direction": "tracedstore.etcd.direction",
    "observer": "tracedstore.observer",
    "version": "tracedstore.version",
    "torch": "tracedstore.torch.version",
    "core": "tracedstore.recording",
}


@dataclass(frozen=True, slots=True)
class Instrument:
    """What a metric is called in OpenTelemetry; its description if it is another."""

    name: str
    unit: str
    description: str = ""


_OPERATION_DURATION = Instrument(
    db_metrics.DB_CLIENT_OPERATION_DURATION, "s", "Duration of Store calls."
)

# Every metric of a process. The page of a node has one more, `names.WORKER_UP`.
INSTRUMENTS: Final = {
    # One histogram for all calls, by the conventions, with the same bounds for all:
    # a bound is no series of its own here.
    names.OPERATION_DURATION: _OPERATION_DURATION,
    names.WAIT_DURATION: _OPERATION_DURATION,
    names.OPERATION_ERRORS: Instrument("tracedstore.operation.errors", "{error}"),
    names.CAS_ATTEMPTS: Instrument("tracedstore.cas.attempts", "{attempt}"),
    names.CAS_RETRIES: Instrument("tracedstore.cas.repeated", "{attempt}"),
    names.VALUE_BYTES: Instrument("tracedstore.operation.io", "By"),
    names.IN_FLIGHT: Instrument("tracedstore.operation.in_flight", "{operation}"),
    names.OLDEST_START: Instrument("tracedstore.operation.oldest_start", "s"),
    names.BARRIER_DURATION: Instrument("tracedstore.barrier.duration", "s"),
    names.BARRIER_ARRIVED: Instrument("tracedstore.barrier.ranks.arrived", "{rank}"),
    names.BARRIER_MISSING: Instrument("tracedstore.barrier.ranks.missing", "{rank}"),
    names.BARRIER_RANK_MISSING: Instrument("tracedstore.barrier.rank.missing", "1"),
    names.BARRIER_LAST_ARRIVALS: Instrument(
        "tracedstore.barrier.last_arrivals", "{barrier}"
    ),
    names.RENDEZVOUS_DURATION: Instrument("tracedstore.rendezvous.duration", "s"),
    names.RENDEZVOUS_WRITES: Instrument(
        "tracedstore.rendezvous.state.writes", "{write}"
    ),
    names.RENDEZVOUS_STATE_BYTES: Instrument("tracedstore.rendezvous.state.size", "By"),
    names.RENDEZVOUS_PARTICIPANTS: Instrument(
        "tracedstore.rendezvous.state.participants", "{node}"
    ),
    names.RENDEZVOUS_WAIT_LIST: Instrument(
        "tracedstore.rendezvous.state.wait_list", "{node}"
    ),
    names.RENDEZVOUS_ROUND: Instrument("tracedstore.rendezvous.state.round", "1"),
    names.RENDEZVOUS_COMPLETE: Instrument("tracedstore.rendezvous.state.complete", "1"),
    names.RENDEZVOUS_OLDEST_HEARTBEAT: Instrument(
        "tracedstore.rendezvous.oldest_heartbeat", "s"
    ),
    names.JOB_AWAITED: Instrument("tracedstore.job.ranks.awaited", "{rank}"),
    names.JOB_RANK_AWAITED: Instrument("tracedstore.job.rank.awaited", "1"),
    names.SPANS_SUPPRESSED: Instrument("tracedstore.spans.suppressed", "{span}"),
    names.ETCD_REQUESTS_MADE: Instrument(
        "tracedstore.etcd.client.requests", "{request}"
    ),
    names.ETCD_RECOVERIES_MADE: Instrument(
        "tracedstore.etcd.client.recoveries", "{recovery}"
    ),
    names.ETCD_BYTES: Instrument("tracedstore.etcd.client.io", "By"),
    names.EVENTS_DROPPED: Instrument("tracedstore.events.dropped", "{event}"),
    names.OPERATIONS_DROPPED: Instrument(
        "tracedstore.operations.dropped", "{operation}"
    ),
    names.TELEMETRY_FAILURES: Instrument("tracedstore.telemetry.failures", "{failure}"),
    names.BUILD_INFO: Instrument("tracedstore.build.info", "1"),
}
