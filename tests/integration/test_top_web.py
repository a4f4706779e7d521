"""``tracedstore top`` on a hung job of torchrun, in tmux and in Chromium; ``--web``."""

import asyncio
import os
import re
import shlex
import signal
import sys
import zipfile
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from integration.conftest import StartCommand
from integration.harness import wait_until
from support.browser import Browser
from support.etcd import free_port
from support.processes import descendants
from support.tmux import Tmux
from support.tools import ROOT
from tracedstore.export.http_endpoint import access_of
from tracedstore.export.settings import Settings
from tracedstore.tools.cli.main import main
from tracedstore.tools.top import web

TOKEN = "s3cret"
JOB = """\
import time

import torch.distributed as dist


def load_dataset():
    time.sleep(600)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    load_dataset()
dist.new_group()
"""
CULPRIT = re.compile(
    r"waiting for\s+rank 1 on .*in\s+\S*train\.py:7\s+load_dataset", re.DOTALL
)
TOP = (sys.executable, "-W", "ignore", "-m", "tracedstore.tools.cli.main", "top")


def runs(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.processes
def test_hung_torchrun(start_command: StartCommand, tmp_path: Path) -> None:
    """The culprit is on the screen, in a terminal and in a browser."""
    (tmp_path / "train.py").write_text(JOB)
    endpoint = f"127.0.0.1:{free_port()}"
    start_command(
        *("tracedstore-run", "torchrun", "--nproc-per-node", "2"),
        *("--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-id", "job-7"),
        *("--rdzv-endpoint", endpoint, tmp_path / "train.py"),
        TRACEDSTORE_STALL_AFTER="2",
    )
    top = [*TOP, "--store", f"tcp://{endpoint}"]
    server = start_command(*top, "--web", "0", TRACEDSTORE_HTTP_TOKEN=TOKEN)
    assert server._process.stdout is not None
    serving = server._process.stdout.readline()
    (port,) = re.findall(r"^serving on http://127.0.0.1:(\d+) until Ctrl-C$", serving)

    with Tmux(tmp_path) as terminal:
        terminal.press(shlex.join(top), "Enter")
        terminal.wait_for("next: s shows")
        check_terminal(terminal)

    with Browser("--window-size=800,520") as browser:
        browser.open(f"http://127.0.0.1:{port}/")
        # Headless, it cannot ask its user.
        browser.wait_until(
            lambda: str(browser.evaluate("document.URL")),
            lambda _url: "a status of 401" in "".join(browser.console),
        )
        browser.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path)
        )
        browser.open(f"http://anyone:{TOKEN}@127.0.0.1:{port}/")
        browser.wait_for("next: s shows")
        check_browser(browser, tmp_path)
        tab = descendants(server.pid)
        assert len(tab) >= 2

    # The tab is closed, and its processes have ended.
    wait_until(lambda: not any(map(runs, tab)))
    os.kill(server.pid, signal.SIGTERM)
    assert server.exit_status() == 143


def check_terminal(terminal: Tmux) -> None:
    """The headline names the culprit; keys select views; q leaves the terminal."""
    screen = terminal.screen()
    assert CULPRIT.search(screen), screen
    assert re.search(r"^A +1 \S+ .* in train\.py:7 load", screen, re.MULTILINE), screen
    assert "next: s shows the stacks of rank 1" in screen
    terminal.press("4")
    assert "job-7: round 0, complete" in terminal.wait_for("joined: 1")
    terminal.press("q")
    screen = terminal.wait_for("\nready$\n")
    # The shell's own screen is back.
    assert "load_dataset" not in screen
    assert "ready$ " + TOP[0] in screen


