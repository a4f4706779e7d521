"""Which process of a host reports what many of them find.

A claim is a lock on one byte of a file in the private directory of this user, where no
other user can take it. The kernel releases it when the process ends, however it ends.
"""

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable
from typing import Final

from tracedstore.local import socket_directory

_FILE: Final = "claims"
# struct flock: type, whence, start, length and pid.
_LOCK: Final = struct.Struct("@hhqqi4x")
# Bytes of a digest that are an offset. Offsets have 63 bits.
_OFFSET_BYTES: Final = 7
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)


class Claim:
    """A claim of this process, until it is closed or freed, or the process ends.

    Args:
        descriptor: The open file that is locked.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor of the open file; -1 if it is closed."""
        return self._descriptor

    # Bound as a default, because module globals may be None at interpreter shutdown.
    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Give the claim up. A forked child that closes its copy releases nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    __del__ = close


def claim(what: str) -> Claim | None:
    """Claim a report for this process; None if another one of this host has it.

    A process that cannot find out, because there is no private directory or it has no
    locks, has the claim: two reports are better than none. A forked child must close
    its copy.
    """
    try:
        return _lock(what)
    except OSError as error:
        if error.errno in _TAKEN:
            return None
        return Claim(-1)


def _lock(what: str) -> Claim:
    with socket_directory.create() as directory:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        held = Claim(os.open(_FILE, flags, 0o600, dir_fd=directory))
    try:
        # Hosts may share the directory.
        named = f"{socket_directory.namespace_digest()}/{what}"
        digest = hashlib.sha256(named.encode("utf-8", "surrogatepass")).digest()
        offset = int.from_bytes(digest[:_OFFSET_BYTES])
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
        # Of the open file: two claims of one process exclude each other, too.
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, lock)
    except OSError:
        held.close()
        raise
    return held
