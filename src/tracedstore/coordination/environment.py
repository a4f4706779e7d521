"""What the environment tells of ranks and hosts, read with care.

A variable that is missing, malformed or at odds with another one is a DecoderError: one
sentence with the variable, its value and the remedy.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from tracedstore.core.errors import TracedStoreError

OWN = "pass a decoder of your own"
_LONGEST_SHOWN = 80
# Not int()'s grammar, which takes "+1", "1_000" and other scripts' digits.
_NUMBER = re.compile(r"[0-9]{1,18}")

T = TypeVar("T")


class DecoderError(TracedStoreError):
    """A decoder cannot be made here; says from what, and what to do instead."""


def required(environ: Mapping[str, str], *names: str) -> str:
    """Give the first of these variables that is set; an empty one is not."""
    for name in names:
        if environ.get(name):
            return name
    raise DecoderError(
        f"{' or '.join(names)} is not set; start under its launcher, or {OWN}"
    )


def number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    """Read a whole number."""
    value = environ[required(environ, name)]
    if not _NUMBER.fullmatch(value) or int(value) < least:
        raise DecoderError(
            f"{name} is {shown(value)}; accepted is a whole number from {least}, else"
            f" {OWN}"
        )
    return int(value)


def parsed(environ: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T:
    """Read a variable with a grammar of its own."""
    try:
        return parse(environ[name])
    except ValueError as error:
        raise DecoderError(
            f"{name} is {shown(environ[name])}: {error}; correct it, or {OWN}"
        ) from None


def agree(environ: Mapping[str, str], name: str, value: int, source: str) -> None:
    """Refuse where a variable is set and another one tells differently."""
    if environ.get(name) and number(environ, name) != value:
        raise DecoderError(
            f"{name} is {shown(environ[name])}, but {source} tells {value}, so ranks"
            f" were given by another launcher; {OWN}"
        )


def refuse_ranks_of(environ: Mapping[str, str], sign: str, launcher: str) -> None:
    """Refuse where a launcher further in has numbered the ranks."""
    if environ.get(sign):
        raise DecoderError(
            f"{sign} is {shown(environ[sign])}, so ranks were given by another"
            f" launcher; use the {launcher} decoder, or {OWN}"
        )


def shown(value: str) -> str:
    """Quote a value in a message, and not all of a long one."""
    return repr(value if len(value) <= _LONGEST_SHOWN else value[:_LONGEST_SHOWN] + "…")
