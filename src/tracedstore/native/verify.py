"""Checks a build of the native base before it is loaded.

Loading a file that was copied in part ends the process with SIGBUS, and one with other
bytes with SIGSEGV. Loading one of another user runs that user's code. So a build has
its size and SHA-256 in a file beside it, and belongs to this user or root.
"""

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tracedstore.common.errors import TracedStoreError

_SUFFIX: Final = ".sha256"
_CONTENT: Final = re.compile(rb"([0-9a-f]{64}) ([0-9]{1,12})\n")
_MAX_CONTENT: Final = 128
_BUILD: Final = "run `tracedstore build-native` again"
_ROOT: Final = 0


class RefusedError(TracedStoreError):
    """A build must not be loaded; the text names the file, the defect and a remedy."""


def digest_file(file: Path) -> Path:
    """Return the file with the size and the SHA-256 of a build."""
    return file.with_name(file.name + _SUFFIX)


def seal(file: Path) -> None:
    """Write the size and the SHA-256 of a new build beside it.

    Only its owner may write to both from now on, whatever the umask is.
    """
    content = file.read_bytes()
    digest = digest_file(file)
    digest.write_text(f"{hashlib.sha256(content).hexdigest()} {len(content)}\n")
    for each in (file, digest):
        each.chmod(stat.S_IMODE(each.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def check_folders(file: Path) -> None:
    """Check the folder of a build, and the directory that has the folder.

    Raises:
        RefusedError: Other users may replace what is in them.
        OSError: They cannot be opened.
    """
    with _open_folder(file):
        pass


def open_verified(file: Path) -> int:
    """Open a build; return its descriptor, which the caller has to close.

    Only open files are checked: what their paths refer to later does not matter.

    Raises:
        RefusedError: It is damaged, or other users may have written it.
    """
    try:
        with _open_folder(file) as folder:
            content = _read_digest(digest_file(file), folder)
            descriptor = _open(file, folder)
    except OSError as error:
        raise RefusedError(f"{file} cannot be read: {error.strerror}") from error
    try:
        _check_file(file, os.fstat(descriptor))
        _check_content(file, descriptor, content)
    except OSError as error:
        os.close(descriptor)
        raise RefusedError(f"{file} cannot be read: {error.strerror}") from error
    except RefusedError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _open_folder(file: Path) -> Iterator[int]:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    directory = os.open(file.parent.parent, flags)
    try:
        _check_folder(file.parent.parent, os.fstat(directory))
        folder = os.open(file.parent.name, flags, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        _check_folder(file.parent, os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _open(file: Path, folder: int) -> int:
    # Opening a pipe must not wait for its other end.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    return os.open(file.name, flags, dir_fd=folder)


def _read_digest(digest: Path, folder: int) -> bytes:
    try:
        descriptor = _open(digest, folder)
    except FileNotFoundError:
        raise RefusedError(
            f"{digest} is missing, so the build beside it cannot be checked; {_BUILD}"
        ) from None
    try:
        _check_file(digest, os.fstat(descriptor))
        return os.read(descriptor, _MAX_CONTENT)
    finally:
        os.close(descriptor)


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise RefusedError(
            f"{path} belongs to the user {found.st_uid}, and not to this one or root;"
            " run `tracedstore build-native` as this user or root, with another --dir"
        )


def _check_file(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise RefusedError(f"{file} is not a regular file; remove it, and {_BUILD}")
    _check_owner(file, found)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # Another user may have written to it.
        raise RefusedError(
            f"other users can write to {file}; run"
            f" `chmod go-w {shlex.quote(str(file))}`, and {_BUILD}"
        )


def _check_folder(folder: Path, found: os.stat_result) -> None:
    _check_owner(folder, found)
    # In a sticky one, as /tmp, nobody can replace what belongs to another user. Files
    # of members of a group are refused by their owner.
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise RefusedError(
            f"every user can write to {folder}; run"
            f" `chmod o-w {shlex.quote(str(folder))}`"
        )


def _check_content(file: Path, descriptor: int, content: bytes) -> None:
    expected = _CONTENT.fullmatch(content)
    if expected is None:
        raise RefusedError(
            f"{digest_file(file)} is damaged, so the build beside it cannot be checked;"
            f" {_BUILD}"
        )
    digest, size = expected[1].decode(), int(expected[2])
    found = os.fstat(descriptor).st_size
    if found != size:
        raise RefusedError(
            f"{file} is damaged: it has {found} bytes, and had {size} when it was"
            f" built; {_BUILD}"
        )
    with open(descriptor, "rb", closefd=False) as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
            raise RefusedError(
                f"{file} is damaged: its SHA-256 is not the one that it was built with;"
                f" {_BUILD}"
            )
