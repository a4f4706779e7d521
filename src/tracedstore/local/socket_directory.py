"""The private directory of this user's Unix sockets and claims, on this host.

The directory may be below /tmp, where any user can create it first. So it is used only
if it is a real directory of this user that no other user can enter. Sockets are reached
through a descriptor of the verified directory: what its path refers to later does not
matter, and the path of a socket may be longer than the 107 bytes of an address.
"""

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tracedstore.common import procfs

MAX_SOCKETS: Final = 4096
_PRIVATE: Final = 0o700
_NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})\.sock")


class NoDirectoryError(OSError):
    """There is no directory that this user can trust."""


def candidates() -> list[str]:
    """Return the paths at which the directory may be, the preferred one first."""
    name = f"tracedstore-{os.getuid()}"
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - verified before use
    paths = [os.path.join(base, name) for base in bases if os.path.isabs(base)]  # noqa: PTH117, PTH118 - no Path is needed
    return list(dict.fromkeys(paths))


@contextmanager
def create() -> Iterator[int]:
    """Create the directory unless it exists, and yield a descriptor of it.

    Raises:
        NoDirectoryError: None of the paths can be created or trusted.
    """
    for path in candidates():
        with suppress(OSError):
            os.mkdir(path, _PRIVATE)  # noqa: PTH102 - no Path is needed
        with suppress(OSError):
            descriptor = _open_verified(path)
            break
    else:
        raise NoDirectoryError(
            f"none of {', '.join(candidates())} is a private directory of this user;"
            " remove what is there, or set XDG_RUNTIME_DIR"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def existing() -> Iterator[list[int]]:
    """Yield descriptors of all directories that exist and can be trusted.

    Processes of one job may have different temporary directories.
    """
    descriptors: list[int] = []
    try:
        for path in candidates():
            with suppress(OSError):
                descriptors.append(_open_verified(path))
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _open_verified(path: str) -> int:
    """Open a directory; OSError unless it is this user's and private."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    found = os.fstat(descriptor)
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == _PRIVATE:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is not a private directory of this user")


def address(directory: int, name: str) -> str:
    """Return the address of a socket in an open directory."""
    return f"/proc/self/fd/{directory}/{name}"


def socket_name(pid: int) -> str:
    """Return the name of the socket of a process of this pid namespace.

    Containers may share the directory, and hosts too, where it is on a network file
    system. The name has a digest of the namespace, so that pids are not mixed up.
    """
    return f"{namespace_digest()}-{pid}.sock"


def pids(directory: int) -> list[int]:
    """Return the pids of this namespace that have a socket, at most 4096."""
    digest = namespace_digest()
    found: list[int] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match and match[1] == digest:
                found.append(int(match[2]))
                if len(found) == MAX_SOCKETS:
                    break
    return found


def remove_stale(directory: int) -> None:
    """Remove the sockets of processes that have ended."""
    for pid in pids(directory):
        if procfs.is_absent(pid):
            remove(directory, pid)


def remove(directory: int, pid: int) -> None:
    """Remove the socket of a process, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(socket_name(pid), dir_fd=directory)


def namespace_digest() -> str:
    """Return a text that identifies the pid namespace of this process.

    Raises:
        NoDirectoryError: It cannot be known.
    """
    namespace = procfs.own_namespace()
    if namespace is None:
        raise NoDirectoryError("/proc does not show the processes of this namespace")
    return hashlib.sha256(namespace.encode()).hexdigest()[:16]
