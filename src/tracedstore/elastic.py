"""Drop-ins for ``torch.distributed.elastic.utils.store``.

Signatures, keys and values are torch's, so that ranks which call these and ranks which
call torch's functions work together. The store's timeout is restored on failure too.

torchrun's agent, distributed checkpoints and ``create_c10d_store`` call torch's barrier
without a rank, so torch cannot name missing ranks. `replace_torch_barrier` puts a
barrier in its place that takes the rank of this process from
`coordination.rank_registry`, where it is known.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tracedstore import names
from tracedstore.coordination.arrivals import BarrierKeys
from tracedstore.coordination.barrier import BarrierCall
from tracedstore.coordination.rank_registry import agent_in
from tracedstore.diagnosis.judgement.inquiry import find_causes
from tracedstore.export.setup import ensure_configured, try_to_configure
from tracedstore.recording.telemetry import TELEMETRY, missing_from_torch

# Any, because torch's stubs declare less than half of a Store's methods.
AnyStore = Any

_lock = threading.Lock()
# The attributes that were replaced in torch's modules, as module and original; empty
# while none is.
_replaced: list[tuple[Any, Any]] = []
# torch's own barrier, once it was replaced.
_torch_barrier: Callable[..., None] | None = None


@contextmanager
def store_timeout(store: AnyStore, timeout: float) -> Iterator[None]:
    """Set a store's timeout, in seconds, and restore the old one on exit."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(before)


def get_all(store: AnyStore, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Get ``{prefix}{n}`` for every n below the world size; wait for each key.

    Rank 0 is often the process that serves the store, so it returns only after all
    other ranks have read their values.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{n}" for n in range(world_size)])
    finished = BarrierKeys(f"{prefix}/finished")
    if store.add(finished.num_members, 1) == world_size:
        store.set(finished.last_member, "<val_ignored>")
    if rank == 0:
        store.wait([finished.last_member])
    return values


def synchronize(
    store: AnyStore,
    data: bytes,
    rank: int,
    world_size: int,
    key_prefix: str,
    timeout: float = 300,
) -> list[bytes]:
    """Exchange data between all ranks; return it in the order of ranks.

    A prefix can be used only once, because its keys are not deleted.
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: AnyStore,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
    *,
    warn_after: float = 30,
) -> None:
    """Wait until all ranks have arrived, and name those that have not.

    The signature is that of ``torch.distributed.elastic.utils.store.barrier``. It
    works on every store. A key prefix is for one use.

    Args:
        store: The store through which the ranks meet; it need not be traced.
        world_size: Number of ranks.
        key_prefix: Prefix of the barrier's keys.
        barrier_timeout: Seconds to wait.
        rank: The rank of this process. Without it, other ranks cannot name it.
        rank_tracing_decoder: Returns the name of a rank. The default is the rank's
            own registration, else the scheduler's environment.
        trace_timeout: Seconds for ranks that arrived without a name to write it.
        warn_after: Seconds after which the first ranks to arrive emit
            `barrier.waiting`, and again each time the wait has doubled. 0 for never.

    Raises:
        BarrierTimeout: A rank did not arrive in time.
        AssertionError: A decoder was given, but no rank.
        ConfigurationError: This is the first use, and a ``TRACEDSTORE_*`` variable
            has a value that cannot be used.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise AssertionError("Tracing requires rank information")
    if TELEMETRY.is_null:
        ensure_configured()
    BarrierCall(
        store,
        world_size,
        key_prefix,
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
        find_causes,
        warn_after,
    ).run()


def replace_torch_barrier() -> None:
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
        # It is ours if another patch restored it.
        if vars(store)["barrier"] is not barrier_for_torch:
            _torch_barrier = vars(store)["barrier"]
        # `distributed` imports it by name; another torch version may not.
        for module in (store, distributed):
            if "barrier" not in vars(module):
                continue
            _replaced.append((module, vars(module)["barrier"]))
            vars(module)["barrier"] = barrier_for_torch


def restore_torch_barrier() -> None:
    """Restore torch's barrier, unless another patch has replaced ours since."""
    with _lock:
        while _replaced:
            module, original = _replaced.pop()
            if vars(module)["barrier"] is barrier_for_torch:
                vars(module)["barrier"] = original


def barrier_for_torch(
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
    wait = barrier
    if _torch_barrier is not None and not try_to_configure(names.BARRIERS):
        wait = _torch_barrier
    own = agent_in(store)
    if (
        wait is barrier
        and rank is None
        and rank_tracing_decoder is None
        and own is not None
        and own.world_size == world_size
    ):
        rank, rank_tracing_decoder = own.rank, own.host_of
    wait(
        store,
        world_size,
        key_prefix,
        barrier_timeout,
        rank,
        rank_tracing_decoder,
        trace_timeout,
    )
