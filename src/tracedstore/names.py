"""The name and description of every metric, span attribute and event.

These names are an interface: dashboards, alerts and queries depend on them.
scripts/update_docs.py fills the tables in docs/ from this module.
"""

from dataclasses import dataclass
from typing import Final

SCOPE: Final = "tracedstore"
# In etcd, the prefix of all keys of EtcdV3Store and of the backend traced-etcd.
ETCD_ROOT: Final = "/tracedstore/"


@dataclass(frozen=True, slots=True)
class Metric:
    """A Prometheus metric family, named as in the exposition."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    @property
    def family(self) -> str:
        """The name without ``_total``, which prometheus_client appends to counters."""
        return self.name.removesuffix("_total")


_CALL = ("store", "operation")
_ENDED = (*_CALL, "error_type")

OPERATION_DURATION = Metric(
    "tracedstore_operation_duration_seconds",
    "histogram",
    _ENDED,
    "Duration of Store calls that do not block; of all calls with"
    " TRACEDSTORE_METRICS=full.",
)
WAIT_DURATION = Metric(
    "tracedstore_wait_duration_seconds",
    "histogram",
    _ENDED,
    "Duration of Store calls that may block: get, multi_get, wait, queue_pop, barrier.",
)
# A call is in one of these. With `full`, a blocking call is in both, with the same
# labels: a reader that adds calls up takes it from the first.
CALL_DURATIONS: Final = (WAIT_DURATION, OPERATION_DURATION)
OPERATION_ERRORS = Metric(
    "tracedstore_operation_errors_total",
    "counter",
    ("store",),
    "Store calls that raised, timeouts included; an empty queue's answer is no error.",
)
CAS_ATTEMPTS = Metric(
    "tracedstore_cas_attempts_total",
    "counter",
    (*_CALL, "result"),
    "Compare-and-set attempts, won or lost to another writer.",
)
CAS_RETRIES = Metric(
    "tracedstore_cas_retries_total",
    "counter",
    _CALL,
    "Compare-and-sets repeated after a loss, inside one call or by a rendezvous node.",
)
VALUE_BYTES = Metric(
    "tracedstore_value_bytes_total",
    "counter",
    _CALL,
    "Bytes of values written and read.",
)
IN_FLIGHT = Metric(
    "tracedstore_operations_in_flight",
    "gauge",
    _CALL,
    "Store calls in flight; absent while none is in flight, but for"
    " TRACEDSTORE_METRICS=full.",
)
OLDEST_START = Metric(
    "tracedstore_oldest_operation_start_timestamp_seconds",
    "gauge",
    _CALL,
    "Start time of the oldest Store call in flight; absent while none is in flight.",
)
BARRIER_DURATION = Metric(
    "tracedstore_barrier_duration_seconds",
    "histogram",
    ("barrier", "result"),
    "Duration of barriers, from this rank's arrival to the end.",
)
BARRIER_ARRIVED = Metric(
    "tracedstore_barrier_arrived_ranks",
    "gauge",
    ("barrier",),
    "Ranks that arrived at a stalled barrier; absent while none is stalled.",
)
BARRIER_MISSING = Metric(
    "tracedstore_barrier_missing_ranks",
    "gauge",
    ("barrier",),
    "Ranks missing at a stalled barrier; absent while none is stalled.",
)
BARRIER_RANK_MISSING = Metric(
    "tracedstore_barrier_rank_missing",
    "gauge",
    ("barrier", "missing_rank", "missing_host"),
    "1 for each rank missing at a stalled barrier, for at most 64 ranks per barrier.",
)
BARRIER_LAST_ARRIVALS = Metric(
    "tracedstore_barrier_last_arrivals_total",
    "counter",
    ("barrier",),
    "Barriers at which this process arrived last.",
)
WORKER_UP = Metric(
    "tracedstore_worker_up",
    "gauge",
    ("rank", "local_rank"),
    "1 for a worker that answered its agent, which serves it, else 0.",
)
RENDEZVOUS_DURATION = Metric(
    "tracedstore_rendezvous_duration_seconds",
    "histogram",
    ("backend", "result"),
    "Time a node took to join a round of the rendezvous, or to give up.",
)
RENDEZVOUS_WRITES = Metric(
    "tracedstore_rendezvous_state_writes_total",
    "counter",
    ("backend", "result"),
    "Writes of the rendezvous state: accepted, in conflict with another node, or"
    " failed.",
)
RENDEZVOUS_STATE_BYTES = Metric(
    "tracedstore_rendezvous_state_bytes",
    "gauge",
    ("backend",),
    "Size of the rendezvous state when last read; absent before the first read.",
)
RENDEZVOUS_PARTICIPANTS = Metric(
    "tracedstore_rendezvous_participants",
    "gauge",
    ("backend",),
    "Nodes that had joined the round when the state was last read.",
)
RENDEZVOUS_WAIT_LIST = Metric(
    "tracedstore_rendezvous_wait_list",
    "gauge",
    ("backend",),
    "Nodes that waited for the next round when the state was last read.",
)
RENDEZVOUS_ROUND = Metric(
    "tracedstore_rendezvous_round",
    "gauge",
    ("backend",),
    "Number of the rendezvous round, from 0, when the state was last read.",
)
RENDEZVOUS_COMPLETE = Metric(
    "tracedstore_rendezvous_complete",
    "gauge",
    ("backend",),
    "1 if the round was complete when the state was last read, else 0.",
)
RENDEZVOUS_OLDEST_HEARTBEAT = Metric(
    "tracedstore_rendezvous_oldest_heartbeat_timestamp_seconds",
    "gauge",
    ("backend",),
    "Time of the last heartbeat of the node that has been silent for longest.",
)
JOB_AWAITED = Metric(
    "tracedstore_job_awaited_ranks",
    "gauge",
    ("cause",),
    "Ranks that the stalled job waits for, 0 if they are unknown; absent while this"
    " process knows of no stall.",
)
JOB_RANK_AWAITED = Metric(
    "tracedstore_job_rank_awaited",
    "gauge",
    ("awaited_rank", "awaited_host", "cause"),
    "1 for each rank that the stalled job waits for, for at most 64 ranks.",
)
SPANS_SUPPRESSED = Metric(
    "tracedstore_spans_suppressed_total",
    "counter",
    ("reason",),
    "Store calls without a span: over the budget, or suppressed by the caller.",
)
ETCD_REQUESTS_MADE = Metric(
    "tracedstore_etcd_requests_total",
    "counter",
    ("method", "result"),
    "Requests of EtcdV3Store and traced-etcd to etcd's v3 API.",
)
ETCD_RECOVERIES_MADE = Metric(
    "tracedstore_etcd_recoveries_total",
    "counter",
    ("kind",),
    "What these did about failures: repeated requests, changes of the member, watches"
    " opened again, log-ins.",
)
ETCD_BYTES = Metric(
    "tracedstore_etcd_bytes_total",
    "counter",
    ("direction",),
    "Bytes of these requests and their answers, without headers.",
)
EVENTS_DROPPED = Metric(
    "tracedstore_events_dropped_total",
    "counter",
    (),
    "Events that were dropped because the log, or OpenTelemetry, blocked and the queue"
    " was full.",
)
OPERATIONS_DROPPED = Metric(
    "tracedstore_operations_dropped_total",
    "counter",
    (),
    "Notable calls of threads unknown to Python that are counted, but got neither span"
    " nor event, because too many came at once.",
)
TELEMETRY_FAILURES = Metric(
    "tracedstore_telemetry_failures_total",
    "counter",
    ("observer",),
    "Failures of the telemetry itself; a failed observer is switched off, any other"
    " failed step is tried again.",
)
BUILD_INFO = Metric(
    "tracedstore_build_info",
    "gauge",
    ("version", "torch", "core"),
    "Always 1; the labels contain the versions and the recording base.",
)

# All of them, in the order in which they are defined.
METRICS: Final = tuple(each for each in vars().values() if isinstance(each, Metric))

WON: Final = "won"
LOST: Final = "lost"

# Values of the `reason` label: why a call has no span.
OVER_BUDGET: Final = "budget"
SUPPRESSED_BY_CALLER: Final = "suppressed"

# Values of the `observer` label: the components of the telemetry that can fail.
# Observers run in this order. Spans come first because metrics and events refer to
# the span.
RECORDING: Final = "recording"
SPANS: Final = "spans"
METRICS_OBSERVER: Final = "metrics"
EVENTS: Final = "events"
INFLIGHT: Final = "inflight"
BARRIERS: Final = "barriers"
ENDPOINT: Final = "endpoint"
RENDEZVOUS: Final = "rendezvous"
AUTO: Final = "auto"
DIAGNOSIS: Final = "diagnosis"
OTEL_METRICS: Final = "otel_metrics"
OTEL_LOGS: Final = "otel_logs"
# Put before the name of an application's observer that has one of these names.
APPLICATION_PREFIX: Final = "application_"
OBSERVERS: Final = (
    RECORDING,
    SPANS,
    METRICS_OBSERVER,
    EVENTS,
    INFLIGHT,
    BARRIERS,
    ENDPOINT,
    RENDEZVOUS,
    AUTO,
    DIAGNOSIS,
    OTEL_METRICS,
    OTEL_LOGS,
)

# Span attributes of tracedstore. OpenTelemetry's are imported from its package.
KEY: Final = "tracedstore.key"
KEYS: Final = "tracedstore.keys"
KEY_COUNT: Final = "tracedstore.key.count"
VALUE_SIZE: Final = "tracedstore.value.size"
CAS_SWAPPED: Final = "tracedstore.cas.swapped"
CAS_RETRY_COUNT: Final = "tracedstore.cas.retries"
ETCD_REQUESTS: Final = "tracedstore.etcd.requests"
ETCD_WATCH_TIMEOUTS: Final = "tracedstore.etcd.watch_timeouts"
ETCD_RECOVERIES: Final = "tracedstore.etcd.recoveries"
ETCD_REQUEST_SECONDS: Final = "tracedstore.etcd.request.seconds"
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
# An OpenTelemetry attribute that its package has only in the unstable module.
HOST_NAME: Final = "host.name"
ATTRIBUTES: Final = {
    KEY: "The key, truncated to 256 characters.",
    KEYS: "The first 16 keys of a call that takes a list of keys.",
    KEY_COUNT: "Number of keys of a call that takes a list of keys.",
    VALUE_SIZE: "Size of the value written or read, in bytes.",
    CAS_SWAPPED: "Whether a compare-and-set was won.",
    CAS_RETRY_COUNT: "In etcd: compare-and-sets repeated inside the call.",
    ETCD_REQUESTS: "In etcd: requests that the call sent to etcd.",
    ETCD_WATCH_TIMEOUTS: "In etcd: watches of the call that timed out.",
    ETCD_RECOVERIES: "EtcdV3Store: retries, failovers, log-ins, watches opened again.",
    ETCD_REQUEST_SECONDS: "On the event `etcd.request`: the duration of the request.",
    RENDEZVOUS_STATE_PARTICIPANTS: (
        "get_state, set_state: number of nodes that have joined the round."
    ),
    RENDEZVOUS_STATE_WAIT_LIST: (
        "get_state, set_state: number of nodes that wait for the next round."
    ),
    RENDEZVOUS_STATE_ROUND: "get_state, set_state: number of the round.",
    RENDEZVOUS_STATE_COMPLETE: ("get_state, set_state: whether the round is complete."),
    RENDEZVOUS_NODES: (
        "get_state, set_state: the first 64 nodes that have sent a heartbeat."
    ),
    RENDEZVOUS_SILENT_SECONDS: (
        "get_state, set_state: seconds since the last heartbeat of each of these"
        " nodes, in the same order."
    ),
    RUN_ID: "The run id of the job: `TRACEDSTORE_RUN_ID`, else torchrun's run id.",
    RANK: (
        "The rank, from `init_process_group` or `RANK`. Barrier: the `rank` argument."
    ),
    LOCAL_RANK: "The rank on this host, from `LOCAL_RANK`.",
    WORLD_SIZE: "The number of ranks, from `init_process_group` or `WORLD_SIZE`.",
    HOST_NAME: "The host name.",
    BARRIER_PREFIX: "Barrier: the key prefix.",
    BARRIER_RESULT: "Barrier: `completed`, `timeout` or `failed`.",
    BARRIER_ARRIVAL_ORDER: "Barrier: position in which this rank arrived, from 1.",
    BARRIER_ARRIVAL: "Barrier: seconds until the store had counted this rank.",
    BARRIER_LAST_RANK: "Barrier, completed: the rank that arrived last.",
    BARRIER_ARRIVED_COUNT: "Barrier, timeout: number of ranks that arrived.",
    BARRIER_MISSING_COUNT: "Barrier, timeout: number of ranks missing.",
    BARRIER_MISSING_RANKS: "Barrier, timeout: the first 64 missing ranks.",
    BARRIER_MISSING_TEXT: (
        "Barrier, timeout: all missing ranks, grouped by host and folded into ranges."
    ),
}

# The event on the span of a call of EtcdV3Store, one for each of its first requests.
ETCD_REQUEST: Final = "etcd.request"

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
JOB_STALLED: Final = "job.stalled"
JOB_RESUMED: Final = "job.resumed"
STORE_STALE: Final = "store.stale_keys"
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
    JOB_STALLED,
    JOB_RESUMED,
    STORE_STALE,
    TELEMETRY_DISABLED,
    TELEMETRY_SERVING,
)
