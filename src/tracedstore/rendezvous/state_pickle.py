"""Reads the pickle of torch's ``_RendezvousState`` as plain data, in bounded time.

A state of 400,000 opcodes takes less than 0.5 s and 64 MB.
"""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, Final, Self

from tracedstore.common import plain_pickle

# A node takes about 70 bytes and 26 opcodes, so these are about 15,000 nodes.
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_OPCODES: Final = 400_000
# A node has one dict.
_MAX_CONTAINERS: Final = 50_000
_DATETIME_BYTES: Final = 10

_TORCH_MODULE: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_FORM: Final = plain_pickle.Form(
    noun="a pickled state",
    opcodes=plain_pickle.DATA
    | {"NEWOBJ", "REDUCE", "BUILD", "GLOBAL", "STACK_GLOBAL"}
    | {"EMPTY_SET", "ADDITEMS", "SHORT_BINBYTES"},
    max_bytes=MAX_BYTES,
    max_opcodes=MAX_OPCODES,
    max_containers=_MAX_CONTAINERS,
    # The longest text that torch writes is a host name.
    max_text=1024,
    calls=True,
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
    state = plain_pickle.load(data, _FORM, _Names().find_class)
    if type(state) is not StateInstance:
        raise ValueError("not a pickled state")
    return state.attributes


class _Call:
    """A function of the pickle; without a dict, which a pickle could fill."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Names:
    """Knows the names of a state only, and makes plain data of them."""

    def __init__(self) -> None:
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
