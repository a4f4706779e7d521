"""The duration of a rendezvous is measured with the configured clock."""

from typing import Any, cast

from prometheus_client import CollectorRegistry
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)

import tracedstore
from tracedstore.rendezvous import TracedRendezvousBackend, TracedRendezvousHandler
from tracedstore.testing import FakeClock


class SlowHandler:
    """A handler whose next round takes five seconds of a fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def next_rendezvous(self) -> RendezvousInfo:
        """Join a round of one node."""
        self._clock.advance(5)
        return RendezvousInfo(HashStore(), 0, 1, cast("Any", None))


def test_configured_clock(registry: CollectorRegistry) -> None:
    """Five seconds of that clock are counted, whatever the system's clock says."""
    clock = FakeClock()
    tracedstore.configure(registry=registry, clock=clock.clock, log_format="off")
    backend = TracedRendezvousBackend(C10dRendezvousBackend(HashStore(), "job-7"))
    inner = cast("RendezvousHandler", SlowHandler(clock))

    TracedRendezvousHandler(inner, backend, warn_after=0).next_rendezvous()

    labels = {"backend": "c10d", "result": "completed"}
    duration = "tracedstore_rendezvous_duration_seconds_sum"
    assert registry.get_sample_value(duration, labels) == 5
