"""Every limit of the pickle reader, each with a pickle that only it refuses."""

import pytest

from tracedstore.rendezvous import state_pickle
from tracedstore.rendezvous.state import parse_state
from tracedstore.rendezvous.state_pickle import MAX_BYTES, MAX_OPCODES, read_state

PROTO = b"\x80\x04"
MODULE = b"ctorch.distributed.elastic.rendezvous.dynamic_rendezvous\n"
STATE = MODULE + b"_RendezvousState\n)\x81"
NODE = MODULE + b"_NodeDesc\n)\x81"
SET = b"cbuiltins\nset\n"
DATETIME = b"cdatetime\ndatetime\n"
TIMEDELTA = b"cdatetime\ntimedelta\n"
TIMEZONE = b"cdatetime\ntimezone\n"
ZERO = TIMEDELTA + b"K\x00K\x00K\x00\x87R"
UTC = TIMEZONE + ZERO + b"\x85R"
PACKED = b"C\x0a\x07\xea\x0b\x10\x0f\x11\x02\x0f\x0c\x86"


def state_of(value: bytes, before: bytes = PROTO) -> bytes:
    """Return the pickle of a state with one attribute."""
    return before + STATE + b"}\x8c\x01a" + value + b"sb."


@pytest.mark.parametrize(
    "value",
    [
        b"K\x07",
        b"\x8a\x08" + b"\x7f" * 8,
        b"X\x00\x04\x00\x00" + b"x" * 1024,
        NODE,
        SET + b"](" + NODE + b"e\x85R",
        b"\x8f(" + NODE + b"\x90",
        b"}\x8c\x01kK\x01s",
        b"}(" + NODE + b"K\x01u",
        DATETIME + PACKED + UTC + b"\x86R",
    ],
)
def test_parsed(value: bytes) -> None:
    """Each kind of attribute is read; the refused ones below differ in one point."""
    assert list(read_state(state_of(value))) == ["a"]


@pytest.mark.parametrize(
    "value",
    [b"}K\x01K\x01s", b"}(K\x01K\x01u", b"\x8f(K\x01\x90", MODULE + b"_NodeDesc\n)R"],
    ids=["an integer as a key", "integers as keys", "a set of integers", "a call"],
)
def test_plain_data(value: bytes) -> None:
    """What torch does not write and does no harm is read, and is no state."""
    assert list(read_state(state_of(value))) == ["a"]
    assert parse_state(state_of(value)) is None


REFUSED = {
    "another class": b"cos\nsystem\n",
    "a class of another name": b"\x8c\x02os\x8c\x06system\x93",
    "a class whose name is no text": b"K\x01K\x01\x93",
    "a long integer": b"\x8a\x09" + b"\x7f" * 9,
    "a long text": b"X\x01\x04\x00\x00" + b"x" * 1025,
    "nested tuples": b")\x85",
    "a tuple as a key": b"})K\x01s",
    "an odd number of items": b"}(\x8c\x01ku",
    "an item of a list": b"]\x8c\x01kNs",
    "an element of a dict": b"}Na",
    "a set of integers from a list": SET + b"](K\x01e\x85R",
    "a set of a dict": SET + b"}\x85R",
    "arguments of a new object": MODULE + b"_NodeDesc\n(K\x01\x85\x81",
    "a new datetime": DATETIME + b")\x81",
    "attributes of a list": b"]}b",
    "attributes that are a list": NODE + b"]b",
    "a call of a text": b"\x8c\x01f)R",
    "arguments that are a list": SET + b"]R",
    "a short datetime": DATETIME + b"C\x09" + PACKED[2:11] + UTC + b"\x86R",
    "a datetime of a text": DATETIME + b"\x8c\x0a" + b"\x01" * 10 + UTC + b"\x86R",
    "a datetime without a zone": DATETIME + PACKED + b"N\x86R",
    "a 13th month": DATETIME + b"C\x0a\x07\xea\x0d" + bytes(7) + UTC + b"\x86R",
    "a time zone of an integer": TIMEZONE + b"K\x00\x85R",
    "a timedelta of None": TIMEDELTA + b"NNN\x87R",
    "a timedelta of a text": TIMEDELTA + b"\x8c\x01a" * 3 + b"\x87R",
    "a timedelta of True": TIMEDELTA + b"\x88K\x00K\x00\x87R",
    "a huge timedelta": TIMEDELTA + b"J\xff\xff\xff\x7fK\x00K\x00\x87R",
    "a gap in the memo": b"Nq\x07",
    "an absent memo entry": b"h\x07",
    "an unknown opcode": b"\xff",
    "an opcode that torch does not use": b"N2",
    "attributes of a function": DATETIME + b"}\x8c\x01kNsb",
    "an item of a class": MODULE + b"_NodeDesc\nNNs",
    "a tuple from the memo as a key": b"}" + ZERO[:-1] + b"\x94Rh\x00h\x00\x86Ns",
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED)
def test_refused(value: bytes) -> None:
    """Anything that torch does not write raises ValueError."""
    with pytest.raises(ValueError, match=r"."):
        read_state(state_of(value))


@pytest.mark.parametrize(
    "data",
    [
        PROTO + NODE + b".",
        PROTO + b"N.",
        PROTO + b".",
        b"\x80\x01" + STATE + b".",
        PROTO + STATE,
        b"",
        PROTO + b"\x8c\x7fabc",
        state_of(b"N", PROTO + b"N\x87"),
    ],
    ids=["node", "none", "empty", "protocol", "no end", "no bytes", "cut off", "tuple"],
)
def test_not_a_state(data: bytes) -> None:
    """A pickle of something else, or a part of one, raises ValueError."""
    with pytest.raises(ValueError, match=r"."):
        read_state(data)


def test_size() -> None:
    """The limit of bytes holds for a state that is valid otherwise."""
    with pytest.raises(ValueError, match=f"more than {MAX_BYTES} bytes"):
        read_state(state_of(b"N") + bytes(MAX_BYTES))


def test_opcodes() -> None:
    """The limit of opcodes holds for a state that is valid otherwise."""
    with pytest.raises(ValueError, match=f"more than {MAX_OPCODES} opcodes"):
        read_state(state_of(b"N", PROTO + b"N" * MAX_OPCODES))


def test_containers() -> None:
    """The limit of containers holds for a state that is valid otherwise."""
    count = state_pickle._MAX_CONTAINERS
    assert read_state(state_of(b"N", PROTO + b"]" * (count - 1)))

    with pytest.raises(ValueError, match=f"more than {count} containers"):
        read_state(state_of(b"N", PROTO + b"]" * count))


def test_copied_list() -> None:
    """Each copy of a list into a set counts as many opcodes as the list has items."""
    items, copies = 5000, 100
    nodes = NODE + b"\x94" + b"h\x00" * (items - 1)
    lists = b"](" + nodes + b"e\x94"
    data = state_of(b"N", PROTO + lists + (SET + b"h\x01\x85R") * copies)

    with pytest.raises(ValueError, match=f"more than {MAX_OPCODES} opcodes"):
        read_state(data)
