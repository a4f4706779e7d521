"""The public names, from where they are; the package itself loads this when asked.

All of them at once: a barrier works alone, but has to find the telemetry set up.
"""

from tracedstore._version import __version__
from tracedstore.auto.places import instrument, uninstrument
from tracedstore.coordination.barrier import barrier
from tracedstore.coordination.errors import BarrierTimeout
from tracedstore.coordination.exchange import get_all, store_timeout, synchronize
from tracedstore.core.errors import ConfigurationError, TracedStoreError
from tracedstore.core.observer import Observer
from tracedstore.core.operation import Operation
from tracedstore.export.settings import Settings
from tracedstore.export.setup import configure, in_flight, shutdown
from tracedstore.signals.inflight import InFlight
from tracedstore.store import TracedStore, wrap

__all__ = [
    "BarrierTimeout",
    "ConfigurationError",
    "InFlight",
    "Observer",
    "Operation",
    "Settings",
    "TracedStore",
    "TracedStoreError",
    "__version__",
    "barrier",
    "configure",
    "get_all",
    "in_flight",
    "instrument",
    "shutdown",
    "store_timeout",
    "synchronize",
    "uninstrument",
    "wrap",
]