def check_browser(browser: Browser, downloads: Path) -> None:
    """The page shows what the terminal shows, and loads nothing from elsewhere."""
    screen = browser.screen()
    assert CULPRIT.search(screen), screen
    browser.screenshot(ROOT / "test-results/top.png")
    browser.press("e")
    browser.wait_for("to the browser")
    (archive,) = wait_until(lambda: [*downloads.glob("*.zip")])
    with zipfile.ZipFile(archive) as saved:
        text, svg = (
            saved.read(name).decode() for name in sorted(saved.namelist(), reverse=True)
        )
    assert CULPRIT.search(text)
    assert svg.startswith("<svg")
    browser.press("?")
    browser.wait_for("a character for each rank")
    # A phone has fewer columns, and words to tap instead of keys.
    size = {"width": 390, "height": 844, "deviceScaleFactor": 0, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.open(str(browser.evaluate("document.URL")))
    browser.wait_for("s stacks  r report")
    assert CULPRIT.search(browser.wait_for("next: s shows"))
    assert browser.evaluate("window.xterm.cols >= 55 && document.hasFocus()")
    addresses = {(url.hostname, url.port) for url in map(urlsplit, browser.requested)}
    assert len(addresses) == 1, browser.requested


# textual-serve's side of a program that draws nothing, and ends when it is told to.
QUIET = "import sys; print('__GANGLION__', flush=True); sys.stdin.buffer.read(5)"
# One that does not end.
DEAF = "import time; print('__GANGLION__', flush=True); time.sleep(600)"


def tabs() -> list[int]:
    """Return the processes of the tabs of a server in this process.

    Servers of other tests are children of this process, too.
    """
    return [pid for pid in descendants(os.getpid()) if runs(pid) and is_tab(pid)]


def is_tab(pid: int) -> bool:
    """Return whether a process runs one of the programs above."""
    with suppress(OSError):
        return b"__GANGLION__" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the test's timeout bounds it."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    program: str, **settings: str
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Serve a program to browsers in this process; SIGTERM ends that."""
    access = access_of(Settings.load(settings, {}))
    server = web.TopServer([sys.executable, "-c", program], "a <title>", access)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(server.run("127.0.0.1", 0, ready.set_result))
    async with aiohttp.ClientSession(base_url=await ready) as client:
        yield client, f"/ws/{server._key}"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 143
    await until(lambda: not tabs())


class TestAccess:
    """Who may see the screen."""

    def test_token(self) -> None:
        """Without the token the page, its files and the websocket are refused."""
        basic = "Basic " + b64encode(f"anyone:{TOKEN}".encode()).decode()
        wrong = "Basic " + b64encode(b"anyone:wrong").decode()

        async def scenario() -> None:
            async with serving(QUIET, http_token=TOKEN) as (client, path):
                for given, expected in (
                    ("", 401),
                    (wrong, 401),
                    (basic, 200),
                    (f"Bearer {TOKEN}", 200),
                ):
                    headers = {"Authorization": given}
                    for page in ("/", "/static/js/textual.js"):
                        async with client.get(page, headers=headers) as answer:
                            assert answer.status == expected
                            text = await answer.text()
                            assert (path in text) is (expected == 200 and page == "/")
                            assert (
                                "default-src 'none'"
                                in answer.headers["Content-Security-Policy"]
                            )
                async with client.get("/download/x") as answer:
                    assert answer.status == 401
                    challenges = answer.headers.getall("WWW-Authenticate")
                    assert challenges == ['Basic realm="tracedstore"', "Bearer"]
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await client.ws_connect("/ws/wrong")
                assert refused.value.status == 401
                async with client.ws_connect(path):
                    pass

        asyncio.run(scenario())

    def test_other_sites(self) -> None:
        """A page of another site can neither read the page nor open a websocket."""

        async def scenario() -> None:
            async with serving(QUIET) as (client, path):
                async with client.get("/", headers={"Host": "evil.example"}) as answer:
                    assert answer.status == 421
                async with client.get("/") as answer:
                    assert answer.status == 200
                    assert "<title>a &lt;title&gt;</title>" in await answer.text()
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await client.ws_connect(path, origin="http://evil.example")
                assert refused.value.status == 403

        asyncio.run(scenario())

    @pytest.mark.parametrize(
        ("address", "token"), [("0.0.0.0:0", None), ("[::]:0", None), ("node1:0", "")]
    )
    def test_beyond_loopback(
        self,
        address: str,
        token: str | None,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Without a token it refuses to listen there; an empty one is none."""
        monkeypatch.delenv("TRACEDSTORE_HTTP_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("TRACEDSTORE_HTTP_TOKEN", token)

        assert main(["top", "--store", "tcp://node1:1", "--web", address]) == 1

        assert capsys.readouterr().err == (
            f"tracedstore: top --web {address.replace('[::]', '::')} would let everyone"
            " in the network watch the job: set TRACEDSTORE_HTTP_TOKEN, or serve on"
            " 127.0.0.1 and use a tunnel\n"
        )

    @pytest.mark.parametrize("given", ["", "x", "1:2:", "65536", "host:-1"])
    def test_invalid(self, given: str, capsys: pytest.CaptureFixture[str]) -> None:
        """An address that is none is refused."""
        with pytest.raises(SystemExit) as ended:
            main(["top", "--store", "tcp://node1:1", "--web", given])

        assert ended.value.code == 64
        assert "accepted is [HOST:]PORT" in capsys.readouterr().err


class TestTabs:
    """A process for each tab."""

    def test_bound(self) -> None:
        """One tab too many is refused, until another one is closed."""

        async def scenario() -> None:
            async with serving(QUIET) as (client, path):
                opened = [await client.ws_connect(path) for _ in range(web.MAX_TABS)]
                async with client.get("/") as answer:
                    assert answer.status == 503
                    assert "close one" in await answer.text()
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await client.ws_connect(path)
                assert refused.value.status == 503
                await until(lambda: len(tabs()) == web.MAX_TABS)
                # Lost without a word, as when a machine loses its network.
                opened[0]._conn.transport.abort()  # type: ignore[union-attr]
                while True:
                    async with client.get("/") as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.01)
                await until(lambda: len(tabs()) == web.MAX_TABS - 1)

        asyncio.run(asyncio.wait_for(scenario(), 240))

    def test_process_that_does_not_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is killed, when its tab is closed and when the server ends."""
        monkeypatch.setattr(web, "_STOP_TIMEOUT", 0.2)

        async def scenario() -> None:
            async with serving(DEAF) as (client, path):
                # A websocket is open before its process runs.
                async with client.ws_connect(path):
                    await until(lambda: bool(tabs()))
                await until(lambda: not tabs())
                await client.ws_connect(path)
                await until(lambda: bool(tabs()))

        asyncio.run(asyncio.wait_for(scenario(), 240))

    def test_process_that_ends(self) -> None:
        """Its tab is closed."""

        async def scenario() -> None:
            async with serving("") as (client, path), client.ws_connect(path) as tab:
                message = await tab.receive()
                assert message.type == aiohttp.WSMsgType.CLOSE

        asyncio.run(asyncio.wait_for(scenario(), 240))

    @pytest.mark.parametrize(
        "message",
        ["x", "{}", "[]", '["resize", {}]', '["resize", {"width": []}]', "[1"],
    )
    def test_hostile_message(self, message: str) -> None:
        """A message of another client closes its own tab only."""

        async def scenario() -> None:
            async with serving(QUIET) as (client, path):
                async with client.ws_connect(path) as tab:
                    await tab.send_str(message)
                    assert (await tab.receive()).data == 1003
                async with client.get("/") as answer:
                    assert answer.status == 200

        asyncio.run(asyncio.wait_for(scenario(), 240))
