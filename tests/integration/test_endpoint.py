"""The HTTP endpoint of a process, asked by clients good and bad."""

import http.client
import json
import os
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import tracedstore
from integration.harness import wait_until
from support.certificates import Authority, Pair
from support.events import Events, check
from tracedstore.export import server
from tracedstore.export.discovery import targets
from tracedstore.testing import FlakyStore

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Endpoint:
    """The endpoint of this process, as a client sees it."""

    def __init__(self, registry: CollectorRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events

    def serve(self, **settings: Any) -> int:
        """Configure this process to serve, and give the port it says it has."""
        chosen: dict[str, Any] = {"http_port": 0, "log_format": "json"} | settings
        tracedstore.configure(registry=self._registry, **chosen)
        serving = [one for one in self._events() if one["event"] == "telemetry.serving"]
        check(serving[-1])
        self.port = int(serving[-1]["url"].split(":")[2].removesuffix("/metrics"))
        return self.port

    def get(self, path: str, **headers: str) -> tuple[int, str, bytes]:
        """Ask for a page; give status, content type and body."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with closing(client):
            client.request("GET", path, headers=headers)
            answer = client.getresponse()
            return answer.status, answer.getheader("Content-Type", ""), answer.read()

    def alive(self) -> bool:
        """Tell whether it answers."""
        try:
            return self.get("/healthz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False


@pytest.fixture
def endpoint(registry: CollectorRegistry, events: Events) -> Endpoint:
    """Not serving yet."""
    return Endpoint(registry, events)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test can wait for."""
    monkeypatch.setattr(server, "_READ_TIMEOUT", 0.3)
    monkeypatch.setattr(server, "_REQUEST_TIMEOUT", 0.6)


class TestPages:
    """What is where."""

    def test_metrics(self, endpoint: Endpoint) -> None:
        """As text, by default."""
        endpoint.serve()
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        status, content_type, body = endpoint.get("/metrics")

        assert status == 200
        assert content_type.startswith("text/plain; version=")
        assert b'tracedstore_operations_in_flight{operation="set"' in body

    def test_openmetrics(
        self, registry: CollectorRegistry, provider: TracerProvider, endpoint: Endpoint
    ) -> None:
        """With exemplars, for those that ask for it."""
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
        """What is blocked, since when, where, and which barrier lacks whom."""
        endpoint.serve()
        store = tracedstore.wrap(dist.HashStore())

        def stay() -> None:
            tracedstore.barrier(store, 2, "step/7", 20, rank=0, warn_after=0.01)

        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(stay)
            found = wait_until(lambda: self._stalled(endpoint))
            tracedstore.barrier(store, 2, "step/7", 20, rank=1)
            staying.result(10)

        # Whoever looks for the missing may be in a call as well.
        (call,) = [one for one in found["in_flight"] if one["operation"] == "wait"]
        assert call["key"] == "step/7/last_member"
        assert call["waited_seconds"] > 0
        (barrier,) = found["barriers"]
        assert (barrier["barrier"], barrier["arrived_count"]) == ("step/*", 1)
        assert list(barrier["missing"].values()) == ["1"]
        assert found["process"]["pid"] == os.getpid()

    @staticmethod
    def _stalled(endpoint: Endpoint) -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(endpoint.get("/inflight")[2])
        return found if found["barriers"] and found["in_flight"] else None

    def test_discovery(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every rank in the registry that serves, as Prometheus wants it."""
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

    def test_discovery_of_nobody(self, endpoint: Endpoint) -> None:
        """An empty list, not an error: Prometheus keeps an old one on errors."""
        endpoint.serve()

        assert json.loads(endpoint.get("/sd")[2]) == []

    def test_registered_before_it_served(self, endpoint: Endpoint) -> None:
        """Then the rank registers anew, with its address."""
        store = dist.HashStore()
        tracedstore.barrier(store, 1, "b", rank=0)
        port = endpoint.serve()

        (target,) = json.loads(endpoint.get("/sd")[2])
        assert target["targets"] == [f"127.0.0.1:{port}"]

    def test_a_page_that_is_not_there(self, endpoint: Endpoint) -> None:
        """Says which are."""
        endpoint.serve()

        status, _, body = endpoint.get("/metricz")

        assert status == 404
        assert body.splitlines() == [
            b"there is:",
            b"/healthz",
            b"/inflight",
            b"/metrics",
            b"/sd",
        ]


class TestPorts:
    """Where it listens."""

    def test_off_until_asked_for(self, registry: CollectorRegistry) -> None:
        """Nothing listens by default."""
        before = threading.active_count()
        tracedstore.configure(registry=registry)

        assert threading.active_count() == before

    def test_base_and_local_rank(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each rank of a host has a port of its own."""
        base = _free_port()
        monkeypatch.setenv("LOCAL_RANK", "2")

        assert base + 2 <= endpoint.serve(http_port=base) < base + 128

    def test_taken(self, endpoint: Endpoint) -> None:
        """The next free one, then."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            asked: int = taken.getsockname()[1]

            assert asked < endpoint.serve(http_port=asked) < asked + 128
            assert endpoint.alive()

    def test_no_such_address(self, registry: CollectorRegistry, events: Events) -> None:
        """Is told, and the job goes on without."""
        tracedstore.configure(
            registry=registry, http_port=0, http_host="203.0.113.1", log_format="json"
        )
        tracedstore.wrap(dist.HashStore()).set("k", "v")

        (event,) = [one for one in events() if one["event"] == "telemetry.disabled"]
        assert event["observer"] == "endpoint"

    def test_again_and_off(self, endpoint: Endpoint) -> None:
        """configure() keeps the port, shutdown() gives it back."""
        port = endpoint.serve()
        assert endpoint.serve(http_port=port) == port
        assert endpoint.alive()

        tracedstore.shutdown()

        assert not endpoint.alive()

    def test_a_forked_child_lets_go(self, endpoint: Endpoint) -> None:
        """The port is the parent's; a child that outlives it does not keep it."""
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


class TestAccess:
    """Who may have what."""

    @pytest.mark.parametrize(
        ("given", "status"),
        [
            ("Bearer hunter2", 200),
            ("Basic " + b64encode(b"me:secret").decode(), 200),
            ("", 401),
            ("Bearer hunter3", 401),
            ("Bearer", 401),
            ("Basic " + b64encode(b"me:wrong").decode(), 401),
            ("Bearer \xe9", 401),
        ],
    )
    def test_credentials(self, endpoint: Endpoint, given: str, status: int) -> None:
        """Token or password; whether the process lives is nobody's secret."""
        endpoint.serve(http_token="hunter2", http_basic_auth="me:secret")

        assert endpoint.get("/metrics", Authorization=given)[0] == status
        assert endpoint.get("/healthz")[0] == 200

    @pytest.mark.parametrize("name", ["http_key", "http_client_ca"])
    def test_tls_needs_a_certificate(self, name: str) -> None:
        """What makes no sense alone is refused."""
        settings: dict[str, Any] = {name: "some.pem", "http_port": 0}

        with pytest.raises(tracedstore.ConfigurationError, match="HTTP_CERT; set that"):
            tracedstore.configure(**settings)


class TestTLS:
    """HTTPS, and clients that have to show who they are."""

    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        """Who signs certificates."""
        return Authority(tmp_path, "authority")

    @staticmethod
    def _serve(endpoint: Endpoint, authority: Authority, **more: Any) -> None:
        pair = authority.sign("server")
        settings: dict[str, Any] = {"http_cert": pair.certificate, "http_key": pair.key}
        endpoint.serve(**settings, **more)

    @staticmethod
    def _get(
        endpoint: Endpoint, authority: Authority, client: Pair | None = None
    ) -> int:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        asking = http.client.HTTPSConnection(
            "127.0.0.1", endpoint.port, timeout=20, context=context
        )
        with closing(asking):
            asking.request("GET", "/metrics")
            return asking.getresponse().status

    def test_served(self, endpoint: Endpoint, authority: Authority) -> None:
        """And discovery says so."""
        self._serve(endpoint, authority)
        store = dist.HashStore()
        tracedstore.barrier(store, 1, "b", rank=0)

        assert self._get(endpoint, authority) == 200
        (target,) = targets()
        assert target["labels"]["__scheme__"] == "https"

    def test_plain_http_is_refused(
        self, endpoint: Endpoint, authority: Authority
    ) -> None:
        """Nobody gets metrics past TLS."""
        self._serve(endpoint, authority)

        with pytest.raises((OSError, http.client.HTTPException)):
            endpoint.get("/metrics")

    def test_clients_certificates(
        self, endpoint: Endpoint, authority: Authority, tmp_path: Path
    ) -> None:
        """The right one is let in; none, a stranger's and an expired one are not."""
        self._serve(endpoint, authority, http_client_ca=authority.certificate)
        stranger = Authority(tmp_path, "stranger").sign("client-of-a-stranger")
        refused = (None, stranger, authority.sign("expired", expired=True))

        assert self._get(endpoint, authority, authority.sign("client")) == 200
        for client in refused:
            with pytest.raises((OSError, http.client.HTTPException)):
                self._get(endpoint, authority, client)

    def test_files_that_cannot_be_used(
        self, authority: Authority, tmp_path: Path
    ) -> None:
        """One sentence at once, which names the setting and the file."""
        pair, other = authority.sign("server"), authority.sign("other")
        junk = tmp_path / "junk.pem"
        junk.write_text("junk")
        bad: list[dict[str, Any]] = [
            {"http_cert": "no-such-file.pem"},
            {"http_cert": junk},
            {"http_cert": pair.certificate, "http_key": other.key},
            {
                "http_cert": pair.certificate,
                "http_key": pair.key,
                "http_client_ca": junk,
            },
        ]

        for settings in bad:
            with pytest.raises(tracedstore.ConfigurationError, match="cannot be used"):
                tracedstore.configure(http_port=0, **settings)


@pytest.mark.usefixtures("quick")
class TestAbuse:
    """Clients that are slow, stuck or hostile cost the job nothing."""

    @pytest.fixture
    def served(self, endpoint: Endpoint) -> Iterator[Endpoint]:
        """Serving."""
        endpoint.serve()
        yield endpoint
        wait_until(lambda: len(_requests()) == 0)

    def test_slow_loris(self, served: Endpoint) -> None:
        """Who sends a byte now and then is cut off all the same."""
        stopped = threading.Event()

        def trickle() -> None:
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                try:
                    while not stopped.wait(0.05):
                        client.sendall(b"x")
                except OSError:
                    return
            raise AssertionError("it was let go on")

        with ThreadPoolExecutor(8) as pool:
            trickling = [pool.submit(trickle) for _ in range(8)]
            try:
                wait_until(served.alive)
                for one in trickling:
                    one.result(20)
            finally:
                stopped.set()

    def test_says_nothing(self, served: Endpoint) -> None:
        """Who connects and says nothing is cut off as well."""
        with ExitStack() as stack:
            for _ in range(8):
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", served.port))
                )

            assert wait_until(served.alive)

    def test_endless_headers(self, served: Endpoint) -> None:
        """Are not read to their end."""
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
    def test_nonsense(
        self, served: Endpoint, sent: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Is answered with an error or not at all, and nothing is printed."""
        with socket.create_connection(("127.0.0.1", served.port)) as client:
            client.settimeout(20)
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(100)

        assert answer == b"" or b" 4" in answer or b" 5" in answer or b"<" in answer
        assert served.alive()
        assert "Traceback" not in capsys.readouterr().err

    def test_a_thousand_connections(self, served: Endpoint) -> None:
        """Have eight threads among them, and the store is as quick as ever."""
        store = tracedstore.wrap(dist.HashStore())
        with ExitStack() as stack:
            for _ in range(1000):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", served.port))
            most = 0
            for _ in range(1000):
                store.set("k", "v")
                most = max(most, len(_requests()))

        assert most <= 8
        assert wait_until(served.alive)

    def test_a_store_that_hangs(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Holds up discovery, and nothing else."""
        from tracedstore.export import pages

        monkeypatch.setattr(pages, "_RENDER_TIMEOUT", 0.05)
        endpoint.serve()
        close_connection, asked = threading.Event(), threading.Event()
        store = FlakyStore()
        tracedstore.barrier(store, 1, "b", rank=0)

        def hang() -> None:
            asked.set()
            close_connection.wait(20)

        store.before("check", hang)
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(endpoint.get, "/sd")
            assert asked.wait(10)

            assert endpoint.get("/sd")[0] == 503
            assert endpoint.get("/metrics")[0] == 200
            close_connection.set()
            assert hanging.result(10)[0] == 200

    def test_a_store_that_is_gone(
        self, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Is given up on; and is not asked again while it is still being asked."""
        from tracedstore.export import discovery, pages

        monkeypatch.setattr(discovery, "_READ_TIMEOUT", 0.05)
        monkeypatch.setattr(pages, "_TARGETS_MAX_AGE", 0.0)
        close_connection = threading.Event()
        gone, there = FlakyStore(), dist.HashStore()
        endpoint.serve()
        tracedstore.barrier(gone, 1, "b", rank=0)
        tracedstore.barrier(there, 1, "b", rank=0)
        gone.before("check", lambda: _wait(close_connection), times=9)
        try:
            for _ in range(3):
                assert len(json.loads(endpoint.get("/sd")[2])) == 1
            looking = [one.name for one in threading.enumerate()]
            assert looking.count("tracedstore-bounded") == 1
        finally:
            close_connection.set()


def _wait(event: threading.Event) -> None:
    event.wait(20)


def _requests() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.endswith("http-request")]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_two_jobs_do_not_mix(endpoint: Endpoint) -> None:
    """Each store has a registry of its own, and so has each job."""
    endpoint.serve()
    mine, other = tracedstore.wrap(dist.HashStore()), tracedstore.wrap(dist.HashStore())
    other.set("tracedstore/RANKS/0", '{"rank": 0, "host": "elsewhere"}')
    tracedstore.barrier(mine, 1, "b", rank=0)

    (target,) = json.loads(endpoint.get("/sd")[2])
    assert target["labels"]["host"] == socket.gethostname()
