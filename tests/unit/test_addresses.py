"""The checks of addresses, and what is read from /proc, gloo and FileStores."""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import tracedstore
from support.etcd import free_port
from support.versions import TORCH
from tracedstore.common import causes, procfs
from tracedstore.common.procfs import port_holder
from tracedstore.diagnosis.connection import (
    addresses,
    connecting,
    connection_attempt,
    file_store,
    group_creation,
)
from tracedstore.diagnosis.connection.addresses import ConnectTarget


class TestSpelling:
    """Checks without I/O."""

    @pytest.mark.parametrize(
        ("value", "remedy"),
        [
            ("", "the host of rank 0"),
            ("  ", "the host of rank 0"),
            (" node1", "'node1'"),
            ("node1\n", "'node1'"),
            ("[fe80::1]", "'fe80::1'"),
            ("http://node1/", "'node1'"),
            ("node1:29500", "'node1' and the port to '29500'"),
            ("no de1", "correct MASTER_ADDR"),
        ],
    )
    def test_host(self, value: str, remedy: str) -> None:
        """A defect has the value, and the remedy the corrected value."""
        defect = addresses.check_host("MASTER_ADDR", value)

        assert defect is not None
        assert repr(value) in str(defect)
        assert remedy in defect.remedy

    @pytest.mark.parametrize(
        "value", ["node1", "10.0.0.1", "::1", "a.b-c.d", "fe80::1"]
    )
    def test_good_host(self, value: str) -> None:
        """Names and addresses of both families pass."""
        assert addresses.check_host("MASTER_ADDR", value) is None

    @pytest.mark.parametrize("value", ["", "x", "-1", "65536", "0"])
    def test_port(self, value: str) -> None:
        """A port that no other rank can connect to."""
        defect = addresses.check_port("MASTER_PORT", value, 2)

        assert defect is not None
        assert f"MASTER_PORT is {value!r}" in defect.finding

    def test_good_port(self) -> None:
        """One rank alone may use port 0."""
        assert addresses.check_port("MASTER_PORT", "0", 1) is None
        assert addresses.check_port("MASTER_PORT", " 29500 ", 2) is None


class TestLookup:
    """Name lookups."""

    def test_unresolvable(self) -> None:
        """The remedy depends on who chose the name."""
        for published, remedy in ((True, "--local-addr"), (False, "an IP address")):
            found, defect = addresses.check_lookup(
                "MASTER_ADDR", "no-such-host.invalid", published=published
            )
            assert not found
            assert defect is not None
            assert "it does not resolve on" in defect.defect
            assert remedy in defect.remedy

    @pytest.mark.parametrize("name", ["a" * 70 + ".invalid", "..", "\udcff"])
    def test_no_name(self, name: str) -> None:
        """What cannot be a name is a defect, and no exception."""
        assert addresses.check_lookup("x", name, published=False)[1] is not None

    def test_local(self) -> None:
        """Loopback is this machine's; an address for documentation is not."""
        local = addresses.resolve("127.0.0.1")
        other = addresses.resolve("203.0.113.9")

        assert addresses.check_served_here("x", "127.0.0.1", local) is None
        defect = addresses.check_served_here("x", "203.0.113.9", other)
        assert defect is not None
        assert socket.gethostname() in defect.defect

    def test_loopback(self) -> None:
        """Loopback is a defect only if the launcher started several nodes."""
        found = addresses.resolve("127.0.0.1")
        several = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
        one = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}

        assert addresses.check_loopback("x", "localhost", found, several)
        assert addresses.check_loopback("x", "localhost", found, one) is None
        assert addresses.check_loopback("x", "localhost", found, {}) is None


class TestTarget:
    """The address of a store, as torch reads it."""

    def test_env(self) -> None:
        """The URL's rank and world size precede the environment's."""
        environ = {"MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "3"}
        target = addresses.from_url("env://?rank=0&world_size=2", None, environ)

        assert target is not None
        assert (target.server, target.rank, target.world_size) == ("h:1", 0, 2)
        assert target.serving

    @pytest.mark.parametrize(
        ("port", "serving"), [("7", False), ("8", TORCH >= (2, 14))]
    )
    def test_agent_store(self, port: str, serving: bool) -> None:
        """Rank 0 does not serve if the agent does.

        From torch 2.14 on it serves at any other address than the agent's.
        """
        environ = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "::1",
            "MASTER_PORT": port,
        }
        url = "tcp://[::1]:7?rank=0&world_size=2"
        target = addresses.from_url(url, None, environ)

        assert target is not None
        assert (target.server, target.serving) == ("[::1]:7", serving)

    @pytest.mark.parametrize("url", ["env://", "tcp://h:x", "tcp://[h:1", "tcp://h:-1"])
    def test_rejected_by_torch(self, url: str) -> None:
        """What torch raises for is left to torch."""
        assert addresses.from_url(url, None, {}) is None


