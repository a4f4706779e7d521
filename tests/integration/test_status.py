"""``tracedstore status``, on the stores of jobs that run, and on what is none."""

import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
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
from torch.distributed.elastic.utils import store as torchs

import tracedstore
from integration.harness import in_background, wait_until
from support.certificates import Authority
from support.etcd import EtcdServer, free_port
from support.rendezvous import pickled_state
from tracedstore.cli.main import main
from tracedstore.coordination import rank_registry
from tracedstore.core.identity import ProcessIdentity

Store = Any
HOST = socket.gethostname()
COMMAND = [sys.executable, "-W", "ignore", "-m", "tracedstore.cli.main", "status"]
AGAIN = ["--watch", "--interval", "0.1"]


def connect(url: str) -> Store:
    """Be one more rank of a job."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return dist.FileStore(parts.path, -1)
    assert parts.port is not None
    if parts.scheme == "tcp":
        return dist.TCPStore(str(parts.hostname), parts.port, None, is_master=False)
    return EtcdStore(etcd.Client(host="127.0.0.1", port=parts.port), parts.path)


def come(url: str, name: str, *numbers: int, world_size: int = 4) -> list[Future[None]]:
    """Let ranks come to a barrier, each on a connection of its own."""

    def rank(number: int) -> None:
        tracedstore.barrier(connect(url), world_size, name, 40, rank=number)

    return [in_background(lambda n=n: rank(n)) for n in numbers]  # type: ignore[misc]


def through(comers: list[Future[None]]) -> None:
    """Wait until they are."""
    for one in comers:
        one.result(30)


def arrived(url: str, name: str, count: int) -> None:
    """Wait until so many came; names are written before anybody is counted."""
    store = connect(url)

    def all_there() -> bool:
        if not store.check([f"{name}/num_members"]):
            return False
        return int(store.get(f"{name}/num_members")) >= count

    wait_until(all_there)


def contents(url: str) -> Any:
    """Everything that is in a store, as its server or its file has it."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(parts.path).read_bytes()
    if parts.scheme == "tcp":
        store = connect(url)
        return {key: store.get(key) for key in store.list_keys()}
    client: Any = etcd.Client(host="127.0.0.1", port=parts.port or 0)
    nodes = client.get(parts.path).children
    return {node.key: (node.value, node.modifiedIndex) for node in nodes}


class Asked:
    """The command, run in this process.

    Attributes:
        code: How it ended.
        out: What it wrote.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        capsys.readouterr()
        self.code = main(["status", *arguments])
        written = capsys.readouterr()
        self.out, self.err = written.out, written.err

    @property
    def lines(self) -> list[str]:
        """Line by line, without what is before and after."""
        return [line.strip() for line in self.out.splitlines()]


Ask = Callable[..., Asked]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run the command."""
    return lambda url, *more: Asked(capsys, "--store", url, *more)


@pytest.fixture
def tcp_job() -> tuple[Store, str]:
    """A job on a TCPStore."""
    store: Store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    return store, f"tcp://127.0.0.1:{store.port}"


