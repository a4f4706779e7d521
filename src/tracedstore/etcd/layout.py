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
from dataclasses import dataclass

from tracedstore import names
from tracedstore.common.errors import ConfigurationError


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