class TestPortHolder:
    """The process that listens at a port."""

    def test_own(self) -> None:
        """pid, command and start time."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            found = port_holder(server.getsockname()[1])

        assert found is not None
        assert found.pid == os.getpid()
        assert "python" in found.command
        assert "started at" in found.describe()

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """No listener, or no proc file system."""
        assert port_holder(free_port()) is None
        monkeypatch.setattr(procfs, "_PROC", tmp_path)
        assert port_holder(1) is None

    def test_not_readable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A socket without a visible process has its user."""
        (tmp_path / "net").mkdir()
        line = "0: 0100007F:0050 00000000:0000 0A 0:0 0:0 0 1234 0 77 1 0\n"
        (tmp_path / "net" / "tcp").write_text("header\nshort\n" + line)
        monkeypatch.setattr(procfs, "_PROC", tmp_path)
        found = port_holder(80)

        assert found is not None
        assert found.describe() == (
            "a process of uid 1234, whose pid is not readable here"
        )


def gloo_value(host: bytes, address: str) -> bytes:
    """Encode an address as gloo does."""
    peer = struct.pack("=HH", socket.AF_INET, socket.htons(7))
    peer = (peer + socket.inet_aton(address)).ljust(136, b"\0")
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", len(peer)) + peer


class TestComparison:
    """Why torch does not take an endpoint for this machine's."""

    def test_name_that_is_loopback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The address is one of this machine, and is not what torch compares with."""
        monkeypatch.setattr(addresses, "own_addresses", lambda: ["10.99.0.1"])
        monkeypatch.setattr(socket, "gethostname", lambda: "nodea")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kw: found)

        assert addresses.describe_comparison("10.99.0.1") == (
            "torch compares '10.99.0.1' with the name nodea and what that resolves to,"
            " which is 127.0.1.1; 10.99.0.1 is an address of this machine all the same"
        )
        assert "all the same" not in addresses.describe_comparison("10.99.0.2")


class TestGloo:
    """Addresses that gloo's ranks publish."""

    def test_real(self) -> None:
        """The value of this torch's gloo has this machine's name."""
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            found = group_creation.read_addresses(
                store, group_creation.key_prefix("0"), 2
            )
        finally:
            dist.destroy_process_group()

        assert list(found) == [0]
        assert found[0].host == socket.gethostname()
        assert found[0].port > 0

    @given(
        st.binary(max_size=300) | st.builds(gloo_value, st.binary(), st.just("1.2.3.4"))
    )
    def test_any_bytes(self, value: bytes) -> None:
        """No value raises."""
        found = group_creation.parse_address(value)
        assert found is None or found.host.isprintable()

    def test_loopback(self) -> None:
        """Ranks at loopback are named only if there are several hosts."""
        a = group_creation.parse_address(gloo_value(b"a", "10.0.0.1"))
        b = group_creation.parse_address(gloo_value(b"b", "127.0.1.1"))
        assert a is not None
        assert b is not None

        verdict = group_creation.check_published({0: a, 1: b}, "phase", {0: 4, 1: 6})
        assert verdict is not None
        assert verdict.awaited_ranks == (6,)
        assert "rank 6 on b: publishes 127.0.1.1:7" in verdict.describe()
        assert group_creation.check_published({0: b, 1: b}, "phase", {}) is None
        assert group_creation.check_published({0: a, 1: a}, "phase", {}) is None


class TestFile:
    """The file of a FileStore."""

    def test_real(self, tmp_path: Path) -> None:
        """Keys are counted once, and without FileStore's own counter."""
        store = dist.FileStore(str(tmp_path / "store"), 2)
        assert file_store.check_earlier_run(str(tmp_path / "store"), 0) is None
        store.set("a", "1")
        store.set("a", "2")
        store.set("b", "3")

        content = file_store.read_file(str(tmp_path / "store"))

        assert content is not None
        assert content.key_count == 2
        # Written after this process began: it may be of an untraced rank of this job.
        assert file_store.check_earlier_run(str(tmp_path / "store"), 0) is None
        os.utime(tmp_path / "store", (1, 1))
        stale = file_store.check_earlier_run(str(tmp_path / "store"), 0)
        assert stale is not None
        assert "holds 2 keys, was last written at 1970-01-01" in stale.known

    @given(content=st.binary(max_size=200))
    def test_any_bytes(
        self, content: bytes, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """No content raises."""
        path = tmp_path_factory.getbasetemp() / "any"
        path.write_bytes(content)

        file_store.check_earlier_run(str(path), 0)

    def test_no_file(self, tmp_path: Path) -> None:
        """No file, a directory and a FIFO are read as nothing."""
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path, tmp_path / "none", tmp_path / "fifo"):
            assert file_store.read_file(str(path)) is None
            assert "cannot be read" in file_store.describe_wait(str(path), 2)