class TestBarriers:
    """On every kind of store."""

    def test_somebody_is_missing(self, job: tuple[Store, str], ask: Ask) -> None:
        """Who and where; and when it has come, all is well."""
        _, url = job
        through(come(url, "step/0", 0, 1, 2, 3))
        waiting = come(url, "checkpoint/7", 0, 1, 3)
        arrived(url, "checkpoint/7", 3)

        short = ask(url)
        told = json.loads(ask(url, "--json").out)
        through([*come(url, "checkpoint/7", 2), *waiting])
        well = ask(url)

        assert short.code == 2
        assert short.lines[0] == "missing: 1 barrier not complete"
        assert f"ranks: 4 of 4 registered\n  {HOST}: ranks 0-3\n" in short.out
        assert "  checkpoint/7: 3 of 4 arrived" in short.out
        assert f"    missing 1 of 4: {HOST} (rank 2)\n" in short.out
        assert any(line.startswith("step/0: 4 arrived") for line in short.lines)
        assert not told["healthy"]
        (barrier,) = told["barriers_in_progress"]
        assert barrier["missing_ranks"] == [2]
        assert barrier["missing_names"] == [HOST]
        (finished,) = told["barriers_finished"]
        assert finished["last_rank"] in range(4)
        assert finished["last_host"] == HOST
        assert well.code == 0
        assert well.lines[0] == "nothing is missing"
        assert "in progress" not in well.out
        last = next(line for line in well.lines if line.startswith("checkpoint/7"))
        assert f"last rank 2 ({HOST})" in last

    def test_nothing_is_written(self, job: tuple[Store, str], ask: Ask) -> None:
        """Whoever looks leaves no trace."""
        store, url = job
        through(come(url, "step/0", 0, 1, world_size=2))
        # Plain torch's way of arriving, so that nobody writes while this is compared.
        store.add("step/1/num_members", 1)
        store.set("torch.rendezvous.j", b64encode(pickled_state({"node1": 0.0})))
        before = contents(url)

        assert ask(url).code == 2
        assert ask(url, "--json").code == 2

        assert contents(url) == before

    def test_since_when(self, tcp_job: tuple[Store, str], ask: Ask) -> None:
        """Where there is a ledger; and one that is young enough is not reported."""
        _, url = tcp_job
        waiting = come(url, "b", 0, world_size=2)
        arrived(url, "b", 1)

        told = json.loads(ask(url, "--json").out)["barriers_in_progress"][0]
        assert 0 <= told["waited_seconds"] < 20
        assert "  b: 1 of 2 arrived, the first " in ask(url).out
        assert ask(url, "--after", "3600").code == 0
        assert ask(url, "--after", "0.001").code == 2
        through([*come(url, "b", 1, world_size=2), *waiting])

    def test_a_barrier_of_torchs_own(
        self, tcp_job: tuple[Store, str], ask: Ask
    ) -> None:
        """How many it is for stands nowhere, nor who came."""
        _, url = tcp_job
        waiting = in_background(lambda: torchs.barrier(connect(url), 2, "theirs", 40))
        arrived(url, "theirs", 1)

        short = ask(url)
        torchs.barrier(connect(url), 2, "theirs", 40)
        waiting.result(30)
        well = ask(url)

        assert (short.code, well.code) == (2, 0)
        assert "ranks: none registered" in short.lines
        assert "theirs: 1 arrived" in short.lines
        assert "theirs: 2 arrived" in well.lines

    def test_what_those_who_wait_say(
        self, tcp_job: tuple[Store, str], ask: Ask
    ) -> None:
        """Names of ranks that never came, and how many the barrier is for."""
        store, url = tcp_job
        under = dist.PrefixStore("default_pg/0", store)
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(under, 8, "b", 0.2, 0, lambda rank: f"gpu{rank // 4}")
        # This one is for three of the eight.
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(under, 3, "c", 0.2, rank=0)

        out = ask(url).out

        assert "ranks under default_pg/*/: 1 of 8 registered" in out
        assert "  not registered: ranks 1-7" in out
        assert "  default_pg/0/b: 1 of 8 arrived" in out
        assert "missing 7 of 8: gpu0 (ranks 1-3), gpu1 (ranks 4-7)" in out
        assert "  default_pg/0/c: 1 of 3 arrived" in out

    def test_abandoned(self, job: tuple[Store, str], ask: Ask) -> None:
        """One that timed out is nobody's trouble any more, in a job that went on."""
        _, url = job
        through(come(url, "step/0", 0, 1, 2, world_size=3))

        def in_vain(rank: int) -> None:
            with pytest.raises(tracedstore.BarrierTimeout):
                tracedstore.barrier(connect(url), 3, "step/1", 0.5, rank=rank)

        through([in_background(lambda n=n: in_vain(n)) for n in (0, 1)])  # type: ignore[misc]
        stuck = ask(url)
        some = come(url, "step/2", 0, 1, world_size=3)
        arrived(url, "step/2", 2)
        halfway = ask(url)
        through([*come(url, "step/2", 2, world_size=3), *some])
        gone_on = ask(url)
        told = json.loads(ask(url, "--json").out)

        assert stuck.code == halfway.code == 2
        assert "  step/1: 2 of 3 arrived" in stuck.out
        if not url.startswith("tcp"):
            # Without a ledger nobody knows who came when.
            assert gone_on.code == 2
            return
        assert halfway.lines[0] == "missing: 1 barrier not complete"
        assert gone_on.code == 0
        assert "in progress" not in gone_on.out
        assert "\nbarriers abandoned: 1:\n  step/1: 2 of 3 arrived, " in gone_on.out
        assert f"    missing 1 of 3: {HOST} (rank 2)\n" in gone_on.out
        assert told["healthy"]
        (left,) = told["barriers_abandoned"]
        assert (left["barrier"], left["missing_ranks"]) == ("step/1", [2])
        assert told["barriers_in_progress"] == []

    def test_not_abandoned(self, tcp_job: tuple[Store, str], ask: Ask) -> None:
        """Another thread of theirs goes on, and this one waits still."""
        _, url = tcp_job
        through(come(url, "step/0", 0, 1, world_size=2))
        waiting = come(url, "checkpoint", 0, world_size=2)
        arrived(url, "checkpoint", 1)
        through(come(url, "step/1", 0, 1, world_size=2))

        asked = ask(url)
        through([*come(url, "checkpoint", 1, world_size=2), *waiting])

        assert asked.code == 2
        assert "  checkpoint: 1 of 2 arrived" in asked.out
        assert "left behind" not in asked.out

    def test_of_one_job(self, tcp_job: tuple[Store, str], ask: Ask) -> None:
        """Others' ranks, barriers and rendezvous are left out."""
        store, url = tcp_job
        for run_id, name in (("mine", "a"), ("yours", "b")):
            under = dist.PrefixStore(name, store)
            told = f'{{"rank": 0, "host": "{run_id}", "pid": 1, "world_size": 1'
            told += f', "run_id": "{run_id}", "started": 1.0}}'
            under.set(f"{rank_registry.REGISTRY}/0", told)
            under.add("step/num_members", 1)
            store.set(f"torch.rendezvous.{run_id}", b64encode(pickled_state()))

        out = ask(url, "--run-id", "mine").out

        assert "yours" not in out
        assert "ranks under a/: 1 of 1 registered" in out
        assert "rendezvous mine: round 0" in out

    def test_many_thousand_keys(self, tcp_job: tuple[Store, str], ask: Ask) -> None:
        """Of a long job the last ones are shown, in their order."""
        store, url = tcp_job
        prefixes = [f"step/{step}" for step in range(5000)]
        for end, value in (("num_members", "4"), ("last_member", "<val_ignored>")):
            store.multi_set([f"{one}/{end}" for one in prefixes], [value] * 5000)
        store.set("somebodys/num_members", "is no number")

        asked = ask(url)

        assert "barriers finished: 5000, the last 8:" in asked.lines
        shown = [line.split(":")[0] for line in asked.lines if line[:5] == "step/"]
        assert shown == prefixes[-8:]
        assert asked.code == 0


