"""Fixtures for all tests: a clean telemetry each, and real servers."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from tracedstore import barrier_patch
from tracedstore import store as store_module
from tracedstore.coordination import rank_registry
from tracedstore.core.counters import SeriesTable
from tracedstore.core.identity import set_group_identity
from tracedstore.core.recorder import RECORDER
from tracedstore.export import setup

# torch asks for the name behind the address of every connection. No name server has
# one for loopback, so none is asked: a slow one would cost five seconds a time.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
# What a shell runs in its background ignores Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# In a fresh checkout Hypothesis's first draw of a text builds its tables, which takes
# two seconds, and a busy machine takes its time for any: neither is a failure. How
# long a test may take is for pytest's timeout to say.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def clean_telemetry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a test counted, wrapped or configured reaches another one."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    structlog.reset_defaults()
    yield
    tracedstore.uninstrument()
    tracedstore.shutdown(timeout=1)
    barrier_patch.restore()
    rank_registry.reset()
    set_group_identity(None)
    RECORDER.reset()
    RECORDER.series = SeriesTable()
    for kept in list(store_module._kept_alive.values()):
        kept.close()
    structlog.reset_defaults()


@pytest.fixture
def registry() -> CollectorRegistry:
    """A Prometheus registry of the test's own."""
    return CollectorRegistry()


@pytest.fixture
def spans() -> InMemorySpanExporter:
    """Where the spans of `provider` end up."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(spans: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """A TracerProvider of the test's own."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    yield provider
    provider.shutdown()


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    """The JSON events that this test wrote so far, to standard error."""
    lines: list[str] = []

    def read() -> list[dict[str, Any]]:
        assert setup._event_writer.flush(20)
        lines.extend(capsys.readouterr().err.splitlines())
        return [json.loads(line) for line in lines if line.startswith("{")]

    return read


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd, for the whole session."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


_prefixes = itertools.count()


@pytest.fixture
def etcd_store(etcd_server: EtcdServer) -> Callable[[Path], Store]:
    """Make an EtcdStore under a prefix that no other test uses."""

    def make(_folder: Path) -> Store:
        store: Store = EtcdStore(etcd_server.client(), f"/test/{next(_prefixes)}")
        return store

    return make
