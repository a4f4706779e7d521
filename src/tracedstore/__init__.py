"""Observability for what distributed PyTorch jobs coordinate through: the Store.

Wrap any ``torch.distributed`` Store and see every call timed, every lost
compare-and-set counted, and every wait while it is still waiting:

    store = tracedstore.wrap(dist.TCPStore(...))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

Importing this package does nothing; the first `wrap` or `configure` does.
"""

from tracedstore._version import __version__
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
    "shutdown",
    "store_timeout",
    "synchronize",
    "wrap",
]
