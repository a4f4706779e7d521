"""The probe of a TCPStore without torch uses torch's own protocol."""

import socket
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError
from threading import Thread

import pytest
import torch.distributed as dist

from tracedstore.diagnosis import tcpstore_probe


@pytest.fixture(params=[True, False], ids=["libuv", "legacy"])
def store(request: pytest.FixtureRequest) -> dist.TCPStore:
    """Serve a TCPStore of either kind."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )


def test_tcpstore(store: dist.TCPStore) -> None:
    """A TCPStore answers, and has no key that it had not before."""
    before = store.num_keys()
    with socket.create_connection(("127.0.0.1", store.port), timeout=10) as connection:
        assert tcpstore_probe.probe(connection)

    assert store.num_keys() == before


def test_request_is_that_of_torch() -> None:
    """A client of torch begins with the same bytes, except for its own number."""
    assert tcpstore_probe.is_supported()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Thread(target=_connect, args=(server.getsockname()[1],))
        client.start()
        connection, _ = server.accept()
        with connection:
            request = connection.recv(len(tcpstore_probe._REQUEST), socket.MSG_WAITALL)
        # The client retries, fails, and times out.
        server.shutdown(socket.SHUT_RDWR)
    client.join(30)

    assert request[:6] == tcpstore_probe._REQUEST[:6]
    assert len(request) == len(tcpstore_probe._REQUEST)


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
def test_another_server(answer: Callable[[socket.socket], object]) -> None:
    """Another server is not taken for a TCPStore."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        answer(theirs)
        theirs.shutdown(socket.SHUT_WR)

        assert not tcpstore_probe.probe(ours)


def test_reset_connection() -> None:
    """A server that closes the connection without reading is not a TCPStore."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        assert not tcpstore_probe.probe(ours)


@pytest.mark.parametrize(
    ("installed", "supported"),
    [("2.6.0", True), ("2.13.1+cpu", True), ("2.14.0", False), ("3.0a0", False)],
)
def test_versions(
    monkeypatch: pytest.MonkeyPatch, installed: str, supported: bool
) -> None:
    """Nothing is assumed about a later torch."""
    monkeypatch.setattr(tcpstore_probe, "version", lambda _: installed)

    assert tcpstore_probe.is_supported() is supported


def test_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is assumed about a torch that is not installed as a package."""

    def unknown(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(tcpstore_probe, "version", unknown)

    assert not tcpstore_probe.is_supported()
