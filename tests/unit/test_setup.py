"""configure() and shutdown(), alone and with the application's own SDK."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from support.fork_server import run_python
from tracedstore import ConfigurationError
from tracedstore.export.http_endpoint import facts_page
from tracedstore.export.setup import set_identity

# The package that is tested, also if another checkout is installed.
SOURCE = str(Path(tracedstore.__file__).parents[1])


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process where nothing is configured."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": SOURCE, **environ}
    return run_python("-c", script, env=env)


def run_with_imports(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter that has imported nothing."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class TestImport:
    """Importing the package has no side effects."""

    def test_no_side_effects(self) -> None:
        """It starts no thread, registers no metric and loads no SDK and no etcd."""
        done = run_with_imports(
            "import sys, threading, torch.distributed\n"
            "import prometheus_client, structlog\n"
            "threads = threading.active_count()\n"
            "text = prometheus_client.generate_latest()\n"
            "modules = set(sys.modules)\n"
            "import tracedstore\n"
            "tracedstore.wrap  # loads the other modules\n"
            "assert threading.active_count() == threads\n"
            "assert b'tracedstore' not in prometheus_client.generate_latest()\n"
            "assert not structlog.is_configured()\n"
            "new = set(sys.modules) - modules\n"
            "print(sorted(m for m in new if m == 'etcd' or '.sdk' in m))\n"
        )

        assert (done.stdout, done.stderr) == ("[]\n", "")


class TestConfigure:
    """configure(), called once or again."""

    def test_invalid_setting_changes_nothing(self, registry: CollectorRegistry) -> None:
        """The earlier configuration stays in effect."""
        tracedstore.configure(registry=registry, log_format="off")
        store = tracedstore.wrap(HashStore())
        with pytest.raises(ConfigurationError):
            tracedstore.configure(spans="some")

        store.set("key", "value")

        count = registry.get_sample_value(
            "tracedstore_operation_duration_seconds_count",
            {"store": "hash_store", "operation": "set", "error_type": ""},
        )
        assert count == 1

    @pytest.mark.parametrize(
        ("variable", "value", "message"),
        [
            (
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL",
                "grpc",
                "METRICS_EXPORTER is 'otlp', and the exporter 'otlp_proto_grpc' is not",
            ),
            ("OTEL_METRIC_EXPORT_INTERVAL", "1m", "'1m'; accepted is a number of"),
            (
                "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
                "sum",
                "is 'sum'; accepted is one of cumulative, delta, lowmemory",
            ),
        ],
    )
    def test_unusable_otlp(
        self, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
    ) -> None:
        """A variable of OpenTelemetry that cannot be used is named."""
        monkeypatch.setenv(variable, value)

        with pytest.raises(ConfigurationError, match=message):
            tracedstore.configure(metrics_exporter="otlp")

    def test_applies_to_wrapped_stores(
        self, provider: TracerProvider, spans: InMemorySpanExporter
    ) -> None:
        """configure() applies to stores that were wrapped before."""
        tracedstore.configure(registry=CollectorRegistry(), spans="off")
        store = tracedstore.wrap(HashStore())
        store.num_keys()
        tracedstore.configure(registry=CollectorRegistry(), tracer_provider=provider)

        store.num_keys()

        assert len(spans.get_finished_spans()) == 1

    @pytest.mark.parametrize("reconfigure", [False, True])
    def test_rank_of_group(
        self,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        monkeypatch: pytest.MonkeyPatch,
        reconfigure: bool,
    ) -> None:
        """Later spans have the group's rank, configured again or not."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("LOCAL_RANK", "2")
        options: dict[str, Any] = {
            "registry": CollectorRegistry(),
            "tracer_provider": provider,
        }
        tracedstore.configure(**options)
        store = tracedstore.wrap(HashStore())
        store.num_keys()
        set_identity(rank=3, world_size=8)
        if reconfigure:
            tracedstore.configure(**options)

        store.num_keys()

        keys = ("tracedstore.rank", "tracedstore.local_rank", "tracedstore.world_size")
        identities = [
            tuple((span.attributes or {}).get(key) for key in keys)
            for span in spans.get_finished_spans()
        ]
        assert identities == [(1, 2, None), (3, 2, 8)]

    def test_rank_of_group_in_status(self) -> None:
        """``/inflight`` has the rank of the process group."""
        set_identity(3, 8)

        process = json.loads(facts_page("").body)["process"]

        assert (process["rank"], process["world_size"]) == (3, 8)

    def test_unknown_setting(self) -> None:
        """The error has the unknown name and the known settings."""
        with pytest.raises(TypeError, match=r"no setting 'slow'; .*'slow_after'"):
            tracedstore.configure(slow=1)

    def test_counted_failures_stay(self, registry: CollectorRegistry) -> None:
        """configure() rearms failed parts and keeps their counts."""

        class Raising:
            name = "raising"

            def observe(self, operation: tracedstore.Operation) -> None:
                raise ZeroDivisionError

        labels = {"observer": "raising"}
        for expected in (1, 2):
            tracedstore.configure(
                registry=registry, observers=[Raising()], slow_after=0, log_format="off"
            )
            tracedstore.wrap(HashStore()).set("key", "value")
            failures = registry.get_sample_value(
                "tracedstore_telemetry_failures_total", labels
            )
            assert failures == expected

    def test_wrap_after_shutdown(self) -> None:
        """wrap() after shutdown() enables recording again."""
        labels = {"store": "hash_store", "operation": "set", "error_type": ""}
        count = "tracedstore_operation_duration_seconds_count"
        store = tracedstore.wrap(HashStore())
        tracedstore.shutdown()
        tracedstore.shutdown()
        store.set("key", "value")
        assert REGISTRY.get_sample_value(count, labels) is None

        tracedstore.wrap(HashStore())
        store.set("key", "value")

        assert REGISTRY.get_sample_value(count, labels) == 1


