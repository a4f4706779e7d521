"""The greeting of a TCPStore without torch is the one that torch has."""

import socket
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from threading import Thread

import pytest
import torch.distributed as dist

from tracedstore.attach import tcpstore_probe


@pytest.fixture(params=[True, False], ids=["libuv", "legacy"])
def store(request: pytest.FixtureRequest) -> dist.TCPStore:
    """A real one, of either kind."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )


def test_a_tcp_store(store: dist.TCPStore) -> None:
    """It answers, and has nothing in it that it had not before."""
    before = store.num_keys()
    with socket.create_connection(("127.0.0.1", store.port), timeout=10) as connection:
        assert tcpstore_probe.greet(connection)

    assert store.num_keys() == before


def test_as_torch_does() -> None:
    """Torch's client begins with the same bytes, but for the number it chose."""
    assert tcpstore_probe.is_known()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Thread(target=_connect, args=(server.getsockname()[1],))
        client.start()
        connection, _ = server.accept()
        with connection:
            heard = connection.recv(len(tcpstore_probe._GREETING), socket.MSG_WAITALL)
        # It tries again, in vain, and gives up.
        server.shutdown(socket.SHUT_RDWR)
    client.join(30)

    assert heard[:6] == tcpstore_probe._GREETING[:6]
    assert len(heard) == len(tcpstore_probe._GREETING)


def _connect(port: int) -> None:
    with pytest.raises(dist.DistError):
        dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.5)
        )


@pytest.mark.parametrize(
    "answer",
    [
        lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda client: client.sendall(b"12"),
        lambda client: None,
    ],
    ids=["other", "cut", "hung up"],
)
def test_something_else(answer: Callable[[socket.socket], object]) -> None:
    """Is not taken for one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answer(theirs)
        theirs.shutdown(socket.SHUT_WR)

        assert not tcpstore_probe.greet(ours)


def test_a_connection_that_is_reset() -> None:
    """Nor is who ends it without having read."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        assert not tcpstore_probe.greet(ours)


@pytest.mark.parametrize(
    ("found", "known"),
    [("2.6.0", True), ("2.13.1+cpu", True), ("2.14.0", False), ("3.0a0", False)],
)
def test_other_versions(
    monkeypatch: pytest.MonkeyPatch, found: str, known: bool
) -> None:
    """Of a later torch nothing is assumed."""
    monkeypatch.setattr(tcpstore_probe, "version", lambda _: found)

    assert tcpstore_probe.is_known() is known


def test_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is not installed as a package neither."""

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tcpstore_probe, "version", unknown)

    assert not tcpstore_probe.is_known()
