"""Tests of local.facts.LastCall."""

from typing import Any

import torch.distributed as dist

import tracedstore
from tracedstore.local.facts import LastCall
from tracedstore.recording.recorder import RECORDER

OPERATION: Any = None  # it is not read


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class TestLastCall:
    """The seconds since the last Store call."""

    def test_without_call(self) -> None:
        """A process that made no call has no last one."""
        assert LastCall(RECORDER, Time()).idle_seconds() is None

    def test_observed(self) -> None:
        """An observed call is exact, also in the first sample."""
        time = Time()
        last = LastCall(RECORDER, time)
        tracedstore.wrap(dist.HashStore()).set("k", "v")
        last.observe(OPERATION)
        time.now += 612

        assert last.idle_seconds() == 612
        time.now += 8
        assert last.idle_seconds() == 620

    def test_first_sample_without_observation(self) -> None:
        """Calls before the first sample ended at an unknown time."""
        time = Time()
        last = LastCall(RECORDER, time)
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        assert last.idle_seconds() is None
        time.now += 5
        assert last.idle_seconds() == 5

    def test_sampled(self) -> None:
        """Without an observation the time of the sample counts, a lower bound."""
        time = Time()
        last = LastCall(RECORDER, time)
        store = tracedstore.wrap(dist.HashStore())
        store.set("k", "v")
        last.observe(OPERATION)
        last.sample()
        time.now += 10
        store.set("k", "v")
        time.now += 1
        last.sample()
        time.now += 30

        assert last.idle_seconds() == 30

    def test_reset(self) -> None:
        """A forked child starts without a call."""
        last = LastCall(RECORDER, Time())
        tracedstore.wrap(dist.HashStore()).set("k", "v")
        last.observe(OPERATION)
        RECORDER.reset()
        last.reset()

        assert last.idle_seconds() is None
