"""The serving rank while it waits for its clients, with a real server."""

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from integration.harness import in_background, wait_until
from support.etcd import free_port
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.connection import connecting, connection_attempt
from tracedstore.diagnosis.connection.addresses import ConnectTarget

WORLD_SIZE = 4
TIMEOUT = timedelta(seconds=60)


@pytest.fixture
def target() -> Iterator[ConnectTarget]:
    """A server that waits for four clients; all have joined after the test."""
    port = free_port()
    serving_store: Future[TCPStore] = in_background(
        lambda: TCPStore("127.0.0.1", port, WORLD_SIZE, True, TIMEOUT)
    )
    wait_until(lambda: connection_attempt.count_joined(port) == 1)
    yield ConnectTarget(
        host="127.0.0.1",
        port_text=str(port),
        rank=0,
        world_size=WORLD_SIZE,
        serving=True,
    )
    for _ in range(WORLD_SIZE - (connection_attempt.count_joined(port) or 0)):
        TCPStore("127.0.0.1", port, WORLD_SIZE, False, TIMEOUT)
    serving_store.result(60)


def join(target: ConnectTarget, rank: int) -> TCPStore:
    """Join as a traced rank does."""
    client = TCPStore("127.0.0.1", target.port, WORLD_SIZE, False, TIMEOUT)
    rank_registry.register_early(client, rank, WORLD_SIZE)
    return client


def test_rank_that_joins_while_others_are_asked(
    target: ConnectTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking takes seconds: a rank that connects in them is not named."""
    clients = [join(target, 1)]

    def ask(*_args: Any, **_kwargs: Any) -> dict[int, Any]:
        clients.append(join(target, 3))
        return {}

    monkeypatch.setattr(connecting, "ask_ranks", ask)
    reached = connection_attempt.connect_once(target, {})

    verdict = connecting.ServerSide(target, 0.0).verdict(reached, 5.0)

    assert verdict is not None
    assert (verdict.cause, verdict.awaited_ranks) == ("not_started", (2,))
    assert "3 of 4 clients joined" in verdict.evidence[0]


def test_rank_that_joins_before_it_registers(
    target: ConnectTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without an entry may be any rank: none of them is named."""
    monkeypatch.setattr(connecting, "_REGISTRATION_DELAYS", (0.01,))
    # After the clients were counted for the first time.
    reached = connection_attempt.connect_once(target, {})
    client = TCPStore("127.0.0.1", target.port, WORLD_SIZE, False, TIMEOUT)

    verdict = connecting.ServerSide(target, 0.0).verdict(reached, 5.0)

    assert client.port == target.port
    assert verdict is not None
    assert (verdict.cause, verdict.awaited_ranks) == ("unknown", ())
    assert verdict.known == (
        "no entry in the store: ranks 1-3, of which 1 joined untraced"
    )
