"""The package's exceptions, and how other exceptions appear in telemetry.

Exceptions of torch and etcd pass through the wrapper unchanged. The package's own:

    TracedStoreError
    ├── ConfigurationError (also a ValueError)
    ├── BarrierTimeout (also a DistStoreError; coordination/barrier.py)
    ├── CommandError
    │   └── UsageError
    ├── EtcdError (also a DistStoreError; etcd/etcd_errors.py)
    ├── StalledJobError
    └── DecoderError (naming/environment.py)
"""

import re
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


class TracedStoreError(Exception):
    """Base of the exceptions that this package raises."""


class ConfigurationError(TracedStoreError, ValueError):
    """A setting has a value that cannot be used; the text names both."""


class StalledJobError(TracedStoreError):
    """This process was ended because its job hangs; the text is the verdict.

    It is in torchelastic's error file. It is not raised in the program, whose main
    thread does not return to Python.
    """


class CommandError(TracedStoreError):
    """A command cannot do what it was asked to.

    The text is one sentence that names the thing, the value and the remedy.

    Attributes:
        exit_code: The exit code of the command.
    """

    exit_code = 1


class UsageError(CommandError):
    """An argument of a command cannot be used."""

    # EX_USAGE of sysexits.h, because argparse's 2 is an exit code of status.
    exit_code = 64


TIMEOUT = "timeout"

# The texts of each store's timeout (torch 2.13): TCPStore "wait timeout after 50ms,
# keys: /k" and "barrier timeout after ...", HashStore and FileStore.wait "Wait
# timeout", FileStore.get "Timeout waiting for key: k after 50 ms", a TCPStore
# that cannot connect "The client socket has timed out after ...". Matched at the
# start only: keys follow, and a key may be any text.
_TIMEOUT_TEXT = re.compile(
    r"(wait|barrier) timeout|timeout waiting for|the client socket has timed out",
    re.IGNORECASE,
)
# queue_pop(key, block=False) on an empty queue raises this. It is counted, but it is
# no failure.
_ORDINARY_ANSWERS = frozenset({"torch.distributed.QueueEmptyError"})

# Texts of these may quote the caller's arguments (pybind's "Invoked with: ...", int()'s
# "invalid literal"), and values are never recorded.
_MAY_QUOTE_VALUES = (TypeError, ValueError, AssertionError)
_MAX_MESSAGE_LENGTH = 256


def error_type(error: BaseException) -> str:
    """Return the ``error_type`` label and ``error.type`` of an exception.

    Every store raises another exception on timeout (DistStoreError, RuntimeError,
    LookupError); all of them are ``timeout``. Anything else is its qualified class
    name.
    """
    if _is_timeout(error):
        return TIMEOUT
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def is_ordinary_answer(error_type: str) -> bool:
    """Return whether an exception of this type is an answer and no failure."""
    return error_type in _ORDINARY_ANSWERS


def error_message(error: BaseException) -> str:
    """Return the first line of an exception's text, "" if it may quote a value."""
    # ConfigurationError quotes settings, but no secret ones.
    ours = isinstance(error, ConfigurationError)
    if isinstance(error, _MAY_QUOTE_VALUES) and not ours:
        return ""
    # str() of an exception runs its class's code.
    try:
        lines = str(error).splitlines()
    except Exception:
        return ""
    return lines[0][:_MAX_MESSAGE_LENGTH] if lines else ""


def error_location(error: BaseException) -> str:
    """Return ``file:line function`` of the innermost frame of this package, or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.lineno} {frame.name}"
    return ""


def _is_timeout(error: BaseException) -> bool:
    if isinstance(error, TimeoutError):
        return True
    # EtcdStore raises a plain LookupError; subclasses have other meanings.
    if type(error) is LookupError:
        return True
    return isinstance(error, RuntimeError) and bool(
        _TIMEOUT_TEXT.match(error_message(error))
    )
