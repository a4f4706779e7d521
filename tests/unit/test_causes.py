"""The cause of a failed rendezvous, from the exceptions that libraries raise."""

import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise

import etcd
import pytest
import urllib3
from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from support.etcd import free_port
from tracedstore.common import causes
from tracedstore.common.causes import find_cause


def chained(*errors: BaseException) -> BaseException:
    """Chain exceptions by __cause__; return the first."""
    for outer, inner in pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


POOL = urllib3.HTTPConnectionPool("h")


class TestClassification:
    """The exception nearest to the root determines the cause."""

    @pytest.mark.parametrize(
        ("error", "cause"),
        [
            (socket.gaierror(-2, "Name or service not known"), "name_resolution"),
            (ConnectionRefusedError(111, "Connection refused"), "refused"),
            (OSError(113, "No route to host"), "unreachable"),
            (TimeoutError("timed out"), "no_answer"),
            (ConnectionResetError(104, "Connection reset by peer"), "connection_lost"),
            (urllib3.exceptions.ProtocolError("IncompleteRead"), "connection_lost"),
            (DistNetworkError("failed to send: Broken pipe"), "connection_lost"),
            (urllib3.exceptions.ReadTimeoutError(POOL, "/", "late"), "no_answer"),
            (ssl.SSLCertVerificationError(1, "expired"), "tls"),
            (etcd.EtcdException("Bad response : 404 page not found\n"), "v2_api_off"),
            (RendezvousStateError("corrupt"), "corrupt_state"),
            (RendezvousClosedError(), "closed"),
            (LookupError("Key MASTER_ADDR not found in EtcdStore"), "not_written"),
            (DistStoreError("wait timeout after 9ms, keys: /k"), "not_written"),
            (RuntimeError("Timeout waiting for key: k after 50 ms"), "not_written"),
            (
                DistNetworkError("The server socket has failed ... name: EADDRINUSE"),
                "address_in_use",
            ),
            (KeyError("what"), "unknown"),
        ],
        ids=lambda given: given if isinstance(given, str) else type(given).__name__,
    )
    def test_each(self, error: Exception, cause: str) -> None:
        """Each exception is classified below the exception that torch raises."""
        wrapped = chained(
            RendezvousConnectionError("See inner exception for details."), error
        )

        diagnosis = find_cause(wrapped)

        assert diagnosis.cause == cause
        assert len(diagnosis.chain) == 2
        assert bool(diagnosis.remedy) == (cause != "unknown")

    def test_chain(self) -> None:
        """The chain is listed from the raised exception to the root, with classes."""
        error = chained(
            RendezvousConnectionError("outer"),
            etcd.EtcdException("middle\nmore"),
            ConnectionRefusedError(111, "Connection refused"),
        )

        assert find_cause(error).chain == (
            "RendezvousConnectionError: outer",
            "EtcdException: middle",
            "ConnectionRefusedError: [Errno 111] Connection refused",
        )

    def test_context(self) -> None:
        """__context__ belongs to the chain, unless it is suppressed."""
        for suppress, expected in ((False, "refused"), (True, "unknown")):
            error = RendezvousError("outer")
            error.__context__ = ConnectionRefusedError()
            error.__suppress_context__ = suppress
            assert find_cause(error).cause == expected

    def test_cyclic_and_long_chains(self) -> None:
        """Cycles end, and long chains are cut."""
        first, second = RendezvousError("1"), RendezvousError("2")
        first.__cause__, second.__cause__ = second, first
        assert len(find_cause(first).chain) == 2

        long = chained(*(RendezvousError(str(number)) for number in range(50)))
        assert len(find_cause(long).chain) == 8

    def test_values_are_not_quoted(self) -> None:
        """A message that may contain a value is omitted."""
        assert find_cause(ValueError("secret")).chain == ("ValueError",)


class TestForeign:
    """Another program answers at the endpoint."""

    @pytest.fixture
    def answering(self) -> Iterator[int]:
        """A port where everything is answered as an HTTP server answers it."""

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=answer)
            thread.start()
            yield server.getsockname()[1]
            # Closing alone does not end accept().
            server.shutdown(socket.SHUT_RDWR)
            thread.join(60)
            assert not thread.is_alive()

    def test_tcpstore(self, answering: int) -> None:
        """The exception of this torch is classified."""
        with pytest.raises(RuntimeError) as raised:
            TCPStore(
                *("127.0.0.1", answering),
                is_master=False,
                timeout=timedelta(seconds=1),
            )

        assert find_cause(raised.value, ("127.0.0.1", answering)).cause == "foreign"


class TestProbe:
    """A TCPStore reports every failure as a timeout, so diagnose connects once more."""

    TIMED_OUT = DistNetworkError("The client socket has timed out after 9ms")

    @pytest.fixture
    def listening(self) -> Iterator[int]:
        """A port that accepts connections and sends nothing."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield server.getsockname()[1]

    def test_refused(self) -> None:
        """Nothing listens at the port."""
        assert find_cause(self.TIMED_OUT, ("127.0.0.1", free_port())).cause == "refused"

    def test_name_resolution(self) -> None:
        """The host does not exist."""
        diagnosis = find_cause(self.TIMED_OUT, ("no.such.host.invalid", 1))
        assert diagnosis.cause == "name_resolution"

    def test_no_answer(self, listening: int) -> None:
        """Another program listens at the port."""
        assert find_cause(self.TIMED_OUT, ("127.0.0.1", listening)).cause == "no_answer"

    def test_only_after_a_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the cause is known, diagnose does not connect."""
        monkeypatch.setattr(
            causes, "probe_endpoint", lambda *_: pytest.fail("connected")
        )
        refused = ConnectionRefusedError()
        assert find_cause(refused, ("127.0.0.1", 1)).cause == "refused"
