"""The probe of a TCPStore without torch uses torch's own protocol."""

import socket
from datetime import timedelta
from threading import Thread

import pytest
import torch.distributed as dist

from tracedstore.diagnosis.connection import connection_attempt
from tracedstore.tools.attach.address import Address


@pytest.fixture(params=[True, False], ids=["libuv", "legacy"])
def store(request: pytest.FixtureRequest) -> dist.TCPStore:
    """Serve a TCPStore of either kind."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=request.param
    )


def test_tcpstore(store: dist.TCPStore) -> None:
    """A TCPStore answers, and has no key that it had not before."""
    before = store.num_keys()
    with socket.create_connection(("127.0.0.1", store.port), timeout=60) as connection:
        assert connection_attempt.probe_tcpstore(connection)

    assert store.num_keys() == before


def test_request_is_that_of_torch() -> None:
    """A client of torch begins with the same bytes, except for its own number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = Thread(target=_connect, args=(server.getsockname()[1],))
        client.start()
        connection, _ = server.accept()
        with connection:
            request = connection.recv(
                len(connection_attempt._PROBE_REQUEST), socket.MSG_WAITALL
            )
        # The client retries, fails, and times out.
        server.shutdown(socket.SHUT_RDWR)
    client.join(60)

    assert request[:6] == connection_attempt._PROBE_REQUEST[:6]
    assert len(request) == len(connection_attempt._PROBE_REQUEST)


def _connect(port: int) -> None:
    with pytest.raises(dist.DistError):
        dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=0.5)
        )


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"-ERR\r\n", False),
        (b"12", False),
        (b"\x15\x03\x03\x00\x02", None),
        (b"\x01\x00\x00\x00", None),
        (b"", None),
    ],
    ids=["http", "redis", "cut text", "tls", "other number", "hung up"],
)
def test_another_server(answer: bytes, result: bool | None) -> None:
    """A server that answers in text is another one; of the rest only torch can tell."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)

        assert connection_attempt.probe_tcpstore(ours) is result


def test_reset_connection() -> None:
    """A server that closes the connection without reading may be a later TCPStore."""
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        assert connection_attempt.probe_tcpstore(ours) is None


def test_unknown_answer() -> None:
    """After an answer that only torch can read, torch connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(
                    len(connection_attempt._PROBE_REQUEST), socket.MSG_WAITALL
                )
                connection.sendall(b"\x01\x00\x00\x00")

        thread = Thread(target=serve)
        thread.start()

        Address(f"tcp://127.0.0.1:{server.getsockname()[1]}").check_reachable()

        thread.join(60)
