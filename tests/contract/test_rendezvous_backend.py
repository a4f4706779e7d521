"""Rendezvous backends: torch's documented behaviour, bare and traced."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)

import tracedstore
from support.etcd import EtcdServer
from support.rendezvous import BACKENDS, Rendezvous
from tracedstore.recording.recorder import RECORDER
from tracedstore.rendezvous import TracedRendezvousBackend
from tracedstore.testing import FlakyStore

pytestmark = pytest.mark.etcd

Outcome = tuple[type, Any]


@pytest.fixture(params=BACKENDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each of torch's backends, on each of its stores."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def telemetry(registry: CollectorRegistry) -> None:
    """Count into the test's registry."""
    tracedstore.configure(registry=registry, log_format="off")


@pytest.fixture
def pair(
    kind: str, tmp_path: Path, etcd_server: EtcdServer
) -> tuple["Journal", "Journal"]:
    """A bare and a traced rendezvous."""
    bare = Rendezvous(kind, tmp_path, etcd_server)
    traced = Rendezvous(kind, tmp_path, etcd_server)
    return Journal(bare, lambda backend: backend), Journal(
        traced, TracedRendezvousBackend
    )


class Journal:
    """Calls a backend and records the outcomes."""

    def __init__(
        self, rendezvous: Rendezvous, trace: Callable[[Any], Any] = lambda b: b
    ) -> None:
        self.rendezvous = rendezvous
        self.backend = trace(rendezvous.connect())
        self.other = trace(rendezvous.connect())
        self.outcomes: list[Outcome] = []
        self._tokens: list[Any] = []

    def get(self) -> Any:
        """Get the state."""
        return self._do(self.backend.get_state)

    def set(self, state: bytes, *token: Any, by: Any = None) -> Any:
        """Set the state."""
        return self._do(lambda: (by or self.backend).set_state(state, *token))

    def _do(self, step: Callable[[], Any]) -> Any:
        try:
            result = step()
        except Exception as error:
            cause = error.__cause__
            self.outcomes.append((type(error), (str(error), type(cause))))
            return None
        self.outcomes.append((type(result), self._comparable(result)))
        return result

    def _comparable(self, result: Any) -> Any:
        if result is None:
            return None
        # etcd's tokens differ between servers: compare the position of their first use.
        state, token, *rest = result
        if token not in self._tokens:
            self._tokens.append(token)
        return (state, type(token), self._tokens.index(token), *rest)


def documented(journal: Journal) -> None:
    """Make all calls of get_state and set_state that torch documents."""
    journal.get()
    _, first, _ = journal.set(b"one")
    journal.get()
    # Without a token: accepted only if there is no state.
    journal.set(b"two")
    # With the current token.
    _, second, _ = journal.set(b"two", first)
    # With a stale token, and with invalid ones.
    journal.set(b"three", first)
    for token in ("invalid", object(), 123456789, b"bm9uZQ==", "", None, 0):
        journal.set(b"three", token)
    journal.get()
    # Another node writes first.
    journal.set(b"theirs", second, by=journal.other)
    journal.set(b"ours", second)
    journal.get()
    journal.set(b"")
    journal.set("not bytes")  # type: ignore[arg-type]
    journal.set(b"\x00" * 100_000, journal.backend.get_state()[1])
    journal.get()


class TestDocumented:
    """Results and exceptions are the bare backend's."""

    def test_get_and_set(self, pair: tuple[Journal, Journal]) -> None:
        """Tokens are valid, stale and invalid, with and without a state."""
        bare, traced = pair

        documented(bare)
        documented(traced)

        assert traced.outcomes == bare.outcomes
        # Some of the outcomes are not errors.
        states = [outcome[0] for _, outcome in bare.outcomes if outcome is not None]
        assert {b"one", b"two", b"theirs", b"\x00" * 100_000} <= set(states)

    # The v3 API stores the bytes of a state as they are.
    @pytest.mark.parametrize(
        "kind", [b for b in BACKENDS if b != "etcd"], indirect=True
    )
    def test_corrupt(self, pair: tuple[Journal, Journal]) -> None:
        """A state that is not base64 raises RendezvousStateError."""
        for journal in pair:
            journal.rendezvous.corrupt()
            journal.get()
            journal.set(b"mine")
            journal.set(b"mine", "invalid")

        bare, traced = pair
        assert traced.outcomes == bare.outcomes
        assert bare.outcomes[0][0] is RendezvousStateError

    def test_keywords(self, pair: tuple[Journal, Journal]) -> None:
        """Arguments can be passed by torch's names."""
        for journal in pair:
            token = journal.backend.set_state(state=b"one")[1]
            assert journal.backend.set_state(token=token, state=b"two")[2] is True


class TestObject:
    """Other attributes are the wrapped backend's."""

    def test_name_and_attributes(self, pair: tuple[Journal, Journal]) -> None:
        """Name and attributes are the wrapped backend's."""
        bare, traced = pair

        assert traced.backend.name == bare.backend.name
        assert type(traced.backend._key) is str
        assert not hasattr(traced.backend, "no_such_thing")
        inner = type(bare.backend).__module__
        assert repr(traced.backend).startswith(f"TracedRendezvousBackend(<{inner}.")

    def test_wrapped_twice(
        self, pair: tuple[Journal, Journal], registry: CollectorRegistry
    ) -> None:
        """A traced backend is not traced twice."""
        backend = TracedRendezvousBackend(pair[1].backend)
        backend.get_state()

        kind = "rendezvous_" + backend.name.replace("-", "_")
        labels = {"store": kind, "operation": "get_state", "error_type": ""}
        name = "tracedstore_operation_duration_seconds_count"
        assert registry.get_sample_value(name, labels) == 1

    def test_not_a_backend(self) -> None:
        """Another type raises TypeError with its name."""
        with pytest.raises(TypeError, match="takes a RendezvousBackend, not HashStore"):
            TracedRendezvousBackend(dist.HashStore())  # type: ignore[arg-type]


