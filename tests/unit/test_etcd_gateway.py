"""The client of etcd's JSON API with servers that fail in a certain way.

A real etcd cannot be made to send these answers, so a script does.
"""

import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from torch.distributed import DistStoreError

from integration.harness import in_background, wait_until
from support.certificates import Authority
from tracedstore.common.errors import ConfigurationError
from tracedstore.etcd import (
    EtcdDeniedError,
    EtcdError,
    EtcdOutcomeUnknownError,
    EtcdUnreachableError,
    EtcdV3Store,
    Tls,
    gateway,
)
from tracedstore.etcd.etcd_errors import EtcdCompactedError, connection_failure
from tracedstore.etcd.gateway import text
from tracedstore.etcd.http_pool import parse_endpoints
from tracedstore.etcd.namespace import Namespace, number_in

SILENT = b"silent"
CLOSE = b""


def answer(message: object, status: int = 200) -> bytes:
    """Return an HTTP answer."""
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


FOUND = answer(
    {"header": {"revision": "5"}, "count": "1", "kvs": [{"key": text(b"k")}]}
)
APPLIED = answer({"header": {"revision": "6"}, "succeeded": True})
NO_USERS = answer({"error": "authentication is not enabled", "code": 9}, 400)


def _read_head(file: Any) -> str:
    """Return the first line and the headers of a request, "" at the end."""
    lines = []
    # readline() returns nothing at the end, each time.
    while (line := file.readline()) not in (b"", b"\r\n"):
        lines.append(line)
    return b"".join(lines).decode()


class Server:
    """Answers each request with the next answer of a script, then with the last one.

    Attributes:
        address: Its address.
        requests: The first line and the headers of each request.
    """

    def __init__(self, *script: bytes) -> None:
        self._script = list(script)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(connection,), daemon=True
                ).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            file = connection.makefile("rb")
            while head := _read_head(file):
                length = re.search(r"Content-Length: (\d+)", head)
                file.read(int(length[1]) if length else 0)
                self.requests.append(head)
                script = self._script
                sent = script.pop(0) if len(script) > 1 else script[0]
                if sent == SILENT:
                    file.read(1)  # until the client closes the connection
                if sent in (SILENT, CLOSE):
                    return
                connection.sendall(sent)

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            # Ends the thread, which a close alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    """Return a function that starts servers."""
    servers: list[Server] = []

    def serve(*script: bytes) -> Server:
        servers.append(Server(*script))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def connect(*servers: Server, **options: Any) -> Any:
    """Return a store that uses the first server first."""
    store = EtcdV3Store([server.address for server in servers], "job", **options)
    store._gateway._index = 0
    return store


_WRONG: list[dict[str, Any]] = [
    {"kvs": 1},
    {"kvs": [1]},
    {"kvs": [{"key": "a"}]},
    {"kvs": [{"key": 1}]},
    {"kvs": [{"value": "\udcff"}]},
    {"kvs": [{"version": {}}]},
    {"kvs": [{"version": "9" * 5000}]},
    {"header": []},
    {"header": {"revision": "x"}},
    {"header": {"revision": 1e300}},
    {"count": "many"},
    {"deleted": None},
    {"succeeded": "no"},
    {"responses": {"response_range": 1}},
    {"responses": [{"response_range": 1}]},
    {"succeeded": True},
]
HOSTILE: list[bytes] = [
    b"[]",
    b"[" * 100_000,
    b'{"kvs":' + b'[{"kv":' * 50_000,
    b'{"header":{"x":' + b"[" * 900 + b"]" * 900 + b"}}",
    *(json.dumps(each).encode() for each in _WRONG),
]


class TestHostileAnswers:
    """Whatever a server sends, a call returns or raises a DistStoreError."""

    @pytest.mark.parametrize("number", range(len(HOSTILE)))
    def test_every_operation(self, serve: Any, number: int) -> None:
        """No other exception leaves the store."""
        server = serve(answer(HOSTILE[number]))
        store = connect(server, timeout=timedelta(seconds=0.1))
        calls = [
            lambda: store.get("k"),
            lambda: store.multi_get(["k", "l"]),
            lambda: store.check(["k", "l"]),
            lambda: store.add("k", 1),
            lambda: store.add("k", 2),
            lambda: store.compare_set("k", "", "v"),
            lambda: store.delete_key("k"),
            store.list_keys,
            lambda: store.queue_len("k"),
            lambda: store.queue_pop("k", False),
        ]

        for call in calls:
            with suppress(DistStoreError):
                call()

    def test_write_is_unknown(self, serve: Any) -> None:
        """A write whose answer makes no sense may have been applied."""
        store = connect(serve(answer({"succeeded": "perhaps"})))

        with pytest.raises(EtcdOutcomeUnknownError, match="does not answer as etcd"):
            store.set("k", "v")

    def test_missing_response(self, serve: Any) -> None:
        """A sum is not made up from an answer without the counter."""
        store = connect(serve(APPLIED))

        with pytest.raises(EtcdError, match="does not answer all reads"):
            store.add("k", 1)

    @pytest.mark.parametrize("token", ["a\r\nX: b", "a\N{BULLET}", 7, "a" * 20_000])
    def test_token(self, serve: Any, token: object) -> None:
        """A token that is no header is not sent."""
        server = serve(answer({"token": token}), FOUND)

        with pytest.raises(EtcdError):
            connect(server, user="u", password="p").check(["k"])

        assert len(server.requests) == 1

    def test_control_characters(self, serve: Any) -> None:
        """A text of the server cannot forge a line of a log."""
        server = serve(answer({"error": "bad\nWARNING: forged", "code": 3}, 400))

        with pytest.raises(EtcdError) as caught:
            connect(server).set("k", "v")

        assert str(caught.value).isprintable()

    @pytest.mark.parametrize(
        "sent",
        [
            b"HTTP/1.1 200 x\r\nX: " + b"x" * 200_000,
            b"HTTP/1.1 200 x\r\n" + b"X: x\r\n" * 20_000,
            b"HTTP/1.1 200 x\r\nContent-Length: 99999999999\r\n\r\n",
            b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
            b"HTTP/1.1 200 x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
            + b"X: x\r\n" * 20_000,
            b"SSH-2.0-x\r\n",
        ],
    )
    def test_no_http(self, serve: Any, sent: bytes) -> None:
        """An answer without an end is not read to its end."""
        with pytest.raises(EtcdUnreachableError, match=r"HTTP|too long"):
            connect(serve(sent)).check(["k"])


