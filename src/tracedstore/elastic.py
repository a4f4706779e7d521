"""The drop-in for ``torch.distributed.elastic.utils.store.barrier``."""

from collections.abc import Callable

from tracedstore.coordination.barrier import BarrierCall
from tracedstore.coordination.exchange import AnyStore
from tracedstore.diagnosis.judgement.inquiry import find_causes
from tracedstore.export.setup import ensure_configured
from tracedstore.recording.telemetry import TELEMETRY


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
