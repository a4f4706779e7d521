"""Fixtures for all tests: telemetry that is reset for each test, and real servers."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import native_caller
import pytest
import structlog
from hypothesis import HealthCheck, settings
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import Store
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

import tracedstore
from support.etcd import EtcdServer
from support.native import use_core, why_not_built
from tracedstore import elastic
from tracedstore import store as store_module
from tracedstore.common.errors import CommandError
from tracedstore.common.identity import set_group_identity
from tracedstore.coordination import rank_registry
from tracedstore.etcd import EtcdV3Store
from tracedstore.export import setup
from tracedstore.recording.counters import SeriesTable
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.watcher import WATCHER

# torch resolves the address of every connection to a name. No name server has a name
# for loopback, and a slow one would cost five seconds per connection.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# A shell's background jobs ignore SIGINT, and their child processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# readline, which pytest imports, exports the size of pytest's terminal to its workers.
# Programs that tests run on a terminal must read the size of that terminal.
for _name in ("LINES", "COLUMNS"):
    os.environ.pop(_name, None)

# In a fresh checkout Hypothesis builds its character tables in the first draw of a
# text, which takes two seconds, and any draw is slow on a busy machine. pytest's
# timeout bounds the duration of a test.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start processes first, because they take longest.

    A long test that starts last runs alone, and leaves the cores idle.
    """
    for item in items:
        # `make tests` looks for exclusive tests there only.
        if (
            item.get_closest_marker("exclusive")
            and "integration" not in item.path.parts
        ):
            raise pytest.UsageError(
                f"{item.nodeid} is exclusive, but not in integration"
            )
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the native base before the first test, which has a timeout."""
    if not session.items or session.config.option.collectonly or why_not_built():
        return
    # Without a compiler only the tests that need it fail.
    with suppress(CommandError):
        native_caller.load()


@pytest.fixture
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recording base, in tests that select one; see `on_both_bases`."""
    return use_core(request.param, monkeypatch)


@pytest.fixture(autouse=True)
def clean_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset what a test counted, wrapped or configured."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    structlog.reset_defaults()
    yield
    tracedstore.uninstrument()
    tracedstore.shutdown(timeout=1)
    elastic.restore_torch_barrier()
    rank_registry.reset()
    set_group_identity(None)
    # A barrier that a test left behind must not delay the reports of the next one.
    WATCHER.stop(timeout=0)
    RECORDER.reset()
    RECORDER.series = SeriesTable()
    for kept in list(store_module._kept_alive.values()):
        kept.close()
    structlog.reset_defaults()


@pytest.fixture
def registry() -> CollectorRegistry:
    """A Prometheus registry for one test."""
    return CollectorRegistry()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """The exporter that receives the spans of `provider`."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """A TracerProvider for one test."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider
    provider.shutdown()


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the JSON events written to standard error so far."""
    lines: list[str] = []

    def read() -> list[dict[str, Any]]:
        assert setup._event_writer.flush(60)
        lines.extend(capsys.readouterr().err.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]

    return read


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd server, one per session and pytest worker."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


_prefixes = itertools.count()


@pytest.fixture
def etcd_store(etcd_server: EtcdServer) -> Callable[[Path], Store]:
    """Return a function that creates an EtcdStore under an unused prefix."""

    def make(_folder: Path) -> Store:
        store: Store = EtcdStore(etcd_server.client(), f"/test/{next(_prefixes)}")
        return store

    return make


@pytest.fixture
def etcd_v3_store(etcd_server: EtcdServer) -> Callable[[Path], Store]:
    """Return a function that creates an EtcdV3Store in an unused namespace."""

    def make(_folder: Path) -> Store:
        return EtcdV3Store(etcd_server.address, f"test/{next(_prefixes)}")

    return make
