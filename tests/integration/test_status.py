"""``tracedstore status``, with the stores of running jobs, and without a store."""

import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import etcd
import pytest
import torch.distributed as dist
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from integration.harness import HANG, in_background, pause, wait_until
from support.certificates import Authority
from support.etcd import EtcdServer, free_port
from support.rendezvous import handler, new_run_id, pickled_state
from support.terminal import frames, without_styles
from tracedstore.common.identity import ProcessIdentity
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.connection.connection_attempt import (
    _PROBE_REQUEST,
    _PROBE_RESPONSE,
)
from tracedstore.tools.cli.main import main

Store = Any
HOST = socket.gethostname()
COMMAND = [sys.executable, "-W", "ignore", "-m", "tracedstore.tools.cli.main", "status"]
WATCH = ["--watch", "--interval", "0.1"]
# What changes the output on a terminal.
ENVIRONMENT = ("NO_COLOR", "LINES", "COLUMNS")


def connect(url: str) -> Store:
    """Connect to the store of a job, as one more rank."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return dist.FileStore(parts.path, -1)
    assert parts.port is not None
    if parts.scheme == "tcp":
        return dist.TCPStore(str(parts.hostname), parts.port, None, is_master=False)
    return EtcdStore(etcd.Client(host="127.0.0.1", port=parts.port), parts.path)


def arrive(
    url: str, name: str, *numbers: int, world_size: int = 4
) -> list[Future[None]]:
    """Let ranks arrive at a barrier, each on its own connection."""

    def rank(number: int) -> None:
        tracedstore.barrier(connect(url), world_size, name, 40, rank=number)

    return [in_background(lambda n=n: rank(n)) for n in numbers]  # type: ignore[misc]


def wait_for(ranks: list[Future[None]]) -> None:
    """Wait until ranks have passed a barrier."""
    for rank in ranks:
        rank.result(60)


def wait_for_arrivals(url: str, name: str, count: int) -> None:
    """Wait for a number of arrivals; a rank writes its name before it is counted."""
    store = connect(url)

    def all_there() -> bool:
        if not store.check([f"{name}/num_members"]):
            return False
        return int(store.get(f"{name}/num_members")) >= count

    wait_until(all_there)


def contents(url: str) -> Any:
    """Return the contents of a store, read from its server or its file."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(parts.path).read_bytes()
    if parts.scheme == "tcp":
        store = connect(url)
        return {key: store.get(key) for key in store.list_keys()}
    client: Any = etcd.Client(host="127.0.0.1", port=parts.port or 0)
    nodes = client.get(parts.path).children
    return {node.key: (node.value, node.modifiedIndex) for node in nodes}


