"""``tracedstore sd``, on the stores of jobs that run, and on what is none."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from integration.harness import wait_until
from tracedstore.attach.address import Address
from tracedstore.cli.main import main
from tracedstore.coordination import rank_registry

Store = Any
# Times that nobody can wait for.
WRONG = ("-1", "nan", "inf", "1e300", "soon")


def register(
    store: Store, *numbers: int, world_size: int = 4, run_id: str | None = None
) -> None:
    """Let ranks register that serve their metrics."""
    for rank in numbers:
        info = rank_registry.RankInfo(
            rank=rank,
            host=f"node{rank}",
            pid=7,
            local_rank=0,
            world_size=world_size,
            run_id=run_id,
            metrics=f"http://node{rank}:9400/metrics",
            started=float(rank),
        )
        rank_registry._write(store, info)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks keep the address that a test gives them."""
    monkeypatch.setattr(rank_registry, "replace", lambda info, **_: info)


@pytest.mark.usefixtures("served")
class TestListing:
    """What is written."""

    def test_to_the_terminal(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every rank that serves, with its labels."""
        store, url = job
        register(store, 1, 0, run_id="job-7")

        assert main(["sd", "--store", url]) == 0

        first, second = json.loads(capsys.readouterr().out)
        assert first == {
            "targets": ["node0:9400"],
            "labels": {
                "__scheme__": "http",
                "run_id": "job-7",
                "rank": "0",
                "local_rank": "0",
                "host": "node0",
            },
        }
        assert second["targets"] == ["node1:9400"]

    def test_nothing_is_written_to_the_store(self, job: tuple[Store, str]) -> None:
        """Whoever looks leaves no trace."""
        store, url = job
        register(store, 0)
        before = _everything(url)

        main(["sd", "--store", url])

        assert _everything(url) == before

    def test_under_prefixes(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A restart's entry counts, and a rank of a job that has shrunk does not."""
        store, url = job
        register(dist.PrefixStore("/worker/attempt_0", store), 0, 1, world_size=2)
        register(dist.PrefixStore("/worker/attempt_1", store), 2, world_size=4)
        register(dist.PrefixStore("other", store), 3, world_size=1)

        main(["sd", "--store", url])

        found = [one["labels"]["rank"] for one in json.loads(capsys.readouterr().out)]
        assert found == ["0", "1", "2"]

    def test_of_one_job(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Others' ranks are left out; those of no name get the one asked for."""
        store, url = job
        register(store, 0, run_id="mine")
        register(store, 1, run_id="yours")
        register(store, 2)

        main(["sd", "--store", url, "--run-id", "mine"])

        found = [one["labels"] for one in json.loads(capsys.readouterr().out)]
        assert [(one["rank"], one["run_id"]) for one in found] == [
            ("0", "mine"),
            ("2", "mine"),
        ]

    def test_to_a_file(self, job: tuple[Store, str], tmp_path: Path) -> None:
        """Readable by Prometheus, and nothing else is left in its folder."""
        store, url = job
        register(store, 0)
        folder = tmp_path / "targets"
        folder.mkdir()

        main(["sd", "--store", url, "--output", str(folder / "job.json")])

        (file,) = folder.iterdir()
        assert len(json.loads(file.read_text())) == 1
        assert file.stat().st_mode & 0o444 == 0o444

    @pytest.mark.parametrize(
        ("output", "why"),
        [("none/job.json", "No such file or directory"), ("", "Is a directory")],
    )
    def test_to_no_file(
        self,
        output: str,
        why: str,
        job: tuple[Store, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Is told in a sentence, and nothing is left behind."""
        store, url = job
        register(store, 0)
        folder = tmp_path / "targets"
        folder.mkdir()

        assert main(["sd", "--store", url, "--output", str(folder / output)]) == 1

        said = f"tracedstore: {folder / output} cannot be written: {why}\n"
        assert capsys.readouterr().err == said
        assert list(folder.iterdir()) == []
        assert not list(tmp_path.glob(".*"))

    def test_watch(self, job: tuple[Store, str], tmp_path: Path) -> None:
        """The file follows the job."""
        store, url = job
        register(store, 0)
        output = tmp_path / "targets.json"
        command = [sys.executable, "-m", "tracedstore.cli.main", "sd", "--watch"]
        command += ["--interval", "0.1", "--store", url, "--output", str(output)]
        watching = subprocess.Popen(command)
        try:
            wait_until(lambda: _ranks(output) == ["0"], 40)
            register(store, 1)
            wait_until(lambda: _ranks(output) == ["0", "1"])
            watching.send_signal(signal.SIGINT)
            assert watching.wait(20) == 130
        finally:
            watching.kill()
            watching.wait(10)

    def test_ranks_that_do_not_serve(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Are no targets; what is no entry is skipped."""
        store, url = job
        store.set("tracedstore/RANKS/3", "nonsense")
        store.set("tracedstore/RANKS.bak", "nonsense")

        assert main(["sd", "--store", url]) == 0
        assert json.loads(capsys.readouterr().out) == []


def _everything(url: str) -> dict[str, bytes]:
    # Without how many have a FileStore open, under a name that list_keys gets wrong.
    snapshot = Address(url).look(lambda keys: [k for k in keys if "count" not in k])
    return {key: snapshot.get(key) for key in snapshot.list_keys()}


def _ranks(output: Path) -> list[str]:
    if not output.exists():
        return []
    return [one["labels"]["rank"] for one in json.loads(output.read_text())]


class TestErrors:
    """One sentence on standard error, and exit code 1, within seconds."""

    @pytest.mark.parametrize(
        ("url", "said"),
        [
            ("redis://here:1", "--store is 'redis://here:1'; accepted is tcp://"),
            ("tcp://here", "--store is 'tcp://here'; accepted is tcp://"),
            ("tcp://here:port", "--store is 'tcp://here:port'; accepted is tcp://"),
            ("tcp://127.0.0.1:1", "cannot be reached: nothing listens there"),
            ("etcd://127.0.0.1:1/p", "cannot be reached: nothing listens there"),
            ("file:///no/such/store", "/no/such/store: No such file"),
            ("file:///", "/: Is a directory"),
            ("file:///dev/zero", "/dev/zero: Not a regular file"),
        ],
    )
    def test_no_store(
        self, url: str, said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Which says what is wrong."""
        assert main(["sd", "--store", url]) == 1

        error = capsys.readouterr().err
        assert error.startswith("tracedstore: ")
        assert said in error
        assert error.count("\n") == 1

    @pytest.mark.parametrize("scheme", ["tcp", "etcd"])
    def test_something_that_never_answers(
        self,
        scheme: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Is not waited for."""
        monkeypatch.setattr("tracedstore.attach.address._WITHIN", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]

            assert main(["sd", "--store", f"{scheme}://127.0.0.1:{port}/p"]) == 1

        assert "does not answer within 0.5 s" in capsys.readouterr().err

    def test_in_the_background(self) -> None:
        """What ignores Ctrl-C goes on, and so does the process that looks for it."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            asking = subprocess.Popen(
                [
                    *("sh", "-c", "trap '' INT; exec \"$@\"", "sh"),
                    *(sys.executable, "-m", "tracedstore.cli.main", "sd"),
                    *("--store", f"tcp://127.0.0.1:{silent.getsockname()[1]}"),
                ],
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            connection, _ = silent.accept()
            with connection:
                os.killpg(asking.pid, signal.SIGINT)
                _, said = asking.communicate(timeout=30)

        assert asking.returncode == 1
        assert "does not answer within" in said

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["nonsense"],
            ["sd"],
            *(["sd", "--store", "tcp://a:1", "--interval", wrong] for wrong in WRONG),
            *(["status", "--store", "tcp://a:1", "--after", wrong] for wrong in WRONG),
        ],
        ids=" ".join,
    )
    def test_bad_command_lines(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Are told apart by their exit code."""
        with pytest.raises(SystemExit) as exited:
            main(arguments)

        assert exited.value.code == 64
        assert " --help\n" in capsys.readouterr().err


def test_watching_a_store_that_goes(tmp_path: Path, start_child: Any) -> None:
    """Ends the command, and what it wrote last stays."""
    child = start_child("tcp_server")
    url = f"tcp://127.0.0.1:{child.next_report()['port']}"
    output = tmp_path / "targets.json"
    command = [sys.executable, "-m", "tracedstore.cli.main", "sd", "--watch"]
    command += ["--interval", "0.1", "--store", url, "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watching:
        try:
            wait_until(output.exists, 40)
            child.kill()
            _, said = watching.communicate(timeout=20)
        finally:
            watching.kill()

    assert watching.returncode == 1
    assert said.startswith(f"tracedstore: the store at {url} ")
    assert output.read_text() == "[]\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """With an example that can be copied."""
    with pytest.raises(SystemExit) as exited:
        main(["sd", "--help"])

    assert exited.value.code == 0
    assert "tracedstore sd --store tcp://node1:29400" in capsys.readouterr().out
