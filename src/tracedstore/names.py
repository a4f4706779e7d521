"""The name and description of every metric, span attribute and event.

These names are an interface: dashboards, alerts and queries depend on them.
scripts/update_docs.py fills the tables in docs/ from this module.
"""

from dataclasses import dataclass
from typing import Final

SCOPE: Final = "tracedstore"
# In etcd, the prefix of all keys of EtcdV3Store and of the backend traced-etcd.
ETCD_ROOT: Final = "/tracedstore/"
# The version of OpenTelemetry's semantic conventions whose names are used. They are
# spelled here, because importing them costs commands that need no OpenTelemetry.
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.36.0"


# What Prometheus appends to a name from OpenTelemetry for its unit.
_SUFFIXES: Final = {"s": "_seconds", "By": "_bytes"}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: a family of Prometheus, and an instrument of OpenTelemetry.

    Attributes:
        name: The name in Prometheus' exposition.
        type: ``counter``, ``gauge`` or ``histogram``.
        labels: The names of its labels.
        help: What it is.
        unit: Its unit, in UCUM's spelling; "" for one that is not in OpenTelemetry. It
            is never "1", which Prometheus makes ``_ratio`` of.
    """

    name: str
    type: str
    labels: tuple[str, ...]
    help: str
    unit: str = ""

    @property
    def family(self) -> str:
        """The name without ``_total``, which prometheus_client appends to counters."""
        return self.name.removesuffix("_total")

    @property
    def otel(self) -> str:
        """The name in OpenTelemetry.

        Prometheus makes the name of the exposition of it, which has unit and type.
        """
        short = self.family.removesuffix(_SUFFIXES.get(self.unit, ""))
        return short.replace("_", ".", 1)


_CALL = ("store", "operation")
_ENDED = (*_CALL, "error_type")

OPERATION_DURATION = Metric(
    "tracedstore_operation_duration_seconds",
    "histogram",
    _ENDED,
    "Duration of Store calls that do not block; of all calls with"
    " TRACEDSTORE_METRICS=full.",
    unit="s",
)
WAIT_DURATION = Metric(
    "tracedstore_wait_duration_seconds",
    "histogram",
    _ENDED,
    "Duration of Store calls that may block: get, multi_get, wait, queue_pop, barrier.",
    unit="s",
)
# A call is in one of these. With `full`, a blocking call is in both, with the same
# labels: a reader that adds calls up takes it from the first.
CALL_DURATIONS: Final = (WAIT_DURATION, OPERATION_DURATION)
OPERATION_ERRORS = Metric(
    "tracedstore_operation_errors_total",
    "counter",
    ("store",),
    "Store calls that raised, timeouts included; an empty queue's answer is no error.",
    unit="{error}",
)
CAS_ATTEMPTS = Metric(
    "tracedstore_cas_attempts_total",
    "counter",
    (*_CALL, "result"),
    "Compare-and-set attempts, won or lost to another writer.",
    unit="{attempt}",
)
CAS_RETRIES = Metric(
    "tracedstore_cas_retries_total",
    "counter",
    _CALL,
    "Compare-and-sets repeated after a loss, inside one call or by a rendezvous node.",
    unit="{attempt}",
)
VALUE_BYTES = Metric(
    "tracedstore_value_bytes_total",
    "counter",
    _CALL,
    "Bytes of values written and read.",
    unit="By",
)
IN_FLIGHT = Metric(
    "tracedstore_operations_in_flight",
    "gauge",
    _CALL,
    "Store calls in flight; absent while none is in flight, but for"
    " TRACEDSTORE_METRICS=full.",
    unit="{operation}",
)
OLDEST_START = Metric(
    "tracedstore_oldest_operation_start_timestamp_seconds",
    "gauge",
    _CALL,
    "Start time of the oldest Store call in flight; absent while none is in flight.",
    unit="s",
)
BARRIER_DURATION = Metric(
    "tracedstore_barrier_duration_seconds",
    "histogram",
    ("barrier", "result"),
    "Duration of barriers, from this rank's arrival to the end.",
    unit="s",
)
BARRIER_ARRIVED = Metric(
    "tracedstore_barrier_arrived_ranks",
    "gauge",
    ("barrier",),
    "Ranks that arrived at a stalled barrier; absent while none is stalled.",
    unit="{rank}",
)
BARRIER_MISSING = Metric(
    "tracedstore_barrier_missing_ranks",
    "gauge",
    ("barrier",),
    "Ranks missing at a stalled barrier; absent while none is stalled.",
    unit="{rank}",
)
BARRIER_RANK_MISSING = Metric(
    "tracedstore_barrier_rank_missing",
    "gauge",
    ("barrier", "missing_rank", "missing_host", "cause"),
    "1 for each rank missing at a stalled barrier, for at most 64 ranks per barrier.",
    unit="{rank}",
)
BARRIER_LAST_ARRIVALS = Metric(
    "tracedstore_barrier_last_arrivals_total",
    "counter",
    ("barrier",),
    "Barriers at which this process arrived last.",
    unit="{barrier}",
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
    unit="s",
)
RENDEZVOUS_WRITES = Metric(
    "tracedstore_rendezvous_state_writes_total",
    "counter",
    ("backend", "result"),
    "Writes of the rendezvous state: accepted, in conflict with another node, or"
    " failed.",
    unit="{write}",
)
RENDEZVOUS_STATE_BYTES = Metric(
    "tracedstore_rendezvous_state_bytes",
    "gauge",
    ("backend",),
    "Size of the rendezvous state when last read; absent before the first read.",
    unit="By",
)
RENDEZVOUS_PARTICIPANTS = Metric(
    "tracedstore_rendezvous_participants",
    "gauge",
    ("backend",),
    "Nodes that had joined the round when the state was last read.",
    unit="{node}",
)
RENDEZVOUS_WAIT_LIST = Metric(
    "tracedstore_rendezvous_wait_list",
    "gauge",
    ("backend",),
    "Nodes that waited for the next round when the state was last read.",
    unit="{node}",
)
RENDEZVOUS_ROUND = Metric(
    "tracedstore_rendezvous_round",
    "gauge",
    ("backend",),
    "Number of the rendezvous round, from 0, when the state was last read.",
    unit="{round}",
)
RENDEZVOUS_COMPLETE = Metric(
    "tracedstore_rendezvous_complete",
    "gauge",
    ("backend",),
    "1 if the round was complete when the state was last read, else 0.",
    unit="{round}",
)
RENDEZVOUS_OLDEST_HEARTBEAT = Metric(
    "tracedstore_rendezvous_oldest_heartbeat_timestamp_seconds",
    "gauge",
    ("backend",),
    "Time of the last heartbeat of the node that has been silent for longest.",
    unit="s",
)
JOB_AWAITED = Metric(
    "tracedstore_job_awaited_ranks",
    "gauge",
    ("cause",),
    "Ranks that the stalled job waits for, 0 if they are unknown; absent while this"
    " process knows of no stall.",
    unit="{rank}",
)
JOB_RANK_AWAITED = Metric(
    "tracedstore_job_rank_awaited",
    "gauge",
    ("awaited_rank", "awaited_host", "cause"),
    "1 for each rank that the stalled job waits for, for at most 64 ranks.",
    unit="{rank}",
)
JOB_ABORTS = Metric(
    "tracedstore_job_aborts_total",
    "counter",
    ("cause",),
    "Processes that TRACEDSTORE_ON_STALL=abort ended. Such a process is scraped once"
    " more at best; OTLP has it.",
    unit="{process}",
)
JOB_STALLED_START = Metric(
    "tracedstore_job_stalled_start_timestamp_seconds",
    "gauge",
    ("cause", "phase", "awaited", "remedy"),
    "When the wait of the stalled job began; the labels are the verdict, for people.",
    unit="s",
)
COLLECTIVE_SEQUENCE = Metric(
    "tracedstore_collective_sequence",
    "gauge",
    ("group",),
    "Sequence number of the default process group, and of the seven others that have"
    " not moved for longest; point-to-point operations count too.",
    unit="{collective}",
)
LAST_PROGRESS = Metric(
    "tracedstore_last_progress_timestamp_seconds",
    "gauge",
    (),
    "When a Store call of this process ended last, or a sequence number of its process"
    " groups moved; absent without a group.",
    unit="s",
)
SPANS_SUPPRESSED = Metric(
    "tracedstore_spans_suppressed_total",
    "counter",
    ("reason",),
    "Store calls without a span: over the budget, or suppressed by the caller.",
    unit="{span}",
)
ETCD_REQUESTS_MADE = Metric(
    "tracedstore_etcd_requests_total",
    "counter",
    ("method", "result"),
    "Requests of EtcdV3Store and traced-etcd to etcd's v3 API.",
    unit="{request}",
)
ETCD_RECOVERIES_MADE = Metric(
    "tracedstore_etcd_recoveries_total",
    "counter",
    ("kind",),
    "What these did about failures: repeated requests, changes of the member, watches"
    " opened again, log-ins.",
    unit="{recovery}",
)
ETCD_BYTES = Metric(
    "tracedstore_etcd_bytes_total",
    "counter",
    ("direction",),
    "Bytes of these requests and their answers, without headers.",
    unit="By",
)
EVENTS_DROPPED = Metric(
    "tracedstore_events_dropped_total",
    "counter",
    (),
    "Events that were dropped because the log, or OpenTelemetry, blocked and the queue"
    " was full.",
    unit="{event}",
)
OPERATIONS_DROPPED = Metric(
    "tracedstore_operations_dropped_total",
    "counter",
    (),
    "Notable calls of threads unknown to Python that are counted, but got neither span"
    " nor event, because too many came at once.",
    unit="{operation}",
)
TELEMETRY_FAILURES = Metric(
    "tracedstore_telemetry_failures_total",
    "counter",
    ("observer",),
    "Failures of the telemetry itself; a failed observer is switched off, any other"
    " failed step is tried again.",
    unit="{failure}",
)
EXPORTS = Metric(
    "tracedstore_exports_total",
    "counter",
    ("signal", "result"),
    "Exports of spans, metrics and logs that this package set up; absent where the"
    " application exports, or nothing does.",
    unit="{export}",
)
EXPORT_DROPPED = Metric(
    "tracedstore_export_dropped_total",
    "counter",
    ("signal",),
    "Spans and log records that these did not deliver: an export failed, or the queue"
    " of spans was full.",
    unit="{item}",
)
BUILD_INFO = Metric(
    "tracedstore_build_info",
    "gauge",
    ("version", "torch", "core"),
    "Always 1; the labels contain the versions and the recording base.",
    unit="{process}",
)

# All of them, in the order in which they are defined.
METRICS: Final = tuple(each for each in vars().values() if isinstance(each, Metric))

# What torchrun's agent sums over the processes of its node.
NODE_SUMS: Final = (OPERATION_DURATION, WAIT_DURATION, BARRIER_DURATION, VALUE_BYTES)

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
REPORT: Final = "report"
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
    REPORT,
)

# Span attributes and their descriptions. OpenTelemetry's are imported from its package.
ATTRIBUTES: Final[dict[str, str]] = {}


def _attribute(name: str, description: str) -> str:
    ATTRIBUTES[name] = description
    return name


KEY: Final = _attribute("tracedstore.key", "The key, truncated to 256 characters.")
KEYS: Final = _attribute(
    "tracedstore.keys", "The first 16 keys of a call that takes a list of keys."
)
KEY_COUNT: Final = _attribute(
    "tracedstore.key.count", "Number of keys of a call that takes a list of keys."
)
VALUE_SIZE: Final = _attribute(
    "tracedstore.value.size", "Size of the value written or read, in bytes."
)
CAS_SWAPPED: Final = _attribute(
    "tracedstore.cas.swapped", "Whether a compare-and-set was won."
)
CAS_RETRY_COUNT: Final = _attribute(
    "tracedstore.cas.retries", "In etcd: compare-and-sets repeated inside the call."
)
ETCD_REQUESTS: Final = _attribute(
    "tracedstore.etcd.requests", "In etcd: requests that the call sent to etcd."
)
ETCD_WATCH_TIMEOUTS: Final = _attribute(
    "tracedstore.etcd.watch_timeouts", "In etcd: watches of the call that timed out."
)
ETCD_RECOVERIES: Final = _attribute(
    "tracedstore.etcd.recoveries",
    "EtcdV3Store: retries, failovers, log-ins, watches opened again.",
)
ETCD_REQUEST_SECONDS: Final = _attribute(
    "tracedstore.etcd.request.seconds",
    "On the event `etcd.request`: the duration of the request.",
)
RENDEZVOUS_STATE_PARTICIPANTS: Final = _attribute(
    "tracedstore.rendezvous.participants",
    "get_state, set_state: number of nodes that have joined the round.",
)
RENDEZVOUS_STATE_WAIT_LIST: Final = _attribute(
    "tracedstore.rendezvous.wait_list",
    "get_state, set_state: number of nodes that wait for the next round.",
)
RENDEZVOUS_STATE_ROUND: Final = _attribute(
    "tracedstore.rendezvous.round", "get_state, set_state: number of the round."
)
RENDEZVOUS_STATE_COMPLETE: Final = _attribute(
    "tracedstore.rendezvous.complete",
    "get_state, set_state: whether the round is complete.",
)
RENDEZVOUS_NODES: Final = _attribute(
    "tracedstore.rendezvous.nodes",
    "get_state, set_state: the first 64 nodes that have sent a heartbeat.",
)
RENDEZVOUS_SILENT_SECONDS: Final = _attribute(
    "tracedstore.rendezvous.silent_seconds",
    "get_state, set_state: seconds since the last heartbeat of each of these"
    " nodes, in the same order.",
)
RUN_ID: Final = _attribute(
    "tracedstore.run_id",
    "The run id of the job: `TRACEDSTORE_RUN_ID`, else torchrun's run id.",
)
RANK: Final = _attribute(
    "tracedstore.rank",
    "The rank, from `init_process_group` or `RANK`. Barrier: the `rank` argument.",
)
LOCAL_RANK: Final = _attribute(
    "tracedstore.local_rank", "The rank on this host, from `LOCAL_RANK`."
)
WORLD_SIZE: Final = _attribute(
    "tracedstore.world_size",
    "The number of ranks, from `init_process_group` or `WORLD_SIZE`.",
)
# One of OpenTelemetry, whose package has it only in the unstable module.
HOST_NAME: Final = _attribute("host.name", "The host name.")
BARRIER_PREFIX: Final = _attribute(
    "tracedstore.barrier.prefix", "Barrier: the key prefix."
)
BARRIER_ROOT: Final = _attribute(
    "tracedstore.barrier.root", "Barrier: true on the root of its trace, of all ranks."
)
BARRIER_RESULT: Final = _attribute(
    "tracedstore.barrier.result", "Barrier: `completed`, `timeout` or `failed`."
)
BARRIER_ARRIVAL_ORDER: Final = _attribute(
    "tracedstore.barrier.arrival_order",
    "Barrier: position in which this rank arrived, from 1.",
)
BARRIER_ARRIVAL: Final = _attribute(
    "tracedstore.barrier.arrival_seconds",
    "Barrier: seconds until the store had counted this rank.",
)
BARRIER_LAST_RANK: Final = _attribute(
    "tracedstore.barrier.last_rank", "Barrier, completed: the rank that arrived last."
)
BARRIER_ARRIVED_COUNT: Final = _attribute(
    "tracedstore.barrier.arrived_count",
    "Barrier, timeout: number of ranks that arrived.",
)
BARRIER_MISSING_COUNT: Final = _attribute(
    "tracedstore.barrier.missing_count", "Barrier, timeout: number of ranks missing."
)
BARRIER_MISSING_RANKS: Final = _attribute(
    "tracedstore.barrier.missing_ranks", "Barrier, timeout: the first 64 missing ranks."
)
BARRIER_MISSING_TEXT: Final = _attribute(
    "tracedstore.barrier.missing",
    "Barrier, timeout: all missing ranks, grouped by host and folded into ranges.",
)

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
JOB_ABORTED: Final = "job.aborted"
STORE_STALE: Final = "store.stale_keys"
TELEMETRY_DISABLED: Final = "telemetry.disabled"
TELEMETRY_SERVING: Final = "telemetry.serving"
EXPORT_FAILED: Final = "telemetry.export_failed"
EXPORT_RESUMED: Final = "telemetry.export_resumed"
# Every event, with its level.
EVENT_LEVELS: Final = {
    OPERATION_SLOW: "info",
    OPERATION_FAILED: "warning",
    OPERATION_STALLED: "warning",
    CAS_CONTENDED: "warning",
    BARRIER_WAITING: "warning",
    BARRIER_COMPLETED: "debug",
    BARRIER_TIMEOUT: "error",
    BARRIER_FAILED: "error",
    BARRIER_STALE_KEY: "warning",
    RENDEZVOUS_CONFLICT: "warning",
    RENDEZVOUS_WAITING: "warning",
    RENDEZVOUS_TIMEOUT: "error",
    RENDEZVOUS_FAILED: "error",
    JOB_STALLED: "warning",
    JOB_RESUMED: "info",
    JOB_ABORTED: "error",
    STORE_STALE: "warning",
    TELEMETRY_DISABLED: "error",
    TELEMETRY_SERVING: "info",
    EXPORT_FAILED: "warning",
    EXPORT_RESUMED: "info",
}
EVENT_NAMES: Final = tuple(EVENT_LEVELS)
