"""``status`` and ``sd`` of a job whose store cannot list its keys."""

import json
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)

import tracedstore
from integration.harness import in_background, in_threads, results
from support.jobs_in_stores import arrive, register
from support.rendezvous import pickled_state
from support.stores import client_of, file, tcp
from support.versions import needs_list_keys
from tracedstore.coordination import key_index, rank_registry
from tracedstore.coordination.key_index import INDEX, read_index, record_keys
from tracedstore.rendezvous import TracedRendezvousBackend
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.known_keys import find_known_keys
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.cli.main import main
from tracedstore.tools.top.model import State
from tracedstore.tools.top.reader_process import JobReader, Request

HOST = socket.gethostname()
UNLISTED = "a torch older than 2.10 cannot list the keys of the store:"
Run = Callable[..., tuple[int, str]]


class FileStore(dist.FileStore):
    """A FileStore in which another rank always writes first.

    Args:
        path: Its file.
        waits_for: Its calls do not return before.
    """

    def __init__(self, path: str, waits_for: threading.Event | None = None) -> None:
        super().__init__(path, -1)
        self._waits_for = waits_for

    def compare_set(self, _key: str, expected: str, _desired: str) -> bytes:
        """Return what the other rank has written."""
        if self._waits_for is not None:
            assert self._waits_for.wait(20)
        return f"{expected}x".encode()


