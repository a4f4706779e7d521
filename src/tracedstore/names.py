"""Every metric, attribute and event name, in one place.

These names are an interface: dashboards, alerts and people's queries hold on to them.
The tables in README.md and docs/ are tested against this module.
"""

from dataclasses import dataclass
from typing import Final

SCOPE: Final = "tracedstore"


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric family, under the name it has in the exposition."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def family(self) -> str:
        """The name as prometheus_client wants it, which adds ``_total`` itself."""
        return self.name.removesuffix("_total")


_CALL = ("store", "operation")
_ENDED = (*_CALL, "error_type")

OPERATION_DURATION = Metric(
    "tracedstore_operation_duration_seconds",
    "histogram",
    _ENDED,
    "How long Store calls took, waits included.",
)
WAIT_DURATION = Metric(
    "tracedstore_wait_duration_seconds",
    "histogram",
    _ENDED,
    "How long Store calls that may block (get, multi_get, wait, queue_pop, barrier)"
    " took.",
)
CAS_ATTEMPTS = Metric(
    "tracedstore_cas_attempts_total",
    "counter",
    (*_CALL, "result"),
    "Compare-and-sets, by whether they were won or lost to another writer.",
)
CAS_RETRIES = Metric(
    "tracedstore_cas_retries_total",
    "counter",
    _CALL,
    "Compare-and-sets that were lost and made again, inside one call or by a node"
    " of a rendezvous.",
)
VALUE_BYTES = Metric(
    "tracedstore_value_bytes_total",
    "counter",
    _CALL,
    "Bytes of value written and read.",
)
IN_FLIGHT = Metric(
    "tracedstore_operations_in_flight",
    "gauge",
    _CALL,
    "Store calls that have not returned yet.",
)
OLDEST_START = Metric(
    "tracedstore_oldest_operation_start_timestamp_seconds",
    "gauge",
    _CALL,
    "When the oldest Store call in flight began; absent while there is none.",
)
BARRIER_DURATION = Metric(
    "tracedstore_barrier_duration_seconds",
    "histogram",
    ("barrier", "result"),
    "How long barriers took from a rank's arrival to their end.",
)
BARRIER_ARRIVED = Metric(
    "tracedstore_barrier_arrived_ranks",
    "gauge",
    ("barrier",),
    "Ranks that arrived at a barrier that is stalled; absent while none is.",
)
BARRIER_MISSING = Metric(
    "tracedstore_barrier_missing_ranks",
    "gauge",
    ("barrier",),
    "Ranks missing at a barrier that is stalled; absent while none is.",
)
BARRIER_RANK_MISSING = Metric(
    "tracedstore_barrier_rank_missing",
    "gauge",
    ("barrier", "missing_rank", "missing_host"),
    "1 for a rank that is missing at a barrier that is stalled, at most 64 of them.",
)
BARRIER_LAST_ARRIVALS = Metric(
    "tracedstore_barrier_last_arrivals_total",
    "counter",
    ("barrier",),
    "Barriers that this process came to as the last one.",
)
RENDEZVOUS_DURATION = Metric(
    "tracedstore_rendezvous_duration_seconds",
    "histogram",
    ("backend", "result"),
    "How long a node took to join a round of the rendezvous, or to give up.",
)
RENDEZVOUS_WRITES = Metric(
    "tracedstore_rendezvous_state_writes_total",
    "counter",
    ("backend", "result"),
    "Writes of the rendezvous state: accepted, in conflict with another node's,"
    " or failed.",
)
RENDEZVOUS_STATE_BYTES = Metric(
    "tracedstore_rendezvous_state_bytes",
    "gauge",
    ("backend",),
    "Size of the rendezvous state as last seen; absent until it was.",
)
RENDEZVOUS_PARTICIPANTS = Metric(
    "tracedstore_rendezvous_participants",
    "gauge",
    ("backend",),
    "Nodes that have joined the round, as last seen.",
)
RENDEZVOUS_WAIT_LIST = Metric(
    "tracedstore_rendezvous_wait_list",
    "gauge",
    ("backend",),
    "Nodes that wait for the next round, as last seen.",
)
RENDEZVOUS_ROUND = Metric(
    "tracedstore_rendezvous_round",
    "gauge",
    ("backend",),
    "The round of the rendezvous, from 0 on, as last seen.",
)
RENDEZVOUS_COMPLETE = Metric(
    "tracedstore_rendezvous_complete",
    "gauge",
    ("backend",),
    "1 if the round was complete when last seen, else 0.",
)
RENDEZVOUS_OLDEST_HEARTBEAT = Metric(
    "tracedstore_rendezvous_oldest_heartbeat_timestamp_seconds",
    "gauge",
    ("backend",),
    "When the node that has been silent for longest was last heard of.",
)
SPANS_SUPPRESSED = Metric(
    "tracedstore_spans_suppressed_total",
    "counter",
    ("reason",),
    "Store calls that got no span: over the budget, or suppressed by the caller.",
)
TELEMETRY_FAILURES = Metric(
    "tracedstore_telemetry_failures_total",
    "counter",
    ("observer",),
    "Failures of the telemetry itself; what failed is switched off.",
)
BUILD_INFO = Metric(
    "tracedstore_build_info",
    "gauge",
    ("version", "torch", "core"),
    "Always 1; the labels say what runs.",
)

