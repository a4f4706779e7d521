"""Commands without --store find the jobs of this host."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

import tracedstore
from integration.conftest import StartChild
from integration.harness import Child
from support.etcd import EtcdServer
from tracedstore.common.errors import CommandError, UsageError
from tracedstore.common.identity import identify
from tracedstore.etcd import EtcdV3Store
from tracedstore.local import sockets
from tracedstore.local.facts import LocalIdentity
from tracedstore.local.sockets import LocalReply
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.local_jobs import LocalJob, find_job, jobs_of
from tracedstore.tools.cli.main import main


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets that only this test uses."""
    folder = tmp_path / f"tracedstore-{os.getuid()}"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(sockets, "directory_candidates", lambda: [str(folder)])
    yield folder
    sockets.LOCAL_SOCKET.stop(5)


@pytest.fixture
def job(private: Path, start_child: StartChild) -> tuple[list[Child], str]:
    """Two ranks of a job that wait for a third one; and the address of its store."""
    server = start_child("tcp_server")
    port = server.next_report()["port"]
    ranks = []
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "3", "TRACEDSTORE_RUN_ID": "job-7"}
        ranks.append(start_child("waiting_rank", port, env=env))
    for child in ranks:
        child.next_report()
    return ranks, f"tcp://127.0.0.1:{port}"


class TestFound:
    """Real processes of a job."""

    def test_store(
        self, job: tuple[list[Child], str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The store of the only job is read; its name is on standard error."""
        ranks, url = job

        assert find_job() == LocalJob(url=url, run_id="job-7", ranks=(0, 1))
        for arguments in ([], ["--pid", str(ranks[1].pid)], ["--run-id", "job-7"]):
            code = main(["status", *arguments])
            written = capsys.readouterr()
            assert code == 2
            assert "2 of 3" in written.out
            assert f"reading run 'job-7' at {url}, " in written.err

    def test_none(
        self, job: tuple[list[Child], str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One sentence says what was looked for, and what to give instead."""
        for arguments, message in {
            ("--run-id", "other"): "no traced rank of run 'other' of this user answers",
            ("--pid", "99999999"): "this host has no process with this id",
            ("--pid", str(os.getpid())): f"no traced rank with pid {os.getpid()} of",
        }.items():
            code = main(["stacks", *arguments])
            error = capsys.readouterr().err
            assert code == 1
            assert message in error
            assert error.count("\n") == 1

    def test_several(
        self, job: tuple[list[Child], str], start_child: StartChild
    ) -> None:
        """Several jobs are listed, with what tells them apart."""
        _, url = job
        port = start_child("tcp_server").next_report()["port"]
        env = {"RANK": "0", "WORLD_SIZE": "2", "TRACEDSTORE_RUN_ID": "job-8"}
        start_child("waiting_rank", port, env=env).next_report()

        with pytest.raises(CommandError) as raised:
            find_job()

        assert f"\n  --store {url}: run 'job-7', ranks 0-1" in str(raised.value)
        other = f"\n  --store tcp://127.0.0.1:{port}: run 'job-8', rank 0"
        assert other in str(raised.value)
        assert find_job(run_id="job-8").ranks == (0,)


def reply_of(
    rank: int | None, *urls: str, master: str = "", pid: int = 1
) -> LocalReply:
    """Return the reply of a rank."""
    identity = LocalIdentity(
        rank=rank,
        world_size=2,
        run_id="job",
        attempt=0,
        pid=pid,
        start_ticks=None,
        master=master,
        registered=bool(urls),
        urls=urls,
    )
    return LocalReply(identity=identity, answer=None, workers=())


class TestJobs:
    """Which processes are one job."""

    def test_names_of_one_server(self) -> None:
        """Ranks may reach the store by a host name or by an address."""
        replies = {
            1: reply_of(0, "tcp://127.0.0.1:29400"),
            2: reply_of(1, "tcp://node1:29400"),
            3: reply_of(2, "tcp://node1:29400"),
        }

        (found,) = jobs_of(replies)

        assert found == LocalJob(url="tcp://node1:29400", run_id="job", ranks=(0, 1, 2))

    def test_before_it_has_a_store(self) -> None:
        """A rank that connects has the address of its store in its environment."""
        (found,) = jobs_of({1: reply_of(0, master="node1:29500")})

        assert found.url == "tcp://node1:29500"

    def test_agents(self) -> None:
        """The store of torchrun's agents is not that of the job."""
        assert jobs_of({1: reply_of(None, "tcp://node1:29400")}) == []


class TestAddresses:
    """A store's own address is what --store takes."""

    def test_stores(self, tmp_path: Path, etcd_server: EtcdServer) -> None:
        """Of every store that other processes can read."""
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = tmp_path / "store"
        stores = {
            server: f"tcp://127.0.0.1:{server.port}",
            FileStore(str(path), 1): f"file://{path}",
            EtcdV3Store(f"127.0.0.1:{etcd_server.port}", "jobs/7"): (
                f"etcd://127.0.0.1:{etcd_server.port}/jobs/7"
            ),
        }
        for store, url in stores.items():
            assert identify(store).url == url
            assert Address(url).url == url
        assert identify(HashStore()).url == ""

    def test_as_torchrun_takes_it(self) -> None:
        """HOST:PORT is a TCPStore."""
        assert Address("node1:29400").url == "tcp://node1:29400"
        assert Address("[::1]:29400").host == "::1"

    def test_unusable(self, capsys: pytest.CaptureFixture[str]) -> None:
        """An address that is none is an error of the command line."""
        for url in ("foo", "redis://here:1", "node1:port"):
            assert main(["status", "--store", url]) == UsageError.exit_code
            assert "accepted is HOST:PORT, tcp://" in capsys.readouterr().err
        assert main(["status", "--store", "a:1", "--pid", "1"]) == 64
        assert "give one of them" in capsys.readouterr().err

    def test_registered_stores(self) -> None:
        """A process tells the addresses of the stores in which it has registered."""
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = tracedstore.wrap(PrefixStore("p", server))
        tracedstore.barrier(store, 1, "b", 5, rank=0)

        assert f"tcp://127.0.0.1:{server.port}" in LocalIdentity.own().urls
