"""What a process answers when somebody asks what it is doing."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tracedstore.coordination.ranges import by_host, fold, unfold
from tracedstore.core.barrier_stats import Stalled
from tracedstore.core.identity import ProcessIdentity
from tracedstore.core.recorder import RECORDER
from tracedstore.export import server
from tracedstore.signals.inflight import InFlight, in_flight

# A thread has one call in flight; a process with more threads than this in calls is
# described well enough by the oldest of them.
_MOST_CALLS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What one process is doing.

    Attributes:
        process: Who says this: rank, host, pid, run id, as far as known.
        recording: Whether calls are recorded there at all.
        calls: The Store calls that have not returned, oldest first.
        more_calls: How many more there are.
        barriers: The barriers that it waits at and found ranks missing from.
    """

    process: Mapping[str, Any]
    recording: bool
    calls: tuple[InFlight, ...]
    more_calls: int
    barriers: tuple[Stalled, ...]

    @classmethod
    def now(cls) -> "ProcessStatus":
        """Tell what this process is doing."""
        calls = in_flight(RECORDER)
        return cls(
            process=ProcessIdentity.from_environment(os.environ).fields(),
            recording=RECORDER.on,
            calls=tuple(calls[:_MOST_CALLS]),
            more_calls=max(0, len(calls) - _MOST_CALLS),
            barriers=tuple(RECORDER.barriers.stalled_barriers()),
        )

    def to_bytes(self) -> bytes:
        """Write it as JSON; the missing ranks folded, because they may be many."""
        return json.dumps(
            {
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
        ).encode()

    @classmethod
    def from_bytes(cls, written: bytes) -> "ProcessStatus":
        """Read it; anything else is a ValueError."""
        try:
            found = json.loads(written)
            return cls(
                process=dict(found["process"]),
                recording=bool(found["recording"]),
                calls=tuple(map(_call, found["in_flight"])),
                more_calls=int(found["more_in_flight"]),
                barriers=tuple(map(_stalled, found["barriers"])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("not the answer of a rank") from error


def _call(found: Mapping[str, Any]) -> InFlight:
    # The types of its fields are str, int and float, which also convert.
    kinds: dict[str, Any] = {field.name: field.type for field in fields(InFlight)}
    return InFlight(**{name: kind(found[name]) for name, kind in kinds.items()})


def _stalled(found: Mapping[str, Any]) -> Stalled:
    return Stalled(
        family=str(found["barrier"]),
        arrived=int(found["arrived_count"]),
        missing={
            rank: str(host)
            for host, ranks in found["missing"].items()
            for rank in unfold(ranks)
        },
        possible=int(found["possibly_missing_count"]),
    )


def page(_accept: str) -> server.Response:
    """Say it over HTTP."""
    return server.Response(ProcessStatus.now().to_bytes() + b"\n", "application/json")
