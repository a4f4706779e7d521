"""Type, message and location of exceptions in telemetry."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import Store

from support.stores import KINDS, SHORT
from tracedstore.common.errors import error_location, error_message, error_type
from tracedstore.export.settings import Settings


class TestErrorType:
    """The type is `timeout` for every store's timeout, otherwise the class."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_real_timeouts(self, kind: str, tmp_path: Path) -> None:
        """The exception of a real store's timeout has the type `timeout`."""
        store: Store = KINDS[kind](tmp_path)

        with pytest.raises(Exception) as raised:  # noqa: PT011 - differs by store
            store.wait(["never"], SHORT)

        assert error_type(raised.value) == "timeout"

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (dist.DistStoreError("barrier timeout after 50ms, key: b"), "timeout"),
            (RuntimeError("Timeout waiting for key: x after 50 ms"), "timeout"),
            (LookupError("Key x not found in EtcdStore"), "timeout"),
            (TimeoutError(), "timeout"),
            (KeyError("x"), "KeyError"),
            (RuntimeError("no such key: wait timeout"), "RuntimeError"),
            (dist.DistNetworkError("gone"), "torch.distributed.DistNetworkError"),
            (KeyboardInterrupt(), "KeyboardInterrupt"),
        ],
    )
    def test_names(self, error: BaseException, expected: str) -> None:
        """A text counts as a timeout only if it starts like one."""
        assert error_type(error) == expected


class TestErrorMessage:
    """A message is one line, bounded, and never quotes a value."""

    def test_first_line_only(self) -> None:
        """Only the first line is kept: torch appends C++ stacks to some messages."""
        assert error_message(RuntimeError("lost\nframe #0: ...")) == "lost"

    def test_bounded(self) -> None:
        """A long message is cut to 256 characters."""
        assert len(error_message(RuntimeError("x" * 10_000))) == 256

    def test_omits_arguments_quoted_by_pybind(self) -> None:
        """The TypeError of a wrong call contains the value, so it has no message."""
        with pytest.raises(TypeError, match="secret") as raised:
            dist.HashStore().set(1, "secret")  # type: ignore[arg-type]

        assert error_message(raised.value) == ""

    def test_str_raises(self) -> None:
        """An exception whose __str__ raises has an empty message."""

        class BrokenError(RuntimeError):
            def __str__(self) -> str:
                raise ZeroDivisionError

        assert error_message(BrokenError()) == ""


class TestErrorLocation:
    """The location in this package where an exception was raised."""

    def test_innermost_frame(self) -> None:
        """The location has file, line and function, even if a library raised."""
        with pytest.raises(ValueError, match="a text") as raised:
            Settings.load({"http_host": ""}, {})
        location = error_location(raised.value)

        assert re.fullmatch(r"export/settings\.py:[0-9]+ load", location)

    def test_raised_elsewhere(self) -> None:
        """An exception without a frame of this package has no location."""
        assert error_location(ValueError()) == ""
