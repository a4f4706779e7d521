"""What the store needs from a connection to etcd.

`Gateway` is the only implementation. One over gRPC would take the same messages: those
of the JSON API are etcd's own, field by field.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tracedstore.etcd.messages import Message


class WatchEnded(Exception):  # noqa: N818 - an ordinary end, never a caller's exception
    """A watch ended without a definite error: the caller reads, and watches again."""


class Transport(Protocol):
    """Sends requests to an etcd cluster, and repeats them where that is safe."""

    def call(
        self,
        method: str,
        request: Mapping[str, Any],
        deadline: float,
        *,
        repeatable: bool,
    ) -> Message:
        """Make one request.

        Args:
            method: The method, for example ``kv/range``.
            request: The message.
            deadline: When to give up, by ``time.monotonic()``.
            repeatable: A second application of the request does no harm.

        Raises:
            EtcdOutcomeUnknownError: The answer was lost, and it is not repeatable.
            EtcdError: Any other failure.
        """

    def watch(
        self, request: Mapping[str, Any], deadline: float
    ) -> AbstractContextManager[Iterator[Message]]:
        """Open a watch; iterate over its messages.

        Raises:
            TimeoutError: The deadline has passed.
            WatchEnded: The connection or the leader was lost.
            EtcdError: Any other failure.
        """

    def close(self) -> None:
        """End the blocked calls of all threads, and close the connections."""
