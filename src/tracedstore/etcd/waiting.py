"""Blocks until etcd keys exist, through restarts, changes of leader and compactions.

A wait reads, and then watches from the revision after the read, so that no change is
lost between the two. When the watch breaks, it reads again.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from math import inf
from typing import TypeVar

from torch.distributed import DistStoreError

from tracedstore.common.keys import shown
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.etcd_errors import EtcdUnreachableError, WatchEnded
from tracedstore.etcd.gateway import Gateway
from tracedstore.etcd.layout import KeyRange
from tracedstore.etcd.messages import KeyValue, Range, events, range_of
from tracedstore.etcd.request_counts import Traffic

T = TypeVar("T")

# A key that exists is returned with a timeout of 0, too.
_FIRST_READ_SECONDS = 0.25
# A member that hangs leaves its watches silent. So a wait reads after this many
# seconds, then after twice as many, up to a maximum.
_READ_AGAIN_SECONDS, _MAX_READ_AGAIN_SECONDS = 5.0, 40.0
# Seconds between two watches that end at once, from the second one on.
_SHORT_WATCH_PAUSE = 0.2


class Deadline:
    """When a blocking call times out, and with which exception."""

    def __init__(self, timeout: timedelta, keys: Sequence[KeyRange]) -> None:
        self._timeout = timeout
        self._keys = keys
        started = time.monotonic()
        self.at = started + timeout.total_seconds()
        self.first_read_at = max(self.at, started + _FIRST_READ_SECONDS)

    def check(self, cause: str = "") -> None:
        """Raise the exception of the call if its time is over."""
        if time.monotonic() < self.at:
            return
        milliseconds = round(self._timeout.total_seconds() * 1000)
        keys = ", ".join(shown(each.name for each in self._keys))
        text = f"Wait timeout after {milliseconds}ms, keys: {keys}"
        raise DistStoreError(f"{text}; {cause}" if cause else text)


def block(
    transport: Gateway,
    traffic: Traffic,
    deadline: Deadline,
    read: Callable[[float], tuple[T | None, Range, int]],
    from_events: Callable[[list[KeyValue]], T] | None = None,
) -> T:
    """Read until there is a result, and watch in between.

    Args:
        transport: The connection to etcd.
        traffic: Counts the watches.
        deadline: When to give up.
        read: Reads within a deadline. Returns the result, or None, the range whose next
            change may bring one, and the revision of the read.
        from_events: Returns the result from the first write to a range that was empty.

    Raises:
        DistStoreError: The deadline has passed.
    """
    pause, until = _READ_AGAIN_SECONDS, deadline.first_read_at
    ended = -inf
    while True:
        try:
            result, keys, revision = read(until)
        except EtcdUnreachableError as error:
            deadline.check(str(error))
            raise
        if result is not None:
            return result
        deadline.check()
        until = deadline.at
        watch_until = min(deadline.at, time.monotonic() + pause)
        try:
            found = _next_puts(transport, keys, revision + 1, watch_until)
            if from_events is not None:
                return from_events(found)
        except TimeoutError as error:
            if raised_by_handler(error):
                raise
            traffic.add_watch_timeout()
            pause = min(2 * pause, _MAX_READ_AGAIN_SECONDS)
            deadline.check()
        except WatchEnded:
            traffic.add_recovery("watch_restart")
            deadline.check()
            now = time.monotonic()
            if now - ended < _SHORT_WATCH_PAUSE:
                time.sleep(max(0.0, min(_SHORT_WATCH_PAUSE, deadline.at - now)))
            ended = time.monotonic()


def _next_puts(
    transport: Gateway, keys: Range, revision: int, until: float
) -> list[KeyValue]:
    """Return the keys of the next write in a range.

    Raises:
        TimeoutError: There was none.
        WatchEnded: The watch broke, or the revision was compacted.
    """
    request = range_of(keys, start_revision=str(revision), filters=["NODELETE"])
    with transport.watch(request, until) as messages:
        for message in messages:
            if message.get("canceled"):
                raise WatchEnded(str(message.get("cancel_reason", "canceled")))
            if found := events(message):
                # One transaction may write several keys of the range.
                first = min(each.modified for _, each in found)
                return [each for _, each in found if each.modified == first]
    raise WatchEnded
