"""Calls of a store from C++, for tests and benchmarks; compiled at the first use."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from tracedstore.native.build import compile_extension
from tracedstore.native.load import PACKAGE_DIRECTORY, build_key

_SOURCE = Path(__file__).with_name("caller.cpp")


@contextmanager
def one_builder() -> Iterator[None]:
    """Let one process at a time build into the checkout: pytest's workers all would."""
    PACKAGE_DIRECTORY.mkdir(exist_ok=True)
    # The lock ends with its process.
    with (PACKAGE_DIRECTORY / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def load() -> Any:
    """Return the module; `benchmarks/caller.cpp` has its functions.

    Raises:
        CommandError: It cannot be compiled here.
    """
    # Another compiler, or one with a sanitizer, makes another file.
    made_of = f"{_SOURCE.read_text('utf-8')}{build_key()}{os.environ.get('CXX')}"
    version = hashlib.sha256(made_of.encode()).hexdigest()
    file = PACKAGE_DIRECTORY / f"caller-{version[:16]}.so"
    with one_builder():
        if not file.is_file():
            made = file.with_suffix(".new")
            compile_extension(_SOURCE, made)
            made.replace(file)
    loader = ExtensionFileLoader("caller", str(file))
    spec = spec_from_file_location("caller", file, loader=loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
