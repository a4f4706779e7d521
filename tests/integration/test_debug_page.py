"""The page in torch's debug server, for a job with several failures."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from http.client import HTTPException
from pathlib import Path

import pytest
import torch.distributed as dist

from integration.harness import Child, forked, in_background, pause, wait_until
from support.versions import DEBUG_SERVER, TORCH, needs_debug_server
from tracedstore.auto.debug_page import install
from tracedstore.coordination.rank_registry import read_ranks

if TORCH >= DEBUG_SERVER:
    from integration.children.debugged import KEY

pytestmark = [pytest.mark.processes, needs_debug_server]

# The task of each rank; rank 5 is never started.
TASKS = ("idle", "wait", "barrier", "idle", "plain")
WORLD = len(TASKS) + 1
STOPPED = 3


def free_port() -> int:
    """Return a free port; torch's frontend does not report the port it chooses."""
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Job:
    """A job: its ranks, the server of their store, and the page.

    Attributes:
        server: The server of the store.
        ranks: The started ranks.
    """

    def __init__(self, folder: Path, tasks: tuple[str, ...], world_size: int) -> None:
        self.ranks: list[Child] = []
        self.server = Child(folder, "tcp_server", env={})
        self.port = self.server.next_report()["port"]
        self.frontend = free_port()
        for rank, task in enumerate(tasks):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.port),
            }
            self.ranks.append(Child(folder, "debugged", self.frontend, task, env=env))
        for child in self.ranks:
            child.next_report()

    def page(self) -> str:
        """Get the page; "" until the frontend has started."""
        url = f"http://127.0.0.1:{self.frontend}/tracedstore"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                text: str = response.read().decode()
                return text
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                return ""
            raise

    def kill(self) -> None:
        """Kill all processes."""
        for child in (*self.ranks, self.server):
            child.kill()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job whose page shows a stalled barrier, and one stopped rank."""
    job = Job(tmp_path_factory.mktemp("job"), TASKS, WORLD)
    try:
        wait_until(lambda: "epoch/*" in job.page(), 30)
        pause(job.ranks[STOPPED].pid)
        yield job
    finally:
        job.kill()


def rows(page: str) -> dict[str, list[str]]:
    """Return the rows of the page's tables by their first cells, unescaped."""
    by_first_cell = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        texts = [unescape(cell.replace("<br>", "\n")).strip() for cell in cells]
        if texts:
            by_first_cell[texts[0]] = texts[1:]
    return by_first_cell


class TestPage:
    """The page shows all ranks, also those that do not answer."""

    def test_shows_every_rank(self, job: Job) -> None:
        """Ranks are blocked, stopped, without the page, or not registered."""
        host = socket.gethostname()
        started = time.monotonic()
        page = job.page()
        took = time.monotonic() - started
        shown = rows(page)
        server = f"tcp_store 127.0.0.1:{job.port}"

        assert took < 8
        assert (
            "6 ranks: 3 answered, 1 did not answer, 1 without this page,"
            " 1 never registered." in page
        )
        assert shown["rank 1"][:3] == [
            f"{host}, pid {job.ranks[1].pid}",
            "in a Store call",
            "wait",
        ]
        assert float(shown["rank 1"][3]) > 0
        assert shown["rank 1"][4:] == [
            server,
            KEY,
            "<script>alert(*)</script>/*",
            "train-wait",
        ]
        assert shown["rank 2"][4:] == [
            server,
            "epoch/3/last_member",
            "epoch/*/last_member",
            "train-barrier",
        ]
        assert shown[f"rank {STOPPED}"][:2] == [
            f"{host}, pid {job.ranks[STOPPED].pid}",
            "did not answer: no response within 2 s",
        ]
        assert shown["rank 4"][1] == "runs torch's debug server without this page"
        assert shown["rank 5"][1] == "never registered"
        assert shown["rank 0"][1] == "in no Store call"

    def test_missing_ranks(self, job: Job) -> None:
        """The missing ranks are listed with the calls they are in."""
        arrived, missing, calls, reported_by = rows(job.page())["epoch/*"]

        assert arrived == "1"
        assert missing == (
            f"missing 5 of 6: {socket.gethostname()} (ranks 0-1,3), ranks 4-5"
        )
        assert reported_by == "rank 2"
        lines = calls.splitlines()
        assert lines[0] == "rank 0: in no Store call"
        assert re.fullmatch(r"rank 1: wait for \d+\.\d s, tcp_store .*", lines[1])
        assert lines[2:] == [
            "rank 3: did not answer",
            "rank 4: without this page",
            "rank 5: never registered",
        ]

    def test_keys_are_escaped(self, job: Job) -> None:
        """A key may contain HTML."""
        assert "<script" not in job.page()

    def test_store_server_is_stopped(self, job: Job) -> None:
        """The page uses the addresses that it read before."""
        pause(job.server.pid)
        try:
            started = time.monotonic()
            page = job.page()
            took = time.monotonic() - started
        finally:
            os.kill(job.server.pid, signal.SIGCONT)

        assert took < 8
        assert "the store did not answer within 2 s" in page
        assert rows(page)["rank 1"][2] == "wait"


