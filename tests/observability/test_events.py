"""The structured log events, parsed and validated against their schema."""

import io
import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import structlog
from jsonschema import Draft202012Validator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from torch.distributed import HashStore

import tracedstore
from support.events import SCHEMA, Events, check, documented_fields
from support.stores import SHORT
from tracedstore import names
from tracedstore.common.causes import CAUSES
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.testing import FakeClock, FlakyStore


def provoke_all(clock: FakeClock) -> None:
    """Cause every event of a store once."""
    flaky = FlakyStore()
    store = tracedstore.wrap(flaky)
    flaky.before("set", lambda: clock.advance(1))
    store.set("slow/1", "value")
    flaky.fail("get", ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        store.get("failed/1")
    for _ in range(5):
        store.compare_set("contended/1", "expected", "desired")


class TestSchema:
    """Events conform to the schema."""

    def test_schema_is_valid_and_complete(self) -> None:
        """The schema is valid and has a branch for every event name."""
        Draft202012Validator.check_schema(SCHEMA)
        assert {branch["title"] for branch in SCHEMA["oneOf"]} == set(names.EVENT_NAMES)
        assert SCHEMA["properties"]["event"]["enum"] == list(names.EVENT_NAMES)

    def test_schema_can_fail(self) -> None:
        """The schema rejects a missing field and a wrong type."""
        event = {"event": "telemetry.disabled", "host": "h", "pid": 1}
        assert not Draft202012Validator(SCHEMA).is_valid(event)
        event |= {"observer": "spans", "error_type": "ValueError", "error": 3}
        assert not Draft202012Validator(SCHEMA).is_valid(event)

    @pytest.mark.parametrize(
        "name", [names.JOB_STALLED, names.JOB_RESUMED, names.JOB_ABORTED]
    )
    def test_verdict(self, name: str) -> None:
        """The fields of a verdict are those of the schema, for every cause."""
        for cause in CAUSES:
            verdict = Verdict(phase="new_group 1", cause=cause, awaited_ranks=(2,))
            # The fields of a collective are absent without one.
            in_collective = replace(
                verdict, group="0", group_ranks=(0, 1), collective="all_reduce"
            )
            event = {
                "event": name,
                "host": "h",
                "pid": 1,
                "level": names.EVENT_LEVELS[name],
            }
            if name == names.JOB_STALLED:
                event["store_url"] = "tcp://node1:29400"
            check(event | verdict.event_fields())
            check(event | in_collective.event_fields())
            assert documented_fields(name) == {
                *SCHEMA["properties"],
                *event,
                *in_collective.event_fields(),
            }

    def test_causes(self) -> None:
        """The schema has the causes of a verdict, and no others."""
        (missing_cause,) = SCHEMA["$defs"]["who"]["properties"]["missing_causes"][
            "items"
        ].values()

        assert SCHEMA["$defs"]["cause"]["enum"] == list(CAUSES)
        assert missing_cause == ["", *CAUSES]

    @pytest.mark.parametrize(
        ("field", "value"),
        [("cause", "lazy"), ("awaited_ranks", ["2"]), ("evidence", "a sentence")],
    )
    def test_wrong_verdict(self, field: str, value: object) -> None:
        """A verdict with a field of a wrong type or value does not conform."""
        event: dict[str, Any] = {"event": names.JOB_RESUMED, "host": "h", "pid": 1}
        event |= Verdict(phase="new_group 1", cause="busy").event_fields()

        assert Draft202012Validator(SCHEMA).is_valid(event)
        assert not Draft202012Validator(SCHEMA).is_valid(event | {field: value})

    def test_stale_keys(self) -> None:
        """The event has the writer of the keys, where it is known."""
        event = {
            "event": names.STORE_STALE,
            "level": "warning",
            "host": "h",
            "pid": 1,
            "rank": 0,
            "previous_attempt": 0,
            "attempt": 1,
            "previous_run_id": "a",
            "previous_pid": 7,
            "previous_host": "h",
            "previous_started": 1.8e9,
            "remedy": "start with a new store",
            "message": "attempt 0 of rank 0 wrote these keys",
        }
        check(event)
        check(event | {"previous_pid": None, "previous_started": None})
        assert not Draft202012Validator(SCHEMA).is_valid(event | {"attempt": None})

    def test_store_events(
        self,
        registry: CollectorRegistry,
        events: Events,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Slow, failed and contended calls emit events with the job's identity."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "8")
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "job-7")
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)

        provoke_all(clock)

        for event in events():
            check(event)
            assert (event["rank"], event["world_size"]) == (3, 8)
            assert event["run_id"] == "job-7"
        slow, failed, contended = events()
        assert slow["event"] == "store.operation.slow"
        assert (slow["key"], slow["key_family"]) == ("slow/1", "slow/*")
        assert (slow["duration_seconds"], slow["in_flight"]) == (1.0, 0)
        assert failed["event"] == "store.operation.failed"
        assert (failed["error_type"], failed["error"]) == ("ConnectionError", "")
        assert contended["event"] == "store.cas.contended"
        assert contended["losses_in_a_row"] == 5

    def test_telemetry_disabled(
        self, registry: CollectorRegistry, events: Events
    ) -> None:
        """The event has the observer that failed, its error and the location."""

        class Broken:
            name = "custom"

            def observe(self, operation: tracedstore.Operation) -> None:
                raise OSError("disk full")

        tracedstore.configure(
            registry=registry, observers=[Broken()], slow_after=0, spans="off"
        )
        tracedstore.wrap(HashStore()).wait([])

        (event,) = events()
        check(event)
        assert (event["observer"], event["error"]) == ("custom", "disk full")
        assert re.fullmatch(
            r"recording/recorder\.py:[0-9]+ notify", event["error_location"]
        )

    def test_with_span(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        spans: InMemorySpanExporter,
        events: Events,
    ) -> None:
        """The event has the ids of the call's span."""
        tracedstore.configure(registry=registry, tracer_provider=provider)
        store = tracedstore.wrap(HashStore())
        with pytest.raises(RuntimeError):
            store.wait(["never"], SHORT)

        (event,) = events()
        (span,) = spans.get_finished_spans()
        check(event)
        assert event["trace_id"] == f"{span.context.trace_id:032x}"
        assert event["span_id"] == f"{span.context.span_id:016x}"

    def test_without_span(
        self,
        registry: CollectorRegistry,
        provider: TracerProvider,
        events: Events,
    ) -> None:
        """The event of a call without a span has the id of the caller's span."""
        tracedstore.configure(registry=registry, spans="off")
        store = tracedstore.wrap(HashStore())
        with (
            provider.get_tracer("job").start_as_current_span("step") as step,
            pytest.raises(RuntimeError),
        ):
            store.wait(["never"], SHORT)

        assert events()[0]["span_id"] == f"{step.get_span_context().span_id:016x}"


