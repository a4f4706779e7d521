"""Finds and loads a build of the native base. Never compiles, downloads or waits."""

import hashlib
import importlib.util
import logging
import os
import runpy
import sys
import sysconfig
from contextlib import suppress
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracedstore import names
from tracedstore._version import __version__
from tracedstore.common.errors import TracedStoreError
from tracedstore.native import verify

SOURCE: Final = Path(__file__).with_name("store.cpp")
MODULE: Final = "tracedstore_native"
DIRECTORY_VARIABLE: Final = "TRACEDSTORE_NATIVE_DIR"
# Builds of an image, or of a checkout.
PACKAGE_DIRECTORY: Final = Path(__file__).with_name("builds")


_logger = logging.getLogger(names.SCOPE)


class NativeUnavailable(TracedStoreError):  # noqa: N818 - a state and no mistake
    """The native base cannot be used; the text has the reason."""


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
        # A directory that must not be read has none.
        with suppress(OSError):
            if file.is_file():
                return file
    looked = ", ".join(map(str, directories))
    raise NativeUnavailable(
        f"no build for torch {installed_torch().version} and Python"
        f" {sys.version.split()[0]} in {looked}; run `tracedstore build-native`"
    )


def load_file(file: Path) -> Any:
    """Load one build.

    Raises:
        NativeUnavailable: It is damaged or not to be trusted, it cannot be loaded, or
            it is one for something else.
    """
    try:
        descriptor = verify.open_verified(file)
    except verify.RefusedError as error:
        raise NativeUnavailable(str(error)) from None
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
        return str(error)
    try:
        return load_file(file)
    except NativeUnavailable as error:
        _logger.warning("%s; the Python base records instead", error)
        return str(error)


def describe() -> str:
    """Return which base records here, and why not the other, as one line."""
    try:
        file = find()
        # Checked and not loaded, because loading it would import torch.
        os.close(verify.open_verified(file))
    except (NativeUnavailable, verify.RefusedError) as error:
        return f"core: python; native is not available: {error}"
    if os.environ.get("TRACEDSTORE_CORE", "").strip().lower() == "python":
        return f"core: python, by TRACEDSTORE_CORE; native is built: {file}"
    return f"core: native, {file}"
