"""JSON of frozen dataclasses, with a bound for every field.

What is read may have been written by any client of a store, or any process of a host.
So the size is checked before the JSON is parsed, and every field has a type that says
what it may be:

    @dataclass(frozen=True, kw_only=True)
    class Stamp:
        rank: Rank
        host: Printable
        keys: Annotated[tuple[Printable, ...], UpTo(16)] = ()

Every field must be there, except those that are None by default, and those that are
marked `LATER`. Fields with other names are ignored: a later version may have written
them. A type without a bound is a TypeError of the class, whatever the value is. Nothing
else than ValueError is raised for a value.
"""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tracedstore.common import ranges, text, validation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """How the JSON value of a field is checked, and how it is written.

    Attributes:
        decode: Returns the field's value for a JSON value and the number of ranks of
            the job; raises ValueError for what it may not be.
        encode: Returns the JSON value for the field's value.
    """

    decode: Callable[[Any, int], Any]
    encode: Callable[[Any], Any] = lambda value: value


# The number of ranks of the job, which the reader knows: it is not written.
_IMPLIED: Final = Kind(lambda _, ranks: ranks)
WorldSize = Annotated[int, _IMPLIED]


@dataclass(frozen=True, slots=True)
class UpTo:
    """The number of items that are read of a list or an object; others are omitted."""

    count: int


# Marks a field that earlier versions did not write: it may be absent.
LATER: Final = "later"


def below(limit: int) -> Kind:
    """Return the kind of an integer from 0 to below a limit."""
    return Kind(lambda value, _: validation.integer(value, limit))


def one_of(known: Sequence[str]) -> Kind:
    """Return the kind of a text that is one of these."""

    def read(value: Any, _ranks: int) -> str:
        if type(value) is not str or value not in known:
            raise ValueError(f"not one of {', '.join(known)}")
        return value

    return Kind(read)


def printable_text(value: Any) -> str:
    """Return a text without control characters; ValueError if it is no text."""
    return text.printable(validation.text(value))


def words(value: Any) -> str:
    """Return a text without control characters, which may be empty."""
    return printable_text(value) if value != "" else ""


def _ranks(value: Any, ranks: int) -> tuple[int, ...]:
    return ranges.unfold_all_below(validation.any_text(value), ranks)


# A rank of the job.
Rank = Annotated[int, Kind(validation.integer)]
# Ranks of the job, folded into ranges.
Ranks = Annotated[tuple[int, ...], Kind(_ranks, ranges.fold)]
# A number of ranks, of attempts or the like.
Small = Annotated[int, below(ranges.MAX_RANKS)]
Pid = Annotated[int, below(validation.MAX_PID)]
Large = Annotated[int, below(2**63)]
# Seconds since the epoch, or of a duration.
Seconds = Annotated[float, Kind(lambda value, _: validation.seconds(value))]
# 1 to 1024 characters: any, those that a terminal prints, and these or none.
Text = Annotated[str, Kind(lambda value, _: validation.text(value))]
Printable = Annotated[str, Kind(lambda value, _: printable_text(value))]
Words = Annotated[str, Kind(lambda value, _: words(value))]
# As `Words`, but a longer text is cut and not refused: the path of a file, for example.
Cut = Annotated[
    str,
    Kind(lambda value, _: words(validation.any_text(value)[: validation.MAX_TEXT])),
]
# What the reader of the field validates.
Unchecked = Annotated[Any, Kind(lambda value, _: value)]
HttpUrl = Annotated[str, Kind(lambda value, _: validation.http_url(value))]


def decode(
    cls: type[T], value: bytes, max_bytes: int, ranks: int = ranges.MAX_RANKS
) -> T | None:
    """Return the object that a value is; None if it is malformed or too large.

    Args:
        cls: The frozen dataclass.
        value: The JSON text.
        max_bytes: Its maximum length.
        ranks: The number of ranks of the job; higher ranks are not valid.
    """
    try:
        return from_fields(cls, validation.load_json(value, max_bytes), ranks)
    except ValueError:
        return None


def encode(value: Any) -> bytes:
    """Return an object as JSON text."""
    return json.dumps(to_fields(value)).encode()


def from_fields(cls: type[T], values: Any, ranks: int = ranges.MAX_RANKS) -> T:
    """Return the object with these JSON values; ValueError if one is not valid."""
    if type(values) is not dict:
        raise ValueError(f"not the fields of {cls.__name__}")
    found = {}
    for name, kind, required in _kinds_of(cls):
        if kind is _IMPLIED:
            found[name] = ranks
        elif name in values:
            found[name] = kind.decode(values[name], ranks)
        elif required:
            raise ValueError(f"{cls.__name__} without {name}")
    return cls(**found)


def to_fields(value: Any) -> dict[str, Any]:
    """Return an object as JSON values."""
    return {
        name: kind.encode(getattr(value, name))
        for name, kind, _ in _kinds_of(type(value))
        if kind is not _IMPLIED
    }


def _read_kinds(cls: Any) -> tuple[tuple[str, Kind, bool], ...]:
    """Return the fields of a class: name, kind, and whether it must be there."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for one in fields(cls):
        hint = hints[one.name]
        later = LATER in getattr(hint, "__metadata__", ())
        required = one.default is not None and not later
        found.append((one.name, _kind_of(hint), required))
    return tuple(found)


_kinds_of: Callable[[Any], tuple[tuple[str, Kind, bool], ...]] = functools.cache(
    _read_kinds
)


def _kind_of(hint: Any) -> Kind:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bound = hint.__metadata__[0]
        return bound if isinstance(bound, Kind) else _items(arguments[0], bound.count)
    if origin in (Union, UnionType) and NoneType in arguments:
        (known,) = (one for one in arguments if one is not NoneType)
        return _optional(_kind_of(known))
    if origin is Literal:
        return one_of(arguments)
    if hint is bool:
        return Kind(lambda value, _: value is True)
    if is_dataclass(hint):
        nested: Any = hint
        return Kind(lambda value, ranks: from_fields(nested, value, ranks), to_fields)
    raise TypeError(f"{hint} has no bound")


def _optional(kind: Kind) -> Kind:
    return Kind(
        lambda value, ranks: None if value is None else kind.decode(value, ranks),
        lambda value: None if value is None else kind.encode(value),
    )


def _items(hint: Any, count: int) -> Kind:
    """Return the kind of a tuple or a mapping, of which the first items are read."""
    kinds = [_kind_of(one) for one in get_args(hint) if one is not Ellipsis]
    if get_origin(hint) is tuple:
        return _list(kinds[0], count)
    return _object(kinds[0], kinds[1], count)


def _list(kind: Kind, count: int) -> Kind:
    def read(value: Any, ranks: int) -> tuple[Any, ...]:
        if type(value) is not list:
            raise ValueError("not a list")
        return tuple(kind.decode(one, ranks) for one in value[:count])

    def write(value: Iterable[Any]) -> list[Any]:
        return [kind.encode(one) for one in value]

    return Kind(read, write)


def _object(key: Kind, item: Kind, count: int) -> Kind:
    def read(value: Any, ranks: int) -> dict[Any, Any]:
        if type(value) is not dict:
            raise ValueError("not an object")
        return {
            key.decode(name, ranks): item.decode(one, ranks)
            for name, one in islice(value.items(), count)
        }

    def write(value: Mapping[Any, Any]) -> dict[str, Any]:
        return {key.encode(name): item.encode(one) for name, one in value.items()}

    return Kind(read, write)
