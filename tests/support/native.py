"""Builds the native base for tests, once for all sessions and workers."""

import fcntl

from tracedstore.native.build import build
from tracedstore.native.load import NativeUnavailable, find, user_directory


def build_once() -> None:
    """Build into the user's cache, unless a build that matches is there."""
    directory = user_directory()
    directory.mkdir(parents=True, exist_ok=True)
    # pytest's workers would all compile. The lock ends with its process.
    with (directory / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            find()
        except NativeUnavailable:
            build(directory, print)
