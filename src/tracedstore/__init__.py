"""Observability for the Store that distributed PyTorch jobs coordinate through.

Wrap any ``torch.distributed`` Store to time every call, count every lost
compare-and-set, and see every wait while it lasts:

    store = tracedstore.wrap(dist.TCPStore(...))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

Or trace the stores that torch creates itself: call ``tracedstore.instrument()``, or
use the init method ``traced+env://``.

Importing this package registers that init method and has no other effect. torch is
imported when one of the names below is first used. The first `wrap` or `configure`
sets up the telemetry.
"""

import typing as _typing

from tracedstore._version import __version__ as __version__
from tracedstore.auto.patches import instrument as instrument
from tracedstore.auto.patches import register_init_methods as _register_init_methods
from tracedstore.auto.patches import uninstrument as uninstrument

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

if _typing.TYPE_CHECKING:
    from tracedstore._public import *  # noqa: F403 - exactly the names above
else:
    # tracedstore-run and every process below it import this package and must not
    # pay for torch.
    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tracedstore import _public  # noqa: PLC0415 - see above

        globals().update({each: getattr(_public, each) for each in _PUBLIC})
        return globals()[name]

    def __dir__() -> list[str]:
        return [*__all__]

    _PUBLIC = [name for name in __all__ if name != "__version__"]


_register_init_methods()
