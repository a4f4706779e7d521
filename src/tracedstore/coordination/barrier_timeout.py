"""What a barrier raises when ranks stay away."""

from collections.abc import Sequence
from typing import Any

from torch.distributed import DistStoreError

from tracedstore.core.errors import TracedStoreError


class BarrierTimeout(TracedStoreError, DistStoreError):  # noqa: N818 - torch says Timed out, we say who
    """A barrier timed out; says who was missing.

    It is a ``DistStoreError``, so code that catches torch's catches this, on every
    store. It survives pickling.

    Attributes:
        key_prefix: Which barrier.
        rank: Which rank waited; None where the caller did not say.
        world_size: How many ranks there should have been.
        timeout: How long it was to wait, in seconds.
        waited: How long it did.
        arrived_ranks: Ranks that arrived and are known by name.
        missing_ranks: Ranks that did not arrive.
        missing_names: Their names, in the same order.
        possibly_missing_ranks: Where some arrived without a name: the ranks among
            which both those and the missing ones are. `missing_ranks` is empty then,
            because nobody who arrived is to be called missing.
        unidentified_count: How many arrived without a name.
        duplicate_ranks: Ranks that arrived more than once, on a prefix that was
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
    possibly_missing_ranks: tuple[int, ...]
    unidentified_count: int
    duplicate_ranks: tuple[int, ...]

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self._facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (str(self), self._facts)


def _rebuilt(message: str, facts: dict[str, Any]) -> BarrierTimeout:
    return BarrierTimeout(message, **facts)


def torch_message(
    key_prefix: str,
    rank: int | None,
    world_size: int,
    missing_names: Sequence[str],
    timeout: float,
) -> str:
    """Begin as torch does, for those who search their logs for that."""
    return (
        f"Timed out waiting on barrier on rank {rank}, for key prefix: {key_prefix} "
        f"(world_size={world_size}, missing_ranks=[{', '.join(missing_names)}], "
        f"timeout={timeout})"
    )
