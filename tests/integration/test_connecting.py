"""Ranks that cannot connect to their store, or wait in it for others: who and why."""

import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from integration.conftest import StartChild, StartCommand
from integration.harness import Child, in_background, pause, wait_until
from support.etcd import free_port
from tracedstore.coordination.rank_registry import read_ranks
from tracedstore.diagnosis.judgement.stall_reports import VERDICT
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.diagnosis.observe.blocked_record import read_blocked

pytestmark = pytest.mark.processes

# Under load, importing torch alone takes 20 s.
SECONDS = 90
STALL = {"TRACEDSTORE_STALL_AFTER": "1"}
NEVER = {"TRACEDSTORE_STALL_AFTER": "600"}

StartRank = Callable[..., Child]


@pytest.fixture
def start_rank(start_child: StartChild) -> StartRank:
    """Return a function that starts a rank and returns when it connects."""

    def start(
        url: str,
        rank: int,
        world_size: int,
        timeout: float = 300,
        env: dict[str, str] | None = None,
    ) -> Child:
        child = start_child(
            "connecting_rank", url, rank, world_size, timeout, env=STALL | (env or {})
        )
        assert child.next_report() == {"state": "connecting"}
        return child

    return start


def stalled(child: Child) -> dict[str, Any]:
    """Wait for the first `job.stalled` of a process."""
    return wait_until(lambda: child.events("job.stalled"), SECONDS)[0]


