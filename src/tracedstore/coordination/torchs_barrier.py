"""Put our barrier where torch's own callers look for theirs, and take it back.

torchrun's agents, checkpoints and ``create_c10d_store`` call
``elastic.utils.store.barrier`` without a rank, so torch can only say that somebody is
missing. The keys are the same, so replaced and plain processes still meet.
"""

import functools
from types import ModuleType
from typing import Any

from tracedstore.coordination.barrier import barrier

_NAME = "barrier"
_replaced: list[tuple[ModuleType, Any]] = []


def replace() -> None:
    """Let torch's callers use our barrier, until `restore`."""
    if _replaced:
        return
    # Not at the top: this is only wanted where torch's own is used.
    from torch.distributed.elastic.utils import distributed, store  # noqa: PLC0415

    @functools.wraps(store.barrier)
    def traced(*args: Any, **kwargs: Any) -> None:
        barrier(*args, **kwargs)

    # `distributed` has it by name.
    for module in (store, distributed):
        _replaced.append((module, getattr(module, _NAME)))
        setattr(module, _NAME, traced)


def restore() -> None:
    """Give torch its own barrier back."""
    while _replaced:
        module, original = _replaced.pop()
        setattr(module, _NAME, original)