class TestShutdown:
    """shutdown() flushes and is bounded in time."""

    def test_flushes(self) -> None:
        """Buffered spans are exported."""
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=60_000)
        )
        tracedstore.configure(registry=CollectorRegistry(), tracer_provider=provider)
        tracedstore.wrap(HashStore()).num_keys()

        tracedstore.shutdown()

        assert len(exporter.get_finished_spans()) == 1

    def test_exporter_hangs(self) -> None:
        """shutdown() returns after its timeout if an exporter hangs."""
        released = threading.Event()

        class HangingProvider(TracerProvider):
            def force_flush(self, timeout_millis: int = 30_000) -> bool:
                return released.wait(60)

        provider = HangingProvider()
        tracedstore.configure(registry=CollectorRegistry(), tracer_provider=provider)
        tracedstore.wrap(HashStore()).num_keys()

        tracedstore.shutdown(timeout=0.1)

        assert not released.is_set()
        released.set()


class TestFork:
    """A forked child starts from zero."""

    # Forks, calls `check` in the child, and prints what that returns.
    SCRIPT = """
import os
import tracedstore
from prometheus_client import REGISTRY
from torch.distributed import HashStore

def in_child(check):
    pid = os.fork()
    if pid == 0:
        print(check(), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""

    @pytest.mark.parametrize("core", ["python", "native"])
    def test_after_shutdown(self, core: str) -> None:
        """A child that configures again does not export the calls of its parent."""
        done = run(
            self.SCRIPT
            + """
store = tracedstore.wrap(HashStore())
for _ in range(3):
    store.set("key", "value")
tracedstore.shutdown()

def check():
    tracedstore.wrap(HashStore()).set("key", "value")
    return REGISTRY.get_sample_value(
        "tracedstore_operation_duration_seconds_count",
        {"store": "hash_store", "operation": "set", "error_type": ""},
    )

in_child(check)
""",
            TRACEDSTORE_CORE=core,
        )

        assert done.stdout == "1\n", done.stderr

    def test_state_of_diagnosis(self) -> None:
        """Workers, claims, probes and readings are the parent's."""
        done = run(
            self.SCRIPT
            + """
from tracedstore.diagnosis.judgement import stall_reports
from tracedstore.diagnosis.connection import connection_attempt
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker
from tracedstore.export import discovery

tracedstore.configure(log_format="off")
store = HashStore()
AGENT_WORKERS.workers = (Worker(rank=0, local_rank=0, pid=1, start_ticks=None),)
AGENT_WORKERS.environ = {"RANK": "0"}
stall_reports._kept["what"] = stall_reports.claim("what")
claimed = stall_reports._kept["what"].fileno()
connection_attempt._unanswered["host", 1] = 0.0
discovery._being_read.add(store)

def check():
    try:
        os.fstat(claimed)
    except OSError:
        closed = True
    return (
        closed,
        AGENT_WORKERS.workers,
        dict(AGENT_WORKERS.environ),
        stall_reports._kept,
        connection_attempt._unanswered,
        len(discovery._being_read),
    )

in_child(check)
os.fstat(claimed)
assert AGENT_WORKERS.workers and connection_attempt._unanswered
"""
        )

        assert done.stdout == "(True, (), {}, {}, {}, 0)\n", done.stderr
        assert done.returncode == 0, done.stderr