@contextmanager
def serving(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """Answer one connection in another thread, and yield the port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(1) as pool,
    ):

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        served = pool.submit(serve)
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)  # ends an accept without a connection
        served.result(60)


class TestReach:
    """One connection attempt."""

    def test_foreign_server(self) -> None:
        """A server that answers something else is no store."""

        # It answers before the request, as an SSH server does.
        def answer(connection: socket.socket) -> None:
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.recv(100)

        with serving(answer) as port:
            target = ConnectTarget(host="127.0.0.1", port_text=str(port), rank=1)
            found = connection_attempt.connect_once(target)
        verdict = connection_attempt.verdict_on(target, found, 3)

        assert found.result == causes.FOREIGN
        assert verdict is not None
        assert verdict.cause == "server_unreachable"
        assert verdict.awaited_ranks == ()

    def test_joined_count(self) -> None:
        """A store that answers reports its clients, and there is no verdict."""
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
        joined = dist.TCPStore("127.0.0.1", store.port, 3, is_master=False)
        target = ConnectTarget(host="127.0.0.1", port_text=str(store.port), rank=1)

        found = connection_attempt.connect_once(target)

        assert (found.result, found.joined) == (connection_attempt.ANSWERED, 1)
        assert connection_attempt.verdict_on(target, found, 3) is None
        del joined

    def test_own_address_of_a_later_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each node was given its own address as that of rank 0."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("NODE_RANK", "1")
        own = ip_address("192.0.2.7")
        monkeypatch.setattr(connection_attempt, "is_local", lambda one: one == own)
        target = ConnectTarget(host="192.0.2.7", port_text="29500", rank=3)
        found = connection_attempt.ConnectionAttempt(
            result=causes.REFUSED, addresses=(own,)
        )

        verdict = connection_attempt.verdict_on(target, found, 3)

        assert verdict is not None
        assert (verdict.cause, verdict.awaited_ranks) == ("address", ())
        assert "MASTER_ADDR is '192.0.2.7': it is an address of" in verdict.known
        assert "where rank 3 runs, and rank 0 does not" in verdict.known
        # A rank of the first node: rank 0 should be here, and is not.
        monkeypatch.setenv("NODE_RANK", "0")
        verdict = connection_attempt.verdict_on(target, found, 3)
        assert verdict is not None
        assert verdict.cause == "server_unreachable"

    def test_no_count(self) -> None:
        """A TCPStore that hangs up when it is asked for the count has answered."""

        def answer(connection: socket.socket) -> None:
            request = connection.recv(10, socket.MSG_WAITALL)
            connection.sendall(request[-4:])

        with serving(answer) as port:
            target = ConnectTarget(host="127.0.0.1", port_text=str(port), rank=1)
            found = connection_attempt.connect_once(target)

        assert (found.result, found.joined) == (connection_attempt.ANSWERED, None)
        assert connection_attempt.verdict_on(target, found, 3) is None

    def test_agents(self) -> None:
        """The agent that serves a static rendezvous reports how many joined."""
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
        target = addresses.of_agent("127.0.0.1", store.port, 3, True)

        verdict = connection_attempt.verdict_on(
            target, connection_attempt.connect_once(target), 3
        )

        assert verdict is not None
        assert verdict.cause == "unknown"
        assert verdict.known.startswith("0 of 3 agents have connected")


class TestFailedConstructor:
    """The note on torch's exception, if the watcher has not looked before."""

    @pytest.fixture
    def resetting_port(self) -> Iterator[int]:
        """The port of a server that resets its connections."""

        def reset(connection: socket.socket) -> None:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

        with serving(reset) as port:
            yield port

    def test_reset(self, resetting_port: int) -> None:
        """Torch's text is that of any failure, so the server is examined once more."""
        tracedstore.configure(log_format="off")
        target = ConnectTarget(
            host="127.0.0.1", port_text=str(resetting_port), rank=1, timeout=600
        )
        text = "The client socket has timed out after 600000ms"

        with (
            pytest.raises(dist.DistNetworkError) as caught,
            connecting.watched(target),
        ):
            raise dist.DistNetworkError(text)

        (note,) = caught.value.__notes__
        assert f"127.0.0.1:{resetting_port} resets connections" in note
        assert str(caught.value) == text


class TestEndpoint:
    """An agent that does not serve its c10d endpoint."""

    def test_no_host(self) -> None:
        """The exception has this machine's name, and how to make it the host."""
        from torch.distributed.elastic.rendezvous.api import (
            RendezvousConnectionError,
            RendezvousParameters,
        )

        from tracedstore.rendezvous import plugins

        params = RendezvousParameters(
            "c10d",
            f"127.0.0.1:{free_port()}",
            "run",
            1,
            1,
            is_host="0",
            read_timeout="1",
        )

        with pytest.raises(RendezvousConnectionError) as caught:
            plugins.CREATORS["c10d"](params)

        (note,) = caught.value.__notes__
        assert (
            "this agent does not serve the endpoint, because is_host is false" in note
        )
        assert f"this machine is {socket.gethostname()}" in note
        assert "--rdzv-conf is_host=1" in note
