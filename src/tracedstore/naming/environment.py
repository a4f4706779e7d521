"""Validated reading of the variables that launchers set.

A variable that is missing, malformed or inconsistent with another one is a
DecoderError: one sentence with the variable, its value and the remedy.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from tracedstore.common.errors import TracedStoreError

# The remedy in every message of a DecoderError.
OWN_DECODER = "pass your own decoder"
_MAX_VALUE_LENGTH = 80
# Stricter than int(), which accepts "+1", "1_000" and the digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,18}")

T = TypeVar("T")


class DecoderError(TracedStoreError):
    """A decoder cannot be created; the message has the reason and the remedy."""


def require(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables that is set and not empty.

    Raises:
        DecoderError: None of them is.
    """
    for name in names:
        if environ.get(name):
            return name
    raise DecoderError(
        f"{' or '.join(names)} is not set; start under its launcher, or {OWN_DECODER}"
    )


def number(environ: Mapping[str, str], name: str, minimum: int = 0) -> int:
    """Read a whole number.

    Raises:
        DecoderError: The variable is missing, not a number, or below the minimum.
    """
    value = environ[require(environ, name)]
    if not _NUMBER.fullmatch(value) or int(value) < minimum:
        raise DecoderError(
            f"{name} is {quoted(value)}, not a whole number of at least {minimum};"
            f" correct it, or {OWN_DECODER}"
        )
    return int(value)


def parse(environ: Mapping[str, str], name: str, parser: Callable[[str], T]) -> T:
    """Parse a variable; the parser's ValueError becomes a DecoderError."""
    try:
        return parser(environ[name])
    except ValueError as error:
        raise DecoderError(
            f"{name} is {quoted(environ[name])}: {error}; correct it, or {OWN_DECODER}"
        ) from None


def require_equal(
    environ: Mapping[str, str], name: str, expected: int, source: str
) -> None:
    """Raise a DecoderError if a variable is set to another number than expected.

    Args:
        environ: The environment.
        name: The variable, which need not be set.
        expected: The number that it should have.
        source: The variable that the expected number is derived from.
    """
    if environ.get(name) and number(environ, name) != expected:
        raise DecoderError(
            f"{name} is {quoted(environ[name])}, but {expected} according to {source},"
            f" so another launcher assigned the ranks; {OWN_DECODER}"
        )


def refuse_if_set(environ: Mapping[str, str], name: str, launcher: str) -> None:
    """Raise a DecoderError if a variable shows that a launcher assigned the ranks.

    Args:
        environ: The environment.
        name: A variable that this launcher sets.
        launcher: The launcher, and the decoder to use instead.
    """
    if environ.get(name):
        raise DecoderError(
            f"{name} is {quoted(environ[name])}, so another launcher assigned the"
            f" ranks; use the {launcher} decoder, or {OWN_DECODER}"
        )


def quoted(value: str) -> str:
    """Quote a value for a message, cut to 80 characters."""
    if len(value) > _MAX_VALUE_LENGTH:
        value = value[:_MAX_VALUE_LENGTH] + "…"
    return repr(value)