class TestTelemetry:
    """Unparsable states and disabled telemetry do not change the results."""

    @pytest.mark.parametrize("state", [b"", b"not a pickle", pickle.dumps({"a": 1})])
    def test_other_states(self, pair: tuple[Journal, Journal], state: bytes) -> None:
        """A state that is not torch's is returned, and is no telemetry failure."""
        backend = pair[1].backend
        backend.set_state(state)

        assert backend.get_state()[0] == state
        assert RECORDER.failures.counts() == {}

    def test_disabled(
        self, pair: tuple[Journal, Journal], registry: CollectorRegistry
    ) -> None:
        """Calls work and are not counted."""
        tracedstore.configure(registry=registry, disabled=True)
        backend = pair[1].backend
        backend.set_state(b"one")

        assert backend.get_state()[0] == b"one"
        labels = {"backend": backend.name, "result": "accepted"}
        name = "tracedstore_rendezvous_state_writes_total"
        assert registry.get_sample_value(name, labels) == 0


class TestLostConnection:
    """A failing store raises RendezvousConnectionError."""

    @pytest.mark.parametrize(
        "error", [ValueError("v"), RuntimeError("r"), TimeoutError("t"), OSError("o")]
    )
    def test_c10d(self, error: Exception) -> None:
        """Exceptions are those of the bare backend, which does not convert all."""
        errors = []
        for trace in (lambda backend: backend, TracedRendezvousBackend):
            flaky = FlakyStore()
            backend = trace(C10dRendezvousBackend(flaky, "run"))
            flaky.fail("get", error)
            flaky.fail("compare_set", error)
            for call in (backend.get_state, lambda b=backend: b.set_state(b"state")):
                with pytest.raises(Exception) as raised:  # noqa: PT011 - compared below
                    call()
                errors.append((raised.type, str(raised.value), raised.value.__cause__))

        assert errors[:2] == errors[2:]
        expected = type(error) if type(error) is OSError else RendezvousConnectionError
        assert {kind for kind, *_ in errors} == {expected}


BAD_PARAMETERS = [
    ("c10d", {"store_type": "redis"}),
    ("c10d", {"read_timeout": "0"}),
    ("c10d", {"read_timeout": "soon"}),
    ("c10d", {"is_host": "perhaps"}),
    ("c10d", {"join_timeout": "0"}),
    ("c10d", {"keep_alive_interval": "often"}),
    ("etcd-v2", {"read_timeout": "-1"}),
    ("etcd-v2", {"protocol": "gopher"}),
    ("etcd-v2", {"last_call_timeout": "0"}),
]


class TestParameters:
    """torch parses the parameters of the traced backends."""

    @pytest.mark.parametrize(("name", "config"), BAD_PARAMETERS)
    def test_invalid(
        self, name: str, config: dict[str, str], etcd_server: EtcdServer
    ) -> None:
        """The error messages are torch's."""
        errors = []
        for backend in (name, f"traced-{name}"):
            endpoint = f"127.0.0.1:{etcd_server.port if 'etcd' in name else 0}"
            params = RendezvousParameters(backend, endpoint, "run", 1, 2, **config)
            with pytest.raises(ValueError, match=r".") as raised:
                rendezvous_handler_registry.create_handler(params)
            errors.append(str(raised.value))

        assert errors[0] == errors[1]

    def test_valid(self, tmp_path: Path, etcd_server: EtcdServer) -> None:
        """The settings and the store are equal."""
        timeouts = {
            "join_timeout": "11",
            "last_call_timeout": "12",
            "close_timeout": "13",
            "heartbeat_timeout": "14",
            "keep_alive_interval": "15",
            "keep_alive_max_attempt": "16",
            "read_timeout": "17",
        }
        endpoints = {
            "c10d": [
                ("127.0.0.1:0", {"is_host": "1"}),
                (str(tmp_path / "file"), {"store_type": "file"}),
            ],
            "etcd-v2": [(f"127.0.0.1:{etcd_server.port}", {"protocol": "http"})],
        }
        for name, cases in endpoints.items():
            for endpoint, config in cases:
                created = []
                for backend in (name, f"traced-{name}"):
                    params = RendezvousParameters(
                        backend, endpoint, "run", 2, 3, **config, **timeouts
                    )
                    handler: Any = rendezvous_handler_registry.create_handler(params)
                    settings = dict(vars(handler.settings))
                    timeout = vars(settings.pop("timeout"))
                    store = handler._store
                    client = getattr(store, "client", None)
                    created.append(
                        (settings, timeout, type(store), store.timeout)
                        + ((client.read_timeout, client.protocol) if client else ())
                    )
                    assert handler.get_backend() == backend
                    assert handler.get_run_id() == "run"

                assert created[0] == created[1]