class TestTracing:
    """configure() sets up the SDK only with tracing=True and without a provider."""

    SCRIPT = (
        "import tracedstore, torch.distributed as dist\n"
        "{before}\n"
        "tracedstore.configure({arguments})\n"
        "tracedstore.wrap(dist.HashStore()).num_keys()\n"
        "tracedstore.shutdown()\n"
    )

    def test_console_exporter_from_environment(self) -> None:
        """OTEL_TRACES_EXPORTER and OTEL_SERVICE_NAME configure the SDK."""
        done = run(
            self.SCRIPT.format(before="", arguments=""),
            TRACEDSTORE_TRACING="1",
            OTEL_TRACES_EXPORTER="console",
            OTEL_SERVICE_NAME="my-job",
            RANK="3",
        )

        assert done.returncode == 0, done.stderr
        assert '"service.name": "my-job"' in done.stdout
        assert done.stdout.count('"tracedstore.rank": 3') == 2

    def test_first_barrier_of_unconfigured_process(self) -> None:
        """barrier() sets up the telemetry before it decides about its span."""
        done = run(
            "from opentelemetry import trace\n"
            "from opentelemetry.sdk.trace import TracerProvider\n"
            "from opentelemetry.sdk.trace.export import SimpleSpanProcessor\n"
            "from opentelemetry.sdk.trace.export.in_memory_span_exporter import (\n"
            "    InMemorySpanExporter,\n"
            ")\n"
            "spans, provider = InMemorySpanExporter(), TracerProvider()\n"
            "provider.add_span_processor(SimpleSpanProcessor(spans))\n"
            "trace.set_tracer_provider(provider)\n"
            "import torch.distributed as dist, tracedstore\n"
            "tracedstore.barrier(dist.HashStore(), 1, 'b', rank=0)\n"
            "provider.force_flush()\n"
            "print([span.name for span in spans.get_finished_spans()])\n"
        )

        # Of the rank, and the root that it has as the first one.
        assert done.stdout == "['barrier b', 'barrier b']\n", done.stderr

    def test_off_by_default(self) -> None:
        """OTEL_TRACES_EXPORTER alone does not set up the SDK."""
        done = run(
            self.SCRIPT.format(before="", arguments=""), OTEL_TRACES_EXPORTER="console"
        )

        assert (done.returncode, done.stdout) == (0, "")

    def test_provider_of_application_stays(self) -> None:
        """The application's provider is used and not replaced."""
        before = (
            "from opentelemetry import trace\n"
            "from opentelemetry.sdk.trace import TracerProvider\n"
            "provider = TracerProvider()\n"
            "trace.set_tracer_provider(provider)\n"
        )
        after = "assert trace.get_tracer_provider() is provider\nprint('same')\n"
        script = self.SCRIPT.format(before=before, arguments="tracing=True") + after
        done = run(script, OTEL_TRACES_EXPORTER="console")

        assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr

    def test_exporter_is_not_installed(self) -> None:
        """The error has the exporter and the remedy."""
        done = run(
            self.SCRIPT.format(before="", arguments="tracing=True"),
            OTEL_TRACES_EXPORTER="jaeger",
        )

        assert done.returncode == 1
        assert "asks for the span exporter 'jaeger', which is not installed" in (
            done.stderr
        )


def test_healthy_worker_does_not_import_what_it_does_not_need() -> None:
    """Each of them takes processor time at every start and restart of every worker."""
    done = run_with_imports(
        "import sys, torch.distributed as dist, tracedstore\n"
        "tracedstore.wrap(dist.HashStore()).set('key', 'value')\n"
        "print(*(name for name in ('structlog', 'rich', 'pygments', 'attr',"
        " 'opentelemetry.sdk', 'tracedstore.etcd', 'tracedstore.rendezvous',"
        " 'tracedstore.tools') if name in sys.modules))"
    )
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


@pytest.mark.parametrize(
    "stderr",
    [
        "sys.stderr.close()",
        "sys.stderr = None",
        "sys.stderr = type('Log', (), {'write': len, 'flush': int})",
    ],
)
def test_wrap_without_usable_standard_error(stderr: str) -> None:
    """A job may have closed or replaced it."""
    done = run(
        "import sys, torch.distributed as dist, tracedstore\n"
        f"{stderr}\n"
        "store = tracedstore.wrap(dist.HashStore())\n"
        "store.set('key', 'value')\n"
        "try:\n"
        "    store.wait(['missing'], __import__('datetime').timedelta(seconds=0.01))\n"
        "except RuntimeError:\n"
        "    print(store.get('key'))"
    )
    assert (done.stdout.strip(), done.returncode) == ("b'value'", 0), done.stderr
