"""``tracedstore sd``, with the stores of running jobs, and without a store."""

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
from tracedstore.coordination import rank_registry
from tracedstore.tools.attach.address import Address
from tracedstore.tools.cli.main import main

Store = Any
# Not a number of seconds that a command can wait.
INVALID_SECONDS = ("-1", "nan", "inf", "1e300", "soon")


def register(
    store: Store, *numbers: int, world_size: int = 4, run_id: str | None = None
) -> None:
    """Register ranks that serve their metrics."""
    for rank in numbers:
        info = rank_registry.RankInfo(
            rank=rank,
            host=f"node{rank}",
            pid=7,
            local_rank=0,
            world_size=world_size,
            run_id=run_id,
            metrics=f"http://node{rank}:27400/metrics",
            started=float(rank),
        )
        rank_registry._write(store, info)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks keep the metrics address of the test."""
    monkeypatch.setattr(rank_registry, "replace", lambda info, **_: info)


@pytest.mark.usefixtures("served")
class TestListing:
    """The targets that are written."""

    def test_standard_output(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every rank that serves its metrics is listed with its labels."""
        store, url = job
        register(store, 1, 0, run_id="job-7")

        assert main(["sd", "--store", url]) == 0

        first, second = json.loads(capsys.readouterr().out)
        assert first == {
            "targets": ["node0:27400"],
            "labels": {
                "__scheme__": "http",
                "run_id": "job-7",
                "rank": "0",
                "local_rank": "0",
                "host": "node0",
            },
        }
        assert second["targets"] == ["node1:27400"]

    def test_store_is_unchanged(self, job: tuple[Store, str]) -> None:
        """The command writes nothing to the store."""
        store, url = job
        register(store, 0)
        before = _contents(url)

        main(["sd", "--store", url])

        assert _contents(url) == before

    def test_prefixes(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A restarted rank is listed once, and a rank of a shrunk job is not."""
        store, url = job
        register(dist.PrefixStore("/worker/attempt_0", store), 0, 1, world_size=2)
        register(dist.PrefixStore("/worker/attempt_1", store), 2, world_size=4)
        register(dist.PrefixStore("other", store), 3, world_size=1)

        main(["sd", "--store", url])

        ranks = [one["labels"]["rank"] for one in json.loads(capsys.readouterr().out)]
        assert ranks == ["0", "1", "2"]

    def test_run_id(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Ranks of other jobs are left out; a rank without a run id gets this one."""
        store, url = job
        register(store, 0, run_id="mine")
        register(store, 1, run_id="yours")
        register(store, 2)

        main(["sd", "--store", url, "--run-id", "mine"])

        labels = [one["labels"] for one in json.loads(capsys.readouterr().out)]
        assert [(one["rank"], one["run_id"]) for one in labels] == [
            ("0", "mine"),
            ("2", "mine"),
        ]

    def test_file(self, job: tuple[Store, str], tmp_path: Path) -> None:
        """The file is readable by Prometheus, and is the only one in its folder."""
        store, url = job
        register(store, 0)
        folder = tmp_path / "targets"
        folder.mkdir()

        main(["sd", "--store", url, "--output", str(folder / "job.json")])

        (file,) = folder.iterdir()
        assert len(json.loads(file.read_text())) == 1
        assert file.stat().st_mode & 0o444 == 0o444

    @pytest.mark.parametrize(
        ("output", "reason"),
        [("none/job.json", "No such file or directory"), ("", "Is a directory")],
    )
    def test_unwritable_file(
        self,
        output: str,
        reason: str,
        job: tuple[Store, str],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """One sentence has the reason, and no temporary file is left."""
        store, url = job
        register(store, 0)
        folder = tmp_path / "targets"
        folder.mkdir()

        assert main(["sd", "--store", url, "--output", str(folder / output)]) == 1

        message = f"tracedstore: {folder / output} cannot be written: {reason}\n"
        assert capsys.readouterr().err == message
        assert list(folder.iterdir()) == []
        assert not list(tmp_path.glob(".*"))

    def test_watch(self, job: tuple[Store, str], tmp_path: Path) -> None:
        """The file is written again when another rank registers."""
        store, url = job
        register(store, 0)
        output = tmp_path / "targets.json"
        command = [sys.executable, "-m", "tracedstore.tools.cli.main", "sd", "--watch"]
        command += ["--interval", "0.1", "--store", url, "--output", str(output)]
        watching = subprocess.Popen(command)
        try:
            wait_until(lambda: _ranks(output) == ["0"])
            register(store, 1)
            wait_until(lambda: _ranks(output) == ["0", "1"])
            watching.send_signal(signal.SIGINT)
            assert watching.wait(240) == 130
        finally:
            watching.kill()
            watching.wait(240)

    def test_no_targets(
        self, job: tuple[Store, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An empty list is explained, and an invalid entry is counted."""
        store, url = job
        store.set("tracedstore/RANKS/3", "nonsense")
        store.set("tracedstore/RANKS.bak", "nonsense")

        assert main(["sd", "--store", url]) == 0
        empty = capsys.readouterr()
        entry = {"rank": 0, "host": "node0", "pid": 7, "world_size": 1, "started": 1.0}
        store.set("tracedstore/RANKS/0", json.dumps(entry))
        assert main(["sd", "--store", url]) == 0
        without = capsys.readouterr()

        assert json.loads(empty.out) == json.loads(without.out) == []
        invalid = (
            "tracedstore: 1 registry entry is not valid, and left out of the list\n"
        )
        assert empty.err == (
            f"{invalid}tracedstore: no rank has registered in the store\n"
        )
        assert without.err == (
            f"{invalid}tracedstore: none of the 1 registered ranks serves its metrics;"
            " set TRACEDSTORE_HTTP_PORT for the job\n"
        )


def _contents(url: str) -> dict[str, bytes]:
    # Without the number of a FileStore's users, whose key list_keys returns wrongly.
    snapshot = Address(url).read_snapshot(
        lambda keys: [key for key in keys if "count" not in key]
    )
    return {key: snapshot.get(key) for key in snapshot.list_keys()}


def _ranks(output: Path) -> list[str]:
    if not output.exists():
        return []
    return [one["labels"]["rank"] for one in json.loads(output.read_text())]


class TestErrors:
    """One sentence on standard error, and exit code 1, within seconds."""

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("redis://here:1", "--store is 'redis://here:1'; accepted is HOST:PORT,"),
            ("tcp://here", "--store is 'tcp://here'; accepted is HOST:PORT,"),
            ("tcp://here:port", "--store is 'tcp://here:port'; accepted is HOST:PORT,"),
            ("tcp://127.0.0.1:1", "cannot be reached: nothing listens there"),
            ("etcd://127.0.0.1:1/p", "cannot be reached: nothing listens there"),
            ("file:///no/such/store", "/no/such/store: No such file"),
            ("file:///", "/: Is a directory"),
            ("file:///dev/zero", "/dev/zero: Not a regular file"),
        ],
    )
    def test_no_store(
        self, url: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The sentence names the URL or the file, and the reason."""
        assert main(["sd", "--store", url]) == (64 if "accepted" in message else 1)

        error = capsys.readouterr().err
        assert error.startswith("tracedstore: ")
        assert message in error
        assert error.count("\n") == 1

    @pytest.mark.parametrize("scheme", ["tcp", "etcd"])
    def test_silent_server(
        self,
        scheme: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A server that never answers is reported after the timeout."""
        monkeypatch.setattr("tracedstore.tools.attach.address._ANSWER_TIMEOUT", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]

            assert main(["sd", "--store", f"{scheme}://127.0.0.1:{port}/p"]) == 1

        assert "does not answer within 0.5 s" in capsys.readouterr().err

    def test_in_the_background(self) -> None:
        """A command that ignores SIGINT has a child that ignores it too."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            command = subprocess.Popen(
                [
                    *("sh", "-c", "trap '' INT; exec \"$@\"", "sh"),
                    *(sys.executable, "-m", "tracedstore.tools.cli.main", "sd"),
                    *("--store", f"tcp://127.0.0.1:{silent.getsockname()[1]}"),
                ],
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            connection, _ = silent.accept()
            with connection:
                os.killpg(command.pid, signal.SIGINT)
                _, errors = command.communicate(timeout=240)

        assert command.returncode == 1
        assert "does not answer within" in errors

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["nonsense"],
            ["sd"],
            *(
                ["sd", "--store", "tcp://a:1", "--interval", text]
                for text in INVALID_SECONDS
            ),
            *(
                ["status", "--store", "tcp://a:1", "--after", text]
                for text in INVALID_SECONDS
            ),
        ],
        ids=" ".join,
    )
    def test_invalid_command_lines(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The exit code is 64, and the message refers to --help."""
        with pytest.raises(SystemExit) as exited:
            main(arguments)

        assert exited.value.code == 64
        assert " --help\n" in capsys.readouterr().err


def test_store_ends_during_watch(tmp_path: Path, start_child: Any) -> None:
    """The command ends with code 1, and the file stays as it was."""
    child = start_child("tcp_server")
    url = f"tcp://127.0.0.1:{child.next_report()['port']}"
    output = tmp_path / "targets.json"
    command = [sys.executable, "-m", "tracedstore.tools.cli.main", "sd", "--watch"]
    command += ["--interval", "0.1", "--store", url, "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watching:
        try:
            wait_until(output.exists)
            child.kill()
            _, errors = watching.communicate(timeout=240)
        finally:
            watching.kill()

    assert watching.returncode == 1
    # The server may end between two reads, or after it has accepted a connection.
    sentences = (f"the store at {url} ", f"the server at {url} ")
    assert errors.startswith(tuple(f"tracedstore: {text}" for text in sentences))
    assert output.read_text() == "[]\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help has an example."""
    with pytest.raises(SystemExit) as exited:
        main(["sd", "--help"])

    assert exited.value.code == 0
    assert "tracedstore sd --store tcp://node1:29400" in capsys.readouterr().out
