"""Finds, checks and loads a build of the native base.

It never compiles, downloads or waits. Loading a file that was copied in part ends the
process with SIGBUS, and one with other bytes with SIGSEGV. Loading one of another user
runs that user's code. So a build has its size and SHA-256 in a file beside it, and
belongs to this user or root.
"""

import hashlib
import importlib.util
import logging
import os
import re
import runpy
import shlex
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import TracedStoreError
from tracedstore.common.identity import process_identity

SOURCE: Final = Path(__file__).with_name("store.cpp")
MODULE: Final = "tracedstore_native"
DIRECTORY_VARIABLE: Final = "TRACEDSTORE_NATIVE_DIR"
# Builds of an image, or of a checkout.
PACKAGE_DIRECTORY: Final = Path(__file__).with_name("builds")
# The file with the size and the SHA-256 of a build.
_SUFFIX: Final = ".sha256"
_CONTENT: Final = re.compile(rb"([0-9a-f]{64}) ([0-9]{1,12})\n")
_MAX_CONTENT: Final = 128
_BUILD: Final = "run `tracedstore build-native` again"
_ROOT: Final = 0
# The module of torchrun's agent.
_AGENT: Final = "torch.distributed.elastic.agent.server.local_elastic_agent"

_logger = logging.getLogger(names.SCOPE)


class NativeUnavailable(TracedStoreError):  # noqa: N818 - a state and no mistake
    """The native base cannot be used; the text has the reason."""


class RefusedError(NativeUnavailable):
    """A build must not be loaded; the text names the file, the defect and a remedy."""


class TorchBuild(NamedTuple):
    """The installed torch: its version, and the commit that it was built from."""

    version: str
    commit: str


@cache
def installed_torch() -> TorchBuild:
    """Read the version of the installed torch, without importing torch.

    `tracedstore --version` answers at once, and importing torch takes seconds.

    Raises:
        NativeUnavailable: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NativeUnavailable("torch is not installed")
    found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(str(found["__version__"]), str(found["git_version"])[:12])


@cache
def build_key() -> str:
    """Return what a build must match exactly, as the name of its folder.

    It has this package's version and source, torch's version and commit, Python's
    version, and the platform. A class of another torch may have another layout, and
    calls of it would go astray.
    """
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]
    torch = installed_torch()
    return "-".join(
        (
            f"{__version__}.{source}",
            f"torch{torch.version}.{torch.commit}",
            # With the ABI: debug and free-threaded Pythons have others.
            str(sysconfig.get_config_var("SOABI")),
            sysconfig.get_platform(),
        )
    )


def file_in(directory: Path) -> Path:
    """Return where the build that matches this process is in a directory."""
    return directory / build_key() / f"{MODULE}.so"


def user_directory() -> Path:
    """Return the directory of builds in the user's cache.

    Raises:
        NativeUnavailable: The user has no home directory.
    """
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise NativeUnavailable(f"the user's cache is unknown: {error}") from None
    return Path(cache) / "tracedstore" / "native"


def find(directory: Path | None = None) -> Path:
    """Return the build that matches this process.

    Args:
        directory: The directory to look in first, instead of the variable's.

    Raises:
        NativeUnavailable: There is none.
    """
    given = directory or os.environ.get(DIRECTORY_VARIABLE)
    directories = [Path(given)] if given else []
    directories.append(PACKAGE_DIRECTORY)
    try:
        directories.append(user_directory())
    except NativeUnavailable:
        if not given:
            raise
    for each in directories:
        file = file_in(each)
        # A directory that this user may not read counts as one without a build.
        with suppress(OSError):
            if file.is_file():
                return file
    looked = ", ".join(map(str, directories))
    raise NativeUnavailable(
        f"no build for torch {installed_torch().version} and Python"
        f" {sys.version.split()[0]} in {looked}; run `tracedstore build-native`"
    )


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


def load_file(file: Path) -> Any:
    """Load one build.

    Raises:
        NativeUnavailable: It is damaged or not to be trusted, it cannot be loaded, or
            it is one for something else.
    """
    descriptor = open_verified(file)
    # The very file that was checked. It is never closed: the dynamic linker knows the
    # library by this name, which must not become that of another file.
    checked = f"/proc/self/fd/{descriptor}"
    loader = ExtensionFileLoader(MODULE, checked)
    spec = ModuleSpec(MODULE, loader, origin=checked)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        module.__file__ = str(file)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise NativeUnavailable(f"{file} cannot be loaded: {reason}") from error
    if build_key() != module.KEY:
        raise NativeUnavailable(f"{file} is a build for {module.KEY}")
    return module


def load() -> Any:
    """Find and load the build that matches this process; look for it once only.

    Raises:
        NativeUnavailable: There is none that can be used.
    """
    found = _load_once()
    if isinstance(found, str):
        raise NativeUnavailable(found)
    return found


@cache
def _load_once() -> Any:
    """Return the extension, or the reason why there is none.

    The exception itself would keep the stores of all callers, in its traceback.
    """
    try:
        file = find()
    except NativeUnavailable as error:
        if _speaks_for_node():
            _logger.info("the Python base records, which has limits: %s", error)
        return str(error)
    try:
        return load_file(file)
    except NativeUnavailable as error:
        _logger.warning("%s; the Python base records instead", error)
        return str(error)


def _speaks_for_node() -> bool:
    """Return whether this is the process of a node that says what is true of all.

    It is local rank 0. A program without ranks speaks for itself, but torchrun's agent
    leaves it to its workers.
    """
    local_rank = process_identity().local_rank
    return local_rank == 0 or (local_rank is None and _AGENT not in sys.modules)


def describe() -> str:
    """Return one line: which base records here, and if it is Python, why."""
    try:
        file = find()
        # Checked and not loaded, because loading it would import torch.
        os.close(open_verified(file))
    except NativeUnavailable as error:
        return f"core: python; native is not available: {error}"
    if os.environ.get("TRACEDSTORE_CORE", "").strip().lower() == "python":
        return f"core: python, by TRACEDSTORE_CORE; native is built: {file}"
    return f"core: native, {file}"
