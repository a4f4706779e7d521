"""The page in torch's debug server, of a job in which everything is amiss."""

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

from integration.children.debugged import KEY
from integration.harness import Child, forked, in_background, wait_until
from tracedstore.auto.debug_page import install
from tracedstore.coordination.rank_registry import registered

pytestmark = pytest.mark.processes

# What each rank does; rank 5 never comes.
TASKS = ("idle", "wait", "barrier", "idle", "plain")
WORLD = len(TASKS) + 1
STOPPED = 3


def free_port() -> int:
    """A port that nobody listens at; torch's frontend does not say which it has."""
    with socket.create_server(("", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Job:
    """Ranks, the server of their store, and the page.

    Attributes:
        server: The server of the store.
        ranks: Those that came.
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
        """Get the page; "" while there is no frontend yet."""
        url = f"http://127.0.0.1:{self.frontend}/tracedstore"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                return ""
            raise

    def kill(self) -> None:
        """End all of it."""
        for child in (*self.ranks, self.server):
            child.kill()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The job, once its page shows the barrier as stalled; then one rank stops."""
    job = Job(tmp_path_factory.mktemp("job"), TASKS, WORLD)
    try:
        wait_until(lambda: "epoch/*" in job.page(), 30)
        os.kill(job.ranks[STOPPED].pid, signal.SIGSTOP)
        yield job
    finally:
        job.kill()


def rows(page: str) -> dict[str, list[str]]:
    """The rows of the page's tables by their first cells, as a reader sees them."""
    found = {}
    for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL):
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)
        shown = [unescape(cell.replace("<br>", "\n")).strip() for cell in cells]
        if shown:
            found[shown[0]] = shown[1:]
    return found


class TestPage:
    """One page says what every rank is doing, also those that cannot."""

    def test_shows_every_rank(self, job: Job) -> None:
        """Blocked, stalled, stopped, without the page, and never registered."""
        host = socket.gethostname()
        started = time.monotonic()
        page = job.page()
        took = time.monotonic() - started
        found = rows(page)
        server = f"tcp_store 127.0.0.1:{job.port}"

        assert took < 8
        assert (
            "6 ranks: 3 answered, 1 did not answer, 1 without this page,"
            " 1 never registered." in page
        )
        assert found["rank 1"][:3] == [
            f"{host}, pid {job.ranks[1].pid}",
            "in a Store call",
            "wait",
        ]
        assert float(found["rank 1"][3]) > 0
        assert found["rank 1"][4:] == [
            server,
            KEY,
            "<script>alert(*)</script>/*",
            "train-wait",
        ]
        assert found["rank 2"][4:] == [
            server,
            "epoch/3/last_member",
            "epoch/*/last_member",
            "train-barrier",
        ]
        assert found[f"rank {STOPPED}"][:2] == [
            f"{host}, pid {job.ranks[STOPPED].pid}",
            "did not answer: no answer within 2 s",
        ]
        assert found["rank 4"][1] == "runs torch's debug server without this page"
        assert found["rank 5"][1] == "never registered"
        assert found["rank 0"][1] == "in no Store call"

    def test_names_the_missing(self, job: Job) -> None:
        """And says of each what it does instead."""
        arrived, missing, doing, told_by = rows(job.page())["epoch/*"]

        assert arrived == "1"
        assert missing == (
            f"missing 5 of 6: {socket.gethostname()} (ranks 0-1,3), ranks 4-5"
        )
        assert told_by == "rank 2"
        lines = doing.splitlines()
        assert lines[0] == "rank 0: in no Store call"
        assert re.fullmatch(r"rank 1: wait for \d+\.\d s, tcp_store .*", lines[1])
        assert lines[2:] == [
            "rank 3: did not answer",
            "rank 4: without this page",
            "rank 5: never registered",
        ]

    def test_keys_are_no_html(self, job: Job) -> None:
        """A key is anybody's text."""
        assert "<script" not in job.page()

    def test_store_that_is_stopped(self, job: Job) -> None:
        """Its server may be what hangs: what was known before is shown."""
        os.kill(job.server.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            page = job.page()
            took = time.monotonic() - started
        finally:
            os.kill(job.server.pid, signal.SIGCONT)

        assert took < 8
        assert "the store has not answered for 2 s" in page
        assert rows(page)["rank 1"][2] == "wait"


class TestExit:
    """A rank that ends while it is asked ends as it would have."""

    def test_asked_all_the_while(self, tmp_path: Path) -> None:
        """Where a handler in torch's own worker server aborts the process or hangs."""
        job = Job(tmp_path, ("idle",), 1)
        try:
            client = dist.TCPStore("127.0.0.1", job.port, None, is_master=False)
            store = dist.PrefixStore("debug_server", client)
            address = registered(store, [0])[0].answers

            def ask() -> int:
                answers = 0
                while True:
                    try:
                        urllib.request.urlopen(f"http://{address}", timeout=5).read()
                        answers += 1
                    except (OSError, HTTPException):  # gone, or gone in the middle
                        return answers

            asking = [in_background(ask) for _ in range(4)]
            wait_until(lambda: "answered" in job.page())
            job.ranks[0].close()

            assert job.ranks[0].exit_status() == 0
            assert all(asked.result(10) > 0 for asked in asking)
            assert "Traceback" not in job.ranks[0].errors()
        finally:
            job.kill()

    def test_children_do_not_listen(self) -> None:
        """A data loader's worker would take questions that it never answers."""
        answering = install._answer()
        try:
            assert answering.listening
            assert not forked(lambda: answering.listening)
        finally:
            answering.stop(5)


class TestDocs:
    """The example of docs/debug-server.md, as it stands there."""

    @pytest.mark.exclusive
    def test_dump(self, tmp_path: Path) -> None:
        """What torch dumps is what the page of the docs shows."""
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
            with suppress(AssertionError):  # the one below says more
                wait_until(lambda: self._newest(tmp_path) == self._folded(expected), 30)
            newest = self._newest(tmp_path)
        finally:
            # Its ranks are in sessions of their own; it ends them.
            job.terminate()
            job.wait(30)

        assert newest == self._folded(expected)

    def _newest(self, folder: Path) -> list[str]:
        dumps = sorted(folder.glob("dumps/*"))[-1:]
        return self._folded("".join(dump.read_text() for dump in dumps))

    @staticmethod
    def _folded(text: str) -> list[str]:
        """Without what differs from run to run; the blocked are in order of time."""
        text = text.replace(socket.gethostname(), "node0")
        text = re.sub(r"for [0-9.]+ s|pid [0-9]+|localhost:[0-9]+", "*", text)
        return sorted(text.splitlines())
