"""Exports at the end of a process."""

import threading

import pytest

from tracedstore.common.threads import DaemonThread
from tracedstore.export import otel_export
from tracedstore.export.otel_export import export_with_timeout
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.telemetry import Failures, Telemetry


class TestNoThreadCanBeStarted:
    """CPython 3.12 starts no thread while it ends."""

    @pytest.fixture
    def spare(self, monkeypatch: pytest.MonkeyPatch) -> QueueWorker:
        """A spare thread that was started before."""
        spare = QueueWorker("tracedstore-spare", "spans", Failures(Telemetry()))
        assert spare.start()
        monkeypatch.setattr(otel_export, "SPARE_THREAD", spare)

        def fail(_thread: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        monkeypatch.setattr(DaemonThread, "start", fail)
        return spare

    @pytest.mark.usefixtures("spare")
    def test_spare_thread_exports(self) -> None:
        """It runs all of them, also after one that fails."""
        exported: list[str] = []

        def fail() -> None:
            exported.append("spans")
            raise OSError

        export_with_timeout(
            20, {"spans": fail, "otel_metrics": lambda: exported.append("metrics")}
        )

        assert exported == ["spans", "metrics"]

    @pytest.mark.usefixtures("spare")
    def test_is_bounded(self) -> None:
        """An export that does not return is abandoned; nothing runs after it."""
        released = threading.Event()
        later: list[bool] = []
        try:
            export_with_timeout(0.01, {"spans": lambda: released.wait(60)})
            export_with_timeout(0.01, {"spans": lambda: later.append(True)})
        finally:
            released.set()

        assert not later
