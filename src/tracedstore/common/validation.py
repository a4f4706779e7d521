"""Checks values that were read from a store, which any client can write."""

import json
import math
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

# Characters of a text, such as a host name or a URL.
MAX_TEXT: Final = 1024
# Seconds since the epoch; the year 5138.
MAX_TIME: Final = 1e11
MAX_PORT: Final = 65535
# Beyond every process id.
MAX_PID: Final = 2**32


def load_json(value: bytes, max_bytes: int) -> Any:
    """Parse JSON without NaN and Infinity; raise ValueError for anything else."""
    if len(value) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def integer(value: Any, below: int) -> int:
    """Return a value that is an integer from 0 to below a limit, else ValueError."""
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"not an integer from 0 to {below - 1}")
    return value


def digits(value: bytes, below: int) -> int:
    """Parse the digits of a counter that is lower than a limit, else ValueError."""
    # int() takes the square of the length.
    if len(value) > len(str(below)) or not value.isdigit():
        raise ValueError(f"not a number from 0 to {below - 1}")
    return integer(int(value), below)


def seconds(value: Any) -> float:
    """Return a value that is a time since the epoch, else ValueError."""
    number = value if type(value) in (int, float) else math.nan
    if not 0 <= number < MAX_TIME:
        raise ValueError("not a time")
    return float(number)


def any_text(value: Any) -> str:
    """Return a value that is a text of any length, else ValueError."""
    if type(value) is not str:
        raise ValueError("not a text")
    return value


def text(value: Any) -> str:
    """Return a value that is a text of bounded length, else ValueError."""
    if type(value) is not str or not 0 < len(value) <= MAX_TEXT:
        raise ValueError(f"not a text of 1 to {MAX_TEXT} characters")
    return value


def http_url(value: Any) -> str:
    """Return a value that is the URL of an HTTP server, else ValueError."""
    url = _graphic(value)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in url:
        raise ValueError("not a URL of an HTTP server")
    # urlsplit checks the port when it is read.
    if parts.port == 0:
        raise ValueError("not a port")
    return url


def host_and_port(value: Any) -> str:
    """Return a value that is ``host:port``, else ValueError."""
    address = _graphic(value)
    host, _, port = address.rpartition(":")
    if not host or any(character in host for character in "/@?#"):
        raise ValueError("not a host and a port")
    if not digits(port.encode(), MAX_PORT + 1):
        raise ValueError("not a port")
    return address


def _graphic(value: Any) -> str:
    """Return a value that is an ASCII text without white space, else ValueError."""
    graphic = text(value)
    if not (graphic.isascii() and graphic.isprintable()) or " " in graphic:
        raise ValueError("not ASCII text without white space")
    return graphic