class TestVersions:
    """The text names the reason why there is no v3 API."""

    @pytest.mark.parametrize(
        ("version", "reason"),
        [
            ({"etcdserver": "3.3.27"}, "this is etcd 3.3.27, and 3.4 is the first"),
            ({"etcdserver": "3.5.1"}, "--enable-grpc-gateway=false"),
            ({"etcdserver": "3." + "5" * 5000}, "it is another server"),
            ({"etcdserver": "3.5\nforged"}, "it is another server"),
            ([], "it is another server"),
        ],
    )
    def test_no_such_path(self, serve: Any, version: object, reason: str) -> None:
        """A server answers 404."""
        server = serve(answer(b"404 page not found", 404), answer(version))

        with pytest.raises(EtcdError, match=reason):
            connect(server).set("k", "v")


class TestFailover:
    """Which requests are repeated, and where."""

    def test_next_write_goes_to_another_member(self, serve: Any) -> None:
        """After a lost answer the next write does not try the same member again."""
        broken, good = serve(CLOSE), serve(APPLIED)
        store = connect(broken, good)

        with pytest.raises(EtcdOutcomeUnknownError):
            store.set("k", "v")
        store.set("k", "v")

        assert (len(broken.requests), len(good.requests)) == (1, 1)

    def test_proxy_without_server(self, serve: Any) -> None:
        """A read waits for a server behind a proxy; a write is not repeated."""
        gone = answer(b"<html>no healthy upstream", 503)
        store = connect(serve(FOUND, gone, FOUND, gone, FOUND))
        store.check(["k"])

        assert store.check(["k"])
        with pytest.raises(EtcdOutcomeUnknownError):
            store.set("k", "v")

    def test_unknown_error_of_the_server(self, serve: Any) -> None:
        """A write that failed inside the server may have been applied."""
        store = connect(serve(answer({"error": "internal", "code": 13}, 500)))

        with pytest.raises(EtcdOutcomeUnknownError, match="internal"):
            store.set("k", "v")

    def test_log_in_without_users(self, serve: Any) -> None:
        """A server that has no users is asked for a token once, until it has some."""
        empty = answer({"error": "etcdserver: user name is empty", "code": 3}, 400)
        token = answer({"token": "t.1"})
        server = serve(NO_USERS, FOUND, FOUND, empty, token, FOUND)
        store = connect(server, user="u", password="p")

        for _ in range(3):
            assert store.check(["k"])

        paths = [request.split()[1].rpartition("/")[2] for request in server.requests]
        assert paths == [
            *("authenticate", "range", "range", "range", "authenticate", "range")
        ]
        assert "Authorization: t.1" in server.requests[-1]

    def test_token_of_another_thread_is_kept(self, serve: Any) -> None:
        """A thread with an old token does not discard the new one."""
        client = gateway.Gateway(parse_endpoints(serve(FOUND).address, secure=False))
        client._token = "new"

        client._forget("old")

        assert client._token == "new"

    def test_leader_is_always_required(self, serve: Any) -> None:
        """Every request to the API asks for a leader, a log-in and a watch too."""
        server = serve(answer({"token": "t.1"}), answer({}), SILENT)
        store = connect(server, user="u", password="p")
        call = in_background(lambda: store.get("k"))
        wait_until(lambda: len(server.requests) == 3)
        store.close()

        with pytest.raises(EtcdError, match="closed"):
            call.result(60)
        for request in server.requests:
            assert "Grpc-Metadata-hasleader: true" in request

    def test_canceled_watches(self, serve: Any) -> None:
        """A server that ends every watch is not asked without a pause."""
        canceled = json.dumps({"result": {"canceled": True}}).encode() + b"\n"
        watch = (
            b"HTTP/1.1 200 x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(canceled), canceled)
        )
        server = serve(*[answer({}), watch] * 500)
        store = connect(server, timeout=timedelta(seconds=1))

        with pytest.raises(DistStoreError, match="Wait timeout"):
            store.get("k")

        # One pause of 0.2 s for each pair.
        assert len(server.requests) < 16


