"""Reads a password from a file, where a command line or a log does not show it."""

import os
from pathlib import Path

from tracedstore.common.errors import ConfigurationError

_MAX_BYTES = 4096


def read_password(path: str | os.PathLike[str]) -> str:
    """Return the password in the first line of a file.

    Raises:
        ConfigurationError: The file cannot be read, or has something else.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    except ValueError:
        raise _unusable(path, "it is no text in UTF-8") from None
    if not password or "\n" in password or len(data) > _MAX_BYTES:
        raise _unusable(path, "it must have one line, the password")
    return password


def _unusable(path: str | os.PathLike[str], reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the password file {os.fspath(path)!r} cannot be used: {reason}"
    )
