"""``tracedstore top`` against real stores: by keys, and in a real terminal."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from textual.pilot import Pilot

from support.etcd import free_port
from support.jobs_in_stores import arrive, block, contents, judge, register
from support.pseudo_terminal import SIZE, Terminal
from tracedstore.tools.attach import job_reading as reading
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.top.live import LiveApp
from tracedstore.tools.top.reader_process import (
    JobReader,
    ReaderLostError,
    ReaderRequest,
)
from tracedstore.tools.top.rows import plain_text

pytestmark = pytest.mark.processes
HOSTILE = "\x1b[31mevil\x07\u202e[bold]"
COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3|4|9|10)[0-8](?:;[\d;]*)?m")


@pytest.fixture
def store() -> Any:
    """Serve a TCPStore."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True)


def url_of(store: Any) -> str:
    """Return the URL of a store."""
    return f"tcp://127.0.0.1:{store.port}"


def stall(store: Any) -> None:
    """Let 63 ranks of 64 wait at a barrier, after one that is complete."""
    now = time.time()
    for rank in range(64):
        register(store, rank, 64, started=now)
    times = {rank: now - 90 + rank / 64 for rank in range(64)}
    arrive(store, "step/1", times, complete=True)
    arrive(store, "step/2", {r: t + 20 for r, t in times.items() if r != 11})


def text_of(app: LiveApp) -> str:
    """Return everything that the parts of the screen have, seen or scrolled."""
    names = ("title", "headline", "tabs", "main", "detail", "footer")
    shown = [name for name in names if app.lines(name).display]
    return "".join(plain_text(app.lines(name).rows) for name in shown)


async def until(pilot: Pilot[int], app: LiveApp, text: str) -> str:
    """Wait for a text on the screen, and return the screen."""
    deadline = time.monotonic() + 20
    while text not in (screen := text_of(app)):
        assert time.monotonic() < deadline, f"no {text!r} in\n{screen}"
        await pilot.pause(0.01)
    await pilot.pause()
    return text_of(app)


@asynccontextmanager
async def running(
    url: str, folder: Path, **options: Any
) -> AsyncIterator[tuple[Pilot[int], LiveApp]]:
    """Run the screen without a terminal."""
    reader = JobReader(Address(url), TokenPolicy(), after=5.0, **options)
    app = LiveApp(reader, 0.1, folder)
    async with app.run_test(size=SIZE) as pilot:
        yield pilot, app