class Result:
    """The result of the command, run in this process.

    Attributes:
        code: The exit code.
        out: Standard output.
        err: Standard error.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        self.code = main(["status", *arguments])
        written = capsys.readouterr()
        self.out, self.err = written.out, written.err

    @property
    def lines(self) -> list[str]:
        """The lines of standard output, without indentation."""
        return [line.strip() for line in self.out.splitlines()]


RunStatus = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> RunStatus:
    """Return a function that runs the command."""
    return lambda url, *more: Result(capsys, "--store", url, *more)


@pytest.fixture
def tcp_job() -> tuple[Store, str]:
    """Serve a TCPStore; return it with its URL."""
    store: Store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    return store, f"tcp://127.0.0.1:{store.port}"


class TestBarriers:
    """Barriers on every kind of store."""

    def test_missing_rank(self, job: tuple[Store, str], run: RunStatus) -> None:
        """A missing rank is named with its host, until it arrives."""
        _, url = job
        wait_for(arrive(url, "step/0", 0, 1, 2, 3))
        waiting = arrive(url, "checkpoint/7", 0, 1, 3)
        wait_for_arrivals(url, "checkpoint/7", 3)

        incomplete = run(url)
        document = json.loads(run(url, "--json").out)
        wait_for([*arrive(url, "checkpoint/7", 2), *waiting])
        complete = run(url)

        assert incomplete.code == 2
        assert re.fullmatch(
            rf"barrier checkpoint/7 waits( for .+)?: missing 1 of 4: {HOST} \(rank 2\)",
            incomplete.lines[0],
        )
        assert incomplete.lines[1] == "missing: 1 barrier not complete"
        assert f"ranks: 4 of 4 registered\n  {HOST}: ranks 0-3\n" in incomplete.out
        assert "  checkpoint/7: 3 of 4 arrived" in incomplete.out
        assert f"    missing 1 of 4: {HOST} (rank 2)\n" in incomplete.out
        assert any(line.startswith("step/0: 4 arrived") for line in incomplete.lines)
        assert not document["healthy"]
        (barrier,) = document["barriers_in_progress"]
        assert barrier["missing_ranks"] == [2]
        assert barrier["missing_names"] == [HOST]
        (finished,) = document["barriers_finished"]
        assert finished["last_rank"] in range(4)
        assert finished["last_host"] == HOST
        assert complete.code == 0
        assert complete.lines[0] == "nothing is missing"
        assert "in progress" not in complete.out
        last = next(line for line in complete.lines if line.startswith("checkpoint/7"))
        assert f"last rank 2 ({HOST})" in last

    def test_store_is_unchanged(self, job: tuple[Store, str], run: RunStatus) -> None:
        """The command writes nothing to the store."""
        store, url = job
        wait_for(arrive(url, "step/0", 0, 1, world_size=2))
        # An arrival as of plain torch, because no rank may write during the comparison.
        store.add("step/1/num_members", 1)
        store.set("torch.rendezvous.j", b64encode(pickled_state({"node1": 0.0})))
        before = contents(url)

        assert run(url).code == 2
        assert run(url, "--json").code == 2

        assert contents(url) == before

    def test_age(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """A ledger has the age of a barrier; a young one does not count as missing."""
        _, url = tcp_job
        waiting = arrive(url, "b", 0, world_size=2)
        wait_for_arrivals(url, "b", 1)

        (barrier,) = json.loads(run(url, "--json").out)["barriers_in_progress"]
        assert 0 <= barrier["waited_seconds"] < HANG
        assert "  b: 1 of 2 arrived, the first " in run(url).out
        assert run(url, "--after", "3600").code == 0
        assert run(url, "--after", "0.001").code == 2
        wait_for([*arrive(url, "b", 1, world_size=2), *waiting])

    def test_barrier_of_torch(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """A barrier of torch records neither its world size nor its ranks."""
        _, url = tcp_job
        waiting = in_background(
            lambda: torch_store.barrier(connect(url), 2, "theirs", 40)
        )
        wait_for_arrivals(url, "theirs", 1)

        incomplete = run(url)
        torch_store.barrier(connect(url), 2, "theirs", 40)
        waiting.result(60)
        complete = run(url)

        assert (incomplete.code, complete.code) == (2, 0)
        assert "ranks: none registered" in incomplete.lines
        assert "theirs: 1 arrived" in incomplete.lines
        assert "theirs: 2 arrived" in complete.lines

    def test_verdict(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """Waiting ranks have recorded the world size and names of missing ranks."""
        store, url = tcp_job
        under = dist.PrefixStore("default_pg/0", store)
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(under, 8, "b", 0.2, 0, lambda rank: f"gpu{rank // 4}")
        # A barrier of three of the eight ranks.
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(under, 3, "c", 0.2, rank=0)

        out = run(url).out

        assert "ranks under default_pg/*/: 1 of 8 registered" in out
        assert "  not registered: ranks 1-7" in out
        assert "  default_pg/0/b: 1 of 8 arrived" in out
        assert "missing 7 of 8: gpu0 (ranks 1-3), gpu1 (ranks 4-7)" in out
        assert "  default_pg/0/c: 1 of 3 arrived" in out

    def test_abandoned(self, job: tuple[Store, str], run: RunStatus) -> None:
        """A barrier that timed out is not missing ranks in a job that continued."""
        _, url = job
        wait_for(arrive(url, "step/0", 0, 1, 2, world_size=3))

        def time_out(rank: int) -> None:
            with pytest.raises(tracedstore.BarrierTimeout):
                tracedstore.barrier(connect(url), 3, "step/1", 0.5, rank=rank)

        wait_for([in_background(lambda n=n: time_out(n)) for n in (0, 1)])  # type: ignore[misc]
        stalled = run(url)
        some = arrive(url, "step/2", 0, 1, world_size=3)
        wait_for_arrivals(url, "step/2", 2)
        halfway = run(url)
        wait_for([*arrive(url, "step/2", 2, world_size=3), *some])
        continued = run(url)
        document = json.loads(run(url, "--json").out)

        assert stalled.code == halfway.code == 2
        assert "  step/1: 2 of 3 arrived" in stalled.out
        if not url.startswith("tcp"):
            # Without a ledger the arrival times are unknown.
            assert continued.code == 2
            return
        assert halfway.lines[0].startswith("barrier step/2 waits for ")
        assert halfway.lines[1] == "missing: 1 barrier not complete"
        assert continued.code == 0
        assert "in progress" not in continued.out
        assert "\nbarriers abandoned: 1:\n  step/1: 2 of 3 arrived, " in continued.out
        assert f"    missing 1 of 3: {HOST} (rank 2)\n" in continued.out
        assert document["healthy"]
        (abandoned,) = document["barriers_abandoned"]
        assert (abandoned["barrier"], abandoned["missing_ranks"]) == ("step/1", [2])
        assert document["barriers_in_progress"] == []

    def test_not_abandoned(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """A barrier is in progress while another thread of its ranks continues."""
        _, url = tcp_job
        wait_for(arrive(url, "step/0", 0, 1, world_size=2))
        waiting = arrive(url, "checkpoint", 0, world_size=2)
        wait_for_arrivals(url, "checkpoint", 1)
        wait_for(arrive(url, "step/1", 0, 1, world_size=2))

        result = run(url)
        wait_for([*arrive(url, "checkpoint", 1, world_size=2), *waiting])

        assert result.code == 2
        assert "  checkpoint: 1 of 2 arrived" in result.out
        assert "abandoned" not in result.out

    def test_run_id(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """Ranks, barriers and rendezvous of other jobs are left out."""
        store, url = tcp_job
        for run_id, name in (("mine", "a"), ("yours", "b")):
            under = dist.PrefixStore(name, store)
            entry = {"rank": 0, "host": run_id, "pid": 1, "world_size": 1}
            entry |= {"run_id": run_id, "started": 1.0}
            under.set(f"{rank_registry.REGISTRY}/0", json.dumps(entry))
            under.add("step/num_members", 1)
            store.set(f"torch.rendezvous.{run_id}", b64encode(pickled_state()))

        out = run(url, "--run-id", "mine").out

        assert "yours" not in out
        assert "ranks under a/: 1 of 1 registered" in out
        assert "rendezvous mine: round 0" in out

    def test_many_thousand_keys(
        self, tcp_job: tuple[Store, str], run: RunStatus
    ) -> None:
        """Of the barriers of a long job the newest are shown, in their order."""
        store, url = tcp_job
        prefixes = [f"step/{step}" for step in range(5000)]
        for end, value in (("num_members", "4"), ("last_member", "<val_ignored>")):
            store.multi_set([f"{one}/{end}" for one in prefixes], [value] * 5000)
        store.set("another/num_members", "is no number")

        result = run(url)

        assert "barriers finished: 5000, the last 8:" in result.lines
        shown = [line.split(":")[0] for line in result.lines if line[:5] == "step/"]
        assert shown == prefixes[-8:]
        assert result.code == 0


def test_64_ranks(
    tcp_job: tuple[Store, str], run: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status of 64 ranks on eight hosts, two of them missing, is a few lines."""
    _, url = tcp_job
    monkeypatch.setattr(
        ProcessIdentity, "host", property(lambda _: threading.current_thread().name)
    )

    def rank(number: int, name: str) -> Future[None]:
        def pass_barrier() -> None:
            tracedstore.barrier(connect(url), 64, name, 40, rank=number)

        return in_background(pass_barrier, f"node{number // 8}")

    wait_for([rank(number, "start") for number in range(64)])
    absent = {42, 43}
    waiting = [rank(number, "end") for number in range(64) if number not in absent]
    wait_for_arrivals(url, "end", 62)
    incomplete = run(url)
    wait_for([*(rank(number, "end") for number in absent), *waiting])
    complete = run(url)

    assert (incomplete.code, complete.code) == (2, 0)
    assert "ranks: 64 of 64 registered" in incomplete.lines
    assert incomplete.lines[0].endswith(": missing 2 of 64: node5 (ranks 42-43)")
    odd = "node5: ranks 40-47, of these ranks 42-43 (2 awaited)"
    assert odd in incomplete.lines
    assert "7 other hosts: 56 ranks, none is awaited" in incomplete.lines
    assert "8 hosts: 64 ranks, none is awaited" in complete.lines
    assert "missing 2 of 64: node5 (ranks 42-43)" in incomplete.lines
    assert "  end: 62 of 64 arrived, the first " in incomplete.out
    assert any(line.startswith("start: 64 arrived within") for line in incomplete.lines)
    assert max(map(len, incomplete.out.splitlines())) <= 80
    assert len(incomplete.lines) < 25


