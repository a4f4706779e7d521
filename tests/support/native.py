"""Builds the native base for tests, once for all sessions and workers."""

import fcntl
from functools import cache

from tracedstore.core.errors import CommandError
from tracedstore.native.build import build
from tracedstore.native.load import NativeUnavailable, find, user_directory


@cache
def why_not_built() -> str:
    """Build into the user's cache, unless a build is there; return why not, or ""."""
    directory = user_directory()
    directory.mkdir(parents=True, exist_ok=True)
    # pytest's workers would all compile. The lock ends with its process.
    with (directory / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            find()
        except NativeUnavailable:
            try:
                build(directory, print)
            except CommandError as error:
                return str(error)
    return ""
