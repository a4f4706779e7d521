"""Work that is bounded in time."""

import threading

import pytest

from tracedstore.core.timeouts import run_with_timeout


class TestRunWithTimeout:
    """The result, the exception, or a TimeoutError."""

    def test_result(self) -> None:
        """The caller gets what the work returns."""
        assert run_with_timeout(20, lambda: 7) == 7

    def test_exception(self) -> None:
        """The caller gets what the work raises."""
        with pytest.raises(ZeroDivisionError):
            run_with_timeout(20, lambda: 1 // 0)

    def test_too_long(self) -> None:
        """Work that does not end is abandoned."""
        release = threading.Event()
        try:
            with pytest.raises(TimeoutError, match=r"not finished after 0\.01 s"):
                run_with_timeout(0.01, lambda: release.wait(20))
        finally:
            release.set()

    def test_no_thread_can_be_started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The work is not run: without a thread it could not be bounded."""

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        ran: list[bool] = []

        with pytest.raises(TimeoutError, match="not run: can't start new thread"):
            run_with_timeout(20, lambda: ran.append(True))

        assert not ran
