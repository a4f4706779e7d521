"""The messages of etcd's API: builds requests, and reads answers.

In JSON, bytes are base64, 64-bit numbers are text, and false, 0 and empty fields are
left out. A server may send anything, so each answer is checked before it is read.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tracedstore.etcd.etcd_errors import EtcdError

Message = dict[str, Any]
Range = tuple[bytes, bytes]

# etcd accepts this many operations in a transaction (--max-txn-ops).
MAX_OPERATIONS = 128
# Values in one answer. Python takes up to fifty times the memory of a short value.
_MAX_VALUES = 4_000_000
_INT64 = 2**63
_MAX_TOKEN = 16_384


def text(data: bytes) -> str:
    """Return bytes as JSON has them."""
    return b64encode(data).decode("ascii")


def range_of(keys: Range | bytes, **options: Any) -> Message:
    """Return the message that reads a range, or one key."""
    if isinstance(keys, bytes):
        return {"key": text(keys), **options}
    return {"key": text(keys[0]), "range_end": text(keys[1]), **options}


def read(keys: Range | bytes, **options: Any) -> Message:
    """Return the operation of a transaction that reads."""
    return {"request_range": range_of(keys, **options)}


def put(key: bytes, value: bytes) -> Message:
    """Return the operation of a transaction that writes a key."""
    return {"request_put": {"key": text(key), "value": text(value)}}


def delete(keys: Range | bytes) -> Message:
    """Return the operation of a transaction that deletes."""
    return {"request_delete_range": range_of(keys)}


def compare(keys: Range | bytes, target: str, result: str, number: int) -> Message:
    """Return a condition on the revision or version of a key, or of all in a range.

    Args:
        keys: The key or range; a key that does not exist has the number 0.
        target: ``MOD``, ``CREATE`` or ``VERSION``.
        result: ``EQUAL`` or ``LESS``.
        number: What it is compared with.
    """
    fields = {
        "MOD": "mod_revision",
        "CREATE": "create_revision",
        "VERSION": "version",
    }
    return range_of(keys, target=target, result=result, **{fields[target]: str(number)})


def load(data: bytes) -> Message:
    """Parse an answer.

    Raises:
        ValueError: It is no JSON object, or one that no etcd sends.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise ValueError("too many values")
    try:
        answer = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _object(answer)


def check(answer: Message) -> None:
    """Check the types of all fields that this package reads.

    Raises:
        ValueError: One has another type.
    """
    try:
        _check(answer)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _check(answer: Any) -> None:
    for name, value in _object(answer).items():
        if checked := _FIELDS.get(name):
            checked(value)


def _object(value: Any) -> Message:
    if type(value) is not dict:
        raise ValueError("not an object")
    return value


def _objects(value: Any) -> None:
    if type(value) is not list:
        raise ValueError("not a list")
    for each in value:
        _check(each)


def _bytes(value: Any) -> None:
    if type(value) is not str:
        raise ValueError("not base64")
    b64decode(value, validate=True)


def _number(value: Any) -> None:
    if not isinstance(value, str | int) or not -_INT64 <= int(value) < _INT64:
        raise ValueError("not a number of 64 bits")


def _flag(value: Any) -> None:
    if type(value) is not bool:
        raise ValueError("neither true nor false")


def _token(value: Any) -> None:
    # It becomes a header of later requests.
    text = value if isinstance(value, str) else "\n"
    if len(text) > _MAX_TOKEN or not (text.isascii() and text.isprintable()):
        raise ValueError("not a token")


_FIELDS: dict[str, Callable[[Any], None]] = {
    **dict.fromkeys(("header", "kv", "response_range", "result"), _check),
    **dict.fromkeys(("kvs", "events", "responses"), _objects),
    **dict.fromkeys(("key", "value"), _bytes),
    **dict.fromkeys(("revision", "create_revision", "mod_revision"), _number),
    **dict.fromkeys(("version", "count", "deleted", "lease"), _number),
    **dict.fromkeys(("ID", "TTL", "grantedTTL"), _number),
    **dict.fromkeys(("succeeded", "more", "canceled"), _flag),
    "token": _token,
}


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key in etcd."""

    key: bytes
    value: bytes
    created: int
    modified: int
    version: int


def key_values(answer: Message) -> list[KeyValue]:
    """Return the keys of a range."""
    return [_key_value(found) for found in answer.get("kvs", ())]


def events(answer: Message) -> list[tuple[bool, KeyValue]]:
    """Return the changes in a message of a watch: whether it is a put, and the key."""
    return [
        (event.get("type", "PUT") == "PUT", _key_value(event.get("kv", {})))
        for event in answer.get("events", ())
    ]


def responses(answer: Message, expected: int) -> list[Message]:
    """Return the answers to the reads of a transaction, in order.

    Raises:
        EtcdError: It has another number of them.
    """
    kind = "response_range"
    found = [each[kind] for each in answer.get("responses", ()) if kind in each]
    if len(found) != expected:
        raise EtcdError("etcd does not answer all reads of a transaction")
    return found


def revision(answer: Message) -> int:
    """Return the revision of the store at an answer."""
    return int(answer.get("header", {}).get("revision", 0))


def count(answer: Message) -> int:
    """Return the number of keys in a range."""
    return int(answer.get("count", 0))


def _key_value(found: Message) -> KeyValue:
    return KeyValue(
        b64decode(found.get("key", "")),
        b64decode(found.get("value", "")),
        int(found.get("create_revision", 0)),
        int(found.get("mod_revision", 0)),
        int(found.get("version", 0)),
    )
