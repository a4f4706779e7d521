"""The keys of one namespace in etcd: where they are, and the requests for them.

Each Store key is one contiguous range of etcd keys.

With ``P = /tracedstore/<namespace>//`` and 00 for a zero byte:

    P key 00             the value
    P key 00 a <unique>  one chunk for each append()
    P key 00 c           the counter: its version is the number of add(key, 1) since the
                         last set()
    P key 00 q <unique>  one entry for each queue_push()

The value is the value plus the counter, then the chunks in the order of their creation.
A key is escaped, so that it has no zero byte: one key's range never includes another's.

A compare-and-set has a definite result after a lost answer, too. Its condition is on
revisions, so it holds at most once, however often the request is sent. After a lost
answer the request is repeated. If it fails then, the first change of the value since
the read shows whether the lost one had been applied.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.common.signal_safety import raised_by_handler
from tracedstore.etcd.etcd_errors import (
    EtcdCompactedError,
    EtcdError,
    EtcdOutcomeUnknownError,
    WatchEnded,
)
from tracedstore.etcd.gateway import (
    INT64,
    MAX_OPERATIONS,
    Gateway,
    KeyValue,
    Message,
    compare,
    count,
    delete,
    events,
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
_MAX_ATTEMPTS = 20
# torch's own stores read the number in a value with C++'s stoll: white space, a sign,
# and as many digits as follow; what comes after them is ignored. The digits are
# bounded, because Python would read a number of any length from a value, and one with
# more than 19 digits has more than 64 bits anyway.
_NUMBER = re.compile(rb"\s*+([+-]?)(?=\d)0*+(\d{0,19}+)(?!\d)")


def prefix_of(namespace: str) -> bytes:
    """Return the prefix of all keys of a namespace.

    Raises:
        ConfigurationError: The namespace is no text that a prefix can have.
    """
    if not namespace or "\0" in namespace:
        raise ConfigurationError(f"the etcd namespace {namespace!r} is no usable text")
    if namespace.strip("/") != namespace or "//" in namespace:
        raise ConfigurationError(
            f"the etcd namespace {namespace!r} has an empty part: it must not start or"
            " end with a slash, or have two in a row"
        )
    # Two slashes: the keys of "a" do not include those of "a/b".
    return f"{names.ETCD_ROOT}{namespace}//".encode("utf-8", "surrogateescape")


def rendezvous_key(namespace: str) -> str:
    """Return the etcd key of a rendezvous' state, which is next to the Store keys."""
    prefix_of(namespace)  # raises for an invalid one
    return f"{names.ETCD_ROOT}{namespace}/rendezvous"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The etcd keys of one Store key.

    Attributes:
        name: The Store key.
        value: The etcd key of the value, and the start of the range.
    """

    name: bytes
    value: bytes

    @property
    def counter(self) -> bytes:
        """The etcd key of the counter."""
        return self.value + b"c"

    @property
    def chunks(self) -> tuple[bytes, bytes]:
        """The range of the chunks."""
        return self.value + b"a", self.value + b"b"

    @property
    def additions(self) -> tuple[bytes, bytes]:
        """The range of all that is added to the value: counter and chunks."""
        return self.value + b"a", self.value + b"q"

    @property
    def content(self) -> tuple[bytes, bytes]:
        """The range of value, counter and chunks."""
        return self.value, self.value + b"q"

    @property
    def queue(self) -> tuple[bytes, bytes]:
        """The range of the queue."""
        return self.value + b"q", self.value + b"r"

    @property
    def everything(self) -> tuple[bytes, bytes]:
        """The whole range."""
        return self.value, self.value[:-1] + b"\1"

    def new_chunk(self) -> bytes:
        """Return an etcd key for a chunk."""
        return self.value + b"a" + os.urandom(12)

    def new_entry(self) -> bytes:
        """Return an etcd key for an entry of the queue."""
        return self.value + b"q" + os.urandom(12)


def key_range(prefix: bytes, key: str | bytes) -> KeyRange:
    """Return the etcd keys of a Store key.

    Raises:
        TypeError: It is no str or bytes.
    """
    name = to_bytes(key, "key")
    escaped = name.replace(b"\1", b"\1\2").replace(b"\0", b"\1\1")
    return KeyRange(name, prefix + escaped + b"\0")


def to_bytes(given: object, what: str) -> bytes:
    """Return a key or a value as bytes.

    Raises:
        TypeError: It is no str or bytes.
    """
    if isinstance(given, str):
        return given.encode("utf-8", "surrogateescape")
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    raise TypeError(f"a {what} must be str or bytes, not {type(given).__name__}")


def split(prefix: bytes, etcd_key: bytes) -> tuple[str, bytes] | None:
    """Return the Store key of an etcd key, and which part of it that is.

    None for an etcd key that no store has written.
    """
    escaped, separator, part = etcd_key[len(prefix) :].partition(b"\0")
    if not separator:
        return None
    name = escaped.replace(b"\1\1", b"\0").replace(b"\1\2", b"\1")
    return name.decode("utf-8", "surrogateescape"), part[:1]


@dataclass(slots=True, kw_only=True)
class Content:
    """The content of a key at one revision.

    Attributes:
        keys: The etcd keys.
        revision: The revision at which it was read.
        value: The value; None if there is none.
        modified: The revision of the value, 0 if there is none.
        counter: The version of the counter, 0 if there is none.
        chunks: What was appended, in order.
    """

    keys: KeyRange
    revision: int
    value: bytes | None = None
    modified: int = 0
    counter: int = 0
    chunks: list[KeyValue] = field(default_factory=list)

    @property
    def exists(self) -> bool:
        """Whether the key exists."""
        return self.value is not None or self.counter > 0 or bool(self.chunks)

    def data(self) -> bytes:
        """Return the value of the Store key."""
        base = self.value or b""
        if self.counter:
            number = number_in(base)
            # A value that is no number: the counter is that of an add() that failed.
            if number is not None:
                base = b"%d" % wrapped(number + self.counter)
        return base + b"".join(chunk.value for chunk in self.chunks)

    def unchanged(self) -> list[Message]:
        """Return the conditions for a write that nothing else may precede."""
        conditions = [
            compare(self.keys.value, "MOD", "EQUAL", self.modified),
            compare(self.keys.counter, "VERSION", "EQUAL", self.counter),
            compare(self.keys.chunks, "CREATE", "LESS", self.revision + 1),
        ]
        if self.chunks:
            # Deleted chunks leave no trace in the condition above.
            last = self.chunks[-1]
            conditions.append(compare(last.key, "CREATE", "EQUAL", last.created))
        return conditions


def content_of(keys: KeyRange, found: Iterable[KeyValue], revision: int) -> Content:
    """Put the content of a key together."""
    content = Content(keys=keys, revision=revision)
    for each in found:
        if each.key == keys.value:
            content.value, content.modified = each.value, each.modified
        elif each.key == keys.counter:
            content.counter = each.version
        else:
            content.chunks.append(each)
    content.chunks.sort(key=lambda chunk: chunk.created)
    return content


def number_in(data: bytes) -> int | None:
    """Return the number that a value starts with, 0 if it is empty.

    None if it starts with no number of 64 bits.
    """
    if not data:
        return 0
    found = _NUMBER.match(data)
    number = INT64 if found is None else int(found[1] + (found[2] or b"0"))
    return number if -INT64 <= number < INT64 else None


def wrapped(number: int) -> int:
    """Return what a signed number of 64 bits holds after an overflow."""
    return (number + INT64) % (2 * INT64) - INT64


class Namespace:
    """Reads and writes the keys of one namespace.

    Attributes:
        prefix: The prefix of its keys in etcd.
        transport: The connection to etcd.
    """

    def __init__(self, name: str, transport: Gateway) -> None:
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


class Swap(Enum):
    """The result of a compare-and-set.

    Attributes:
        WON: It wrote.
        LOST: Another client wrote before it.
        SAME: An answer was lost, and the same value was written: by this client or by
            another one.
    """

    WON = auto()
    LOST = auto()
    SAME = auto()


def swap(
    transport: Gateway, old: Content, new: bytes, deadline: float
) -> tuple[Swap, Content]:
    """Replace the content of a key, unless it has changed.

    Returns:
        The result, and the content that was found if it is not `Swap.WON`.

    Raises:
        EtcdOutcomeUnknownError: The answer was lost, and etcd no longer has the history
            that shows the result.
    """
    request: Message = {
        "compare": old.unchanged(),
        "success": [delete(old.keys.additions), put(old.keys.value, new)],
        "failure": [read(old.keys.content)],
    }
    answer, lost = _send(transport, request, deadline)
    succeeded = bool(answer.get("succeeded"))
    now = old
    if not succeeded:
        (found,) = responses(answer, 1)
        now = content_of(old.keys, key_values(found), revision(answer))
    if lost is None:
        return (Swap.WON if succeeded else Swap.LOST), now
    # An answer was lost, and this one is of a repetition. If that succeeded, the lost
    # request did not reach etcd, or it did and another client has undone it. If it
    # failed, the lost request wrote, or another client did. The first change of the
    # value since the read shows which.
    if not succeeded and now.modified == old.modified != 0:
        # The value is the old one, so nothing wrote it: the counter or the chunks have
        # changed.
        return Swap.LOST, now
    if not succeeded and now.value is None and old.value is None:
        # There may be no change of the value in the history, and a watch for one would
        # wait until the deadline.
        raise lost
    written = _first_change(transport, old, deadline)
    if written is None:
        raise lost
    is_put, change = written
    if succeeded:
        if change.modified != revision(answer):
            # The lost request wrote first, and its write was undone before this one.
            raise lost
        return Swap.WON, now
    same = is_put and change.value == new
    return (Swap.SAME if same else Swap.LOST), now


def _send(
    transport: Gateway, request: Message, deadline: float
) -> tuple[Message, EtcdOutcomeUnknownError | None]:
    """Send a transaction until it is answered; return whether an answer was lost."""
    lost: EtcdOutcomeUnknownError | None = None
    for _ in range(_MAX_ATTEMPTS):
        try:
            answer = transport.call("kv/txn", request, deadline, repeatable=False)
        except EtcdOutcomeUnknownError as error:
            lost = error
        except EtcdError as error:
            # Whatever fails now, an earlier one may have been applied.
            raise lost or error from error.__cause__
        else:
            return answer, lost
    raise lost or EtcdOutcomeUnknownError


def _first_change(
    transport: Gateway, old: Content, deadline: float
) -> tuple[bool, KeyValue] | None:
    """Return the first change of a value since it was read; None if it is forgotten."""
    request = range_of(old.keys.value, start_revision=str(old.revision + 1))
    for _ in range(_MAX_ATTEMPTS):
        try:
            with transport.watch(request, deadline) as messages:
                for message in messages:
                    if message.get("canceled"):
                        return None
                    if found := events(message):
                        return found[0]
        except WatchEnded:
            continue
        except (TimeoutError, EtcdError) as error:
            if raised_by_handler(error):
                raise
            return None
    return None