METRICS: Final = (
    OPERATION_DURATION,
    WAIT_DURATION,
    CAS_ATTEMPTS,
    CAS_RETRIES,
    VALUE_BYTES,
    IN_FLIGHT,
    OLDEST_START,
    BARRIER_DURATION,
    BARRIER_ARRIVED,
    BARRIER_MISSING,
    BARRIER_RANK_MISSING,
    BARRIER_LAST_ARRIVALS,
    RENDEZVOUS_DURATION,
    RENDEZVOUS_WRITES,
    RENDEZVOUS_STATE_BYTES,
    RENDEZVOUS_PARTICIPANTS,
    RENDEZVOUS_WAIT_LIST,
    RENDEZVOUS_ROUND,
    RENDEZVOUS_COMPLETE,
    RENDEZVOUS_OLDEST_HEARTBEAT,
    SPANS_SUPPRESSED,
    TELEMETRY_FAILURES,
    BUILD_INFO,
)

WON: Final = "won"
LOST: Final = "lost"

# Why a call got no span.
OVER_BUDGET: Final = "budget"
SUPPRESSED_BY_CALLER: Final = "suppressed"

# The parts of the telemetry that can fail, as the `observer` label has them. Their
# order is the one in which they are told of a call: spans first, because the others
# refer to the span.
RECORDING: Final = "recording"
SPANS: Final = "spans"
METRICS_OBSERVER: Final = "metrics"
EVENTS: Final = "events"
INFLIGHT: Final = "inflight"
BARRIERS: Final = "barriers"
ENDPOINT: Final = "endpoint"
DEBUG_PAGE: Final = "debug_page"
RENDEZVOUS: Final = "rendezvous"
AUTO: Final = "auto"
OBSERVERS: Final = (
    RECORDING,
    SPANS,
    METRICS_OBSERVER,
    EVENTS,
    INFLIGHT,
    BARRIERS,
    ENDPOINT,
    DEBUG_PAGE,
    RENDEZVOUS,
    AUTO,
)

