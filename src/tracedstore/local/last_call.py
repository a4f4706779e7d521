"""When the last Store call of this process ended, at no cost for a call."""

import time
from collections.abc import Callable
from typing import Final

from tracedstore import names
from tracedstore.recording.counters import BUCKETS
from tracedstore.recording.operation import Operation
from tracedstore.recording.recorder import RECORDER, Recorder


class LastCall:
    """Estimates when the last Store call ended.

    There are two sources. As an observer it gets the calls within the span budget: with
    ``spans=budget`` the last of them ended at most 50 ms before the last call of all
    (``1 / span_rate``; without a tracer provider the interval at which spans check for
    one). Without that budget, `sample` compares the number of ended calls with that of
    the sample before. The result is then a lower bound, and low by at most the time
    between two samples.
    """

    name = names.DIAGNOSIS

    def __init__(
        self, recorder: Recorder, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder = recorder
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._observed: float | None = None
        self._count = 0
        self._sampled: float | None = None
        # Of the last sample with more calls than the one before, and of that one.
        self._changed: float | None = None
        self._before: float | None = None

    def observe(self, _operation: Operation) -> None:
        """Note the end of a call within the span budget."""
        self._observed = self._monotonic()

    def sample(self) -> None:
        """Compare the number of ended calls with that of the last sample."""
        now = self._monotonic()
        count = sum(
            sum(counts[BUCKETS:]) for counts in self._recorder.counters.sums().values()
        )
        if count != self._count:
            self._changed, self._before = now, self._sampled
            self._count = count
        self._sampled = now

    def idle_seconds(self) -> float | None:
        """Return the seconds since the last call ended.

        None if there was no call, or if this is the first sample and no call was
        observed.
        """
        self.sample()
        if not self._count or self._changed is None:
            return None
        now = self._monotonic()
        observed, before = self._observed, self._before
        if observed is not None and (before is None or observed > before):
            return now - observed
        # Calls before the first sample may have ended at any time.
        if before is None and self._changed == self._sampled:
            return None
        return now - self._changed


# One a process, like the recorder that it reads.
LAST_CALL: Final = LastCall(RECORDER)
