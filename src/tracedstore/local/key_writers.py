"""The key families that this process wrote, learned from the calls that it observes."""

from typing import Final

from tracedstore import names
from tracedstore.common import keys
from tracedstore.common.identity import process_identity
from tracedstore.local.facts import WrittenFamily
from tracedstore.recording.operation import Operation

_WRITES: Final = frozenset(
    ("set", "add", "append", "compare_set", "multi_set", "queue_push")
)
# Keys of this package are no keys of the job.
_OWN_KEYS: Final = "tracedstore/"


class _Learned:
    """What is learned about one family.

    Attributes:
        last_key: The key of the last write.
        writes: The number of writes.
        numbers: The number at each variable part; None for one that changes.
    """

    __slots__ = ("last_key", "numbers", "writes")

    def __init__(self, key: str, numbers: list[int | None]) -> None:
        self.last_key = key
        self.writes = 1
        self.numbers = numbers

    def add(self, key: str, numbers: list[int | None]) -> None:
        self.last_key = key
        self.writes += 1
        for position, number in enumerate(numbers):
            if self.numbers[position] != number:
                self.numbers[position] = None


class KeyWriters:
    """Observes writes, and remembers the first 64 families of their keys.

    An ordinary write is observed only within the span budget; without a tracer provider
    that is one call in 50 ms. A write right after another call may be missed, so
    absence proves nothing.
    """

    name = names.DIAGNOSIS

    def __init__(self, limit: int = keys.MAX_FAMILIES) -> None:
        self._limit = limit
        self._families: dict[str, _Learned] = {}

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._families = {}

    def observe(self, operation: Operation) -> None:
        """Learn from one call."""
        if operation.method.name not in _WRITES or operation.error is not None:
            return
        if operation.method.swapped is not None and not operation.swapped:
            return  # a compare-and-set that wrote nothing
        for key in operation.keys:
            if _OWN_KEYS not in key:
                self._learn(key)

    def _learn(self, key: str) -> None:
        family, numbers = keys.fold_numbers(key)
        learned = self._families.get(family)
        if learned is not None:
            learned.add(key, numbers)
        # Two threads may both pass this test: one family too many does no harm.
        elif len(self._families) < self._limit:
            self._families[family] = _Learned(key, numbers)

    def wrote(self, family: str) -> WrittenFamily | None:
        """Return what this process wrote to a family; None if nothing is known."""
        learned = self._families.get(family)
        if learned is None:
            return None
        rank = process_identity().rank
        return WrittenFamily(
            family=family,
            last_key=learned.last_key,
            writes=learned.writes,
            rank_positions=tuple(
                position
                for position, number in enumerate(learned.numbers)
                if number is not None and number == rank
            ),
        )


# One a process, like the recorder whose calls it observes.
KEY_WRITERS: Final = KeyWriters()