class TestExit:
    """The status server does not change how a rank exits."""

    def test_requests_during_exit(self, tmp_path: Path) -> None:
        """A handler in torch's worker server would abort the process or hang."""
        job = Job(tmp_path, ("idle",), 1)
        try:
            tcp_store = dist.TCPStore("127.0.0.1", job.port, None, is_master=False)
            store = dist.PrefixStore("debug_server", tcp_store)
            address = read_ranks(store, [0])[0].answers

            def send_requests() -> int:
                count = 0
                while True:
                    try:
                        urllib.request.urlopen(f"http://{address}", timeout=5).read()
                        count += 1
                    except (OSError, HTTPException):  # the rank has exited
                        return count

            clients = [in_background(send_requests) for _ in range(4)]
            wait_until(lambda: "answered" in job.page())
            job.ranks[0].close()

            assert job.ranks[0].exit_status() == 0
            assert all(client.result(10) > 0 for client in clients)
            assert "Traceback" not in job.ranks[0].errors()
        finally:
            job.kill()

    def test_forked_children_do_not_listen(self) -> None:
        """A data loader's worker would accept connections and never answer."""
        server = install._start_status_server()
        try:
            assert server.listening
            assert not forked(lambda: server.listening)
        finally:
            server.stop(5)


class TestDocs:
    """The example of docs/debug-server.md."""

    @pytest.mark.exclusive
    def test_dump(self, tmp_path: Path) -> None:
        """The dump that torch writes is equal to the output in the docs."""
        page = Path(__file__).parents[2] / "docs/debug-server.md"
        text = page.read_text("utf-8").replace("25999", str(free_port()))
        ((program, command),) = re.findall(
            r"```python\n(.*?)```\n\n```console\n(.*?)```", text, re.DOTALL
        )
        (expected,) = re.findall(r"```\n(4 ranks.*?)```", text, re.DOTALL)
        (tmp_path / "train.py").write_text(program)
        with (tmp_path / "log").open("wb") as log:
            job = subprocess.Popen(
                command.split(),
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                },
                stdout=log,
                stderr=log,
            )
        try:
            with suppress(AssertionError):  # the assertion below shows the difference
                wait_until(lambda: self._newest(tmp_path) == self._folded(expected), 30)
            newest = self._newest(tmp_path)
        finally:
            # Its ranks are in other sessions; torchrun ends them.
            job.terminate()
            job.wait(30)

        assert newest == self._folded(expected)

    def _newest(self, folder: Path) -> list[str]:
        dumps = sorted(folder.glob("dumps/*"))[-1:]
        return self._folded("".join(dump.read_text() for dump in dumps))

    @staticmethod
    def _folded(text: str) -> list[str]:
        """Replace what differs between runs; sort, because rows are ordered by time."""
        text = text.replace(socket.gethostname(), "node0")
        text = re.sub(r"for [0-9.]+ s|pid [0-9]+|localhost:[0-9]+", "*", text)
        return sorted(text.splitlines())