class TestWhichCalls:
    """Blocking calls have a higher threshold than the others."""

    def test_wait_is_not_slow(
        self, registry: CollectorRegistry, events: Events
    ) -> None:
        """A blocking call emits a slow event only after stall_after."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)
        flaky = FlakyStore()
        flaky.set("key", "value")
        store = tracedstore.wrap(flaky)
        flaky.before("get", lambda: clock.advance(29))
        store.get("key")
        assert events() == []

        flaky.before("get", lambda: clock.advance(31))
        store.get("key")

        assert [event["event"] for event in events()] == ["store.operation.slow"]


class TestSlow:
    """Which calls that do not block are slow."""

    def store(
        self, registry: CollectorRegistry, **settings: Any
    ) -> tuple[FakeClock, FlakyStore, Any]:
        """Return a traced store, and what makes its calls last."""
        clock, flaky = FakeClock(), FlakyStore()
        tracedstore.configure(registry=registry, clock=clock.clock, **settings)
        return clock, flaky, tracedstore.wrap(flaky)

    def test_relative(self, registry: CollectorRegistry, events: Events) -> None:
        """A call is slow if it takes much longer than this store's calls do."""
        clock, flaky, store = self.store(registry)
        for seconds, times in ((0.01, 100), (0.4, 1), (0.6, 1)):
            flaky.before("set", partial(clock.advance, seconds), times)
            for _ in range(times):
                store.set("key", "value")

        assert [event["duration_seconds"] for event in events()] == [0.6]

    def test_first_calls(self, registry: CollectorRegistry, events: Events) -> None:
        """Without a median, a call is slow after a second."""
        clock, flaky, store = self.store(registry)
        flaky.before("set", lambda: clock.advance(0.9))
        store.set("key", "value")
        assert events() == []

        flaky.before("set", lambda: clock.advance(1))
        store.set("key", "value")

        assert len(events()) == 1

    def test_floor(self, registry: CollectorRegistry, events: Events) -> None:
        """No call of less than 0.1 s is slow, however fast the others are."""
        clock, flaky, store = self.store(registry)
        for _ in range(200):
            store.set("key", "value")

        flaky.before("set", lambda: clock.advance(0.09))
        store.set("key", "value")
        assert events() == []

        flaky.before("set", lambda: clock.advance(0.1))
        store.set("key", "value")

        assert len(events()) == 1

    def test_own_calls(self, registry: CollectorRegistry, events: Events) -> None:
        """The keys of this package are never reported."""
        for slow_after in (0.01, 0):
            clock, flaky, store = self.store(registry, slow_after=slow_after)
            flaky.before("set", partial(clock.advance, 5))
            store.set("prefix/tracedstore/RANKS/0", "value")

        assert events() == []

    def test_once_a_minute(self, registry: CollectorRegistry, events: Events) -> None:
        """A server has one event a minute, with the number of the others."""
        clock, flaky, store = self.store(registry)
        for key in ("a", "b", "c", "d"):
            flaky.before("set", lambda: clock.advance(21))
            store.set(key, "value")

        emitted = [(event["key"], event["suppressed_count"]) for event in events()]
        assert emitted == [("a", 0), ("d", 2)]

    def test_every_call(self, registry: CollectorRegistry, events: Events) -> None:
        """With slow_after=0 a program shows what it calls."""
        _, _, store = self.store(registry, slow_after=0)
        store.set("a", "value")
        store.set("b/c", "value")

        assert [event["key"] for event in events()] == ["a", "b/c"]


