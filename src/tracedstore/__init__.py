"""Observability for what distributed PyTorch jobs coordinate through: the Store.

Wrap any ``torch.distributed`` Store and see every call timed, every lost
compare-and-set counted, and every wait while it is still waiting:

    store = tracedstore.wrap(dist.TCPStore(...))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

or let torch make it: ``tracedstore.instrument()``, or the init method
``traced+env://``.

Importing this package lets torch know the init method and does nothing else: torch
comes with the first of the names below that is used. The first `wrap` or `configure`
sets the telemetry up.
"""

import typing as _typing

from tracedstore._version import __version__ as __version__
from tracedstore.auto.places import instrument as instrument
from tracedstore.auto.places import offer_init_methods as _offer_init_methods
from tracedstore.auto.places import uninstrument as uninstrument

if _typing.TYPE_CHECKING:
    from tracedstore._public import *  # noqa: F403 - it has a list of them
    from tracedstore._public import __all__ as __all__
else:
    # tracedstore-run, and what every process below it loads, pass through here and
    # must not pay for torch.
    def __getattr__(name: str) -> object:
        if name == "__all__" or not name.startswith("_"):
            from tracedstore import _public  # noqa: PLC0415 - see above

            globals().update({each: getattr(_public, each) for each in _public.__all__})
            globals()["__all__"] = _public.__all__
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return [*__getattr__("__all__")]


_offer_init_methods()
