"""The content of one Store key, put together from its etcd keys."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tracedstore.etcd.answers import KeyValue
from tracedstore.etcd.layout import KeyRange
from tracedstore.etcd.messages import Message, compare

# What C++'s stoll reads, which torch's own stores use; an empty value is 0.
# A longer one has more than 64 bits.
_NUMBER = re.compile(rb"\s*+([+-]?)(?=\d)0*+(\d{0,19}+)(?!\d)")
_INT64 = 2**63


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
