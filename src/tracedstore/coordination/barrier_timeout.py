"""The exception that a barrier raises when ranks are missing at its timeout."""

from collections.abc import Sequence
from typing import Any

from torch.distributed import DistStoreError

from tracedstore.common.errors import TracedStoreError


class BarrierTimeout(TracedStoreError, DistStoreError):  # noqa: N818 - a public name
    """A barrier timed out; has the missing ranks.

    It is a ``DistStoreError``, so code that catches torch's exception catches this one,
    on every store. It can be pickled.

    Attributes:
        key_prefix: The key prefix of the barrier.
        rank: The rank that waited; None if the caller did not pass one.
        world_size: The number of ranks that the barrier is for.
        timeout: The timeout in seconds.
        waited: The seconds that this rank waited.
        arrived_ranks: Ranks that arrived and are identified.
        missing_ranks: Ranks that did not arrive.
        missing_names: Their names, in the same order.
        missing_causes: Why they did not arrive, in the same order: ``gone``, ``busy``,
            ``stopped``, ``not_started``; "" where it is unknown.
        missing_doing: What their processes do instead, in the same order; "" where it
            is unknown.
        missing_evidence: How that is known, in the same order; "" where nothing is.
        possibly_missing_ranks: If there were unidentified arrivals: the ranks that are
            either missing or among these arrivals. `missing_ranks` is empty then, so
            that a rank that arrived is never reported missing.
        unidentified_count: Number of arrivals without a rank.
        duplicate_ranks: Ranks that arrived more than once, because the key prefix was
            used before.
    """

    key_prefix: str
    rank: int | None
    world_size: int
    timeout: float
    waited: float
    arrived_ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    missing_names: tuple[str, ...]
    missing_causes: tuple[str, ...]
    missing_doing: tuple[str, ...]
    missing_evidence: tuple[str, ...]
    possibly_missing_ranks: tuple[int, ...]
    unidentified_count: int
    duplicate_ranks: tuple[int, ...]

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self._fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (str(self), self._fields)


def _unpickle(message: str, fields: dict[str, Any]) -> BarrierTimeout:
    return BarrierTimeout(message, **fields)


def torch_message(
    key_prefix: str,
    rank: int | None,
    world_size: int,
    missing_names: Sequence[str],
    timeout: float,
) -> str:
    """Return torch's text for a barrier timeout, for those who search logs for it."""
    return (
        f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
        f"(world_size={world_size}, missing_ranks=[{', '.join(missing_names)}], "
        f"timeout={timeout})"
    )