def test_64_ranks(
    tcp_job: tuple[Store, str], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight hosts, of which one lost two ranks, in few lines."""
    _, url = tcp_job
    monkeypatch.setattr(
        ProcessIdentity, "host", property(lambda _: threading.current_thread().name)
    )

    def rank(number: int, name: str) -> Future[None]:
        def meet() -> None:
            tracedstore.barrier(connect(url), 64, name, 40, rank=number)

        return in_background(meet, f"node{number // 8}")

    through([rank(number, "start") for number in range(64)])
    absent = {42, 43}
    waiting = [rank(number, "end") for number in range(64) if number not in absent]
    arrived(url, "end", 62)
    short = ask(url)
    through([*(rank(number, "end") for number in absent), *waiting])
    well = ask(url)

    assert (short.code, well.code) == (2, 0)
    assert "ranks: 64 of 64 registered" in short.lines
    assert [f"node{n}: ranks {8 * n}-{8 * n + 7}" in short.lines for n in range(8)] == (
        [True] * 8
    )
    assert "missing 2 of 64: node5 (ranks 42-43)" in short.lines
    assert "  end: 62 of 64 arrived, the first " in short.out
    assert any(line.startswith("start: 64 arrived within") for line in short.lines)
    assert max(map(len, short.out.splitlines())) <= 80
    assert len(short.lines) < 25


class TestRendezvous:
    """What the nodes share."""

    # Made in the test: heartbeats are of now.
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
                    "silent: node2 (pid 101), for 1 min ",
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
            (lambda: b"nonsense", 0, ["rendezvous job-7: its state cannot be read"]),
        ],
        ids=["complete", "silent", "not complete", "closed", "unreadable"],
    )
    def test_states(
        self,
        state: Callable[[], bytes],
        code: int,
        lines: list[str],
        tcp_job: tuple[Store, str],
        ask: Ask,
    ) -> None:
        """Participants, wait list, and who has not been heard of."""
        store, url = tcp_job
        store.set("torch.rendezvous.job-7", b64encode(state()))

        asked = ask(url)

        assert asked.code == code
        for line in lines:
            assert line in asked.out
        told = json.loads(ask(url, "--json").out)
        assert told["rendezvous"][0]["run_id"] == "job-7"
        assert told["healthy"] == (code == 0)

    def test_beside_the_store(self, etcd_server: EtcdServer, ask: Ask) -> None:
        """Where torch's etcd-v2 has it."""
        client: Any = etcd_server.client()
        store: Store = EtcdStore(client, "/torch/elastic/store")
        store.set("k", "v")
        state = b64encode(pickled_state({"node1": 0.0}, complete=True)).decode()
        client.set("/torch/elastic/rendezvous/job-8", state)
        url = f"etcd://127.0.0.1:{etcd_server.port}/torch/elastic/store"
        try:
            asked = ask(url)
        finally:
            client.delete("/torch", recursive=True, dir=True)

        assert "rendezvous job-8: round 0, complete" in asked.lines
        assert "joined: node1 (pid 100)" in asked.lines

    def test_of_torchrun(self, start_command: Any, ask: Ask) -> None:
        """Its agents meet in one store, and say where their workers meet."""
        port = free_port()
        endpoint = ("--rdzv-backend", "traced-c10d", "--rdzv-endpoint")
        start_command(
            *("torchrun", "--nproc-per-node", 3, "--rdzv-id", "job-7"),
            *(*endpoint, f"127.0.0.1:{port}"),
            *(Path(__file__).parent / "children" / "elastic_rank.py", 50),
        )
        meet = "its workers meet in "

        def agents() -> Asked | None:
            asked = ask(f"tcp://127.0.0.1:{port}")
            return asked if meet in asked.out else None

        found = wait_until(agents, 40)
        (where,) = (line for line in found.lines if line.startswith(meet))
        url = where.removeprefix(meet)
        told = json.loads(ask(f"tcp://127.0.0.1:{port}", "--json").out)
        arrived(url, "checkpoint/7", 2)
        workers = ask(url)
        followed = ask(f"tcp://127.0.0.1:{port}")

        assert (followed.code, workers.code) == (2, 2)
        assert "rendezvous job-7: round 0, complete" in followed.lines
        assert followed.out.count("rendezvous job-7") == 1
        # What is asked of the endpoint is answered from where the workers are.
        assert "ranks: 2 of 3 registered" in followed.lines
        assert "missing 1 of 3: " in followed.out
        assert told["rendezvous"][0]["workers_store"] == url
        assert "ranks: 2 of 3 registered" in workers.lines
        assert "missing 1 of 3: " in workers.out


class TestBlocked:
    """What the ranks say themselves."""

    def test_asked_with_a_token(
        self, tcp_job: tuple[Store, str], ask: Ask, registry: CollectorRegistry
    ) -> None:
        """What each is in, and since when; without the token, that they do not say."""
        _, url = tcp_job
        tracedstore.configure(http_port=0, http_token="secret", registry=registry)
        store = tracedstore.wrap(connect(url))
        waiting = in_background(
            lambda: tracedstore.barrier(store, 2, "b", 40, rank=0), "waits"
        )
        arrived(url, "b", 1)
        wait_until(tracedstore.in_flight)

        told = ask(url, "--token", "secret")
        calls = json.loads(ask(url, "--token", "secret", "--json").out)["blocked"]
        refused = ask(url, "--token", "wrong")
        through([*come(url, "b", 1, world_size=2), waiting])

        assert any(
            line.startswith("rank 0: wait b/last_member for ") for line in told.lines
        )
        assert calls[0]["in_flight"][0]["key"] == "b/last_member"
        assert "not known: rank 0 (answered 401 Unauthorized)" in refused.lines

    @pytest.mark.parametrize("token", [None, "secret"], ids=["open", "with a token"])
    def test_over_https(
        self,
        token: str | None,
        tcp_job: tuple[Store, str],
        ask: Ask,
        registry: CollectorRegistry,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Whoever signed the ranks' certificates has to be trusted here."""
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
        monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", token or "not asked for")

        monkeypatch.setenv("SSL_CERT_FILE", str(ours.certificate))
        trusted = ask(url)
        wrong = ask(url, "--token", "wrong")
        monkeypatch.setenv("SSL_CERT_FILE", str(others.certificate))
        untrusted = ask(url)
        told = json.loads(ask(url, "--json").out)["blocked"]
        connect(url).set("never", "now")
        waiting.result(30)

        blocked = "  rank 0: wait never for "
        assert blocked in trusted.out
        assert (blocked in wrong.out) == (token is None)
        assert "not known: rank 0 (SSLCertVerificationError: " in untrusted.out
        assert "CERTIFICATE_VERIFY_FAILED" in told[0]["why"]
        assert {trusted.code, wrong.code, untrusted.code} == {0}

    def test_those_that_cannot_be_asked(
        self, tcp_job: tuple[Store, str], ask: Ask
    ) -> None:
        """Nobody is waited for, and each is accounted for."""
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
            began = time.monotonic()
            asked = ask(url)

        assert time.monotonic() - began < 10
        assert "not known: rank 0 (no response within 1 s)" in asked.lines
        assert "not known: rank 1 (connection refused)" in asked.out
        assert "not known: ranks 2-3 (no endpoint)" in asked.lines
        assert asked.code == 0


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Something that listens and is no store; gives its port."""

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
        # A thread in accept() does not notice a close.
        server.shutdown(socket.SHUT_RDWR)


def speaks_http(client: socket.socket) -> None:
    """Answer as a web server does to what it cannot read."""
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def is_old(client: socket.socket) -> None:
    """Let a client connect and count keys, and hang up when asked for more."""
    greeting = client.recv(10, socket.MSG_WAITALL)
    client.sendall(greeting[6:])
    client.recv(1)
    client.sendall(struct.pack("<q", 3))
    client.recv(1)


def in_a_process(url: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, from its start to its end."""
    return subprocess.run(
        [*COMMAND, "--store", url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def without_torch(*arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run both commands, each with each of these, where torch cannot be loaded."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from tracedstore.cli.main import main\n"
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
        timeout=50,
        check=False,
    )


class StopsLater:
    """Passes on what a client and a TCPStore say, until the store has counted its keys.

    Then the store's process is stopped: what is asked next is never answered.

    Attributes:
        port: Where clients connect.
        stopped: Is set when it was stopped.
    """

    # The echo of a greeting, and a number of keys.
    ANSWERS = 4 + 8

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
            in_background(lambda c=client, s=server: self._ask(c, s))  # type: ignore[misc]
            in_background(lambda c=client, s=server: self._answer(s, c))  # type: ignore[misc]

    @staticmethod
    def _ask(client: socket.socket, server: socket.socket) -> None:
        while asked := client.recv(1000):
            server.sendall(asked)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        said = 0
        while answer := server.recv(1000):
            said += len(answer)
            if said == self.ANSWERS:
                os.kill(self._store.pid, signal.SIGSTOP)
                self.stopped.set()
            client.sendall(answer)

    def close(self) -> None:
        """Hang up."""
        for one in self._open:
            # A thread in accept() or recv() does not notice a close.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def stops_later(start_child: Any) -> Iterator[StopsLater]:
    """A TCPStore with something in it."""
    child = start_child("tcp_server")
    port = child.next_report()["port"]
    connect(f"tcp://127.0.0.1:{port}").set("k", "v")
    between = StopsLater(child, port)
    yield between
    between.close()


class TestErrors:
    """One sentence on standard error, and exit code 1."""

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (speaks_http, "not answer as a TCPStore does"),
            (is_old, "its torch is too old"),
        ],
    )
    def test_something_else(
        self, answer: Callable[[socket.socket], None], said: str
    ) -> None:
        """Is told apart."""
        with answering(answer) as port:
            done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1

    def test_at_once(self, tmp_path: Path) -> None:
        """What needs no torch does not wait for it, nor does help."""
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
                "tcp://no-such-host.invalid:1": "'no-such-host.invalid' is not known",
                "redis://here:1": "accepted is tcp://",
                f"etcd://127.0.0.1:{free_port()}/p": "nothing listens there",
                f"etcd://127.0.0.1:{modern.port}/p": "as an etcd with the v2 API",
                f"file://{tmp_path}/none": "none: No such file",
            }
            lines = [["--store", url] for url in cases] + [["--interval", "0"]]
            done = without_torch(*lines, ["--help"])

        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"\n{[1] * len(cases) + [64, 0]}\n") == 2
        for said in cases.values():
            assert said in done.stderr
        assert done.stderr.count("tracedstore: ") == 2 * len(cases)
        assert "argument --interval: is '0'; accepted are seconds" in done.stderr

    def test_nothing_under_the_prefix(self, etcd_server: EtcdServer, ask: Ask) -> None:
        """Which a mistyped one is."""
        asked = ask(f"etcd://127.0.0.1:{etcd_server.port}/no/such")

        assert asked.code == 1
        assert "has nothing under /no/such" in asked.err

    @pytest.mark.parametrize("silent", [True, False], ids=["silent", "dead"])
    def test_as_a_process(self, silent: bool) -> None:
        """From its start to its end, within a few seconds."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1] if silent else free_port()
            done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("tracedstore: the store at tcp://")
        assert done.stderr.count("\n") == 1
        assert ("does not answer" if silent else "nothing listens") in done.stderr

    def test_a_store_that_stops(self, start_child: Any) -> None:
        """A server that was stopped is connected to by the kernel, and says nothing."""
        child = start_child("tcp_server")
        port = child.next_report()["port"]
        os.kill(child.pid, signal.SIGSTOP)

        done = in_a_process(f"tcp://127.0.0.1:{port}")

        assert done.returncode == 1
        assert "does not answer within" in done.stderr

    def test_a_store_that_stops_later(self, stops_later: StopsLater) -> None:
        """While it is asked for its keys, when torch keeps the GIL."""
        done = in_a_process(f"tcp://127.0.0.1:{stops_later.port}")

        assert stops_later.stopped.is_set()
        assert (done.returncode, done.stdout) == (1, "")
        assert "answered, and then not for 3 s" in done.stderr
        assert done.stderr.count("\n") == 1

    def test_ctrl_c(self, stops_later: StopsLater) -> None:
        """Is heard even then, and nothing is left of it."""
        url = f"tcp://127.0.0.1:{stops_later.port}"
        asking = subprocess.Popen(
            [*COMMAND, "--store", url],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert stops_later.stopped.wait(30)
            os.killpg(asking.pid, signal.SIGINT)
            _, said = asking.communicate(timeout=20)
        finally:
            asking.kill()
            asking.wait(10)

        assert (asking.returncode, said) == (130, "")
        with pytest.raises(ProcessLookupError):
            os.killpg(asking.pid, 0)

    def test_ctrl_c_while_torch_is_loaded(self, tmp_path: Path) -> None:
        """Which swallows it: its parts catch all that goes wrong with NumPy."""
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
        asking = subprocess.Popen(
            [*COMMAND, "--store", f"file://{store}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        try:
            assert asking.stdout is not None
            assert asking.stdout.readline() == "loading\n"
            asking.send_signal(signal.SIGINT)
            _, said = asking.communicate(timeout=20)
        finally:
            asking.kill()
            asking.communicate()

        assert (asking.returncode, said) == (-signal.SIGINT, "")


class TestWatching:
    """Again and again."""

    def test_into_a_pipe(self, tcp_job: tuple[Store, str]) -> None:
        """One after the other, each with its time; it ends when the job does."""
        store, url = tcp_job
        store.add("b/num_members", 1)
        command = [*COMMAND, "--store", url, *AGAIN]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert watching.stdout is not None
            lines = iter(watching.stdout.readline, "")
            assert next(lines).startswith("20")
            assert next(lines).startswith("missing: 1 barrier not complete")
            store.set("b/last_member", "")
            assert any(line == "nothing is missing\n" for line in lines)
        finally:
            watching.kill()
            watching.communicate(timeout=10)

    def test_on_a_terminal(self, tcp_job: tuple[Store, str]) -> None:
        """Over the one before, however low the terminal is, until Ctrl-C."""
        store, url = tcp_job
        for number in range(20):
            store.add(f"b/{number}/num_members", 1)
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (10, 60))
        # Who has that terminal gets a signal from the key.
        watching = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *COMMAND, "--store", url, *AGAIN],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            # Without what readline, which pytest loads, says of pytest's own terminal.
            env=dict(os.environ),
        )
        os.close(theirs)
        try:
            seen = b""
            while seen.count(b"\x1b[J") < 2:
                seen += os.read(ours, 1000)
            os.write(ours, b"\x03")
            code = watching.wait(20)
            with suppress(OSError):
                while more := os.read(ours, 65536):
                    seen += more
        finally:
            watching.kill()
            watching.wait(10)
            os.close(ours)

        before, first, second, *_ = seen.split(b"\x1b[H")
        assert before == b""
        assert b"missing: 20 barriers not complete\x1b[K\r\n" in first
        assert b"... 15 more lines; the terminal has 10" in first
        assert b"\x1b[2J" not in seen
        assert first.count(b"\n") == second.count(b"\n") == 9
        assert code == 130
        assert b"Traceback" not in seen
        assert seen.endswith((b"\x1b[J\r\n", b"\x1b[J\r\n^C"))

    def test_into_something_that_has_enough(self, tcp_job: tuple[Store, str]) -> None:
        """It ends as well, and says nothing."""
        _, url = tcp_job
        command = [*COMMAND, "--store", url, *AGAIN]
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
    """With examples that can be copied, and what the exit codes mean."""
    with pytest.raises(SystemExit) as exited:
        main(["status", "--help"])

    said = capsys.readouterr().out
    assert exited.value.code == 0
    assert "tracedstore status --store tcp://node1:29400" in said
    assert "Exit codes: 0 nothing is missing" in said