def address(scheme: str, port: int) -> tuple[str, dict[str, str]]:
    """Return an init method, and the variables that it needs."""
    if scheme == "tcp":
        return f"tcp://127.0.0.1:{port}", {}
    return "env://", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def resetting_server() -> Iterator[int]:
    """Yield the port of a server that resets every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # the server was shut down
                # To close a socket that lingers for 0 s sends a reset.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.close()

        resetting = in_background(reset)
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            resetting.result(SECONDS)


class TestAbsentRanks:
    """Rank 0 serves the store and waits in the constructor for the others."""

    @pytest.mark.parametrize(
        ("scheme", "world_size", "absent"),
        [("tcp", 2, [1]), ("env", 4, [1, 3]), ("traced+tcp", 5, [4]), ("tcp", 8, [3])],
    )
    def test_are_named(
        self, start_rank: StartRank, scheme: str, world_size: int, absent: list[int]
    ) -> None:
        """Rank 0 names them, and publishes that it waits for them."""
        port = free_port()
        url, env = address(scheme.removeprefix("traced+"), port)
        url = f"traced+{url}" if scheme.startswith("traced+") else url
        present = [rank for rank in range(world_size) if rank not in absent]
        ranks = [start_rank(url, rank, world_size, env=env) for rank in present]
        store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=SECONDS))

        def registered() -> bool:
            return set(read_ranks(store, range(world_size))) == set(present)

        wait_until(registered, SECONDS)
        event = wait_until(
            lambda: [
                event
                for event in ranks[0].events("job.stalled")
                if event["awaited_ranks"] == absent
            ],
            SECONDS,
        )[0]
        wait_until(
            lambda: read_blocked(store, world_size)[0].awaits == tuple(absent), SECONDS
        )
        record = read_blocked(store, world_size)[0]
        verdict = Verdict.from_bytes(store.get(VERDICT))

        assert event["cause"] == "not_started"
        assert event["phase"] == "connecting to the store"
        assert event["rank"] == 0
        assert f"{len(present)} of {world_size} clients joined" in event["evidence"][0]
        assert (record.operation, record.pid) == ("connect", ranks[0].pid)
        assert verdict is not None
        assert verdict.awaited_ranks == tuple(absent)
        # The others wait for rank 0, which waits itself. While ranks still start, more
        # of them are absent.
        for rank in ranks[1:]:
            for stalled_event in rank.events("job.stalled"):
                assert set(absent) <= set(stalled_event["awaited_ranks"])
                assert 0 not in stalled_event["awaited_ranks"]
        assert not ranks[0].events("telemetry.disabled")

    def test_note(self, start_rank: StartRank) -> None:
        """Torch's exception keeps type, text and arguments, and gets a note.

        The timeout is shorter than stall_after.
        """
        rank = start_rank(f"tcp://127.0.0.1:{free_port()}", 0, 3, timeout=5, env=NEVER)

        failed = rank.next_report()

        assert failed["type"] == "DistStoreError"
        assert failed["text"].endswith("waiting for clients. 1/3 clients joined.")
        assert failed["args"] == [failed["text"]]
        (note,) = failed["notes"]
        assert "rank 1: never registered in this store; rank 2:" in note
        assert rank.exit_status(SECONDS) == 0
        (event,) = rank.events("job.stalled")
        assert event["awaited_ranks"] == [1, 2]
        assert not rank.events("job.resumed")
        assert not rank.events("telemetry.disabled")

    def test_resumed(self, start_rank: StartRank) -> None:
        """When the last rank connects, the records are withdrawn, the job resumes."""
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        first = start_rank(url, 0, 2)
        assert stalled(first)["awaited_ranks"] == [1]
        second = start_rank(url, 1, 2)

        assert first.next_report()["state"] == second.next_report()["state"]
        store = dist.TCPStore("127.0.0.1", port)
        left = read_blocked(store, 2), store.check([VERDICT])
        for rank in (first, second):
            rank.write("\n")

        assert [rank.exit_status(SECONDS) for rank in (first, second)] == [0, 0]
        (resumed,) = first.events("job.resumed")
        assert resumed["awaited_ranks"] == [1]
        assert left == ({}, False)
        assert not second.events("job.stalled")

    def test_slow_job(self, start_rank: StartRank) -> None:
        """A job that connects before stall_after reports nothing."""
        url = f"tcp://127.0.0.1:{free_port()}"
        first = start_rank(url, 0, 2, env=NEVER)
        second = start_rank(url, 1, 2, env=NEVER)

        for rank in (first, second):
            assert rank.next_report()["state"] == "connected"
            rank.write("\n")
        for rank in (first, second):
            assert rank.exit_status(SECONDS) == 0
            assert not rank.events("job.stalled")
            assert not rank.events("telemetry.disabled")

    def test_untraced_rank(self, start_rank: StartRank) -> None:
        """A rank that joined without tracing is not accused, and neither is another."""
        port = free_port()
        first = start_rank(f"tcp://127.0.0.1:{port}", 0, 3)
        untraced = dist.TCPStore(
            "127.0.0.1", port, 3, timeout=timedelta(seconds=SECONDS)
        )

        event = wait_until(
            lambda: [
                event
                for event in first.events("job.stalled")
                if "2 of 3 clients joined" in event["evidence"][0]
            ],
            SECONDS,
        )[0]

        assert event["cause"] == "unknown"
        assert event["awaited_ranks"] == []
        assert "no entry in the store: ranks 1-2, of which 1" in event["awaited"]
        del untraced

    def test_address_of_another_machine(self, start_rank: StartRank) -> None:
        """Rank 0 serves, but MASTER_ADDR is not an address of its machine."""
        rank = start_rank(f"tcp://203.0.113.9:{free_port()}", 0, 2)

        event = stalled(rank)

        assert event["cause"] == "address"
        assert "is not an address of" in event["awaited"]
        assert event["awaited_ranks"] == []


class TestUnreachable:
    """A client that cannot connect."""

    def test_refused(self, start_rank: StartRank) -> None:
        """No process listens: one rank of the host reports, all get the note."""
        port = free_port()
        url = f"tcp://127.0.0.1:{port}"
        ranks = [start_rank(url, rank, 4, timeout=4) for rank in (1, 2, 3)]

        reports = [rank.next_report() for rank in ranks]

        for failed in reports:
            assert failed["type"] == "DistNetworkError"
            assert failed["text"].startswith("The client socket has timed out after")
            (note,) = failed["notes"]
            assert f"rank 0: does not listen at 127.0.0.1:{port}" in note
            assert "refuses connections" in note
        for rank in ranks:
            assert rank.exit_status(SECONDS) == 0
            assert not rank.events("telemetry.disabled")
        reporting = [rank for rank in ranks if rank.events("job.stalled")]
        event = stalled(reporting[0])
        assert event["cause"] == "server_unreachable"
        assert event["awaited_ranks"] == [0]

    def test_late_server(self, start_rank: StartRank) -> None:
        """The client resumes when rank 0 listens."""
        url = f"tcp://127.0.0.1:{free_port()}"
        second = start_rank(url, 1, 2)
        assert stalled(second)["awaited_ranks"] == [0]
        first = start_rank(url, 0, 2)

        for rank in (first, second):
            assert rank.next_report()["state"] == "connected"
            rank.write("\n")

        assert second.exit_status(SECONDS) == 0
        assert second.events("job.resumed")

    def test_server_of_torchrun_gone(self, start_rank: StartRank) -> None:
        """The agent's store refuses connections: it has ended, and no rank is named."""
        port = free_port()
        env = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        rank = start_rank(f"tcp://127.0.0.1:{port}", 0, 2, env=env)

        event = stalled(rank)

        assert event["cause"] == "server_gone"
        assert event["awaited_ranks"] == []

    def test_dropped_packets(self, start_rank: StartRank) -> None:
        """The host does not answer: here because the backlog of the port is full."""
        with ExitStack() as stack:
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            for _ in range(3):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(server.getsockname())
            rank = start_rank(f"tcp://127.0.0.1:{server.getsockname()[1]}", 1, 2)

            event = stalled(rank)

        assert event["cause"] == "server_unreachable"
        assert "times out: packets are dropped" in event["evidence"][0]

    def test_silent_server(self, start_rank: StartRank) -> None:
        """A port that accepts and does not answer, where torch ignores its timeout."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            rank = start_rank(f"tcp://127.0.0.1:{port}", 1, 2, timeout=2)

            event = stalled(rank)

        assert event["cause"] == "server_unreachable"
        assert "accepts connections and does not answer" in event["awaited"]
        assert any(f"held by pid {os.getpid()} (" in e for e in event["evidence"])

    def test_reset_connections(self, start_rank: StartRank) -> None:
        """The server resets every connection, as one whose backlog is full may."""
        with resetting_server() as port:
            rank = start_rank(f"tcp://127.0.0.1:{port}", 1, 2, timeout=6, env=NEVER)
            failed = rank.next_report()

        (note,) = failed["notes"]
        assert "tracedstore" not in failed["text"]
        assert "[server_unreachable: " in note
        assert f"127.0.0.1:{port} resets connections: its backlog is full" in note
        assert "net.core.somaxconn is " in note
        assert rank.exit_status(SECONDS) == 0

    def test_stopped_server(self, start_rank: StartRank) -> None:
        """Rank 0 is stopped by a signal: its pid and state are in the evidence."""
        port = free_port()
        first = start_rank(f"tcp://127.0.0.1:{port}", 0, 2)
        stalled(first)
        pause(first.pid)
        second = start_rank(f"tcp://127.0.0.1:{port}", 1, 2)

        event = stalled(second)

        assert event["cause"] == "server_unreachable"
        assert any(f"pid {first.pid} (" in e for e in event["evidence"])
        assert any("stopped by a signal" in e for e in event["evidence"])


class TestAddress:
    """An address that cannot work."""

    @pytest.mark.parametrize(
        ("host", "port", "finding", "remedy"),
        [
            (" 127.0.0.1", "29500", "white space around it", "'127.0.0.1'"),
            ("[::1]", "29500", "it has brackets", "'::1'"),
            ("127.0.0.1:29500", "29500", "it has a port", "'127.0.0.1'"),
            ("127.0.0.1", "0", "rank 0 listens at any free port", "free port"),
        ],
    )
    @pytest.mark.parametrize("rank", [0, 1])
    def test_spelling(
        self,
        start_rank: StartRank,
        rank: int,
        host: str,
        port: str,
        finding: str,
        remedy: str,
    ) -> None:
        """It is reported before torch connects."""
        env = {"MASTER_ADDR": host, "MASTER_PORT": port}
        child = start_rank("env://", rank, 2, env=env | NEVER)

        event = stalled(child)

        assert (event["cause"], event["waited_seconds"]) == ("address", 0)
        assert finding in event["awaited"]
        assert remedy in event["remedy"]
        assert event["awaited_ranks"] == []

    def test_port_that_torch_rejects(self, start_rank: StartRank) -> None:
        """Torch raises at once; the note names the variable."""
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}
        child = start_rank("env://", 1, 2, env=env)

        failed = child.next_report()

        assert failed["type"] == "ValueError"
        assert "MASTER_PORT is '70000'" in failed["notes"][0]

    def test_unresolvable(self, start_rank: StartRank) -> None:
        """A name without an address, in the event and in the note."""
        url = f"tcp://no-such-host.invalid:{free_port()}"
        child = start_rank(url, 1, 2, timeout=4)

        failed = child.next_report()

        assert failed["type"] == "DistNetworkError"
        assert "it does not resolve on" in failed["notes"][0]
        assert stalled(child)["cause"] == "address"

    def test_port_in_use(self, start_rank: StartRank) -> None:
        """The note has the process that holds the port."""
        with socket.create_server(("0.0.0.0", 0)) as server:
            port = server.getsockname()[1]
            child = start_rank(f"tcp://127.0.0.1:{port}", 0, 2)

            failed = child.next_report()

        assert failed["type"] == "DistNetworkError"
        assert "EADDRINUSE" in failed["text"]
        assert f"port {port} of" in failed["notes"][0]
        assert f"is held by pid {os.getpid()} (" in failed["notes"][0]

    def test_ranks_0_1_1(self, start_rank: StartRank) -> None:
        """A rank that was started twice, in place of another one."""
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        first = start_rank("env://", 0, 4, timeout=300, env=env)
        others = [start_rank("env://", 1, 4, timeout=300, env=env) for _ in range(2)]

        def duplicate() -> list[dict[str, Any]]:
            stalls = first.events("job.stalled")
            return [one for one in stalls if one["cause"] == "duplicate"]

        (stall, *_) = wait_until(duplicate)

        assert any(
            text.startswith("rank 1 was started twice: pid ")
            and all(str(other.pid) in text for other in others)
            for text in stall["evidence"]
        )

    def test_rank_0_of_another_job(self, start_rank: StartRank) -> None:
        """Its process is healthy: the remedy is another port."""
        env = {
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        first = start_rank("env://", 0, 2, env={**env, "TRACEDSTORE_RUN_ID": "theirs"})
        stalled(first)
        second = start_rank("env://", 0, 2, env={**env, "TRACEDSTORE_RUN_ID": "ours"})

        failed = second.next_report()

        (note,) = failed["notes"]
        assert f"is held by pid {first.pid} (" in note
        assert "started at" in note
        assert "another job: rank 0 of run 'theirs'; this is run 'ours'" in note
        assert note.endswith("set MASTER_PORT to another port")
        assert stalled(second)["cause"] == "address"

    def test_rank_0_twice(self, start_rank: StartRank) -> None:
        """Two processes with RANK=0 on one host: both pids are in the note."""
        env = {
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        first = start_rank("env://", 0, 2, env=env)
        stalled(first)
        second = start_rank("env://", 0, 2, env=env)

        failed = second.next_report()

        (note,) = failed["notes"]
        assert f"rank 0 on {socket.gethostname()} (pid {first.pid})" in note
        assert f"also started as pid {second.pid}" in note
        assert stalled(second)["cause"] == "duplicate"

    def test_two_servers(self, start_rank: StartRank) -> None:
        """Two ranks 0 of one run serve at two ports: each names both processes.

        Without a run id they may be two jobs: then only absent ranks are named.
        """
        ports = [free_port(), free_port()]
        job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        run = {**job, "TRACEDSTORE_RUN_ID": "two-servers"}
        ranks = [
            start_rank("env://", 0, 2, env={**run, "MASTER_PORT": str(port)})
            for port in ports
        ]
        unrelated = start_rank(
            "env://", 0, 2, env={**job, "MASTER_PORT": str(free_port())}
        )

        def found() -> dict[str, Any] | None:
            events = [*ranks[0].events("job.stalled"), *ranks[1].events("job.stalled")]
            duplicates = [one for one in events if one["cause"] == "duplicate"]
            return duplicates[0] if duplicates else None

        event = wait_until(found, SECONDS)

        own = 0 if event["pid"] == ranks[0].pid else 1
        assert event["evidence"][0] == (
            f"rank 0 of run 'two-servers' was started twice: pid {ranks[own].pid}"
            f" serves 127.0.0.1:{ports[own]}, and pid {ranks[1 - own].pid} serves"
            f" 127.0.0.1:{ports[1 - own]}"
        )
        assert event["awaited_ranks"] == [1]
        assert stalled(unrelated)["cause"] == "not_started"
        assert all(
            "started twice" not in text
            for one in unrelated.events("job.stalled")
            for text in one["evidence"]
        )

    def test_published_by_agent(self, start_command: StartCommand) -> None:
        """Torchrun's agent publishes a name that its workers cannot resolve."""
        train = Path(__file__).parent / "jobs" / "train.py"
        torchrun = start_command(
            "tracedstore-run",
            *("torchrun", "--nnodes=1", "--nproc-per-node=2"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
            *("--local-addr=no-such-host.invalid", train),
            **STALL,
        )

        events = wait_until(lambda: torchrun.events("job.stalled"), SECONDS)

        assert events[0]["cause"] == "address"
        assert "MASTER_ADDR is 'no-such-host.invalid'" in events[0]["awaited"]
        assert "--local-addr" in events[0]["remedy"]


@pytest.fixture
def forged_address() -> Iterator[bytes]:
    """A gloo address of another host at loopback, where no process accepts."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        host = b"other-host"
        peer = struct.pack("=HH", socket.AF_INET, socket.htons(port))
        peer += socket.inet_aton("127.0.0.1")
        peer = peer.ljust(136, b"\0")
        yield b"".join(
            [struct.pack("=Q", len(host)), host, struct.pack("=Q", len(peer)), peer]
        ) + struct.pack("=QQ", 0, 1)


class TestGloo:
    """Ranks that publish loopback addresses to other hosts."""

    def test_loopback_of_another_host(
        self, start_rank: StartRank, forged_address: bytes
    ) -> None:
        """The exception of gloo gets a note that names the rank and its host."""
        port = free_port()
        rank = start_rank(f"tcp://127.0.0.1:{port}", 0, 2, timeout=8)
        # torch's stubs accept text only.
        other: Any = dist.TCPStore(
            "127.0.0.1", port, 2, timeout=timedelta(seconds=SECONDS)
        )
        other.set("default_pg/0//cpu//0/1", forged_address)

        failed = rank.next_report()

        assert failed["type"] == "RuntimeError"
        (note,) = failed["notes"]
        assert "rank 1 on other-host: publishes 127.0.0.1" in note
        assert "GLOO_SOCKET_IFNAME" in note


class TestTwoJobs:
    """Two jobs in one TCPStore, whose keys have no prefix of their own."""

    def test_are_named(self, start_rank: StartRank, tcp_server: Child) -> None:
        """At the start of the second one, while it hangs, and in its exception."""
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(tcp_server.next_report()["port"]),
            # So that rank 0 does not serve.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        first = [
            start_rank("env://", rank, 2, env={**env, "TRACEDSTORE_RUN_ID": "a"})
            for rank in (0, 1)
        ]
        for rank in first:
            assert rank.next_report()["state"] == "connected"
        # It reads the address of rank 0 of the other job, which gloo may connect to.
        # No job has a rank 2.
        second = start_rank(
            "env://", 1, 3, timeout=10, env={**env, "TRACEDSTORE_RUN_ID": "b"}
        )

        failed = second.next_report()

        host = socket.gethostname()
        (stale,) = second.events("store.stale_keys")
        assert (stale["previous_run_id"], stale["previous_pid"]) == ("a", first[1].pid)
        assert "two jobs share this store; this is run 'b'" in stale["message"]
        event = stalled(second)
        assert (event["cause"], event["awaited_ranks"]) == ("too_many", [])
        assert event["awaited"] == "2 jobs share this store"
        assert event["evidence"] == [
            f"run 'a': rank 1, pid {first[1].pid} on {host}",
            f"run 'b': rank 1, pid {second.pid} on {host}",
        ]
        (note,) = failed["notes"]
        assert "2 jobs share this store [too_many: run 'a': rank 1, pid" in note


class TestFile:
    """FileStores that an earlier run left."""

    def test_earlier_run(self, start_rank: StartRank, tmp_path: Path) -> None:
        """One rank of the host warns, and the note of a timeout names the file."""
        path = tmp_path / "store"
        url = f"file://{path}"
        killed = [start_rank(url, rank, 2) for rank in range(2)]
        for rank in killed:
            assert rank.next_report()["state"] == "connected"
            assert not rank.events("store.stale_keys")
        for rank in killed:
            os.kill(rank.pid, signal.SIGKILL)
            rank.exit_status()
        again = start_rank(url, 1, 3, timeout=4)

        def warnings() -> list[str]:
            found = again.events("store.stale_keys")
            return [e["message"] for e in found if f"{path} holds" in e["message"]]

        (message,) = wait_until(warnings, SECONDS)
        failed = again.next_report()

        assert f"was pid {killed[0].pid} on" in message
        assert [note for note in failed["notes"] if f"{path} holds" in note]

    def test_new_job(self, start_rank: StartRank, tmp_path: Path) -> None:
        """Ranks that start one after the other do not take each other for stale."""
        url = f"file://{tmp_path / 'store'}"
        first = start_rank(url, 0, 2)
        wait_until((tmp_path / "store").exists, SECONDS)
        second = start_rank(url, 1, 2)

        for rank in (first, second):
            assert rank.next_report()["state"] == "connected"
            assert not rank.events("store.stale_keys")
