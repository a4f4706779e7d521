"""Where a Store key is in etcd: one contiguous range of etcd keys.

With ``P = /tracedstore/<namespace>//`` and 00 for a zero byte:

    P key 00             the value
    P key 00 a <unique>  one chunk for each append()
    P key 00 c           the counter: its version is the number of add(key, 1) since the
                         last set()
    P key 00 q <unique>  one entry for each queue_push()

The value is the value plus the counter, then the chunks in the order of their creation.
A key is escaped, so that it has no zero byte: one key's range never includes another's.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.etcd.messages import KeyValue, Message, compare

# What C++'s stoll reads, which torch's own stores use; an empty value is 0.
# A longer one has more than 64 bits.
_NUMBER = re.compile(rb"\s*+([+-]?)(?=\d)0*+(\d{0,19}+)(?!\d)")
_INT64 = 2**63


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
    """Return the number that a value starts with; None if there is none."""
    if not data:
        return 0
    found = _NUMBER.match(data)
    number = _INT64 if found is None else int(found[1] + (found[2] or b"0"))
    return number if -_INT64 <= number < _INT64 else None


def wrapped(number: int) -> int:
    """Return what a signed number of 64 bits holds after an overflow."""
    return (number + _INT64) % (2 * _INT64) - _INT64
