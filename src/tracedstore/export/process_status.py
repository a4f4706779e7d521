"""The status of this process: its calls in flight and stalled barriers, as JSON.

An agent of torchrun that serves a node has the status of each worker in it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tracedstore import names
from tracedstore.common import validation
from tracedstore.common.identity import process_identity
from tracedstore.common.ranges import fold, unfold
from tracedstore.coordination.missing_report import StalledBarrier
from tracedstore.diagnosis.ask.agent_workers import AGENT_WORKERS
from tracedstore.diagnosis.ask.local_client import LocalReply
from tracedstore.diagnosis.ask.local_socket import STATUS_PAGE
from tracedstore.export import http_server as server
from tracedstore.export.worker_replies import ask_workers
from tracedstore.naming.decoders import by_host
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.inflight import InFlight, in_flight

# Maximum number of calls listed. A thread has one call in flight, and the oldest ones
# describe a process with more threads well enough.
_MAX_CALLS = 64
# Maximum size of a status that is parsed. Clients read no more than that either.
_MAX_BYTES = 4 << 20
# Maximum number of missing ranks in a status that is parsed. A few bytes may stand for
# any number of ranks.
_MAX_MISSING_RANKS = 1 << 17
# Seconds for the workers of an agent to reply. Clients wait for a second.
_WORKERS_TIMEOUT = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """The status of one process.

    Attributes:
        process: Its identity: rank, host, pid, run id, as far as known.
        recording: Whether it records calls.
        calls: Its Store calls in flight, oldest first.
        more_calls: Number of further calls in flight.
        barriers: Its stalled barriers.
    """

    process: Mapping[str, Any]
    recording: bool
    calls: tuple[InFlight, ...]
    more_calls: int
    barriers: tuple[StalledBarrier, ...]

    @classmethod
    def now(cls) -> "ProcessStatus":
        """Return the status of this process."""
        calls = in_flight(RECORDER)
        return cls(
            process=process_identity().fields(),
            recording=RECORDER.on,
            calls=tuple(calls[:_MAX_CALLS]),
            more_calls=max(0, len(calls) - _MAX_CALLS),
            barriers=tuple(RECORDER.cold.states(StalledBarrier)),
        )

    def to_bytes(self) -> bytes:
        """Return it as JSON; missing ranks are folded, as they may be many."""
        return json.dumps(self.to_fields()).encode()

    def to_fields(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "process": dict(self.process),
            "recording": self.recording,
            "in_flight": [asdict(call) for call in self.calls],
            "more_in_flight": self.more_calls,
            "barriers": [
                {
                    "barrier": stalled.family,
                    "arrived_count": stalled.arrived,
                    "missing": {
                        host: fold(ranks)
                        for host, ranks in by_host(
                            stalled.missing, stalled.missing.__getitem__
                        ).items()
                    },
                    "possibly_missing_count": stalled.possible,
                }
                for stalled in self.barriers
            ],
        }

    @classmethod
    def from_bytes(cls, written: bytes) -> "ProcessStatus":
        """Parse it; raise ValueError for anything else."""
        return cls.from_fields(validation.load_json(written, _MAX_BYTES))

    @classmethod
    def of_worker(cls, written: bytes, agent: int, rank: int) -> "ProcessStatus | None":
        """Parse the status of a worker in that of its agent; None without one.

        Raises:
            ValueError: It is not the status of this agent, or not a status.
        """
        found = validation.load_json(written, _MAX_BYTES)
        if cls.from_fields(found).process.get("pid") != agent:
            raise ValueError("another process responds at the address of its agent")
        workers = found.get("workers")
        if type(workers) is not dict:
            raise ValueError("not the status of an agent with workers")
        worker = workers.get(str(rank))
        return None if worker is None else cls.from_fields(worker)

    @classmethod
    def from_fields(cls, found: Any) -> "ProcessStatus":
        """Return the status with these JSON values; ValueError for anything else."""
        try:
            return cls(
                process=dict(found["process"]),
                recording=bool(found["recording"]),
                calls=tuple(map(_call, found["in_flight"])),
                more_calls=int(found["more_in_flight"]),
                barriers=_stalled_barriers(found["barriers"]),
            )
        # RecursionError: the text of a value that is nested almost too deeply.
        except (
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ValueError("not the status of a process") from error


def _call(found: Mapping[str, Any]) -> InFlight:
    # The fields' types (str, int, float) convert their values.
    kinds: dict[str, Any] = {field.name: field.type for field in fields(InFlight)}
    call = InFlight(**{name: kind(found[name]) for name, kind in kinds.items()})
    # float() also converts the texts "nan" and "inf".
    if not (math.isfinite(call.started) and math.isfinite(call.waited_seconds)):
        raise ValueError("a time that is not finite")
    return call


def _stalled_barriers(found: Iterable[Mapping[str, Any]]) -> tuple[StalledBarrier, ...]:
    """Parse barriers; ranks are counted over all of them."""
    barriers = []
    remaining = _MAX_MISSING_RANKS
    for barrier in found:
        missing: dict[int, str] = {}
        for host, folded in barrier["missing"].items():
            ranks = unfold(folded, remaining)
            remaining -= len(ranks)
            missing |= dict.fromkeys(ranks, host)
        barriers.append(
            StalledBarrier(
                family=str(barrier["barrier"]),
                arrived=int(barrier["arrived_count"]),
                missing=missing,
                possible=int(barrier["possibly_missing_count"]),
            )
        )
    return tuple(barriers)


def own_fields() -> dict[str, Any]:
    """Return the status of this process as JSON values."""
    return ProcessStatus.now().to_fields()


def page(_accept: str) -> server.Response:
    """Return the page ``/inflight``."""
    return _response(own_fields())


def node_page(_accept: str) -> server.Response:
    """Return the page ``/inflight`` of an agent, with its workers by rank."""
    fields = own_fields()
    if workers := AGENT_WORKERS.workers:
        replies = ask_workers(workers, STATUS_PAGE, _WORKERS_TIMEOUT)
        fields["workers"] = {
            str(worker.rank): _worker_fields(replies.get(worker)) for worker in workers
        }
    return _response(fields)


def _response(fields: dict[str, Any]) -> server.Response:
    return server.Response(json.dumps(fields).encode() + b"\n", "application/json")


def _worker_fields(reply: LocalReply | None) -> dict[str, Any] | None:
    if reply is None or reply.page is None:
        return None
    try:
        return ProcessStatus.from_fields(reply.page).to_fields()
    except ValueError as error:
        RECORDER.failures.add(names.ENDPOINT, error)
        return None
