"""What exceptions are called in telemetry."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import Store

from support.stores import KINDS, SHORT
from tracedstore.core.errors import error_location, error_message, error_type
from tracedstore.export.settings import Settings


class TestErrorType:
    """Every store's timeout is `timeout`; anything else is its class."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_real_timeouts(self, kind: str, tmp_path: Path) -> None:
        """What a real store raises when a wait runs out."""
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
        """The text counts only where it begins like a timeout's."""
        assert error_type(error) == expected


class TestErrorMessage:
    """A message is one line, bounded, and never quotes a value."""

    def test_first_line_only(self) -> None:
        """Torch appends a C++ stack to some of its messages."""
        assert error_message(RuntimeError("lost\nframe #0: ...")) == "lost"

    def test_bounded(self) -> None:
        """A message of any length takes 256 characters."""
        assert len(error_message(RuntimeError("x" * 10_000))) == 256

    def test_pybind_quotes_the_arguments(self) -> None:
        """The TypeError of a wrong call has the value in it, which is not told."""
        with pytest.raises(TypeError, match="secret") as raised:
            dist.HashStore().set(1, "secret")  # type: ignore[arg-type]

        assert error_message(raised.value) == ""

    def test_an_exception_that_cannot_be_shown(self) -> None:
        """A broken __str__ is not our business to raise."""

        class BrokenError(RuntimeError):
            def __str__(self) -> str:
                raise ZeroDivisionError

        assert error_message(BrokenError()) == ""


class TestErrorLocation:
    """Where in this package an exception was raised."""

    def test_innermost_frame(self) -> None:
        """File, line and function, also where a library raised it."""
        with pytest.raises(ValueError, match="a text") as raised:
            Settings.load({"http_host": ""}, {})
        location = error_location(raised.value)

        assert re.fullmatch(r"export/settings\.py:[0-9]+ load", location)

    def test_raised_elsewhere(self) -> None:
        """An exception that never passed through this package has none."""
        assert error_location(ValueError()) == ""
