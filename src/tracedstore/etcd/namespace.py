"""The requests for the keys of one namespace."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from tracedstore.etcd.etcd_errors import (
    EtcdCompactedError,
    EtcdError,
    EtcdOutcomeUnknownError,
)
from tracedstore.etcd.gateway import Gateway
from tracedstore.etcd.layout import (
    Content,
    KeyRange,
    content_of,
    key_range,
    number_in,
    prefix_of,
    wrapped,
)
from tracedstore.etcd.messages import (
    MAX_OPERATIONS,
    Message,
    compare,
    count,
    delete,
    key_values,
    put,
    range_of,
    read,
    responses,
    revision,
    text,
)

T = TypeVar("T")

# Seconds for a call that does not block, with all its attempts.
_CALL_SECONDS = 30.0
# Keys in one answer of a listing.
_PAGE = 5_000


class Namespace:
    """Reads and writes the keys of one namespace.

    Attributes:
        name: The name of the namespace.
        prefix: The prefix of its keys in etcd.
        transport: The connection to etcd.
    """

    def __init__(self, name: str, transport: Gateway) -> None:
        self.name = name
        self.prefix = prefix_of(name)
        self.transport = transport

    def range(self, key: str | bytes) -> KeyRange:
        """Return the etcd keys of a Store key."""
        return key_range(self.prefix, key)

    def ranges(self, keys: Iterable[str | bytes]) -> list[KeyRange]:
        """Return the etcd keys of several Store keys.

        Raises:
            TypeError: It is one key instead of several.
        """
        if isinstance(keys, (str, bytes)):
            raise TypeError("keys must be a list of keys, not one key")
        return [self.range(key) for key in keys]

    def read(self, keys: KeyRange, deadline: float) -> Content:
        """Read the content of a key."""
        answer = self._read(range_of(keys.content), deadline)
        return content_of(keys, key_values(answer), revision(answer))

    def read_all(self, keys: Sequence[KeyRange], deadline: float) -> list[Content]:
        """Read the content of several keys; one revision for 128 of them."""
        found: list[Content] = []
        for batch in _batches(keys):
            answer = self._read_many([read(each.content) for each in batch], deadline)
            found += [
                content_of(each, key_values(response), revision(answer))
                for each, response in _pairs(batch, answer)
            ]
        return found

    def missing(
        self, keys: Sequence[KeyRange], deadline: float
    ) -> tuple[list[KeyRange], int]:
        """Return the keys that do not exist, and a revision at which they did not.

        A key with a queue only exists as well, as in torch's stores.
        """
        missing: list[KeyRange] = []
        at = 0
        for batch in _batches(keys):
            operations = [read(each.everything, count_only=True) for each in batch]
            answer = self._read_many(operations, deadline)
            # The first batch has the oldest revision. A watch from there misses none.
            at = at or revision(answer)
            missing += [
                each for each, response in _pairs(batch, answer) if not count(response)
            ]
        return missing, at

    def scan(self) -> list[bytes]:
        """Return all etcd keys of the namespace at one revision."""
        # It begins again if that revision is compacted meanwhile.
        deadline = deadline_of_call()
        while True:
            with suppress(EtcdCompactedError):
                return self._scan(deadline)

    def _scan(self, deadline: float) -> list[bytes]:
        start, end = self.prefix, self.prefix[:-1] + b"0"  # the character after /
        keys: list[bytes] = []
        options: dict[str, str] = {}
        while True:
            request = range_of((start, end), keys_only=True, limit=_PAGE, **options)
            answer = self._read(request, deadline)
            options = options or {"revision": str(revision(answer))}
            found = [each.key for each in key_values(answer)]
            keys += found
            if not answer.get("more") or not found or found[-1] < start:
                return keys
            start = found[-1] + b"\0"

    def queue_length(self, keys: KeyRange) -> int:
        """Return the number of entries in a queue."""
        request = range_of(keys.queue, count_only=True)
        return count(self._read(request, deadline_of_call()))

    def put(self, key: bytes, value: bytes) -> None:
        """Write an etcd key that no other client writes."""
        request = {"key": text(key), "value": text(value)}
        self.transport.call("kv/put", request, deadline_of_call(), repeatable=False)

    def set(self, values: Iterable[tuple[KeyRange, bytes]]) -> None:
        """Write the values of keys in one transaction."""
        operations: list[Message] = []
        for keys, value in values:
            operations += [delete(keys.additions), put(keys.value, value)]
        self._transact({"success": operations})

    def delete(self, keys: KeyRange) -> bool:
        """Delete a key; return whether it existed."""
        answer = self.transport.call(
            "kv/deleterange",
            range_of(keys.content),
            deadline_of_call(),
            repeatable=False,
        )
        return int(answer.get("deleted", 0)) > 0

    def count_up(self, keys: KeyRange) -> int | Content:
        """Add 1 to a key without a comparison, so that no other client can get ahead.

        Returns:
            The sum; or the content, unchanged, if it has chunks.

        Raises:
            ValueError: The value is no number.
        """
        answer = self._transact(
            {
                "compare": [compare(keys.chunks, "CREATE", "EQUAL", 0)],
                "success": [
                    put(keys.counter, b""),
                    read(keys.value),
                    read(keys.counter, keys_only=True),
                ],
                "failure": [read(keys.content)],
            }
        )
        succeeded = answer.get("succeeded", False)
        read_back = responses(answer, 2 if succeeded else 1)
        found = [key for each in read_back for key in key_values(each)]
        content = content_of(keys, found, revision(answer))
        if not succeeded:
            return content
        number = number_in(content.value or b"")
        if number is None:
            self._transact(
                {
                    "compare": [compare(keys.value, "MOD", "EQUAL", content.modified)],
                    "success": [delete(keys.counter)],
                }
            )
            raise ValueError("add() on a key whose value is no number")
        return wrapped(number + content.counter)

    def pop(self, keys: KeyRange, deadline: float) -> tuple[bytes | None, int]:
        """Remove the oldest entry of a queue.

        Returns:
            Its value, None if the queue is empty, and the revision of that.
        """
        oldest = range_of(
            keys.queue, limit=1, sort_target="CREATE", sort_order="ASCEND"
        )
        answer = self._read(oldest, deadline)
        entries, at = key_values(answer), revision(answer)
        # A pop that has found an entry is not given up at the deadline: it would be
        # unknown who has the entry.
        until = max(deadline, deadline_of_call())
        while entries:
            entry = entries[0]
            request: Message = {
                "compare": [compare(entry.key, "CREATE", "EQUAL", entry.created)],
                "success": [delete(entry.key)],
                "failure": [{"request_range": oldest}],
            }
            try:
                answer = self._transact(request, until)
            except EtcdOutcomeUnknownError as lost:
                # It can succeed once only. If it fails now, the entry is gone: this
                # client has removed it, or another one.
                with suppress(EtcdError):
                    if self._transact(request).get("succeeded"):
                        return entry.value, at
                raise lost from lost.__cause__
            if answer.get("succeeded"):
                return entry.value, at
            (response,) = responses(answer, 1)
            entries, at = key_values(response), revision(answer)
        return None, at

    def _read(self, request: Message, deadline: float) -> Message:
        return self.transport.call("kv/range", request, deadline, repeatable=True)

    def _read_many(self, operations: list[Message], deadline: float) -> Message:
        """Read in one transaction; a single read needs none, which is faster."""
        if len(operations) > 1:
            return self.transport.call(
                "kv/txn", {"success": operations}, deadline, repeatable=True
            )
        answer = self._read(operations[0]["request_range"], deadline)
        return {
            "header": answer.get("header", {}),
            "responses": [{"response_range": answer}],
        }

    def _transact(self, request: Message, deadline: float | None = None) -> Message:
        if deadline is None:
            deadline = deadline_of_call()
        return self.transport.call("kv/txn", request, deadline, repeatable=False)


def deadline_of_call() -> float:
    """Return when a call that does not block gives up."""
    return time.monotonic() + _CALL_SECONDS


def _pairs(
    batch: Sequence[KeyRange], answer: Message
) -> Iterator[tuple[KeyRange, Message]]:
    return zip(batch, responses(answer, len(batch)), strict=True)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), MAX_OPERATIONS):
        yield items[start : start + MAX_OPERATIONS]
