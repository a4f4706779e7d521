"""The codec of dataclasses: bounds, defaults, and nothing but ValueError."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given

from support.hostile_json import values
from tracedstore.common import codec
from tracedstore.common.codec import (
    LATER,
    Pid,
    Printable,
    Rank,
    Ranks,
    Seconds,
    Text,
    UpTo,
    Words,
    WorldSize,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A part of a value."""

    rank: Rank
    note: Words = ""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A value with a field of every form."""

    world_size: WorldSize
    pid: Pid
    host: Printable
    text: Text = "t"
    state: Literal["on", "off"] = "on"
    flag: bool = False
    time: Seconds | None = None
    awaits: Ranks = ()
    one: Inner | None = None
    some: Annotated[tuple[Inner, ...], UpTo(2)] = ()
    named: Annotated[Mapping[Words, Annotated[tuple[Words, ...], UpTo(2)]], UpTo(2)]
    more: Annotated[tuple[Words, ...], UpTo(2), LATER] = field(default_factory=tuple)


VALUE = Outer(
    world_size=8,
    pid=7,
    host="node1",
    state="off",
    flag=True,
    time=1.5,
    awaits=(0, 1, 2, 5),
    one=Inner(rank=3, note="a"),
    some=(Inner(rank=1), Inner(rank=2)),
    named={"a": ("x",), "": ()},
)
FIELDS = json.loads(codec.encode(VALUE))


def decoded(**changed: Any) -> Outer | None:
    """Decode the value with other fields."""
    return codec.decode(Outer, json.dumps(FIELDS | changed).encode(), 10_000, 8)


def test_round_trip() -> None:
    """Every field survives; ranks are folded, and what the reader knows is absent."""
    assert decoded() == VALUE
    assert FIELDS["awaits"] == "0-2,5"
    assert FIELDS["some"] == [{"rank": 1, "note": ""}, {"rank": 2, "note": ""}]
    assert "world_size" not in FIELDS


def test_absent_and_unknown_fields() -> None:
    """Only what is None by default, or marked, may be absent; others are ignored."""
    for name in FIELDS:
        rest = {k: v for k, v in FIELDS.items() if k != name} | {"unknown": [[1]]}
        if name in ("time", "one", "more"):
            found = codec.from_fields(Outer, rest, 8)
            assert getattr(found, name) == (() if name == "more" else None)
        else:
            with pytest.raises(ValueError, match=name):
                codec.from_fields(Outer, rest, 8)


INVALID: dict[str, list[Any]] = {
    "pid": [-1, 2**32, True, 1.0, "1", None],
    "host": ["", 3, None, "x" * 1025, ["h"]],
    "text": ["", None, {}],
    "state": ["maybe", None, ["on"], {}],
    "time": [-1, True, "1", 1e12],
    "awaits": [7, None, ["1"], "5-1", "8", "0-999999", "x"],
    "one": [3, [], {}, {"rank": 8, "note": ""}, {"rank": 1}],
    "some": [None, {}, "ab", [None], [{"rank": -1, "note": ""}]],
    "named": [None, [], "a", {"a": "x"}, {"a": [1]}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, one) for name, some in INVALID.items() for one in some]
)
def test_one_invalid_field_refuses_all(name: str, value: Any) -> None:
    """No half of a value is used."""
    assert decoded(**{name: value}) is None


def test_further_items_are_omitted() -> None:
    """They are not even checked."""
    found = decoded(
        some=[*FIELDS["some"], None],
        named={"a": ["x", "y", 3], "b": [], "c": 3},
    )
    assert found is not None
    assert found.some == (Inner(rank=1), Inner(rank=2))
    assert found.named == {"a": ("x", "y"), "b": ()}


def test_control_characters_are_replaced() -> None:
    """In texts that are shown; a text that is only compared stays."""
    found = decoded(host="a\x1bb", text="a\x1bb", more=["\ud800"])
    assert found is not None
    assert (found.host, found.text, found.more) == ("a\ufffdb", "a\x1bb", ("\ufffd",))


@pytest.mark.parametrize(
    "value",
    [b"", b"3", b"null", b"[]", b"{", b"\xff", b"[" * 9_000, b"NaN", b"9" * 5000],
)
def test_other_json(value: bytes) -> None:
    """What is no object is refused."""
    assert codec.decode(Outer, value, 10_000) is None


def test_size_is_checked_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is too large costs nothing."""
    written = codec.encode(VALUE)
    assert codec.decode(Outer, written, len(written), 8) == VALUE
    monkeypatch.setattr(json, "loads", None)
    assert codec.decode(Outer, written, len(written) - 1, 8) is None


@given(values(FIELDS))
def test_hostile_value(value: bytes) -> None:
    """It raises nothing; what is accepted can be written and read again."""
    found = codec.decode(Outer, value, 100_000, 8)
    if found is not None:
        assert codec.decode(Outer, codec.encode(found), 100_000, 8) == found


@pytest.mark.parametrize("hint", [int, str, tuple[int, ...], dict[str, int], Any])
def test_field_without_a_bound(hint: Any) -> None:
    """A class that has one cannot be read, so that none is forgotten."""

    @dataclass(frozen=True)
    class Unbounded:
        value: hint

    with pytest.raises(TypeError, match="no bound"):
        codec.from_fields(Unbounded, {"value": 1})