@pytest.fixture(autouse=True)
def without_list_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the method from torch's stores."""
    monkeypatch.delattr(dist.Store, "list_keys", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command; its result is the code and the output."""

    def run_command(command: str, url: str, *more: str) -> tuple[int, str]:
        capsys.readouterr()
        code = main([command, "--store", url, *more])
        return code, capsys.readouterr().out

    return run_command


@pytest.fixture(params=["tcp", "file"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, str]:
    """Return a store, and its URL."""
    if request.param == "tcp":
        store = tcp(tmp_path)
        return store, f"tcp://127.0.0.1:{store.port}"
    path = file(tmp_path)
    return path, f"file://{path.path}"  # type: ignore[attr-defined]


class TestStatus:
    """What is found without a list of keys."""

    def test_barriers(self, job: tuple[Any, str], run: Run) -> None:
        """Ranks and barriers are found, and the output has the limit."""
        store, url = job
        tracedstore.configure(log_format="off")
        for number in range(2):
            with pytest.raises(tracedstore.BarrierTimeout):
                tracedstore.barrier(store, 2, f"step/{number}", 0.1, rank=0)
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(store, 2, "last", 0.1, rank=1)

        code, text = run("status", url)
        document = json.loads(run("status", url, "--json")[1])

        assert code == 2
        assert UNLISTED in " ".join(text.split())
        assert f"{HOST}: rank" in text
        assert "missing 1 of 2: " in text
        assert not document["keys_listed"]
        found = {one["barrier"] for one in document["barriers_in_progress"]}
        found |= {one["barrier"] for one in document["barriers_abandoned"]}
        assert found == {"step/0", "step/1", "last"}

    def test_finished_barrier(self, tmp_path: Path, run: Run) -> None:
        """A complete barrier is shown with its last rank."""
        store = tcp(tmp_path)

        def rank(number: int) -> None:
            with client_of(store) as client:
                tracedstore.barrier(client, 2, "b", 30, rank=number)

        tracedstore.configure(log_format="off")
        results(in_threads(2, rank))

        code, text = run("status", f"tcp://127.0.0.1:{store.port}")

        assert code == 0
        assert "ranks: 2 of 2 registered" in text
        assert "b: 2 arrived" in text

    def test_rendezvous(self, tmp_path: Path, run: Run) -> None:
        """The rendezvous of traced agents, and of plain ones without a run id."""
        store = tcp(tmp_path)
        tracedstore.configure(log_format="off")
        state = pickled_state({"node1": 0.0, "node2": 0.0}, round=3, complete=True)
        TracedRendezvousBackend(C10dRendezvousBackend(store, "j7")).set_state(state)
        store.set("torch.rendezvous.none", b64encode(state).decode())
        for name, value in (("ADDR", "127.0.0.1"), ("PORT", "1")):
            store.set(f"torch.rendezvous.j7.3/MASTER_{name}", value)
        agents: Any = dist.PrefixStore("torch.rendezvous.j7.3", store)
        agents.add("torchelastic/agent/terminal_state/num_members", 1)

        _, text = run("status", f"tcp://127.0.0.1:{store.port}")

        assert "rendezvous j7: round 3, complete" in text
        assert "rendezvous none: round 3, complete" in text
        assert "worker store: tcp://127.0.0.1:1" in text
        assert "torch.rendezvous.j7.3/torchelastic/agent/terminal_state: 1" in text

    def test_empty_store(self, tmp_path: Path, run: Run) -> None:
        """A store without known keys has nothing that is missing."""
        store = tcp(tmp_path)

        code, text = run("status", f"tcp://127.0.0.1:{store.port}")

        assert code == 0
        assert text.startswith("nothing is known: ")

    def test_sd(self, tmp_path: Path, run: Run) -> None:
        """Ranks with an endpoint are targets."""
        store = tcp(tmp_path)
        tracedstore.configure(http_port=0, log_format="off")
        rank_registry.register(store, 0, 1)

        code, text = run("sd", f"tcp://127.0.0.1:{store.port}")

        assert code == 0
        (target,) = json.loads(text)
        assert target["labels"]["rank"] == "0"


class OldServer:
    """A proxy of a TCPStore that hangs up at LIST_KEYS, as torch 2.8 does.

    Attributes:
        port: The port for clients.
        hung_up: Is set when it has hung up.
    """

    _LIST_KEYS = 17

    def __init__(self, port: int) -> None:
        self._to = port
        self.hung_up = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        in_background(self._serve)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._to))
            in_background(lambda c=client, s=server: self._forward(c, s))  # type: ignore[misc]
            in_background(lambda c=client, s=server: self._answer(s, c))  # type: ignore[misc]

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        while request := client.recv(65536):
            if request == bytes([self._LIST_KEYS]):
                self.hung_up.set()
                break
            server.sendall(request)
        for one in (client, server):
            one.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _answer(server: socket.socket, client: socket.socket) -> None:
        with server, client:
            try:
                while answer := server.recv(65536):
                    client.sendall(answer)
            except OSError:
                return

    def close(self) -> None:
        """Accept no more connections."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class TestOldServer:
    """A newer torch here than in the job."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[tuple[Any, OldServer]]:
        """Serve a store that an older torch has written, behind the proxy."""
        store = tcp(tmp_path)
        proxy = OldServer(store.port)
        yield store, proxy
        proxy.close()

    @needs_list_keys
    def test_status(
        self,
        server: tuple[Any, OldServer],
        run: Run,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """After the server has hung up, known keys are read."""
        store, proxy = server
        tracedstore.configure(log_format="off")
        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(store, 2, "b", 0.1, rank=0)
        monkeypatch.undo()

        code, text = run("status", f"tcp://127.0.0.1:{proxy.port}")

        assert proxy.hung_up.is_set()
        assert code == 2
        assert UNLISTED in " ".join(text.split())
        assert "b: 1 of 2 arrived" in text


def test_top(job: tuple[Any, str]) -> None:
    """The screen of a hung job has its ranks, and the one that is missing."""
    store, url = job
    for rank in range(4):
        register(store, rank, 4)
    arrive(store, "step/1", {0: 1.0, 1: 1.0, 3: 1.0})
    reader = JobReader(Address(url), TokenPolicy(), after=5.0)
    try:
        model = reader.read(Request()).model
    finally:
        reader.close()

    assert model is not None
    assert "missing 1 of 4: node0 (rank 2)" in model.headline
    shown = {rank.rank: rank.state for rank in model.ranks}
    assert shown == {2: State.AWAITED} | dict.fromkeys((0, 1, 3), State.WAITING)


class TestIndex:
    """The key that has the names of keys."""

    def test_only_where_it_is_needed(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A store that can list its keys has no index."""
        store = tcp(tmp_path)
        monkeypatch.setattr(dist.Store, "list_keys", lambda _self: [], raising=False)

        record_keys(store, "a")

        assert not store.check([INDEX])

    def test_index_is_never_written(self, tmp_path: Path) -> None:
        """What torch's append of a FileStore does without end is given up."""
        store: Any = FileStore(str(tmp_path / "store"))
        with pytest.raises(tracedstore.TracedStoreError, match="in each of 1000"):
            record_keys(store, "a")

    def test_file_does_not_respond(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The job goes on if a call for the index does not return."""
        released = threading.Event()
        store: Any = FileStore(str(tmp_path / "store"), waits_for=released)
        monkeypatch.setattr(key_index, "_FILE_TIMEOUT", 0.01)
        with pytest.raises(TimeoutError):
            record_keys(store, "a")
        released.set()

    def test_ranks_at_once(self, tmp_path: Path) -> None:
        """Keys that processes add to a FileStore at the same time are all there."""
        path = str(tmp_path / "store")
        stores: list[Any] = [dist.FileStore(path, -1) for _ in range(8)]
        results(in_threads(8, lambda n: record_keys(stores[n], f"k{n}")))

        indexed = list(read_index(stores[0].get(INDEX)))
        assert sorted(indexed) == [f"k{n}" for n in range(8)]

    def test_hostile_index(self, tmp_path: Path) -> None:
        """Malformed entries are omitted, and the search ends."""
        store: Any = tcp(tmp_path)
        store.set_timeout(timedelta(seconds=5))
        record_keys(store, "b/num_members", "ä\n")
        store.append(INDEX, b'{"a": 1}\n"\\ud800"\n\xff\n""\n' + b"[" * 100_000)
        store.append(INDEX, b"\n" + b'"x/num_members"\n' * 10_000)
        store.add("b/num_members", 1)
        heartbeats: list[None] = []

        found = find_known_keys(store, lambda: heartbeats.append(None))

        assert found == ["b/num_members"]
        assert len(heartbeats) < 200
        indexed = list(read_index(store.get(INDEX)))
        assert set(indexed) == {"b/num_members", "ä\n", "x/num_members"}