class TestKeys:
    """The screen, by its keys."""

    def test_hung_job(self, store: Any, tmp_path: Path) -> None:
        """The culprit is on the screen, selected, and every key does its work."""
        stall(store)
        before = contents(store), store.num_keys()

        async def scenario() -> None:
            async with running(url_of(store), tmp_path) as (pilot, app):
                screen = await until(pilot, app, "missing 1 of 64: node1 (rank 11)")
                assert "!! barrier step/2 waits for 1 min" in screen
                assert re.search(r"node1 +wwwAwwww  1 awaited, 7 waiting", screen)
                assert "rank 11 on node1: awaited" in screen

                await pilot.press("right")
                assert "rank 12 on node1: waiting" in text_of(app)
                await pilot.press("down", "home")
                assert "rank 8 on node1" in text_of(app)

                await pilot.press("slash", "6", "3", "enter")
                screen = text_of(app)
                assert "filter: 63" in screen
                assert "rank 63 on node7" in screen
                assert "node1  " not in screen
                await pilot.press("escape")
                assert "node1  " in text_of(app)

                await pilot.press("2")
                screen = text_of(app)
                assert "63/64" in screen
                assert "node1 (11)" in screen
                await pilot.press("down")
                assert "step/1: 64 arrived within" in text_of(app)
                await pilot.press("enter")
                assert not app.lines("main").display
                await pilot.press("escape", "tab")
                assert "63  node7" in text_of(app)

                await pilot.press("4")
                assert "no rendezvous" in text_of(app)
                await pilot.press("5")
                await until(pilot, app, "no rank serves an endpoint")

                await pilot.press("question_mark")
                assert "a character for each rank" in text_of(app)
                await pilot.press("q")
            assert app.return_value == 0

        asyncio.run(scenario())
        # Reading has written nothing.
        assert (contents(store), store.num_keys()) == before

    def test_files(self, store: Any, tmp_path: Path) -> None:
        """`e` writes text and SVG, `r` a report; a folder may be unwritable."""
        stall(store)

        async def scenario() -> None:
            async with running(url_of(store), tmp_path) as (pilot, app):
                await until(pilot, app, "missing 1 of 64")
                await pilot.press("e")
                await until(pilot, app, "saved tracedstore-top-")
                await pilot.press("r")
                await until(pilot, app, ".html")
                app._folder = tmp_path / "absent"
                await pilot.press("e")
                await until(pilot, app, "cannot be saved")

        asyncio.run(scenario())
        (text,), (svg,), (page,) = (
            list(tmp_path.glob(f"*.{kind}")) for kind in ("txt", "svg", "html")
        )
        assert "missing 1 of 64: node1 (rank 11)" in text.read_text()
        assert "url(http" not in svg.read_text()
        assert "rank&#160;11" in svg.read_text()
        assert "step/2" in page.read_text()
        assert "rank 11" in page.read_text()

    def test_mouse(self, store: Any, tmp_path: Path) -> None:
        """A click selects a rank, and a view."""
        stall(store)

        async def scenario() -> None:
            async with running(url_of(store), tmp_path) as (pilot, app):
                await until(pilot, app, "rank 11 on node1: awaited")
                await pilot.click("#main", offset=(len("node1  ") + 1, 0))
                assert "rank 9 on node1" in text_of(app)
                await pilot.click("#tabs", offset=(12, 0))
                assert "step/1" in text_of(app)

        asyncio.run(scenario())

    def test_lost_store(self, tmp_path: Path) -> None:
        """A store that is not there yet, and one that is lost, are tried again."""
        port = free_port()

        async def scenario() -> None:
            async with running(f"tcp://127.0.0.1:{port}", tmp_path) as (pilot, app):
                await until(pilot, app, "nothing listens there")
                assert "; trying again" in app.shown_job().headline
                with served(port):
                    await until(pilot, app, "healthy: 2 ranks on 1 host")
                screen = await until(pilot, app, "store lost, last read ")
                # What was read last stays.
                assert re.search(r"^\. +1 node0 +running", screen, re.MULTILINE)
                with served(port):
                    await until(pilot, app, "healthy: 2 ranks on 1 host")

        asyncio.run(scenario())

    def test_verdict_and_hostile_names(self, store: Any, tmp_path: Path) -> None:
        """A verdict is the headline; no escape sequence reaches the terminal."""
        now = time.time()
        register(store, 0, 3, host=HOSTILE)
        register(store, 1, 3, host="x" * 1000)
        register(store, 2, 3, pid=1002)
        block(store, 0, now - 40, host=HOSTILE, phase="new_group 1")
        judge(store, now, [0, 1], {2: "stopped"})

        async def scenario() -> None:
            async with running(url_of(store), tmp_path) as (pilot, app):
                screen = await until(pilot, app, "stalled in new_group 1")
                assert "rank 2 on node0: stopped" in screen
                await pilot.press("i")
                assert "remedy: look at them" in text_of(app)
                await pilot.press("escape", "down")
                drawn = [
                    segment.text
                    for y in range(SIZE[1])
                    for segment in app.lines("main").render_line(y)
                ]
                assert "".join(drawn).isprintable()
                assert "rank 0 on \\x1b[31mevil\\x07\\u202e[bold]" in text_of(app)

        asyncio.run(scenario())

    def test_stacks(
        self, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`s` asks after a second press; nobody answers for a rank that is gone."""
        monkeypatch.setattr(reading, "ANSWER_TIMEOUT", 0.3)
        register(store, 0, 1, host="elsewhere")

        async def scenario() -> None:
            async with running(url_of(store), tmp_path) as (pilot, app):
                await until(pilot, app, "rank 0 on elsewhere")
                await pilot.press("s")
                assert "press s again" in text_of(app)
                assert not store.check(["tracedstore/QUESTIONS"])
                await pilot.press("s")
                await until(pilot, app, "no answer from rank 0")
                assert store.check(["tracedstore/QUESTIONS"])

        asyncio.run(scenario())


@contextmanager
def served(port: int) -> Iterator[None]:
    """Serve a store with a job of two ranks at a port."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=True)
    for rank in range(2):
        register(store, rank, 2)
    yield
    del store


class TestReader:
    """The process that reads."""

    def test_close_while_it_reads(self) -> None:
        """A screen that ends does not wait for a store that hangs."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            reader = JobReader(Address(f"tcp://127.0.0.1:{port}"), TokenPolicy())
            reader.close()
            with pytest.raises(ReaderLostError):
                reader.read(ReaderRequest())


def top(*arguments: str, **environ: str) -> Terminal:
    """Run the command in a terminal."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tracedstore.tools.cli.main",
        "top",
    ]
    return Terminal([*command, *arguments], environ=environ)


class TestTerminal:
    """The screen in a real terminal, which is left as it was."""

    def test_ctrl_c(self, store: Any) -> None:
        """The culprit is on the screen, in colour; Ctrl-C restores the terminal."""
        stall(store)
        with top("--store", url_of(store)) as screen:
            screen.wait_for("(rank 11)")
            screen.press(b"\x03")

            assert screen.end() == 130
            assert COLOUR.search(screen.output)

    def test_sigterm(self) -> None:
        """SIGTERM restores the terminal; with NO_COLOR there is no colour."""
        address = f"tcp://127.0.0.1:{free_port()}"
        with top("--store", address, NO_COLOR="1") as screen:
            screen.wait_for("nothing listens there")
            screen.process.send_signal(signal.SIGTERM)

            assert screen.end() == 143
            assert not COLOUR.search(screen.output)

    def test_no_terminal(self) -> None:
        """Without a terminal, one sentence says what to use instead."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tracedstore.tools.cli.main",
                "top",
                "--store",
                "tcp://a:1",
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert done.returncode == 1
        assert done.stderr == (
            "tracedstore: top needs a terminal: tracedstore status --watch prints"
            " lines\n"
        )

    def test_without_textual(self, store: Any, tmp_path: Path) -> None:
        """Without the extra, one sentence has the remedy."""
        (tmp_path / "textual.py").write_text(
            "raise ModuleNotFoundError(name='textual')"
        )
        with top("--store", url_of(store), PYTHONPATH=str(tmp_path)) as screen:
            assert screen.process.wait(240) == 1
            screen.read()

        assert screen.output == (
            "tracedstore: top needs textual, which is not installed: pip install"
            " 'tracedstore[tools]'\r\n"
        )
