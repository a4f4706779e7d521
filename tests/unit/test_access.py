"""Which Host and Origin headers the endpoint accepts."""

import socket

import pytest

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
