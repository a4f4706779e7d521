"""Which recording base a test runs on, and the build of the native one.

The tests run on the native base, which ``TRACEDSTORE_CORE=auto`` selects for torch's
C++ stores. Tests of what depends on the base run on both.
"""

import os
from functools import cache

import pytest
from native_caller import one_builder

from tracedstore.common.errors import CommandError
from tracedstore.native.build import build
from tracedstore.native.load import (
    PACKAGE_DIRECTORY,
    RefusedError,
    file_in,
    open_verified,
)

on_both_bases = pytest.mark.parametrize("core", ["python", "native"], indirect=True)


def use_core(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Record on one base from now on, in child processes too; return its name."""
    if name == "native" and (reason := why_not_built()):
        pytest.fail(reason)
    monkeypatch.setenv("TRACEDSTORE_CORE", name)
    return name


@cache
def why_not_built() -> str:
    """Build it into this checkout, unless it is there; return why not, or ""."""
    with one_builder():
        try:
            os.close(open_verified(file_in(PACKAGE_DIRECTORY)))
        except RefusedError:
            try:
                build(PACKAGE_DIRECTORY, print)
            except CommandError as error:
                return str(error)
    return ""
