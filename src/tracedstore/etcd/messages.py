"""Builds the messages of etcd's API. `answers` reads those of the server."""

from base64 import b64encode
from typing import Any

Message = dict[str, Any]
Range = tuple[bytes, bytes]

# etcd accepts this many operations in a transaction (--max-txn-ops).
MAX_OPERATIONS = 128


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
