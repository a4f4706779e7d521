"""The HTTP endpoint of a process, with well-behaved and misbehaving clients."""

import errno
import http.client
import json
import os
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import tracedstore
from integration.harness import Child, in_background, wait_until
from support.certificates import Authority, Pair
from support.etcd import free_port
from support.events import Events, check
from support.stores import is_listening
from tracedstore.common.threads import DaemonThread
from tracedstore.export import http_server as server
from tracedstore.export.discovery import targets
from tracedstore.testing import FlakyStore

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Endpoint:
    """Configures the endpoint of this process, and requests its pages."""

    def __init__(self, registry: CollectorRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events

    def serve(self, **settings: Any) -> int:
        """Configure this process to serve, and return the port that its event has."""
        options: dict[str, Any] = {"http_port": 0, "log_format": "json"} | settings
        tracedstore.configure(registry=self._registry, **options)
        serving = [e for e in self._events() if e["event"] == "telemetry.serving"]
        check(serving[-1])
        self.port = int(serving[-1]["url"].split(":")[2].removesuffix("/metrics"))
        return self.port

    def get(self, path: str, **headers: str) -> tuple[int, str, bytes]:
        """Request a page, and return status, content type and body."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(client):
            client.request("GET", path, headers=headers)
            response = client.getresponse()
            content_type = response.getheader("Content-Type", "")
            return response.status, content_type, response.read()

    def alive(self) -> bool:
        """Return whether the endpoint responds."""
        try:
            return self.get("/healthz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False


@pytest.fixture
def endpoint(registry: CollectorRegistry, events: Events) -> Endpoint:
    """Return an endpoint that does not serve yet."""
    return Endpoint(registry, events)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set timeouts that a test can wait for."""
    monkeypatch.setattr(server, "_READ_TIMEOUT", 0.3)
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT", 0.6)


class TestPages:
    """The pages of the endpoint."""

    def test_metrics(self, endpoint: Endpoint) -> None:
        """/metrics has the text format by default."""
        endpoint.serve()
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        status, content_type, body = endpoint.get("/metrics")

        assert status == 200
        assert content_type.startswith("text/plain; version=")
        assert b'operation_duration_seconds_count{error_type="",operation="set"' in body

    def test_openmetrics(
        self, registry: CollectorRegistry, provider: TracerProvider, endpoint: Endpoint
    ) -> None:
        """/metrics has OpenMetrics with exemplars if the client accepts it."""
        endpoint.serve(tracer_provider=provider, spans="all")
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        _, content_type, body = endpoint.get("/metrics", Accept=OPENMETRICS)

        assert content_type.startswith("application/openmetrics-text")
        exemplars = [
            sample.exemplar
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
            if sample.exemplar
        ]
        assert "trace_id" in exemplars[0].labels

    def test_in_flight(self, endpoint: Endpoint) -> None:
        """/inflight has blocked calls, and barriers with their missing ranks."""
        endpoint.serve()
        store = tracedstore.wrap(dist.HashStore())

        def block() -> None:
            tracedstore.barrier(store, 2, "step/7", 20, rank=0, warn_after=0.01)

        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(block)
            status = wait_until(lambda: self._stalled(endpoint))
            tracedstore.barrier(store, 2, "step/7", 20, rank=1)
            blocked.result(60)

        # The watcher may be in a call too, in which it reads the missing ranks.
        (call,) = [c for c in status["in_flight"] if c["operation"] == "wait"]
        assert call["key"] == "step/7/last_member"
        assert call["waited_seconds"] > 0
        (barrier,) = status["barriers"]
        assert (barrier["barrier"], barrier["arrived_count"]) == ("step/*", 1)
        assert list(barrier["missing"].values()) == ["1"]
        assert status["process"]["pid"] == os.getpid()

    @staticmethod
    def _stalled(endpoint: Endpoint) -> dict[str, Any] | None:
        status: dict[str, Any] = json.loads(endpoint.get("/inflight")[2])
        return status if status["barriers"] and status["in_flight"] else None

    def test_discovery(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """/sd has every registered rank that serves, in Prometheus's format."""
        monkeypatch.setenv("TRACEDSTORE_RUN_ID", "job-7")
        monkeypatch.setenv("LOCAL_RANK", "0")
        port = endpoint.serve()
        store = tracedstore.wrap(dist.HashStore())
        tracedstore.barrier(store, 1, "b", rank=0)

        status, content_type, body = endpoint.get("/sd")

        assert (status, content_type) == (200, "application/json")
        assert json.loads(body) == [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {
                    "__scheme__": "http",
                    "run_id": "job-7",
                    "rank": "0",
                    "local_rank": "0",
                    "host": socket.gethostname(),
                },
            }
        ]

    def test_discovery_without_ranks(self, endpoint: Endpoint) -> None:
        """/sd is an empty list and no error, on which Prometheus keeps the old list."""
        endpoint.serve()

        assert json.loads(endpoint.get("/sd")[2]) == []

    def test_registered_before_serving(self, endpoint: Endpoint) -> None:
        """A rank that serves later registers again with its address."""
        store = dist.HashStore()
        tracedstore.barrier(store, 1, "b", rank=0)
        port = endpoint.serve()

        (target,) = json.loads(endpoint.get("/sd")[2])
        assert target["targets"] == [f"127.0.0.1:{port}"]

    def test_unknown_page(self, endpoint: Endpoint) -> None:
        """The 404 response lists the pages."""
        endpoint.serve()

        status, _, body = endpoint.get("/metricz")

        assert status == 404
        assert body.splitlines() == [
            b"there is:",
            b"/healthz",
            b"/inflight",
            b"/metrics",
            b"/metrics/ranks",
            b"/sd",
        ]


class TestPorts:
    """The port that the endpoint listens on."""

    def test_off_by_default(self, registry: CollectorRegistry) -> None:
        """The endpoint is off by default."""
        before = threading.active_count()
        tracedstore.configure(registry=registry)

        assert threading.active_count() == before

    def test_base_and_local_rank(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The port is the base port plus the local rank."""
        base = _free_port()
        monkeypatch.setenv("LOCAL_RANK", "2")

        assert base + 2 <= endpoint.serve(http_port=base) < base + 128

    def test_port_in_use(self, endpoint: Endpoint) -> None:
        """If the port is in use, the next free one is used."""
        with socket.create_server(("127.0.0.1", 0)) as other:
            port: int = other.getsockname()[1]

            assert port < endpoint.serve(http_port=port) < port + 128
            assert endpoint.alive()

    def test_all_addresses(self, endpoint: Endpoint) -> None:
        """An endpoint at all addresses of IPv6 answers at those of IPv4 too."""
        port = endpoint.serve(http_host="::")
        urls = [f"http://127.0.0.1:{port}/healthz"]
        with (
            suppress(OSError),
            socket.create_server(("::1", 0), family=socket.AF_INET6),
        ):
            urls.append(f"http://[::1]:{port}/healthz")

        for url in urls:
            with urllib.request.urlopen(url, timeout=60) as response:
                assert response.read() == b"ok\n"

    def test_all_addresses_without_ipv6(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a machine without IPv6, all addresses are those of IPv4."""
        original = server._Listener.server_bind

        def bind(listener: server._Listener) -> None:
            if listener.address_family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "no IPv6")
            original(listener)

        monkeypatch.setattr(server._Listener, "server_bind", bind)
        endpoint.serve(http_host="::")

        assert endpoint.alive()

    def test_advertised_address(self, endpoint: Endpoint) -> None:
        """The registry has the advertised address; localhost is served as well."""
        port = endpoint.serve(http_host="::", http_advertised_host="Pod.example")
        store = tracedstore.wrap(dist.HashStore())
        tracedstore.barrier(store, 1, "b", rank=0)

        (target,) = json.loads(endpoint.get("/sd", Host="localhost")[2])
        assert target["targets"] == [f"Pod.example:{port}"]
        assert endpoint.get("/sd", Host=f"pod.example:{port}")[0] == 200
        assert endpoint.get("/sd", Host="other.example")[0] == 421

    def test_invalid_address(self, registry: CollectorRegistry, events: Events) -> None:
        """An address that cannot be bound emits an event; the job continues."""
        tracedstore.configure(
            registry=registry, http_port=0, http_host="203.0.113.1", log_format="json"
        )
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        (event,) = [e for e in events() if e["event"] == "telemetry.disabled"]
        assert event["observer"] == "endpoint"

    def test_no_port_for_local_rank(
        self,
        registry: CollectorRegistry,
        events: Events,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A port beyond the last one is reported in one sentence; the job continues."""
        monkeypatch.setenv("LOCAL_RANK", "7")
        tracedstore.configure(registry=registry, http_port=65530, log_format="json")
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        (event,) = [e for e in events() if e["event"] == "telemetry.disabled"]
        assert event["observer"] == "endpoint"
        assert event["error"] == (
            "TRACEDSTORE_HTTP_PORT is 65530, and with the local rank 7 the port is"
            " 65537; set it to 65528 or less"
        )

    def test_no_thread_can_be_started(
        self, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing listens at a port that no thread serves."""

        def fail(_thread: DaemonThread) -> None:
            raise RuntimeError("can't start new thread")

        port = free_port()
        monkeypatch.setattr(DaemonThread, "start", fail)
        tracedstore.configure(registry=registry, http_port=port, log_format="off")

        assert not is_listening(port)

    def test_configure_again_and_shutdown(self, endpoint: Endpoint) -> None:
        """configure() keeps the port, and shutdown() frees it."""
        port = endpoint.serve()
        assert endpoint.serve(http_port=port) == port
        assert endpoint.alive()

        tracedstore.shutdown()

        assert not endpoint.alive()

    def test_forked_child_closes_socket(self, endpoint: Endpoint) -> None:
        """A forked child does not keep the port of its parent open."""
        port = endpoint.serve()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        try:
            tracedstore.shutdown()
            with socket.create_server(("127.0.0.1", port)):
                pass
        finally:
            os.close(writer)
            os.close(reader)
            os.waitpid(pid, 0)

    def test_requests_during_exit(self, tmp_path: Path) -> None:
        """Requests that arrive while a process ends do not change how it ends."""
        port = free_port()
        child = Child(tmp_path, "serving", port, env={})
        answered = [0] * 4

        def send_requests(number: int) -> None:
            while True:
                client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                try:
                    with closing(client):
                        client.request("GET", "/inflight")
                        client.getresponse().read()
                except (OSError, http.client.HTTPException):  # it has ended
                    return
                answered[number] += 1

        try:
            child.next_report()
            clients = [
                in_background(partial(send_requests, number)) for number in range(4)
            ]
            wait_until(lambda: all(answered), 30)
            child.close()

            assert child.exit_status() == 0
            for client in clients:
                client.result(240)
            assert "Traceback" not in child.errors()
        finally:
            child.kill()


class TestAccess:
    """Authentication."""

    @pytest.mark.parametrize(
        ("authorization", "status"),
        [
            ("Bearer hunter2", 200),
            ("Basic " + b64encode(b"user:secret").decode(), 200),
            # As a browser sends the token.
            ("Basic " + b64encode(b"anyone:hunter2").decode(), 200),
            ("basic " + b64encode(b":hunter2").decode(), 200),
            ("", 401),
            ("Bearer hunter3", 401),
            ("Bearer", 401),
            ("Basic " + b64encode(b"user:wrong").decode(), 401),
            ("Bearer \xe9", 401),
            ("Bearer user:secret", 401),
            ("Basic hunter2", 401),
            ("Basic " + b64encode(b"hunter2").decode(), 401),
            ("Basic " + b64encode(b"user:\xff").decode(), 401),
        ],
    )
    def test_credentials(
        self, endpoint: Endpoint, authorization: str, status: int
    ) -> None:
        """/metrics needs the token or the password; /healthz is public."""
        endpoint.serve(http_token="hunter2", http_basic_auth="user:secret")

        assert endpoint.get("/metrics", Authorization=authorization)[0] == status
        assert endpoint.get("/healthz")[0] == 200

    @pytest.mark.parametrize(
        ("host", "status"),
        [
            ("127.0.0.1:27400", 200),
            ("10.1.2.3", 200),
            ("[::1]:27400", 200),
            ("localhost", 200),
            (socket.gethostname().upper(), 200),
            ("metrics.cluster:27400", 200),
            ("attacker.example", 421),
            ("localhost.attacker.example", 421),
            ("[::1", 421),
            ("", 421),
        ],
    )
    def test_host_header(self, endpoint: Endpoint, host: str, status: int) -> None:
        """Only names of this machine, IP addresses and configured names are served."""
        endpoint.serve(http_hosts="metrics.cluster, other")

        assert endpoint.get("/metrics", Host=host)[0] == status

    @pytest.mark.parametrize("token", ["a b", "a\nb", "a\tb", "ä"])
    def test_token_that_no_header_can_carry(self, token: str) -> None:
        """The error does not show the token."""
        with pytest.raises(
            tracedstore.ConfigurationError, match="http_token is not shown here"
        ):
            tracedstore.configure(http_token=token)

    @pytest.mark.parametrize("name", ["http_key", "http_client_ca"])
    def test_tls_needs_certificate(self, name: str) -> None:
        """A key or a client CA without a certificate is rejected."""
        settings: dict[str, Any] = {name: "some.pem", "http_port": 0}

        with pytest.raises(tracedstore.ConfigurationError, match="HTTP_CERT; set that"):
            tracedstore.configure(**settings)


class TestTLS:
    """HTTPS and client certificates."""

    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        """Return a certificate authority."""
        return Authority(tmp_path, "authority")

    @staticmethod
    def _serve(endpoint: Endpoint, authority: Authority, **options: Any) -> None:
        pair = authority.sign("server")
        settings: dict[str, Any] = {"http_cert": pair.certificate, "http_key": pair.key}
        endpoint.serve(**settings, **options)

    @staticmethod
    def _get(
        endpoint: Endpoint, authority: Authority, client: Pair | None = None
    ) -> int:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        connection = http.client.HTTPSConnection(
            "127.0.0.1", endpoint.port, timeout=60, context=context
        )
        with closing(connection):
            connection.request("GET", "/metrics")
            return connection.getresponse().status

    def test_served(self, endpoint: Endpoint, authority: Authority) -> None:
        """Pages are served over HTTPS, and discovery has the https scheme."""
        self._serve(endpoint, authority)
        store = dist.HashStore()
        tracedstore.barrier(store, 1, "b", rank=0)

        assert self._get(endpoint, authority) == 200
        (target,) = targets()
        assert target["labels"]["__scheme__"] == "https"

    def test_plain_http_fails(self, endpoint: Endpoint, authority: Authority) -> None:
        """A plain HTTP request gets no response."""
        self._serve(endpoint, authority)

        with pytest.raises((OSError, http.client.HTTPException)):
            endpoint.get("/metrics")

    def test_client_certificates(
        self, endpoint: Endpoint, authority: Authority, tmp_path: Path
    ) -> None:
        """Only a valid client certificate of the configured CA is accepted."""
        self._serve(endpoint, authority, http_client_ca=authority.certificate)
        other_ca = Authority(tmp_path, "other-authority").sign("client-of-other")
        rejected = (None, other_ca, authority.sign("expired", expired=True))

        assert self._get(endpoint, authority, authority.sign("client")) == 200
        for client in rejected:
            with pytest.raises((OSError, http.client.HTTPException)):
                self._get(endpoint, authority, client)

    def test_invalid_files(self, authority: Authority, tmp_path: Path) -> None:
        """configure() raises ConfigurationError for files it cannot use."""
        pair, other = authority.sign("server"), authority.sign("other")
        junk = tmp_path / "junk.pem"
        junk.write_text("junk")
        invalid: list[dict[str, Any]] = [
            {"http_cert": "no-such-file.pem"},
            {"http_cert": junk},
            {"http_cert": pair.certificate, "http_key": other.key},
            {
                "http_cert": pair.certificate,
                "http_key": pair.key,
                "http_client_ca": junk,
            },
        ]

        for settings in invalid:
            with pytest.raises(tracedstore.ConfigurationError, match="cannot be used"):
                tracedstore.configure(http_port=0, **settings)


@pytest.mark.usefixtures("short_timeouts")
class TestAbuse:
    """Slow, blocked or hostile clients do not affect the job."""

    @pytest.fixture
    def served(self, endpoint: Endpoint) -> Iterator[Endpoint]:
        """Return an endpoint that serves."""
        endpoint.serve()
        yield endpoint
        wait_until(lambda: len(_request_threads()) == 0)

    def test_slow_loris(self, served: Endpoint) -> None:
        """A client that sends one byte at a time is disconnected."""
        stopped = threading.Event()

        def trickle() -> None:
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                try:
                    while not stopped.wait(0.05):
                        client.sendall(b"x")
                except OSError:
                    return
            raise AssertionError("the client was not disconnected")

        with ThreadPoolExecutor(8) as pool:
            clients = [pool.submit(trickle) for _ in range(8)]
            try:
                wait_until(served.alive)
                for client in clients:
                    client.result(60)
            finally:
                stopped.set()

    def test_silent_clients(self, served: Endpoint) -> None:
        """Clients that connect and send nothing are disconnected."""
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", served.port))
                )

            assert wait_until(served.alive)

    def test_endless_headers(self, served: Endpoint) -> None:
        """Endless headers are not read to their end."""
        endless = b"X" * 100_000_000
        with (
            socket.create_connection(("127.0.0.1", served.port)) as client,
            pytest.raises(OSError, match=r"reset|pipe"),
        ):
            client.sendall(endless)

        assert wait_until(served.alive)

    @pytest.mark.parametrize(
        "sent",
        [b"\0" * 100, b"GET\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02"],
        ids=["zeros", "no path", "post", "tls"],
    )
    def test_invalid_requests(
        self, served: Endpoint, sent: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Invalid requests get an error or no response, and nothing is printed."""
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.settimeout(20)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            reply = client.recv(100)

        assert reply == b"" or b" 4" in reply or b" 5" in reply or b"<" in reply
        assert served.alive()
        assert "Traceback" not in capsys.readouterr().err

    def test_thousand_connections(self, served: Endpoint) -> None:
        """1000 connections use at most eight threads, and store calls succeed."""
        store = tracedstore.wrap(dist.HashStore())
        with ExitStack() as stack:
            for _ in range(1000):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", served.port))
            max_threads = 0
            for _ in range(1000):
                store.set("k", "v")
                max_threads = max(max_threads, len(_request_threads()))

        assert max_threads <= 8
        assert wait_until(served.alive)

    def test_no_thread_can_be_started(
        self, served: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Connections are closed without a word, and served when there are threads."""

        def fail(_thread: DaemonThread) -> None:
            raise RuntimeError("can't start new thread")

        # What writes a traceback to standard error.
        written: list[Any] = []
        monkeypatch.setattr(
            server._Listener, "handle_error", lambda *args: written.append(args)
        )
        with monkeypatch.context() as patch:
            patch.setattr(DaemonThread, "start", fail)
            assert not any(served.alive() for _ in range(10))

        assert served.alive()
        assert not written

    def test_store_hangs(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hanging store delays discovery and no other page."""
        from tracedstore.export import http_endpoint

        monkeypatch.setattr(http_endpoint, "_RENDER_TIMEOUT", 0.05)
        endpoint.serve()
        release, entered = threading.Event(), threading.Event()
        store = FlakyStore()
        tracedstore.barrier(store, 1, "b", rank=0)

        def hang() -> None:
            entered.set()
            release.wait(60)

        store.before("check", hang)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(endpoint.get, "/sd")
            assert entered.wait(60)

            assert endpoint.get("/sd")[0] == 503
            assert endpoint.get("/metrics")[0] == 200
            release.set()
            assert first.result(60)[0] == 200

    def test_store_does_not_respond(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Reading a hanging store times out, and is not repeated while it runs."""
        from tracedstore.export import discovery, http_endpoint

        monkeypatch.setattr(discovery, "_READ_TIMEOUT", 0.05)
        monkeypatch.setattr(http_endpoint, "_TARGETS_MAX_AGE", 0.0)
        release = threading.Event()
        hanging, working = FlakyStore(), dist.HashStore()
        endpoint.serve()
        tracedstore.barrier(hanging, 1, "b", rank=0)
        tracedstore.barrier(working, 1, "b", rank=0)
        hanging.before("check", lambda: _wait(release), times=9)
        try:
            for _ in range(3):
                assert len(json.loads(endpoint.get("/sd")[2])) == 1
            threads = [thread.name for thread in threading.enumerate()]
            assert threads.count("tracedstore-bounded") == 1
        finally:
            release.set()


def _wait(event: threading.Event) -> None:
    event.wait(60)


def _request_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.endswith("http-request")]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_jobs_are_separate(endpoint: Endpoint) -> None:
    """/sd has no ranks from the registry of another job's store."""
    endpoint.serve()
    this, other = tracedstore.wrap(dist.HashStore()), tracedstore.wrap(dist.HashStore())
    other.set("tracedstore/RANKS/0", '{"rank": 0, "host": "elsewhere"}')
    tracedstore.barrier(this, 1, "b", rank=0)

    (target,) = json.loads(endpoint.get("/sd")[2])
    assert target["labels"]["host"] == socket.gethostname()