# Span attributes of our own; those of OpenTelemetry come from its own package.
KEY: Final = "tracedstore.key"
KEYS: Final = "tracedstore.keys"
KEY_COUNT: Final = "tracedstore.key.count"
VALUE_SIZE: Final = "tracedstore.value.size"
CAS_SWAPPED: Final = "tracedstore.cas.swapped"
CAS_RETRY_COUNT: Final = "tracedstore.cas.retries"
ETCD_REQUESTS: Final = "tracedstore.etcd.requests"
ETCD_WATCH_TIMEOUTS: Final = "tracedstore.etcd.watch_timeouts"
RENDEZVOUS_STATE_PARTICIPANTS: Final = "tracedstore.rendezvous.participants"
RENDEZVOUS_STATE_WAIT_LIST: Final = "tracedstore.rendezvous.wait_list"
RENDEZVOUS_STATE_ROUND: Final = "tracedstore.rendezvous.round"
RENDEZVOUS_STATE_COMPLETE: Final = "tracedstore.rendezvous.complete"
RENDEZVOUS_NODES: Final = "tracedstore.rendezvous.nodes"
RENDEZVOUS_SILENT_SECONDS: Final = "tracedstore.rendezvous.silent_seconds"
RUN_ID: Final = "tracedstore.run_id"
RANK: Final = "tracedstore.rank"
LOCAL_RANK: Final = "tracedstore.local_rank"
WORLD_SIZE: Final = "tracedstore.world_size"
BARRIER_PREFIX: Final = "tracedstore.barrier.prefix"
BARRIER_RESULT: Final = "tracedstore.barrier.result"
BARRIER_ARRIVAL_ORDER: Final = "tracedstore.barrier.arrival_order"
BARRIER_ARRIVAL: Final = "tracedstore.barrier.arrival_seconds"
BARRIER_LAST_RANK: Final = "tracedstore.barrier.last_rank"
BARRIER_ARRIVED_COUNT: Final = "tracedstore.barrier.arrived_count"
BARRIER_MISSING_COUNT: Final = "tracedstore.barrier.missing_count"
BARRIER_MISSING_RANKS: Final = "tracedstore.barrier.missing_ranks"
BARRIER_MISSING_TEXT: Final = "tracedstore.barrier.missing"
# OpenTelemetry's, which its package has only among what is not stable.
HOST_NAME: Final = "host.name"
ATTRIBUTES: Final = {
    KEY: "The key, cut at 256 characters.",
    KEYS: "The first 16 keys of a call that takes several.",
    KEY_COUNT: "How many keys such a call had.",
    VALUE_SIZE: "Bytes of value written or read.",
    CAS_SWAPPED: "Whether a compare-and-set was won.",
    CAS_RETRY_COUNT: "EtcdStore: compare-and-sets repeated inside the call.",
    ETCD_REQUESTS: "EtcdStore: requests the call made to etcd.",
    ETCD_WATCH_TIMEOUTS: "EtcdStore: watches of the call that ended without news.",
    RENDEZVOUS_STATE_PARTICIPANTS: (
        "get_state, set_state: nodes that have joined the round."
    ),
    RENDEZVOUS_STATE_WAIT_LIST: "Likewise: nodes that wait for the next one.",
    RENDEZVOUS_STATE_ROUND: "Likewise: which round it is.",
    RENDEZVOUS_STATE_COMPLETE: "Likewise: whether it is complete.",
    RENDEZVOUS_NODES: "Likewise: the first 64 nodes that were heard of.",
    RENDEZVOUS_SILENT_SECONDS: (
        "How long each of these has been silent, in the same order."
    ),
    RUN_ID: "The job: `TRACEDSTORE_RUN_ID`, else torchrun's run id.",
    RANK: (
        "The rank, from `init_process_group` or `RANK`; of a barrier, the one it was"
        " given."
    ),
    LOCAL_RANK: "The rank on this host, from `LOCAL_RANK`.",
    WORLD_SIZE: "How many ranks there are, likewise, or from `WORLD_SIZE`.",
    HOST_NAME: "The machine's name.",
    BARRIER_PREFIX: "Barrier: its key prefix.",
    BARRIER_RESULT: "Barrier: `completed`, `timeout` or `failed`.",
    BARRIER_ARRIVAL_ORDER: "Barrier: position in which this rank arrived, from 1.",
    BARRIER_ARRIVAL: "Barrier: seconds until the store had counted this rank.",
    BARRIER_LAST_RANK: "Barrier, completed: the rank that came last.",
    BARRIER_ARRIVED_COUNT: "Barrier, timeout: how many ranks arrived.",
    BARRIER_MISSING_COUNT: "Barrier, timeout: how many ranks are missing.",
    BARRIER_MISSING_RANKS: "Barrier, timeout: the first 64 of them.",
    BARRIER_MISSING_TEXT: "Barrier, timeout: all of them, in ranges and by host.",
}

# Context key: set while a barrier makes Store calls, which its own span covers.
SUPPRESS_CALL_SPANS: Final = "tracedstore.suppress-call-spans"

OPERATION_SLOW: Final = "store.operation.slow"
OPERATION_FAILED: Final = "store.operation.failed"
OPERATION_STALLED: Final = "store.operation.stalled"
CAS_CONTENDED: Final = "store.cas.contended"
BARRIER_WAITING: Final = "barrier.waiting"
BARRIER_COMPLETED: Final = "barrier.completed"
BARRIER_TIMEOUT: Final = "barrier.timeout"
BARRIER_FAILED: Final = "barrier.failed"
BARRIER_STALE_KEY: Final = "barrier.stale_key"
RENDEZVOUS_CONFLICT: Final = "rendezvous.conflict"
RENDEZVOUS_WAITING: Final = "rendezvous.waiting"
RENDEZVOUS_TIMEOUT: Final = "rendezvous.timeout"
RENDEZVOUS_FAILED: Final = "rendezvous.failed"
TELEMETRY_DISABLED: Final = "telemetry.disabled"
TELEMETRY_SERVING: Final = "telemetry.serving"
EVENT_NAMES: Final = (
    OPERATION_SLOW,
    OPERATION_FAILED,
    OPERATION_STALLED,
    CAS_CONTENDED,
    BARRIER_WAITING,
    BARRIER_COMPLETED,
    BARRIER_TIMEOUT,
    BARRIER_FAILED,
    BARRIER_STALE_KEY,
    RENDEZVOUS_CONFLICT,
    RENDEZVOUS_WAITING,
    RENDEZVOUS_TIMEOUT,
    RENDEZVOUS_FAILED,
    TELEMETRY_DISABLED,
    TELEMETRY_SERVING,
)
