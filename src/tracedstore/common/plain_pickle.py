"""Unpickles what others have written as plain data, in bounded time and memory.

``pickle.Unpickler`` with a restricted ``find_class`` calls nothing of others, but is
not safe: a few hundred bytes make it hash nested tuples for years, copy a list a
million times or allocate gigabytes, with the GIL held. So the opcodes are checked
before it sees them: only those that a form needs, as many as its largest instance has,
and no tuple but those of the form.
"""

import io
import pickle
import pickletools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

# Integers of more bits are in no form.
_MAX_INTEGER: Final = 2**63
_PROTOCOLS: Final = range(2, 6)
_CONTAINERS: Final = frozenset({"EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"})
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CALLS: Final = frozenset({"NEWOBJ", "REDUCE"})
_PUTS: Final = frozenset({"MEMOIZE", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"BINGET", "LONG_BINGET"})
_TEXTS: Final = frozenset({"SHORT_BINUNICODE", "BINUNICODE"})
_AFTER_TUPLE: Final = _CALLS | _PUTS
_MAX_TUPLE: Final = max(_TUPLES.values())
# Dicts, lists, texts and numbers, in the pickles of Python and of torch's C++.
DATA: Final = (
    _PUTS
    | _GETS
    | _TEXTS
    | {"PROTO", "STOP", "MARK", "EMPTY_DICT", "EMPTY_LIST"}
    | {"NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"}
    | {"SETITEM", "SETITEMS", "APPEND", "APPENDS"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a pickle may consist of.

    Attributes:
        noun: What it is, for errors.
        opcodes: The opcodes besides those of tuples.
        max_bytes: Its bytes.
        max_opcodes: Its opcodes.
        max_containers: Its dicts, lists and sets. An empty set takes 216 bytes.
        max_text: Characters of one text.
        calls: Tuples are the arguments of calls, and nothing else. The functions that
            are called must refuse tuples, so that none nests. Without calls, tuples
            consist of texts.
    """

    noun: str
    opcodes: frozenset[str]
    max_bytes: int
    max_opcodes: int
    max_containers: int
    max_text: int
    calls: bool = False


def load(
    data: bytes, form: Form, find_class: Callable[[str, str], Any] | None = None
) -> Any:
    """Return what a pickle contains.

    Args:
        data: The pickle.
        form: What it may consist of.
        find_class: Returns what a name in the pickle stands for, as of
            ``pickle.Unpickler``; for forms with names.

    Raises:
        ValueError: The bytes are no such pickle, or exceed the limits.
    """
    if len(data) > form.max_bytes:
        raise ValueError(f"more than {form.max_bytes} bytes")
    _check_opcodes(data, form)
    try:
        return _Unpickler(data, find_class).load()
    except (
        pickle.UnpicklingError,
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        TypeError,
    ) as error:
        raise ValueError(f"not {form.noun}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, data: bytes, find_class: Callable[[str, str], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._find_class = find_class

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name of the pickle stands for."""
        if self._find_class is None:
            raise ValueError("a class in plain data")
        return self._find_class(module, name)


def _check_opcodes(data: bytes, form: Form) -> None:
    """Raise ValueError for a pickle that is not of a form."""
    containers = 0
    tuples = _TuplesOfCalls() if form.calls else _TuplesOfTexts()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if name == "FRAME":
            continue  # it may begin before any other one
        if name not in form.opcodes and name not in _TUPLES:
            raise ValueError(f"the opcode {name}")
        if count >= form.max_opcodes:
            raise ValueError(f"more than {form.max_opcodes} opcodes")
        tuples.add(name, argument)
        if name in _CONTAINERS:
            containers += 1
            if containers > form.max_containers:
                raise ValueError(f"more than {form.max_containers} containers")
        elif argument is not None and name not in _PUTS:
            _check_argument(name, argument, form)


class _Memo:
    """Checks that the memo is filled in order: a gap would be allocated."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, name: str, argument: Any) -> None:
        """Check the next opcode."""
        if name in _PUTS:
            if argument not in (None, self.count):
                raise ValueError("a gap in the memo")
            self.count += 1


class _TuplesOfCalls(_Memo):
    """Checks that a tuple is the arguments of a call."""

    def __init__(self) -> None:
        super().__init__()
        self._is_made = False

    def add(self, name: str, argument: Any) -> None:
        """Check the next opcode."""
        if self._is_made and name not in _AFTER_TUPLE:
            raise ValueError("a tuple that is not the arguments of a call")
        self._is_made = name in _TUPLES or (self._is_made and name not in _CALLS)
        super().add(name, argument)


class _TuplesOfTexts(_Memo):
    """Checks that a tuple consists of the texts right before it."""

    def __init__(self) -> None:
        super().__init__()
        # Whether the last values are texts, and the places in the memo that have one.
        self._texts: deque[bool] = deque([False], maxlen=_MAX_TUPLE)
        self._memoized: set[int] = set()

    def add(self, name: str, argument: Any) -> None:
        """Check the next opcode."""
        length = _TUPLES.get(name)
        if length is not None and not (length and all(list(self._texts)[-length:])):
            raise ValueError("a tuple of something else than texts")
        if name in _PUTS:
            if self._texts[-1]:
                self._memoized.add(self.count)
        else:
            is_known = name in _GETS and argument in self._memoized
            self._texts.append(name in _TEXTS or is_known)
        super().add(name, argument)


def _check_argument(name: str, argument: Any, form: Form) -> None:
    if name == "PROTO" and argument not in _PROTOCOLS:
        raise ValueError("an unknown pickle protocol")
    if type(argument) is int and not -_MAX_INTEGER <= argument < _MAX_INTEGER:
        raise ValueError("an integer of more than 8 bytes")
    if type(argument) is str and len(argument) > form.max_text:
        raise ValueError(f"a text of {len(argument)} characters")
