"""Reads the pickle of torch's ``_RendezvousState`` as plain data, in bounded time.

``pickle.Unpickler`` with a restricted ``find_class`` calls nothing of others, but is
not safe: a few hundred bytes make it hash nested tuples for years, copy a list a
million times or allocate gigabytes, with the GIL held. So the opcodes are checked
before it sees them: only those that pickle protocols 3 to 5 use for this state, as many
as the largest job needs, and no tuple but as the arguments of a call. The calls refuse
tuples as arguments, so that none nests. A state of 400,000 opcodes takes less than
0.5 s and 64 MB.
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, Final, Self

# A node takes about 70 bytes and 26 opcodes, so these are about 15,000 nodes.
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_OPCODES: Final = 400_000
# An empty set takes 216 bytes. A node has one dict.
_MAX_CONTAINERS: Final = 50_000
# Characters of a text; the longest one that torch writes is a host name.
_MAX_TEXT: Final = 1024
# Process ids and rounds are far smaller.
_MAX_INTEGER: Final = 2**63
_PROTOCOLS: Final = range(2, 6)
_DATETIME_BYTES: Final = 10

_TORCH_MODULE: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_CONTAINERS: Final = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"})
_TUPLES: Final = frozenset({"EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_CALLS: Final = frozenset({"NEWOBJ", "REDUCE"})
_PUTS: Final = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT"})
# A frame may begin before any opcode.
_AFTER_TUPLE: Final = _CALLS | _PUTS | {"FRAME"}
_OPCODES: Final = (
    _CONTAINERS
    | _TUPLES
    | _CALLS
    | _PUTS
    | {"PROTO", "FRAME", "STOP", "MARK", "BINGET", "LONG_BINGET"}
    | {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"}
    | {"SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES"}
    | {"SETITEM", "SETITEMS", "APPEND", "APPENDS", "ADDITEMS", "BUILD"}
    | {"GLOBAL", "STACK_GLOBAL"}
)


class Instance:
    """An instance of ``_RendezvousState`` or ``_NodeDesc``; compared by identity.

    Attributes:
        attributes: Its attributes, empty until they are set.
    """

    __slots__ = ("attributes",)

    attributes: dict[Any, Any]

    # An unpickler does not call __init__.
    def __new__(cls) -> Self:
        """Return an instance without attributes."""
        made = super().__new__(cls)
        made.attributes = {}
        return made

    def __setstate__(self, attributes: object) -> None:
        if type(attributes) is not dict:
            raise ValueError("attributes that are no dict")
        self.attributes = attributes


class StateInstance(Instance):
    """An instance of ``_RendezvousState``."""

    __slots__ = ()


class NodeInstance(Instance):
    """An instance of ``_NodeDesc``."""

    __slots__ = ()


def read_state(data: bytes) -> dict[Any, Any]:
    """Return the attributes of a pickled ``_RendezvousState``.

    Nodes are `NodeInstance` objects. The types of the attributes are not checked.

    Raises:
        ValueError: The bytes are not such a pickle, or exceed the limits.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    _check_opcodes(data)
    try:
        state = _Unpickler(data).load()
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
    ) as error:
        raise ValueError("not a pickled state") from error
    if type(state) is not StateInstance:
        raise ValueError("not a pickled state")
    return state.attributes


def _check_opcodes(data: bytes) -> None:
    """Raise ValueError for a pickle that torch does not write."""
    containers = memoized = 0
    makes_tuple = False
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name not in _OPCODES:
            raise ValueError(f"the opcode {name}")
        if count >= MAX_OPCODES:
            raise ValueError(f"more than {MAX_OPCODES} opcodes")
        if makes_tuple and name not in _AFTER_TUPLE:
            raise ValueError("a tuple that is not the arguments of a call")
        makes_tuple = name in _TUPLES or (makes_tuple and name not in _CALLS)
        if name in _PUTS:
            # A gap would be allocated.
            if argument not in (None, memoized):
                raise ValueError("a gap in the memo")
            memoized += 1
        elif name in _CONTAINERS:
            containers += 1
            if containers > _MAX_CONTAINERS:
                raise ValueError(f"more than {_MAX_CONTAINERS} containers")
        elif argument is not None:
            _check_argument(name, argument)


def _check_argument(name: str, argument: Any) -> None:
    if name == "PROTO" and argument not in _PROTOCOLS:
        raise ValueError("an unknown pickle protocol")
    if type(argument) is int and not -_MAX_INTEGER <= argument < _MAX_INTEGER:
        raise ValueError("an integer of more than 8 bytes")
    if type(argument) is str and len(argument) > _MAX_TEXT:
        raise ValueError(f"a text of {len(argument)} characters")


class _Call:
    """A function of the pickle; without a dict, which a pickle could fill."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Unpickler(pickle.Unpickler):
    """Knows the names of a state only, and makes plain data of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._budget = MAX_OPCODES

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name of the pickle stands for."""
        found: dict[tuple[str, str], Any] = {
            (_TORCH_MODULE, "_RendezvousState"): StateInstance,
            (_TORCH_MODULE, "_NodeDesc"): NodeInstance,
            ("datetime", "datetime"): _DATETIME,
            ("datetime", "timedelta"): _TIMEDELTA,
            ("datetime", "timezone"): _TIMEZONE,
            ("builtins", "set"): _Call(self._set),
        }
        if (module, name) not in found:
            raise ValueError("a class that is not part of a state")
        return found[module, name]

    def _set(self, items: object) -> set[Instance]:
        if type(items) is not list:
            raise ValueError("a set of something else than a list")
        # The same list may be copied by many opcodes. A set takes the memory of eight.
        self._budget -= len(items) + 8
        if self._budget < 0:
            raise ValueError(f"more than {MAX_OPCODES} opcodes")
        if not all(type(item) is NodeInstance for item in items):
            raise ValueError("a set of something else than nodes")
        return set(items)


def _datetime(packed: bytes, zone: timezone) -> datetime:
    if type(packed) is not bytes or len(packed) != _DATETIME_BYTES:
        raise ValueError("not a packed datetime")
    if type(zone) is not timezone:
        raise ValueError("a datetime without a time zone")
    # datetime accepts the packed bytes too, but does not check the day and the time.
    month, day, hour, minute, second = packed[2:7]
    return datetime(
        year=int.from_bytes(packed[:2]),
        month=month,
        day=day,
        hour=hour,
        minute=minute,
        second=second,
        microsecond=int.from_bytes(packed[7:]),
        tzinfo=zone,
    )


def _timedelta(days: int, seconds: int, microseconds: int) -> timedelta:
    if not all(type(part) is int for part in (days, seconds, microseconds)):
        raise ValueError("not a timedelta")
    return timedelta(days, seconds, microseconds)


def _timezone(offset: timedelta) -> timezone:
    if type(offset) is not timedelta:
        raise ValueError("not a time zone")
    return timezone(offset)


_DATETIME: Final = _Call(_datetime)
_TIMEDELTA: Final = _Call(_timedelta)
_TIMEZONE: Final = _Call(_timezone)
