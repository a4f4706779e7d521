"""One trace over all ranks of a barrier.

Every rank derives the ids of one parent from the job, the attempt and the prefix of the
barrier, so that no rank has to wait for the ids of another one. The spans of all ranks
are children of this parent, which is no span itself: a span gets its id from the
application's OpenTelemetry SDK. Where the caller is in a trace already, the span stays
in that trace and links to the parent.

A job is known by its run id. Without one, jobs with equal prefixes would share traces.
There the ranks agree on a random id in the store, once for each store.
"""

import hashlib
import os
import secrets
import threading
from collections.abc import Mapping
from contextvars import Context
from datetime import timedelta
from typing import Any, Final

from opentelemetry import context, trace
from opentelemetry.trace import Span, Status, StatusCode

from tracedstore import names
from tracedstore.common.identity import restart_count, run_id_of
from tracedstore.common.keys import key_text
from tracedstore.common.weak_table import WeakTable
from tracedstore.recording.counters import handle_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.telemetry import NULL_TELEMETRY, SharedParent, Telemetry

# The random id of a job without a run id. On stores without compare-and-set the first
# rank to count itself under the second key writes it.
JOB_KEY: Final = "tracedstore/JOB"
JOB_COUNT_KEY: Final = "tracedstore/JOB_COUNT"
# Seconds that the others wait for it: the first one writes it at once.
_JOB_TIMEOUT = 1.0
# What torchrun has for a run id if it is given none.
_NO_RUN_ID: Final = "none"
_MAX_JOB_BYTES = 64

# By handle, because the address of a store that was freed may be used for another one.
_agreed: WeakTable[bytes] = WeakTable()


def job_of(store: Any) -> bytes | None:
    """Return what all ranks of this job and attempt have in common, and no other job.

    Makes calls of the store only if there is no run id, and once for each store.

    Args:
        store: The store through which the ranks meet.

    Returns:
        None if the ranks could not agree on an id.
    """
    run_id = run_id_of(os.environ)
    if run_id is not None and run_id != _NO_RUN_ID:
        return f"{run_id}\0{restart_count(os.environ)}".encode("utf-8", "replace")
    known = _agreed.get(handle_of(store))
    if known is None:
        agreed = RECORDER.failures.guarded_call(
            names.BARRIERS, _agree, store, secrets.token_hex(16)
        )
        # Also if it failed: that is not tried again at every barrier.
        known = (agreed or b"")[:_MAX_JOB_BYTES]
        _agreed.set(handle_of(store), known)
    return known or None


def _agree(store: Any, own: str) -> bytes:
    """Write an id, unless another rank has; return the one that is written."""
    agreed: bytes
    if store.has_extended_api():
        agreed = store.compare_set(JOB_KEY, "", own)
        return agreed
    if store.add(JOB_COUNT_KEY, 1) == 1:
        store.set(JOB_KEY, own)
        return own.encode()
    store.wait([JOB_KEY], timedelta(seconds=_JOB_TIMEOUT))
    agreed = store.get(JOB_KEY)
    return agreed


def shared_parent(job: bytes, prefix: str) -> SharedParent:
    """Derive the ids of the parent that the spans of all ranks have.

    Args:
        job: What the ranks have in common.
        prefix: Prefix of the barrier's keys.
    """
    digest = hashlib.sha256(b"%b\0%b" % (job, prefix.encode("utf-8", "replace")))
    ids = digest.digest()
    return SharedParent(int.from_bytes(ids[:16]), int.from_bytes(ids[16:24]))


class BarrierSpan:
    """The span of one rank's barrier call, in the trace that all ranks share.

    Args:
        telemetry: Starts the span.
        job: What all ranks have in common; None if that is not known.
        prefix: Prefix of the barrier's keys.
        rank: The rank of this process, where it is known.
        world_size: Number of ranks.
        began: When the call began, in ticks.
        caller: The context of the caller: most spans are started in another thread.
        enabled: Record spans.

    Attributes:
        enabled: Spans are recorded; otherwise every method has no effect.
    """

    __slots__ = (
        "_caller",
        "_job",
        "_lock",
        "_prefix",
        "_rank",
        "_span",
        "_started",
        "_telemetry",
        "_world_size",
        "enabled",
    )

    def __init__(
        self,
        telemetry: Telemetry,
        job: bytes | None,
        prefix: str,
        rank: int | None,
        world_size: int,
        began: int,
        caller: Context,
        *,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self._span: Span | None = None
        if not enabled:
            return
        self._telemetry = telemetry
        self._job = job
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size
        self._started = RECORDER.clock.wall_of(began)
        self._caller = caller
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Start the span, unless it is started: an event is about to have its ids."""
        if not self.enabled:
            return
        with self._lock:
            if self._span is None:
                self._start({})

    def ids(self) -> dict[str, str]:
        """Return the trace and span ids for an event of this call."""
        found = None if self._span is None else self._span.get_span_context()
        if found is None or not (found.is_valid and found.trace_flags.sampled):
            return {}
        return {
            "trace_id": trace.format_trace_id(found.trace_id),
            "span_id": trace.format_span_id(found.span_id),
        }

    def end(
        self, nanoseconds: int, attributes: Mapping[str, Any], error: str | None = None
    ) -> None:
        """End the span, this long after its start; start it first if it is not started.

        Args:
            nanoseconds: Its duration.
            attributes: Further attributes.
            error: The error that ended the call.
        """
        if not self.enabled:
            return
        with self._lock:
            if self._span is None:
                self._start(attributes)
            else:
                self._span.set_attributes(dict(attributes))
        if self._span is None:
            return
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._started + nanoseconds)

    def _start(self, more: Mapping[str, Any]) -> None:
        shown = key_text(self._prefix)
        self._span = self._telemetry.start_span(
            f"barrier {RECORDER.cold.label_value('barrier', shown)}",
            attributes={
                names.BARRIER_PREFIX: shown,
                names.WORLD_SIZE: self._world_size,
                **({} if self._rank is None else {names.RANK: self._rank}),
                **more,
            },
            started_ns=self._started,
            parent=self._caller.run(context.get_current),
            shared=(
                None if self._job is None else shared_parent(self._job, self._prefix)
            ),
        )


# For calls without a span.
NO_SPAN: Final = BarrierSpan(
    NULL_TELEMETRY, None, "", None, 0, 0, Context(), enabled=False
)
