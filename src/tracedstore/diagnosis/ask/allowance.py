"""What a process may spend on values that any client of the store can write."""

import time
from collections.abc import Callable
from typing import Final

# Seconds that may be spent at once, by a process that has spent nothing for so long.
_BURST: Final = 16.0
# Seconds after which it reads again, however much it has spent.
_LONGEST_PAUSE: Final = 30.0
# Bytes that are read in one second: in any job, and for each rank of a large one.
_BYTES_PER_SECOND: Final = 64 * 1024
_BYTES_OF_RANK: Final = 16


class Allowance:
    """Seconds of a process for reading and answering, one each second.

    A store has no request for the length of a value, so a long one is known as such
    only when it has been read. Then nothing is read for as long as it would have taken
    at `_BYTES_PER_SECOND`.

    Args:
        world_size: The number of ranks.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._rate = max(_BYTES_PER_SECOND, _BYTES_OF_RANK * world_size)
        # When everything that was spent is earned again.
        self._due = clock()

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be read now."""
        return self._due - self._clock() > _BURST

    def spend(self, seconds: float) -> None:
        """Take off the seconds that something is worth."""
        now = self._clock()
        due = max(self._due, now) + seconds
        self._due = min(due, now + _BURST + _LONGEST_PAUSE)

    def spend_bytes(self, number: int) -> None:
        """Take off what it costs to read so many bytes."""
        self.spend(number / self._rate)