class TestRendezvous:
    """The state that agents share."""

    # Made in the test, because heartbeats are recent.
    @pytest.mark.parametrize(
        ("state", "code", "lines"),
        [
            (
                lambda: pickled_state({"node1": 0, "node2": 0}, complete=True, round=3),
                0,
                [
                    "rendezvous job-7: round 3, complete",
                    "joined: node1 (pid 100), node2 (pid 101)",
                ],
            ),
            (
                lambda: pickled_state(
                    {"node1": 0, "node2": 100}, {"node3": 0}, complete=True
                ),
                2,
                [
                    "waiting for the next round: node3 (pid 200)",
                    "silent: node2 (pid 101), no heartbeat for 1 min ",
                ],
            ),
            (
                lambda: pickled_state({"node1": 0}),
                2,
                ["rendezvous job-7: round 0, not complete"],
            ),
            (
                lambda: pickled_state({"node1": 100}, complete=True, closed=True),
                0,
                ["rendezvous job-7: round 0, complete, closed"],
            ),
            (lambda: b"nonsense", 3, ["rendezvous job-7: its state cannot be read"]),
        ],
        ids=["complete", "silent", "not complete", "closed", "unreadable"],
    )
    def test_states(
        self,
        state: Callable[[], bytes],
        code: int,
        lines: list[str],
        tcp_job: tuple[Store, str],
        run: RunStatus,
    ) -> None:
        """Participants, wait list and silent nodes are shown."""
        store, url = tcp_job
        store.set("torch.rendezvous.job-7", b64encode(state()))

        result = run(url)

        assert result.code == code
        for line in lines:
            assert line in result.out
        document = json.loads(run(url, "--json").out)
        assert document["rendezvous"][0]["run_id"] == "job-7"
        assert document["healthy"] == (code == 0)

    def test_outside_the_store(self, etcd_server: EtcdServer, run: RunStatus) -> None:
        """The state that torch's etcd-v2 backend keeps outside its store is read."""
        client: Any = etcd_server.client()
        store: Store = EtcdStore(client, "/torch/elastic/store")
        store.set("k", "v")
        state = b64encode(pickled_state({"node1": 0.0}, complete=True)).decode()
        client.set("/torch/elastic/rendezvous/job-8", state)
        url = f"etcd://127.0.0.1:{etcd_server.port}/torch/elastic/store"
        try:
            result = run(url)
        finally:
            client.delete("/torch", recursive=True, dir=True)

        assert "rendezvous job-8: round 0, complete" in result.lines
        assert "joined: node1 (pid 100)" in result.lines

    def test_nothing_is_known(self, tcp_job: tuple[Store, str], run: RunStatus) -> None:
        """A store without a job is not healthy: exit code 3, with the reason."""
        store, url = tcp_job
        store.set("other", "value")

        result = run(url)

        assert result.code == 3
        assert "nothing is known: the store has no rank" in result.out
        assert run(url, "--json").code == 3

    def test_v3(self, etcd_server: EtcdServer, run: RunStatus) -> None:
        """Keys and rendezvous of the v3 API are found on the same server as v2's."""
        run_id = new_run_id()
        node = handler("traced-etcd", etcd_server.address, run_id, nodes=(1, 1))
        node.next_rendezvous()
        try:
            for path in (run_id, f"tracedstore/{run_id}"):
                result = run(f"etcd://{etcd_server.address}/{path}")
                assert f"rendezvous {run_id}: round 0, complete" in result.lines
        finally:
            node.shutdown()

    def test_invalid_keys(self, etcd_server: EtcdServer, run: RunStatus) -> None:
        """Keys and values in etcd that no Store has written are listed."""
        client: Any = etcd_server.client()
        prefix = "/jobs/invalid-keys"
        store: Store = EtcdStore(client, prefix)
        store.set("step/num_members", "1")
        not_utf8 = b64encode(b"\xc3(").decode()
        for key in ("no base64", "odd", not_utf8):
            client.set(f"{prefix}/{key}", "eA==")
        bad_value = b64encode(b"k").decode()
        client.set(f"{prefix}/{bad_value}", "%")
        url = f"etcd://127.0.0.1:{etcd_server.port}{prefix}"

        result = run(url)
        document = json.loads(run(url, "--json").out)

        assert (result.code, result.err) == (2, "")
        assert "keys that are not valid: 4:" in result.lines
        assert "odd: no Store has written it" in result.lines
        assert any(line.startswith("step: 1 arrived") for line in result.lines)
        assert set(document["invalid_keys"]) == {
            "no base64",
            "odd",
            not_utf8,
            bad_value,
        }

    def test_torchrun(self, start_command: Any, run: RunStatus) -> None:
        """The agents' store has the address of the worker store, which is read too."""
        port = free_port()
        endpoint = ("--rdzv-backend", "traced-c10d", "--rdzv-endpoint")
        start_command(
            *("torchrun", "--nproc-per-node", 3, "--rdzv-id", "job-7"),
            *(*endpoint, f"127.0.0.1:{port}"),
            *(Path(__file__).parent / "children" / "elastic_rank.py", 50),
        )
        label = "worker store: "

        def agents() -> Result | None:
            result = run(f"tcp://127.0.0.1:{port}")
            return result if label in result.out else None

        result = wait_until(agents)
        (line,) = (line for line in result.lines if line.startswith(label))
        url = line.removeprefix(label)
        document = json.loads(run(f"tcp://127.0.0.1:{port}", "--json").out)
        wait_for_arrivals(url, "checkpoint/7", 2)
        workers = run(url)
        agents_store = run(f"tcp://127.0.0.1:{port}")

        assert (agents_store.code, workers.code) == (2, 2)
        assert "rendezvous job-7: round 0, complete" in agents_store.lines
        assert agents_store.out.count("rendezvous job-7") == 1
        # The status of the endpoint includes that of the worker store.
        assert "ranks: 2 of 3 registered" in agents_store.lines
        assert "missing 1 of 3: " in agents_store.out
        assert document["rendezvous"][0]["workers_store"] == url
        assert "ranks: 2 of 3 registered" in workers.lines
        assert "missing 1 of 3: " in workers.out


