"""Which Host and Origin headers the endpoint accepts."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tracedstore.export import http_server
from tracedstore.export.http_server import Access


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (None, True),
        ("localhost", True),
        ("LOCALHOST:9464", True),
        ("127.0.0.1:9464", True),
        ("[::1]:9464", True),
        (socket.gethostname(), True),
        ("metrics.example:80", True),
        ("", False),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example#localhost", False),
        ("localhost#:", False),
        ("localhost/evil.example", False),
        ("evil.example@localhost", False),
        ("localhost\\evil.example", False),
        ("[::1", False),
    ],
)
def test_host(header: str | None, accepted: bool) -> None:
    """Names and addresses of this machine, those that are configured, no others."""
    access = Access(hosts=frozenset({"metrics.example"}))
    assert access.accepts_host(header) == accepted


@pytest.mark.parametrize(
    ("origin", "accepted"),
    [
        (None, True),
        ("http://127.0.0.1:9464", True),
        ("HTTPS://127.0.0.1:9464", True),
        ("http://127.0.0.1:9465", False),
        ("http://127.0.0.1:9464#:", False),
        ("http://127.0.0.1:9464/page", False),
        ("http://evil.example@127.0.0.1:9464", False),
        ("ftp://127.0.0.1:9464", False),
        ("http://[", False),
        ("null", False),
        ("", False),
    ],
)
def test_origin(origin: str | None, accepted: bool) -> None:
    """Only pages of this server, as a browser writes their origin."""
    assert Access.accepts_origin(origin, "127.0.0.1:9464") == accepted


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give this process the names that a pod of an Indexed Job has."""
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text(
        "search team-a.svc.cluster.local svc.cluster.local cluster.local corp.example\n"
        "nameserver 10.96.0.10\noptions ndots:5\n"
    )
    monkeypatch.setattr(http_server, "_RESOLV_CONF", resolv_conf)
    monkeypatch.setattr(socket, "gethostname", lambda: "train-0")
    full = "train-0.train.team-a.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: full)
    caches = (http_server._own_names, http_server._service_domains)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("train-0:9464", True),
        ("train-0.train", True),
        ("train-0.train.team-a:9464", True),
        ("train-0.train.team-a.svc", True),
        ("train-0.train.team-a.svc.cluster.local", True),
        # Services, whose names only the DNS of the cluster has.
        ("metrics.team-a.svc", True),
        ("metrics.team-a.svc.cluster.local:9464", True),
        ("train-1.train", False),
        ("evil.example", False),
        ("train-0.train.evil.example", False),
        ("metrics.team-a.svc.evil.example", False),
        ("svc", False),
        ("evilsvc", False),
        ("host.corp.example", False),
        ("cluster.local", False),
    ],
)
@pytest.mark.usefixtures("pod")
def test_host_of_pod(header: str, accepted: bool) -> None:
    """In a pod, its names and those of Services are accepted, and no others."""
    assert Access().accepts_host(header) == accepted


def test_services_outside_of_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Elsewhere, a name with .svc in it is as any other."""
    for text in ("", "search corp.example\n", "search\n", None):
        path = tmp_path / "resolv.conf"
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        monkeypatch.setattr(http_server, "_RESOLV_CONF", path)
        http_server._service_domains.cache_clear()
        assert not Access().accepts_host("metrics.team-a.svc")
    http_server._service_domains.cache_clear()