class TestClose:
    """close() ends what other threads wait for, in this process only."""

    def test_in_forked_child(self, serve: Any) -> None:
        """A child that closes the store leaves its parent's calls alone."""
        server = serve(answer({}), SILENT)
        store = connect(server)
        call = in_background(lambda: store.get("never"))
        wait_until(lambda: len(server.requests) == 2)
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)

        with pytest.raises(TimeoutError):
            call.result(0.3)
        assert len(server.requests) == 2
        store.close()
        with pytest.raises(EtcdError, match="closed"):
            call.result(60)

    @pytest.mark.parametrize("tls", [None, ssl.create_default_context()])
    def test_while_connecting(self, tls: ssl.SSLContext | None) -> None:
        """A connection that is not accepted, or whose TLS is not answered, ends."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            address = listener.getsockname()
            others = []
            if tls is None:  # fill the queue
                for _ in range(3):
                    others.append(socket.socket())
                    others[-1].setblocking(False)
                    others[-1].connect_ex(address)
            store = EtcdV3Store(f"127.0.0.1:{address[1]}", "job", tls=tls)
            call = in_background(lambda: store.get("k"))
            wait_until(
                lambda: any(
                    hasattr(each, "_socket")
                    for each in list(store._gateway._pool._own().busy)
                )
            )
            time.sleep(0.1)  # no event says that the kernel is connecting

            store.close()

            with pytest.raises(EtcdError, match="closed"):
                call.result(60)
            for each in others:
                each.close()


class TestSettings:
    """Settings that cannot be used are refused in one sentence."""

    @pytest.mark.parametrize(
        "endpoint",
        ["http://user:pass@host:1", "user:pass@host", "h:1?x=pass", "a" * 64],
    )
    def test_endpoints(self, endpoint: str) -> None:
        """A password is not repeated."""
        with pytest.raises(ConfigurationError, match="etcd endpoint") as caught:
            EtcdV3Store(endpoint, "job")

        assert "user:pass" not in str(caught.value)

    def test_international_host(self) -> None:
        """A host name is sent as DNS has it."""
        (endpoint,) = parse_endpoints("bücher.example:1", secure=False)

        assert str(endpoint) == "xn--bcher-kva.example:1"
        assert str(parse_endpoints("[::1]:7", secure=False)[0]) == "[::1]:7"

    def test_key_with_password(self, tmp_path: Path) -> None:
        """Nobody is asked for it on a terminal."""
        pair = Authority(tmp_path, "authority").sign("client")
        key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(b"secret"),
            )
        )

        with pytest.raises(ConfigurationError, match="has a password"):
            EtcdV3Store("h", "job", tls=Tls(cert=pair.certificate, key=pair.key))

    def test_files(self, tmp_path: Path) -> None:
        """A key without a certificate, and a file that is no certificate."""
        (tmp_path / "text.pem").write_text("text")

        with pytest.raises(ConfigurationError, match="no certificate for it"):
            EtcdV3Store("h", "job", tls=Tls(key="key.pem"))
        with pytest.raises(ConfigurationError, match="not a certificate, or not its"):
            EtcdV3Store("h", "job", tls=Tls(ca_cert=tmp_path / "text.pem"))


def test_certificate_not_yet_valid() -> None:
    """The text points to the clocks, not to the authority."""
    error = ssl.SSLCertVerificationError(1, "certificate is not yet valid")
    error.verify_code = 9

    failure = connection_failure("h:1", error, sent=False)

    assert isinstance(failure.error, EtcdDeniedError)
    assert "not valid yet; compare the clocks" in str(failure.error)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b"", 0),
        (b" -12x", -12),
        (b"0", 0),
        (b"-0007", -7),
        (b"0" * 5000 + b"7", 7),
        (b"9223372036854775807", 2**63 - 1),
        (b"9223372036854775808", None),
        (b"9" * 5000, None),
        (b"x", None),
    ],
)
def test_number(value: bytes, number: int | None) -> None:
    """A number of more than 64 bits is none, as in torch's stores."""
    assert number_in(value) == number


def test_listing_begins_again_after_a_compaction() -> None:
    """A listing whose revision is compacted between two pages is complete."""
    page = {"header": {"revision": "5"}, "kvs": [{"key": text(b"a")}], "more": True}
    last = {"header": {"revision": "9"}, "kvs": [{"key": text(b"b")}]}
    script: list[Any] = [page, EtcdCompactedError("compacted"), page, last]

    class Script:
        def call(
            self, method: str, request: Mapping[str, Any], deadline: float, **_: Any
        ) -> Any:
            given = script.pop(0)
            if isinstance(given, Exception):
                raise given
            return given

    transport: Any = Script()

    assert Namespace("job", transport).scan() == [b"a", b"b"]
