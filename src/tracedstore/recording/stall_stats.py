"""The stall that this process has reported, for the gauges."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledJob:
    """A stalled job, as of the last report.

    Attributes:
        cause: Why it is stalled.
        awaited_count: Number of ranks that it waits for, 0 if they are unknown.
        awaited: Host and cause of each of the first 64 of them.
    """

    cause: str
    awaited_count: int
    awaited: Mapping[int, tuple[str, str]]


class StallStats:
    """Keeps the stalls that this process has reported and that last."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all stalls, as a forked child must."""
        self._lock = threading.RLock()
        self._stalls: dict[object, StalledJob] = {}

    def begin(self, key: object, stalled: StalledJob) -> None:
        """Keep a stall, or replace it, under a key of the caller's."""
        with self._lock:
            self._stalls[key] = stalled

    def end(self, key: object) -> bool:
        """Forget a stall; return whether there was one."""
        with self._lock:
            return self._stalls.pop(key, None) is not None

    def current(self) -> StalledJob | None:
        """Return the latest stall that lasts, None if there is none."""
        with self._lock:
            return next(reversed(self._stalls.values()), None)
