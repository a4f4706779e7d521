"""Put our barrier in the place of torch's, for those that call torch's themselves.

torchrun's agent, distributed checkpoints and ``create_c10d_store`` call
``torch.distributed.elastic.utils.store.barrier``, all of them without a rank, so that
nobody can be named. Whoever replaces it gets what `tracedstore.barrier` tells, and the
ranks of those that have a place (see `places`).
"""

import threading
from collections.abc import Callable
from typing import Any

from tracedstore import names
from tracedstore.coordination import membership
from tracedstore.coordination.barrier import barrier as with_names
from tracedstore.coordination.exchange import AnyStore
from tracedstore.core.recorder import RECORDER

_lock = threading.Lock()
# What stood there before, by module; empty while torch's own stands there.
_replaced: list[tuple[Any, Any]] = []
# Torch's own, once ours has stood in its place.
_torchs: Callable[..., None] | None = None


def replace() -> None:
    """Let torch's callers have ours. Once is enough, and twice is no harm."""
    # Here, because importing the package is to stay cheap.
    from torch.distributed.elastic.utils import distributed, store  # noqa: PLC0415

    global _torchs  # noqa: PLW0603 - as one process has one
    with _lock:
        if _replaced:
            return
        if vars(store)["barrier"] is not barrier:  # put there again by somebody else
            _torchs = vars(store)["barrier"]
        # The second has it by name, and need not for ever.
        for module in (store, distributed):
            if "barrier" not in vars(module):
                continue
            _replaced.append((module, vars(module)["barrier"]))
            vars(module)["barrier"] = barrier


def restore() -> None:
    """Let them have torch's own again."""
    with _lock:
        while _replaced:
            module, torchs = _replaced.pop()
            # Somebody else may have put theirs over ours meanwhile.
            if vars(module)["barrier"] is barrier:
                vars(module)["barrier"] = torchs


def _wanted() -> bool:
    """Tell whether there is to be any telemetry: nobody here has asked for ours."""
    try:
        RECORDER.set_up()
    except Exception as error:
        RECORDER.failures.add(names.BARRIERS, error)
        return False
    return RECORDER.on


def barrier(
    store: AnyStore,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait as torch's barrier does, with the rank that the caller did not give."""
    wait = with_names if _torchs is None or _wanted() else _torchs
    place = membership.of(store)
    if (
        wait is with_names
        and rank is None
        and rank_tracing_decoder is None
        and place is not None
        and place.world_size == world_size
    ):
        rank, rank_tracing_decoder = place.rank, place.name_of
    wait(
        store,
        world_size,
        key_prefix,
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
    )
