"""Tests of the Unix socket on which processes answer, with real processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from integration.harness import HANG, Child, in_background, pause, wait_until
from support.fork_server import python_path
from tracedstore import names
from tracedstore.common import procfs
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.local import sockets
from tracedstore.local.facts import LocalIdentity
from tracedstore.local.host_ranks import ask_host, ranks_of_host
from tracedstore.local.sockets import (
    LOCAL_SOCKET,
    METRICS_PAGE,
    LocalReply,
    ask_processes,
    local_processes,
)
from tracedstore.recording.recorder import RECORDER

# Seconds for an answer on a loaded machine, and for none.
LONG, SHORT = 20.0, 0.5
JOB = {
    "WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "job-1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
Start = Callable[..., tuple[Child, dict[str, Any]]]


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets that only this test uses."""
    # Longer than the address of a Unix socket may be.
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    private = folder / f"tracedstore-{os.getuid()}"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(sockets, "directory_candidates", lambda: [str(private)])
    yield private
    LOCAL_SOCKET.stop(5)
    LOCAL_SOCKET.enable(on=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start processes that listen for questions; they are killed after the test."""
    with ExitStack() as stack:

        def start_one(
            activity: str, rank: int, **env: str
        ) -> tuple[Child, dict[str, Any]]:
            environ = {**JOB, "RANK": str(rank), **env}
            child = Child(tmp_path, "answering", activity, env=environ)
            stack.callback(child.kill)
            return child, child.next_report()

        yield start_one


def ask_local(pid: int, kind: str, timeout: float) -> LocalReply | None:
    """Ask one process of this host; None if it does not listen or does not answer."""
    return ask_processes([pid], kind, timeout).get(pid)


def info_of(rank: int, reported: dict[str, Any]) -> RankInfo:
    """Return what a child would have registered."""
    return RankInfo(
        rank=rank,
        host="node",
        pid=reported["pid"],
        world_size=8,
        started=1.0,
        start_ticks=reported["start_ticks"],
        namespace=reported["namespace"],
    )


def functions_of(pid: int) -> list[str]:
    """Return the functions on the stack of a process's main thread."""
    reply = ask_local(pid, "status", LONG)
    assert reply is not None
    assert reply.answer is not None
    return [frame.function for frame in reply.answer.frames]


def own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a rank of the children's job."""
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)


