"""Reads weak dictionaries that other threads write to."""

from contextlib import suppress
from typing import TypeVar
from weakref import WeakKeyDictionary

K = TypeVar("K")
V = TypeVar("V")


def items(table: WeakKeyDictionary[K, V]) -> list[tuple[K, V]]:
    """Return the entries that live, as of now.

    Iterating over the table itself runs Python code between two entries, and raises
    RuntimeError if another thread adds one meanwhile.
    """
    found = []
    # One step of C: no other thread runs meanwhile.
    for reference in table.keyrefs():
        key = reference()
        if key is not None:
            with suppress(KeyError):
                found.append((key, table[key]))
    return found
