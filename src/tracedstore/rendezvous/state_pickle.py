"""Reads the pickle of torch's ``_RendezvousState`` as plain data, in bounded time.

``pickle.Unpickler`` is not used, even with a restricted ``find_class``: a few hundred
bytes make it hash nested tuples for years, copy a list a million times or allocate
gigabytes, with the GIL held. The interpreter here knows only the opcodes that pickle
protocols 3 to 5 use for this state. It builds nothing that nests, and hashes only text
and node references. A state of 400,000 opcodes takes less than 0.5 s and 64 MB.
"""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, Final

# A node takes about 70 bytes and 26 opcodes, so these are about 15,000 nodes.
MAX_BYTES: Final = 4 * 1024 * 1024
MAX_OPCODES: Final = 400_000
# An empty set takes 216 bytes. A node has one dict.
_MAX_CONTAINERS: Final = 50_000
# Bytes of a text; the longest one that torch writes is a host name.
_MAX_TEXT: Final = 1024
# Bytes of an integer. Process ids and rounds are far smaller.
_MAX_INTEGER: Final = 8
_PROTOCOLS: Final = range(2, 6)
_DATETIME_BYTES: Final = 10

_TORCH_MODULE: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_GLOBALS: Final = frozenset(
    {
        (_TORCH_MODULE, "_RendezvousState"),
        (_TORCH_MODULE, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
        ("builtins", "set"),
    }
)


class Instance:
    """An instance of ``_RendezvousState`` or ``_NodeDesc``; compared by identity.

    Attributes:
        class_name: The name of its class.
        attributes: Its attributes, empty until they are set.
    """

    __slots__ = ("attributes", "class_name")

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name
        self.attributes: dict[Any, Any] = {}


class _Global:
    """A class that the pickle refers to."""

    __slots__ = ("name",)

    def __init__(self, module: str, name: str) -> None:
        if (module, name) not in _GLOBALS:
            raise ValueError("a class that is not part of a state")
        self.name = name


def read_state(data: bytes) -> dict[Any, Any]:
    """Return the attributes of a pickled ``_RendezvousState``.

    Nodes are `Instance` objects. The types of the attributes are not checked.

    Raises:
        ValueError: The bytes are not such a pickle, or exceed the limits.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    try:
        state = _Interpreter(data).run()
    except (ArithmeticError, LookupError, TypeError) as error:
        raise ValueError("not a pickled state") from error
    if type(state) is not Instance or state.class_name != "_RendezvousState":
        raise ValueError("not a pickled state")
    return state.attributes


class _Interpreter:
    """Executes the opcodes of one pickle.

    Invalid input raises ValueError, ArithmeticError, LookupError or TypeError.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._globals: dict[tuple[str, str], _Global] = {}
        self._containers = 0
        self._budget = MAX_OPCODES

    def run(self) -> Any:
        """Return the object that the pickle describes."""
        data, stack, memo, position = self._data, self._stack, self._memo, 0
        while self._budget > 0:
            self._budget -= 1
            opcode = data[position]
            position += 1
            # Half of a state's opcodes are the first two. A method call for each takes
            # a third of the time.
            if opcode == _MEMOIZE:
                memo.append(stack[-1])
            elif opcode == _GET:
                stack.append(memo[data[position]])
                position += 1
            elif opcode == _STOP:
                return stack.pop()
            else:
                self._position = position
                _OPCODES[opcode](self)
                position = self._position
        raise ValueError(f"more than {MAX_OPCODES} opcodes")

    def _read(self, size: int) -> bytes:
        start = self._position
        self._position = end = start + size
        if end > len(self._data):
            raise ValueError("the pickle is cut off")
        return self._data[start:end]

    def _read_integer(self, size: int) -> int:
        return int.from_bytes(self._read(size), "little")

    def pop(self) -> Any:
        return self._stack.pop()

    def pop_marked(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    # Opcodes that affect only the position and the memo.

    def protocol(self) -> None:
        if self._read_integer(1) not in _PROTOCOLS:
            raise ValueError("an unknown pickle protocol")

    def frame(self) -> None:
        self._read(8)

    def put(self, size: int) -> None:
        # A pickler numbers its memo consecutively.
        if self._read_integer(size) != len(self._memo):
            raise ValueError("a gap in the memo")
        self._memo.append(self._stack[-1])

    def get(self) -> None:
        self._stack.append(self._memo[self._read_integer(4)])

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    # Opcodes that push plain values.

    def constant(self, value: object) -> None:
        self._stack.append(value)

    def unsigned(self, size: int) -> None:
        self._stack.append(self._read_integer(size))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self._read(4), "little", signed=True))

    def long_integer(self) -> None:
        size = self._read_integer(1)
        if size > _MAX_INTEGER:
            raise ValueError(f"an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._read(size), "little", signed=True))

    def text(self, size: int) -> None:
        length = self._read_integer(size)
        if length > _MAX_TEXT:
            raise ValueError(f"a text of {length} bytes")
        self._stack.append(self._read(length).decode())

    def short_bytes(self) -> None:
        self._stack.append(self._read(self._read_integer(1)))

    def tuple_of(self, size: int) -> None:
        stack = self._stack
        if size > len(stack):
            raise ValueError("the stack is empty")
        items = tuple(stack[-size:])
        # Tuples are arguments of constructors only. None of them is a tuple.
        if any(type(item) is tuple for item in items):
            raise ValueError("nested tuples")
        stack[-size:] = [items]

    # Opcodes that make and fill containers.

    def container(self, kind: type[Any]) -> None:
        self._containers += 1
        if self._containers > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} containers")
        self._stack.append(kind())

    def set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values) or not all(type(key) in _KEYS for key in keys):
            raise ValueError("keys that are neither text nor nodes")
        target.update(zip(keys, values, strict=True))

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        if type(key) not in _KEYS:
            raise ValueError("a key that is neither text nor a node")
        self._top(dict)[key] = value

    def append_items(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def add_items(self, items: list[Any]) -> None:
        self._top(set).update(_nodes(items))

    def _top(self, kind: type[Any]) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise ValueError("not the expected container")
        return target

    # Opcodes that make objects.

    def global_lines(self) -> None:
        end = self._data.index(b"\n", self._position, self._position + _MAX_TEXT)
        module = self._read(end + 1 - self._position)
        end = self._data.index(b"\n", self._position, self._position + _MAX_TEXT)
        name = self._read(end + 1 - self._position)
        self._push_global(module[:-1].decode(), name[:-1].decode())

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError("a class whose name is not a text")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        key = module, name
        if key not in self._globals:
            self._globals[key] = _Global(module, name)
        self._stack.append(self._globals[key])

    def new_object(self) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if arguments != () or type(kind) is not _Global or kind.name not in _INSTANCES:
            raise ValueError("not an instance of a state's classes")
        self._stack.append(Instance(kind.name))

    def build(self) -> None:
        attributes, target = self._stack.pop(), self._stack[-1]
        if type(target) is not Instance or type(attributes) is not dict:
            raise ValueError("attributes of another object")
        target.attributes = attributes

    def reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        if type(arguments) is not tuple or type(function) is not _Global:
            raise ValueError("not a constructor call")
        if function.name != "set":
            self._stack.append(_CONSTRUCTORS[function.name](*arguments))
            return
        (items,) = arguments
        if type(items) is not list:
            raise ValueError("a set of something else than a list")
        # The same list may be copied by many opcodes.
        self._budget -= len(items)
        self.container(set)
        self.add_items(items)


def _nodes(items: list[Any]) -> set[Instance]:
    if not all(type(item) is Instance for item in items):
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


_CONSTRUCTORS: Final[dict[str, Callable[..., Any]]] = {
    "datetime": _datetime,
    "timedelta": _timedelta,
    "timezone": _timezone,
}
_INSTANCES: Final = ("_RendezvousState", "_NodeDesc")
_KEYS: Final = frozenset({str, Instance})
_STOP: Final = ord(".")
_MEMOIZE: Final = 0x94
_GET: Final = ord("h")
_Opcode = Callable[[_Interpreter], None]
_OPCODES: Final[dict[int, _Opcode]] = {
    0x80: _Interpreter.protocol,
    0x95: _Interpreter.frame,
    ord("q"): lambda machine: machine.put(1),
    ord("r"): lambda machine: machine.put(4),
    ord("j"): _Interpreter.get,
    ord("("): _Interpreter.mark,
    ord("N"): lambda machine: machine.constant(None),
    0x88: lambda machine: machine.constant(True),
    0x89: lambda machine: machine.constant(False),
    ord(")"): lambda machine: machine.constant(()),
    ord("K"): lambda machine: machine.unsigned(1),
    ord("M"): lambda machine: machine.unsigned(2),
    ord("J"): _Interpreter.signed,
    0x8A: _Interpreter.long_integer,
    0x8C: lambda machine: machine.text(1),
    ord("X"): lambda machine: machine.text(4),
    ord("C"): _Interpreter.short_bytes,
    0x85: lambda machine: machine.tuple_of(1),
    0x86: lambda machine: machine.tuple_of(2),
    0x87: lambda machine: machine.tuple_of(3),
    ord("}"): lambda machine: machine.container(dict),
    ord("]"): lambda machine: machine.container(list),
    0x8F: lambda machine: machine.container(set),
    ord("s"): _Interpreter.set_item,
    ord("u"): lambda machine: machine.set_items(machine.pop_marked()),
    ord("a"): lambda machine: machine.append_items([machine.pop()]),
    ord("e"): lambda machine: machine.append_items(machine.pop_marked()),
    0x90: lambda machine: machine.add_items(machine.pop_marked()),
    ord("c"): _Interpreter.global_lines,
    0x93: _Interpreter.stack_global,
    0x81: _Interpreter.new_object,
    ord("b"): _Interpreter.build,
    ord("R"): _Interpreter.reduce,
}