class TestAnswers:
    """What processes answer, and what /proc answers for them."""

    def test_waiting_process(self, start: Start) -> None:
        """A process answers with its identity and its frames, innermost first."""
        child, _ = start("load_dataset", 3, TORCHELASTIC_RESTART_COUNT="2")

        wait_until(lambda: functions_of(child.pid)[:1] == ["load_dataset"])
        reply = ask_local(child.pid, "status", LONG)

        assert reply is not None
        assert reply.identity == LocalIdentity(
            rank=3,
            world_size=8,
            run_id="job-1",
            attempt=2,
            pid=child.pid,
            start_ticks=reply.identity.start_ticks,
            master="node0:29500",
            registered=False,
        )
        assert reply.answer is not None
        assert reply.answer.state == "running"
        assert not reply.answer.registered
        functions = [frame.function for frame in reply.answer.frames]
        assert functions == ["load_dataset", "<module>", *functions[2:]]
        assert reply.answer.frames[0].file == "children/answering.py"

    def test_stacks(self, start: Start) -> None:
        """All threads with their names, the main thread first."""
        child, _ = start("load_dataset", 3)

        reply = ask_local(child.pid, "stacks", LONG)

        assert reply is not None
        assert reply.answer is not None
        assert next(iter(reply.answer.stacks)) == "MainThread"
        assert "tracedstore-answers" in reply.answer.stacks

    def test_busy_process(self, start: Start) -> None:
        """A process that computes in Python answers."""
        child, reported = start("compute", 1)

        wait_until(lambda: "compute" in functions_of(child.pid))
        found = ask_host({1: info_of(1, reported)}, [1], LONG)

        assert found[1].state == "running"
        assert found[1].source == "itself"

    @pytest.mark.parametrize("activity", ["hold_gil", "backtrack"])
    def test_process_that_holds_the_gil(self, start: Start, activity: str) -> None:
        """It is alive, and nothing but a state of /proc makes it stopped."""
        child, reported = start(activity, 1)
        # It may answer once more before it has taken the GIL.
        wait_until(lambda: local_processes(SHORT).get(child.pid, 0) is None)

        found = ask_host({1: info_of(1, reported)}, [1], SHORT)

        assert found[1].state == "unresponsive"
        assert found[1].source == "/proc of its host"
        assert re.fullmatch(
            r"did not answer within .* s \(state [A-Z], .* s of CPU time in .* s\)",
            found[1].detail,
        )
        assert found[1].pid == child.pid

    def test_stopped_process(self, start: Start) -> None:
        """A process after SIGSTOP is stopped; the others answer meanwhile."""
        stopped, reported = start("load_dataset", 1)
        other, _ = start("load_dataset", 2)
        pause(stopped.pid)

        replies = local_processes(2.0)
        found = ask_host({1: info_of(1, reported)}, [1], SHORT)

        assert replies[stopped.pid] is None
        assert replies[other.pid] is not None
        assert found[1].state == "stopped"
        assert found[1].detail == "stopped by a signal (T)"

    def test_stopped_process_is_not_waited_for(self, start: Start) -> None:
        """It cannot answer, whatever the timeout is."""
        stopped, reported = start("load_dataset", 1)
        pause(stopped.pid)

        found = ask_host({1: info_of(1, reported)}, [1], 10 * HANG)

        assert found[1].detail == "stopped by a signal (T)"

    def test_process_in_the_kernel(self, start: Start) -> None:
        """A system call that does not return: a vfork waits for its child."""
        child, reported = start("vfork", 1)
        wait_until(lambda: procfs.watch([child.pid])[child.pid].halt)

        found = ask_host({1: info_of(1, reported)}, [1], SHORT)

        assert (found[1].state, found[1].detail) == ("stopped", procfs.IN_KERNEL)

    def test_killed_process(self, start: Start, runtime_dir: Path) -> None:
        """A killed process is gone, and the next process removes its socket."""
        child, reported = start("load_dataset", 1)
        os.kill(child.pid, signal.SIGKILL)
        child.exit_status()
        assert len(list(runtime_dir.iterdir())) == 1

        found = ask_host({1: info_of(1, reported)}, [1], SHORT)
        other, _ = start("load_dataset", 2)

        assert found[1].state == "gone"
        (left,) = runtime_dir.iterdir()
        assert left.name.endswith(f"-{other.pid}.sock")

    def test_process_without_socket_runs(self, start: Start) -> None:
        """A process that does not listen is not taken for one that cannot answer."""
        _, reported = start("load_dataset", 1, TRACEDSTORE_ANSWERS="off")

        found = ask_host({1: info_of(1, reported)}, [1], SHORT)

        assert found[1].state == "running"
        assert found[1].detail == "it does not listen for questions"

    def test_unregistered_ranks(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that has not registered is found if it is of the same job."""
        own_job(monkeypatch)
        mine, _ = start("load_dataset", 4)
        stopped, _ = start("load_dataset", 5)
        start("load_dataset", 6, MASTER_PORT="29501")
        pause(stopped.pid)

        found = ask_host({}, range(8), 2.0)

        assert found.keys() == {4, 5}
        assert found[4].pid == mine.pid
        assert not found[4].registered
        assert (found[5].pid, found[5].state) == (stopped.pid, "stopped")
        assert ranks_of_host(local_processes(2.0), LocalIdentity.own()) == {4, 5}

    def test_earlier_attempt(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A registered process that is gone gives way to the one that replaced it."""
        own_job(monkeypatch)
        before, reported = start("load_dataset", 4)
        before.kill()
        after, _ = start("load_dataset", 4)

        found = ask_host({4: info_of(4, reported)}, [4], LONG)

        assert found[4].pid == after.pid
        assert not found[4].registered

    def test_helper_of_a_rank(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process that a rank started has its RANK, and is not taken for it."""
        own_job(monkeypatch)
        script = (
            "import subprocess, sys\n"
            "from tracedstore.auto import patches\n"
            "patches.answer_before_registration()\n"
            "subprocess.run([sys.executable, '-m',"
            " 'integration.children.answering', 'load_dataset'])\n"
        )
        environ = {**os.environ, "RANK": "4", "PYTHONPATH": python_path()}
        with subprocess.Popen(
            [sys.executable, "-c", script],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as rank:
            assert rank.stdout is not None
            helper = json.loads(rank.stdout.readline())["pid"]

            found = ask_host({}, [4], LONG)

            assert helper in local_processes(LONG)
            assert found[4].pid == rank.pid
            rank.communicate()


class TestPages:
    """What a worker lets its agent serve."""

    def test_page_that_blocks(self) -> None:
        """A collector that blocks does not delay questions."""
        began, end = threading.Event(), threading.Event()

        def blocks() -> list[int]:
            began.set()
            end.wait(LONG)
            return [7]

        LOCAL_SOCKET.metrics = blocks
        LOCAL_SOCKET.start()
        pid = os.getpid()
        first = in_background(lambda: ask_local(pid, METRICS_PAGE, LONG))
        assert began.wait(LONG)

        assert ask_local(pid, "status", LONG) is not None
        # One thread renders a page.
        assert ask_local(pid, METRICS_PAGE, LONG) is None
        end.set()
        reply = first.result(LONG)
        assert reply is not None
        assert reply.page == [7]
        assert wait_until(lambda: ask_local(pid, METRICS_PAGE, LONG)).page == [7]

    def test_page_that_fails(self) -> None:
        """A page that cannot be rendered is no reply, and a counted failure."""
        LOCAL_SOCKET.metrics = lambda: 1 / 0
        LOCAL_SOCKET.start()

        assert ask_local(os.getpid(), METRICS_PAGE, LONG) is None
        assert RECORDER.failures.counts() == {names.ENDPOINT: 1}


def has_socket(pid: int) -> bool:
    """Return whether a process has an open socket."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(str(link.readlink()).startswith("socket:") for link in links)


class TestLifetime:
    """When the socket is there."""

    def test_exit(self, start: Start, runtime_dir: Path) -> None:
        """A process that ends removes its socket."""
        child, _ = start("load_dataset", 1)
        assert list(runtime_dir.iterdir())
        child.close()

        assert child.exit_status() == 0, child.errors()
        assert not list(runtime_dir.iterdir())

    def test_fork(self, start: Start, runtime_dir: Path) -> None:
        """A forked child does not listen, and its end leaves the parent's socket."""
        child, _ = start("fork", 1)
        forked = child.next_report()["child"]

        # It is reported before its hooks have run.
        wait_until(lambda: not has_socket(forked))
        assert local_processes(LONG).keys() == {child.pid}
        os.kill(forked, signal.SIGKILL)
        assert ask_local(child.pid, "status", LONG) is not None

    def test_disabled(self, start: Start, runtime_dir: Path) -> None:
        """With TRACEDSTORE_ANSWERS=off there is no socket and no thread for it."""
        # Without the threads that look for stalls.
        env = {"TRACEDSTORE_STALL_AFTER": "0", "TRACEDSTORE_ANSWERS": "off"}
        child, _ = start("load_dataset", 1, **env)

        assert not list(runtime_dir.iterdir())
        # The main thread, and the helper thread that has set the telemetry up.
        assert len(list(Path(f"/proc/{child.pid}/task").iterdir())) == 2

    def test_one_thread(self, start: Start) -> None:
        """It costs one thread."""
        child, _ = start("load_dataset", 1, TRACEDSTORE_STALL_AFTER="0")

        # Beside the main thread and the helper thread that has started it.
        assert len(list(Path(f"/proc/{child.pid}/task").iterdir())) == 3

    def test_no_torch(self, start: Start) -> None:
        """Listening before torch is imported does not import it."""
        child, _ = start("load_dataset", 1)

        maps = Path(f"/proc/{child.pid}/maps").read_text()
        assert "libtorch" not in maps

    def test_start_and_stop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It can be started and stopped again; both may be repeated."""
        monkeypatch.setenv("RANK", "1")
        for _ in range(2):
            LOCAL_SOCKET.start()
            LOCAL_SOCKET.start()
            assert ask_local(os.getpid(), "status", LONG) is not None
            LOCAL_SOCKET.stop(5)
            LOCAL_SOCKET.stop(5)
            assert local_processes(SHORT) == {}
        assert "tracedstore-answers" not in [t.name for t in threading.enumerate()]


class TestHostileDirectory:
    """A directory that another user has prepared is not used."""

    @pytest.fixture(autouse=True)
    def _without_directory(self, runtime_dir: Path) -> None:
        runtime_dir.rmdir()

    def test_open_to_others(self, runtime_dir: Path) -> None:
        """A directory that others can enter is refused, in one sentence."""
        runtime_dir.mkdir()
        runtime_dir.chmod(0o755)

        with pytest.raises(OSError, match=r"is a private directory of this user;"):
            LOCAL_SOCKET.start()
        assert local_processes(SHORT) == {}

    def test_symbolic_link(self, runtime_dir: Path, tmp_path: Path) -> None:
        """A link to a private directory is refused."""
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        runtime_dir.symlink_to(tmp_path / "elsewhere")

        with pytest.raises(OSError, match="private directory"):
            LOCAL_SOCKET.start()

    def test_other_owner(self, runtime_dir: Path) -> None:
        """A directory of another user is refused."""
        runtime_dir.mkdir(mode=0o700)
        if os.getuid() != 0:
            pytest.skip("changing the owner of a directory needs root")
        os.chown(runtime_dir, 12345, -1)

        with pytest.raises(OSError, match="private directory"):
            LOCAL_SOCKET.start()

    def test_file(self, runtime_dir: Path) -> None:
        """A file of this name is refused."""
        runtime_dir.write_text("")

        with pytest.raises(OSError, match="private directory"):
            LOCAL_SOCKET.start()

    def test_next_candidate(
        self, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the preferred directory cannot be used, the next one is."""
        runtime_dir.write_text("")
        monkeypatch.setenv("RANK", "1")
        paths = [str(runtime_dir), str(tmp_path / "second")]
        monkeypatch.setattr(sockets, "directory_candidates", lambda: paths)

        LOCAL_SOCKET.start()

        assert ask_local(os.getpid(), "status", LONG) is not None

    def test_candidates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Relative paths are not used; the user's runtime directory is preferred."""
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")

        name = f"tracedstore-{os.getuid()}"
        assert sockets.directory_candidates()[0] == f"/run/user/7/{name}"
        monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
        assert all(path.startswith("/") for path in sockets.directory_candidates())


class TestHostilePeers:
    """Clients and servers that do not follow the protocol."""

    @pytest.fixture
    def address(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
        """The address of this process's socket."""
        monkeypatch.setenv("RANK", "1")
        LOCAL_SOCKET.start()
        with sockets.existing_directories() as (directory,):
            name = sockets.socket_name(os.getpid())
            yield sockets.socket_address(directory, name)

    @pytest.mark.parametrize(
        "request_line",
        [
            b"\n",
            b"{}\n",
            b"[]\n",
            b'{"kind": "environment"}\n',
            b'{"kind": ["status"]}\n',
            b'{"kind": "status", "families": "x"}\n',
            b"[" * 60_000 + b"\n",
            b"x" * 100_000 + b"\n",
            b"\xff\n",
        ],
    )
    def test_bad_request(self, address: str, request_line: bytes) -> None:
        """A bad request gets no answer, and the next request is answered."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(LONG)
            client.connect(address)
            try:
                client.sendall(request_line)
                assert client.recv(10) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass

        assert ask_local(os.getpid(), "status", LONG) is not None

    def test_silent_client(self, address: str) -> None:
        """A client that sends nothing is dropped after a second."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(LONG)
            client.connect(address)
            assert client.recv(10) == b""

        assert ask_local(os.getpid(), "status", LONG) is not None

    def test_other_user(self, runtime_dir: Path, tmp_path: Path) -> None:
        """A process of another user is refused, even if it reaches the socket."""
        if os.getuid() != 0:
            pytest.skip("becoming another user needs root")
        LOCAL_SOCKET.start()
        (name,) = [path.name for path in runtime_dir.iterdir()]
        script = (
            "import os, socket, sys\n"
            f"os.chdir({str(runtime_dir)!r})\n"
            "os.setgid(12345); os.setuid(12345)\n"
            "client = socket.socket(socket.AF_UNIX)\n"
            "try:\n"
            f"    client.connect({name!r})\n"
            '    client.sendall(b\'{"kind": "status"}\\n\')\n'
            "    print(client.recv(100))\n"
            "except OSError as error: print(type(error).__name__)\n"
        )
        # Any user may use the socket itself; the directory is what is private.
        (runtime_dir / name).chmod(0o777)
        runtime_dir.chmod(0o711)

        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        runtime_dir.chmod(0o700)
        accepted = (r"b''", "ConnectionResetError", "BrokenPipeError")
        assert done.stdout.strip() in accepted, done.stderr

    @pytest.mark.parametrize(
        "line", [b"\n", b"{}\n", b'{"identity": {}, "answer": 1}\n', b"x" * 100, b""]
    )
    def test_bad_server(self, runtime_dir: Path, line: bytes) -> None:
        """A socket that answers something else is no traced process."""
        with socket.socket(socket.AF_UNIX) as server:
            with sockets.existing_directories() as (directory,):
                name = sockets.socket_name(os.getpid())
                server.bind(sockets.socket_address(directory, name))
            server.listen()

            def serve() -> None:
                client, _ = server.accept()
                with client:
                    client.recv(1000)
                    client.sendall(line)

            thread = threading.Thread(target=serve)
            thread.start()
            assert local_processes(LONG) == {}
            thread.join(LONG)

    def test_foreign_files(self, runtime_dir: Path) -> None:
        """Other files in the directory are ignored and not removed."""
        (runtime_dir / "notes.txt").write_text("")
        (runtime_dir / "0123456789abcdef-1.sock").write_text("")

        LOCAL_SOCKET.start()

        assert (runtime_dir / "notes.txt").exists()
        # A socket of another namespace: its pid is not known here.
        assert (runtime_dir / "0123456789abcdef-1.sock").exists()
        names = [path.name for path in runtime_dir.iterdir()]
        assert sum(bool(re.search(rf"-{os.getpid()}\.sock", n)) for n in names) == 1

    def test_bounded_time(self, start: Start) -> None:
        """Many processes that do not answer take one timeout together."""
        children = [start("load_dataset", rank)[0] for rank in range(3)]
        for child in children:
            pause(child.pid)

        began = time.monotonic()
        replies = local_processes(4.0)

        assert list(replies.values()) == [None] * 3
        # One after the other would take 12 s.
        assert time.monotonic() - began < 12


FORKS_A_WORKER = """
import multiprocessing
import os
import sys

import tracedstore

tracedstore.instrument()
import torch.distributed


def work():
    os.environ["RANK"] = "3"
    print(os.getpid(), flush=True)
    os.read(int(sys.argv[1]), 1)  # until the test ends


context = multiprocessing.get_context("fork")
worker = context.Process(target=work)
worker.start()
worker.join()
"""


def test_forked_worker_answers_before_it_registers() -> None:
    """It gets its rank after the fork, as the workers of a notebook do."""
    reading, writing = os.pipe()
    environ = {name: one for name, one in os.environ.items() if name != "RANK"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS_A_WORKER, str(reading)],
        env=environ | JOB,
        pass_fds=(reading,),
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        os.close(reading)
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())

        reply = wait_until(lambda: local_processes(LONG).get(pid))
        os.close(writing)

    assert reply.identity.rank == 3
    assert not reply.identity.registered
    assert reply.answer is not None
    assert launcher.returncode == 0
