"""The package's own exceptions, and what a foreign one is called in telemetry.

Exceptions of torch and etcd pass through the wrapper untouched. Our own:

    TracedStoreError
    ├── ConfigurationError (also a ValueError)
    ├── BarrierTimeout (also a DistStoreError; coordination/barrier_timeout.py)
    ├── CommandError
    └── DecoderError (coordination/environment.py)
"""

import re


class TracedStoreError(Exception):
    """Base of every exception this package raises by itself."""


class ConfigurationError(TracedStoreError, ValueError):
    """A setting has a value that cannot be used; says which, and what can."""


class CommandError(TracedStoreError):
    """A command cannot do what it was asked to.

    The text is one sentence that names the thing, the value and the remedy.
    """


TIMEOUT = "timeout"

# How each store words a timeout (torch 2.13): TCPStore "wait timeout after 50ms,
# keys: /k" and "barrier timeout after ...", HashStore and FileStore.wait "Wait
# timeout", FileStore.get "Timeout waiting for key: k after 50 ms", a TCPStore
# that cannot connect "The client socket has timed out after ...". Anchored to
# the start, because keys stand further back and may be called anything.
_TIMEOUT_TEXT = re.compile(
    r"(wait|barrier) timeout|timeout waiting for|the client socket has timed out",
    re.IGNORECASE,
)
# "queue is empty" is the ordinary answer to queue_pop(key, block=False), which
# torch words as an exception. It is counted, but it is no incident.
_ORDINARY_ANSWERS = frozenset({"torch.distributed.QueueEmptyError"})

# Texts of these may carry what the caller passed in (pybind's "Invoked with:
# ...", int()'s "invalid literal"), and values are never recorded.
_MAY_QUOTE_VALUES = (TypeError, ValueError, AssertionError)
_LONGEST_MESSAGE = 256


def error_type(error: BaseException) -> str:
    """Name an exception for the ``error_type`` label and ``error.type``.

    Every store words its timeout differently (DistStoreError, RuntimeError,
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
    """Tell whether an exception of this type is an answer rather than a failure."""
    return error_type in _ORDINARY_ANSWERS


def error_message(error: BaseException) -> str:
    """Give the first line of an exception's text, if it cannot hold a value."""
    # Ours quotes settings, but no secret ones.
    ours = isinstance(error, ConfigurationError)
    if isinstance(error, _MAY_QUOTE_VALUES) and not ours:
        return ""
    # str() of a foreign exception is foreign code.
    try:
        lines = str(error).splitlines()
    except Exception:
        return ""
    return lines[0][:_LONGEST_MESSAGE] if lines else ""


def _is_timeout(error: BaseException) -> bool:
    if isinstance(error, TimeoutError):
        return True
    # EtcdStore raises a plain LookupError; its subclasses mean something else.
    if type(error) is LookupError:
        return True
    return isinstance(error, RuntimeError) and bool(
        _TIMEOUT_TEXT.match(error_message(error))
    )