def register_endpoint(folder: Path, port: int) -> str:
    """Register a rank with an endpoint here in a FileStore; return its URL."""
    entry = {"rank": 0, "host": "node", "pid": 1, "world_size": 1, "started": 1.0}
    entry |= {"metrics": f"http://127.0.0.1:{port}/metrics"}
    store: Store = dist.FileStore(str(folder / "store"), -1)
    store.set(f"{rank_registry.REGISTRY}/0", json.dumps(entry))
    return f"file://{folder / 'store'}"


class TestBlocked:
    """The replies of the ranks."""

    def test_token(
        self, tcp_job: tuple[Store, str], run: RunStatus, registry: CollectorRegistry
    ) -> None:
        """With the token a rank reports its calls in flight, without it a 401."""
        _, url = tcp_job
        tracedstore.configure(http_port=0, http_token="secret", registry=registry)
        store = tracedstore.wrap(connect(url))
        waiting = in_background(
            lambda: tracedstore.barrier(store, 2, "b", 40, rank=0), "waits"
        )
        wait_for_arrivals(url, "b", 1)
        wait_until(tracedstore.in_flight)

        result = run(url, "--token", "secret")
        calls = json.loads(run(url, "--token", "secret", "--json").out)["replies"]
        refused = run(url, "--token", "wrong")
        wait_for([*arrive(url, "b", 1, world_size=2), waiting])

        assert any(
            line.startswith("rank 0: wait b/last_member for ") for line in result.lines
        )
        assert calls[0]["in_flight"][0]["key"] == "b/last_member"
        assert "unknown: rank 0 (responded 401 Unauthorized)" in refused.lines

    @pytest.mark.parametrize(
        ("options", "sent"),
        [([], False), (["--token-host", "127.0.0.1"], True)],
        ids=["not named", "named"],
    )
    def test_token_policy(
        self, options: list[str], sent: bool, tmp_path: Path, run: RunStatus
    ) -> None:
        """A host that the user has not named gets no token, and the status why."""
        requests: list[bytes] = []

        def refuse(client: socket.socket) -> None:
            requests.append(client.recv(1000))
            client.sendall(b"HTTP/1.1 401 Unauthorized\r\n\r\n")

        with answering(refuse) as port:
            url = register_endpoint(tmp_path, port)
            result = run(url, "--token", "secret", *options)
            document = json.loads(run(url, "--token", "secret", *options, "--json").out)

        refusal = (
            f"token not sent to http://127.0.0.1:{port} (not TLS): use --token-host"
            " 127.0.0.1"
        )
        assert len(requests) == 2
        assert [b"secret" in request for request in requests] == [sent, sent]
        reason = "responded 401 Unauthorized" if sent else refusal
        assert document["replies"][0]["error"] == reason
        assert f"unknown: rank 0 ({reason})" in " ".join(result.lines)
        assert result.code == 0

    def test_redirects_are_not_followed(self, tmp_path: Path, run: RunStatus) -> None:
        """A rank cannot send the token elsewhere."""
        requests: list[bytes] = []

        def record(client: socket.socket) -> None:
            requests.append(client.recv(1000))

        with answering(record) as elsewhere:

            def redirect(client: socket.socket) -> None:
                client.recv(1000)
                location = f"Location: http://127.0.0.1:{elsewhere}/inflight"
                client.sendall(f"HTTP/1.1 302 Found\r\n{location}\r\n\r\n".encode())

            with answering(redirect) as port:
                url = register_endpoint(tmp_path, port)
                named = ("--token-host", "127.0.0.1")
                result = run(url, "--token", "secret", *named)

        assert "unknown: rank 0 (responded 302 Found)" in result.lines
        assert requests == []

    @pytest.mark.parametrize("token", [None, "secret"], ids=["open", "with a token"])
    def test_over_https(
        self,
        token: str | None,
        tcp_job: tuple[Store, str],
        run: RunStatus,
        registry: CollectorRegistry,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The authority of the ranks' certificates must be trusted."""
        _, url = tcp_job
        ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
        pair = ours.sign("rank")
        tracedstore.configure(
            http_port=0,
            http_cert=str(pair.certificate),
            http_key=str(pair.key),
            http_token=token,
            registry=registry,
        )
        store: Any = tracedstore.wrap(connect(url))
        tracedstore.barrier(store, 1, "b", rank=0)
        waiting = in_background(lambda: store.wait(["never"]), "waits")
        wait_until(tracedstore.in_flight)
        monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", token or "not-needed")

        monkeypatch.setenv("SSL_CERT_FILE", str(ours.certificate))
        trusted = run(url)
        wrong = run(url, "--token", "wrong")
        monkeypatch.setenv("SSL_CERT_FILE", str(others.certificate))
        untrusted = run(url)
        replies = json.loads(run(url, "--json").out)["replies"]
        connect(url).set("never", "now")
        waiting.result(60)

        blocked = "  rank 0: wait never for "
        assert blocked in trusted.out
        assert (blocked in wrong.out) == (token is None)
        assert "unknown: rank 0 (SSLCertVerificationError: " in untrusted.out
        assert "CERTIFICATE_VERIFY_FAILED" in replies[0]["error"]
        assert {trusted.code, wrong.code, untrusted.code} == {0}

    def test_ranks_without_reply(
        self, tcp_job: tuple[Store, str], run: RunStatus
    ) -> None:
        """Each rank without a reply is listed with the reason, though one hangs."""
        store, url = tcp_job
        with socket.create_server(("127.0.0.1", 0)) as silent:
            addresses = [
                f"http://127.0.0.1:{silent.getsockname()[1]}/metrics",
                f"http://127.0.0.1:{free_port()}/metrics",
                None,
                None,
            ]
            for rank, address in enumerate(addresses):
                info = {"rank": rank, "host": "node", "pid": 1, "world_size": 4}
                info |= {"metrics": address, "started": 1.0}
                store.set(f"{rank_registry.REGISTRY}/{rank}", json.dumps(info))
            result = run(url)

        assert "unknown: rank 0 (no response within 1 s)" in result.lines
        assert "unknown: rank 1 (connection refused)" in result.out
        assert "unknown: ranks 2-3 (no endpoint)" in result.lines
        assert result.code == 0


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve another protocol than that of a store; yield the port."""

    def serve(server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                try:
                    answer(client)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        in_background(lambda: serve(server))
        yield port
        # close() does not wake a thread in accept().
        server.shutdown(socket.SHUT_RDWR)


def answers_the_probe_only(client: socket.socket) -> None:
    """Answer as a TCPStore does, and then not any more, as a busy server does."""
    while request := client.recv(1000):
        if request == _PROBE_REQUEST:
            client.sendall(_PROBE_RESPONSE)


def test_busy_store_is_not_another_server(run: RunStatus) -> None:
    """A server that answers as a TCPStore does is one, however slow it is then."""
    with answering(answers_the_probe_only) as port:
        result = run(f"tcp://127.0.0.1:{port}")

    assert result.code == 1
    assert "another" not in result.err
    assert "answered as a TCPStore does" in result.err
    assert "it is overloaded, or hangs" in result.err


def speaks_http(client: socket.socket) -> None:
    """Answer as a web server answers an invalid request."""
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hangs_up(client: socket.socket) -> None:
    """Let a client connect and count keys, and hang up at the next request."""
    request = client.recv(10, socket.MSG_WAITALL)
    client.sendall(request[6:])
    client.recv(1)
    client.sendall(struct.pack("<q", 3))
    client.recv(1)


def in_a_process(url: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process."""
    return subprocess.run(
        [*COMMAND, "--store", url],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def without_torch(*arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run status and sd with each of the arguments where torch cannot be imported."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from tracedstore.tools.cli.main import main\n"
        "def code(*given):\n"
        "    try:\n"
        "        return main(given)\n"
        "    except SystemExit as end:\n"
        "        return end.code\n"
        "for command in ('status', 'sd'):\n"
        f"    print([code(command, *given) for given in {arguments}])\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class StopsLater:
    """A proxy of a TCPStore, until the store has answered a request for num_keys.

    Then the server process is stopped, and the next request is never answered.

    Attributes:
        port: The port for clients.
        stopped: Is set when the server is stopped.
    """

    # Bytes of the echo of PING, and of a number of keys.
    ANSWER_SIZE = 4 + 8

    def __init__(self, store: Any, port: int) -> None:
        self._store, self._to = store, port
        self.stopped = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open = [self._server]
        self.port: int = self._server.getsockname()[1]
        in_background(self._serve)

    def _serve(self) -> None:
        while True:
            client, _ = self._server.accept()
            server = socket.create_connection(("127.0.0.1", self._to))
            self._open += [client, server]
            in_background(lambda c=client, s=server: self._forward(c, s))  # type: ignore[misc]
            in_background(lambda c=client, s=server: self._answer(s, c))  # type: ignore[misc]

    @staticmethod
    def _forward(client: socket.socket, server: socket.socket) -> None:
        while request := client.recv(1000):
            server.sendall(request)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        answered = 0
        while answer := server.recv(1000):
            answered += len(answer)
            if answered == self.ANSWER_SIZE:
                pause(self._store.pid)
                self.stopped.set()
            client.sendall(answer)

    def close(self) -> None:
        """Close all connections."""
        for one in self._open:
            # close() does not wake a thread in accept() or recv().
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def stops_later(start_child: Any) -> Iterator[StopsLater]:
    """Serve a TCPStore with one key, behind a proxy that stops it."""
    child = start_child("tcp_server")
    port = child.next_report()["port"]
    connect(f"tcp://127.0.0.1:{port}").set("k", "v")
    between = StopsLater(child, port)
    yield between
    between.close()


class TestErrors:
    """One sentence on standard error, and exit code 1."""

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            (speaks_http, "not answer as a TCPStore does"),
            (
                hangs_up,
                "the job has just ended, its torch is older than 2.10,",
            ),
        ],
    )
    def test_another_server(
        self, answer: Callable[[socket.socket], None], message: str
    ) -> None:
        """Another server and one that hangs up are distinguished."""
        with answering(answer) as port:
            done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1

    def test_without_torch(self, tmp_path: Path) -> None:
        """Errors that need no torch, and help, do not import it."""
        modern = EtcdServer(tmp_path, "--enable-v2=false")
        with ExitStack() as stack:
            modern.start()
            stack.callback(modern.stop)
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            other = stack.enter_context(answering(speaks_http))
            cases = {
                f"tcp://127.0.0.1:{silent.getsockname()[1]}": "does not answer within",
                f"tcp://127.0.0.1:{other}": "not answer as a TCPStore does",
                f"tcp://127.0.0.1:{free_port()}": "nothing listens there",
                "tcp://none.invalid:1": "host name 'none.invalid' cannot be resolved",
                "redis://here:1": "accepted is HOST:PORT, tcp://",
                f"etcd://127.0.0.1:{free_port()}/p": "nothing listens there",
                f"etcd://127.0.0.1:{modern.port}/p": "no keys under /tracedstore/p/",
                f"file://{tmp_path}/none": "none: No such file",
            }
            lines = [["--store", url] for url in cases] + [["--interval", "0"]]
            done = without_torch(*lines, ["--help"])

        assert done.returncode == 0, done.stderr
        codes = [64 if url.startswith("redis") else 1 for url in cases]
        assert done.stdout.count(f"\n{[*codes, 64, 0]}\n") == 2
        for message in cases.values():
            assert message in done.stderr
        assert done.stderr.count("tracedstore: ") == 2 * len(cases)
        assert "argument --interval: is '0'; accepted are seconds" in done.stderr

    def test_empty_prefix(self, etcd_server: EtcdServer, run: RunStatus) -> None:
        """A prefix without keys, such as a mistyped one, is reported."""
        result = run(f"etcd://127.0.0.1:{etcd_server.port}/no/such")

        assert result.code == 1
        assert "has no key under /no/such" in result.err

    @pytest.mark.parametrize("silent", [True, False], ids=["silent", "dead"])
    def test_as_a_process(self, silent: bool) -> None:
        """An unreachable or silent server is reported within a few seconds."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1] if silent else free_port()
            done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("tracedstore: the store at tcp://")
        assert done.stderr.count("\n") == 1
        assert ("does not answer" if silent else "nothing listens") in done.stderr

    def test_stopped_server(self, start_child: Any) -> None:
        """The kernel accepts connections for a stopped server, which never answers."""
        child = start_child("tcp_server")
        port = child.next_report()["port"]
        pause(child.pid)

        done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert done.returncode == 1
        assert "does not answer within" in done.stderr

    def test_server_that_stops_later(self, stops_later: StopsLater) -> None:
        """A server that stops while torch lists keys with the GIL held is reported."""
        done = in_a_process(f"tcp://127.0.0.1:{stops_later.port}")

        assert stops_later.stopped.is_set()
        assert (done.returncode, done.stdout) == (1, "")
        assert "answered, and then not for 3 s" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_ctrl_c(self, stops_later: StopsLater) -> None:
        """Ctrl-C ends the command in that state too, and leaves no process."""
        url = f"tcp://127.0.0.1:{stops_later.port}"
        command = subprocess.Popen(
            [*COMMAND, "--store", url],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert stops_later.stopped.wait(60)
            os.killpg(command.pid, signal.SIGINT)
            _, errors = command.communicate(timeout=240)
        finally:
            command.kill()
            command.wait(240)

        assert (command.returncode, errors) == (130, "")
        with pytest.raises(ProcessLookupError):
            os.killpg(command.pid, 0)

    def test_ctrl_c_while_torch_is_imported(self, tmp_path: Path) -> None:
        """Ctrl-C ends the import of torch, which catches every exception of NumPy."""
        (tmp_path / "torch.py").write_text(
            "import sys, time\n"
            "print('loading', flush=True)\n"
            "try:\n"
            "    time.sleep(100)\n"
            "except KeyboardInterrupt:\n"
            "    time.sleep(100)\n"
        )
        store = tmp_path / "store"
        store.touch()
        command = subprocess.Popen(
            [*COMMAND, "--store", f"file://{store}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        try:
            assert command.stdout is not None
            assert command.stdout.readline() == "loading\n"
            command.send_signal(signal.SIGINT)
            _, errors = command.communicate(timeout=240)
        finally:
            command.kill()
            command.communicate()

        assert (command.returncode, errors) == (-signal.SIGINT, "")


class TestWatch:
    """``--watch``."""

    def test_pipe(self, tcp_job: tuple[Store, str]) -> None:
        """Each status is printed with its time, without escape sequences."""
        store, url = tcp_job
        store.add("b/num_members", 1)
        command = [*COMMAND, "--store", url, *WATCH]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert watching.stdout is not None
            lines = iter(watching.stdout.readline, "")
            assert next(lines).startswith("20")
            assert next(lines) == "missing: 1 barrier not complete\n"
            store.set("b/last_member", "")
            assert any(line == "nothing is missing\n" for line in lines)
        finally:
            watching.kill()
            watching.communicate(timeout=240)

    def test_terminal(self, tcp_job: tuple[Store, str]) -> None:
        """The status is redrawn, as much as fits, and is whole after Ctrl-C."""
        store, url = tcp_job
        for number in range(20):
            store.add(f"b/{number}/num_members", 1)
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (10, 60))
        # The leader of a terminal's session is signalled by its keys.
        watching = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *COMMAND, "--store", url, *WATCH],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # Without LINES and COLUMNS, which readline sets for pytest's own terminal.
            env={
                **{k: v for k, v in os.environ.items() if k not in ENVIRONMENT},
                "TERM": "xterm",
            },
        )
        os.close(theirs)
        try:
            seen = b""
            # Until a view is complete after three redraws: a signal in the middle of
            # one leaves half of it.
            while seen.count(b"more lines") < 4:
                seen += os.read(ours, 1000)
            os.write(ours, b"\x03")
            code = watching.wait(240)
            with suppress(OSError):
                while more := os.read(ours, 65536):
                    seen += more
        finally:
            watching.kill()
            watching.wait(240)
            os.close(ours)

        output = seen.decode()
        *shown, last = [
            [without_styles(line) for line in lines] for lines in frames(output)
        ]
        assert code == 130
        hint = "tracedstore top is this as a screen with keys"
        for lines in shown[:3]:
            assert lines[:2] == [hint, "missing: 20 barriers not complete"]
            assert len(lines) == 11
            assert lines[-2:] == ["... 15 more lines", ""]
        assert last[:2] == [hint, "missing: 20 barriers not complete"]
        assert last[-2:] == ["  b/19: 1 arrived", ""]
        # Nothing but the view is erased, and no mode of the terminal is changed.
        assert "\x1b[2J" not in output
        assert "\x1b[?" not in output
        assert "Traceback" not in output

    def test_closed_pipe(self, tcp_job: tuple[Store, str]) -> None:
        """The command ends with code 141 when its reader closes the pipe."""
        _, url = tcp_job
        command = [*COMMAND, "--store", url, *WATCH]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as watching:
            assert watching.stdout is not None
            assert watching.stderr is not None
            watching.stdout.readline()
            watching.stdout.close()
            assert watching.stderr.read() == b""
        assert watching.returncode == 141


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has examples and exit codes."""
    with pytest.raises(SystemExit) as exited:
        main(["status", "--help"])

    text = capsys.readouterr().out
    assert exited.value.code == 0
    assert "tracedstore status --store tcp://node1:29400" in text
    assert "Exit codes: 0 nothing is missing" in text
