"""etcd servers with TLS, and with users."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.certificates import Pair
from support.etcd import EtcdServer
from tracedstore.etcd.gateway import text

SECRET = "secret-of-a-test"


@contextlib.contextmanager
def tls_server(folder: Path, pair: Pair, *options: str) -> Iterator[EtcdServer]:
    """Run an etcd with a certificate."""
    folder.mkdir()
    server = EtcdServer(
        folder,
        f"--cert-file={pair.certificate}",
        f"--key-file={pair.key}",
        *options,
        scheme="https",
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


class Administrator:
    """The root user of an etcd with authentication."""

    def __init__(self, server: EtcdServer, call: Callable[..., Any]) -> None:
        """Enable authentication, for the user ``worker`` of the namespace ``mine``.

        Args:
            server: The server.
            call: Makes a request to it without a user.
        """
        self.server = server
        for name in ("root", "worker"):
            call("auth/user/add", {"name": name, "password": SECRET})
            call("auth/role/add", {"name": name})
            call("auth/user/grant", {"user": name, "role": name})
        # The prefix of docs/etcd.md.
        permission = {
            "permType": "READWRITE",
            "key": text(b"/tracedstore/mine/"),
            "range_end": text(b"/tracedstore/mine0"),
        }
        call("auth/role/grant", {"name": "worker", "perm": permission})
        call("auth/enable", {})

    def call(self, method: str, request: dict[str, Any]) -> None:
        """Make a request as the root user."""
        login = {"name": "root", "password": SECRET}
        token = self.server.call("auth/authenticate", login)["token"]
        self.server.call(method, request, token)