class TestRepeats:
    """The same failure of the same key family emits one event in ten seconds."""

    def test_suppressed(self, registry: CollectorRegistry, events: Events) -> None:
        """The next event has the number of suppressed ones."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)
        flaky = FlakyStore()
        flaky.fail("get", OSError("gone"), times=1000)
        store = tracedstore.wrap(flaky)

        def fail(key: str, times: int) -> None:
            for _ in range(times):
                with pytest.raises(OSError, match="gone"):
                    store.get(key)

        fail("worker/1", 50)
        fail("worker/2", 50)
        clock.advance(10)
        fail("worker/3", 1)
        fail("other", 1)

        emitted = [(event["key"], event["suppressed_count"]) for event in events()]
        assert emitted == [("worker/1", 0), ("worker/3", 99), ("other", 0)]


class TestDestination:
    """Where events are written."""

    def test_standard_error(
        self, registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Without a structlog configuration events are written to standard error."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)

        provoke_all(clock)

        captured = capsys.readouterr()
        assert captured.out == ""
        assert "store.operation.slow" in captured.err

    def test_console(
        self, registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """log_format="console" writes a sentence for each event."""
        clock = FakeClock()
        tracedstore.configure(
            registry=registry, clock=clock.clock, log_format="console"
        )

        provoke_all(clock)

        slow, failed, contended = capsys.readouterr().err.splitlines()
        assert slow.endswith(": set 'slow/1' of flaky_store took 1 s")
        assert "get 'failed/1' of flaky_store failed after 0 s" in failed
        assert "lost 5 compare-and-sets in a row" in contended

    def test_off(
        self, registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """log_format="off" writes no events."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock, log_format="off")

        provoke_all(clock)

        assert capsys.readouterr().err == ""

    def test_structlog_of_application(
        self, registry: CollectorRegistry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The application's processors and sink are used, even if configured later."""
        clock, sink = FakeClock(), io.StringIO()
        tracedstore.configure(registry=registry, clock=clock.clock)
        structlog.configure(
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            logger_factory=structlog.WriteLoggerFactory(sink),
        )

        provoke_all(clock)

        assert sink.getvalue().startswith("event='store.operation.slow'")
        assert capsys.readouterr().err == ""

    def test_standard_library(
        self, registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Structlog over logging uses a logger named tracedstore."""
        clock = FakeClock()
        tracedstore.configure(registry=registry, clock=clock.clock)
        structlog.configure(
            processors=[structlog.processors.JSONRenderer()],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )

        with caplog.at_level(logging.WARNING):
            provoke_all(clock)

        assert {record.name for record in caplog.records} == {"tracedstore"}
