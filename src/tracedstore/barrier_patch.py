"""Replaces torch's barrier by ours, for callers that call torch's.

torchrun's agent, distributed checkpoints and ``create_c10d_store`` call
``torch.distributed.elastic.utils.store.barrier`` without a rank, so torch cannot name
missing ranks. The replacement takes the rank of this process from
`coordination.membership`, where it is known.
"""

import threading
from collections.abc import Callable
from typing import Any

from tracedstore import names
from tracedstore.coordination import membership
from tracedstore.coordination.exchange import AnyStore
from tracedstore.elastic import barrier as barrier_with_names
from tracedstore.export.setup import try_to_configure
from tracedstore.recording.observer import missing_from_torch

_lock = threading.Lock()
# The attributes that were replaced, as module and original; empty while none is.
_replaced: list[tuple[Any, Any]] = []
# torch's own barrier, once it was replaced.
_torch_barrier: Callable[..., None] | None = None


def replace() -> None:
    """Replace torch's barrier. A second call has no effect."""
    # Imported here: importing the package must stay cheap.
    from torch.distributed.elastic.utils import distributed, store  # noqa: PLC0415

    if "barrier" not in vars(store):
        raise missing_from_torch(
            f"{store.__name__}.barrier", "barriers of torch do not name missing ranks"
        )
    global _torch_barrier  # noqa: PLW0603 - torch's modules are one a process
    with _lock:
        if _replaced:
            return
        if vars(store)["barrier"] is not barrier:  # unless another patch restored ours
            _torch_barrier = vars(store)["barrier"]
        # `distributed` imports it by name; another torch version may not.
        for module in (store, distributed):
            if "barrier" not in vars(module):
                continue
            _replaced.append((module, vars(module)["barrier"]))
            vars(module)["barrier"] = barrier


def restore() -> None:
    """Restore torch's barrier, unless another patch has replaced ours since."""
    with _lock:
        while _replaced:
            module, original = _replaced.pop()
            if vars(module)["barrier"] is barrier:
                vars(module)["barrier"] = original


def barrier(
    store: AnyStore,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait as torch's barrier does, with the rank that the caller did not pass.

    Without telemetry (a setting that cannot be used, ``TRACEDSTORE_DISABLED``) this is
    torch's own barrier: the caller did not ask for ours.
    """
    wait = barrier_with_names
    if _torch_barrier is not None and not try_to_configure(names.BARRIERS):
        wait = _torch_barrier
    own = membership.of(store)
    if (
        wait is barrier_with_names
        and rank is None
        and rank_tracing_decoder is None
        and own is not None
        and own.world_size == world_size
    ):
        rank, rank_tracing_decoder = own.rank, own.name_of
    wait(
        store,
        world_size,
        key_prefix,
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
    )
