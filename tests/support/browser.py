"""Drives Chromium through its debugging protocol, and reads a terminal in a page."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Self

from support.pages import BROWSER_OPTIONS
from support.tools import tool

# xterm.js keeps its terminal to itself. The first object that gets a property `_core`
# is that terminal; its buffer has the cells that it draws.
_FIND_TERMINAL = """
Object.defineProperty(Object.prototype, "_core", {
  configurable: true,
  set(value) {
    Object.defineProperty(this, "_core", {value, writable: true, configurable: true});
    window.xterm ??= this;
  },
});
"""
_READ_TERMINAL = """
(() => {
  const buffer = window.xterm?.buffer.active;
  return Array.from({length: buffer?.length ?? 0},
    (_, y) => buffer.getLine(y).translateToString(true)).join("\\n");
})()
"""
# Chromium reads commands from descriptor 3 and writes to 4. It ends with them.
_LAUNCH = """
import os, fcntl, sys
given = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for descriptor, one in enumerate(given, 3):
    os.dup2(one, descriptor)
os.execv(sys.argv[3], sys.argv[3:])
"""
# Seconds for one answer of the browser, and for a text on the screen.
_ANSWER_TIMEOUT, _SCREEN_TIMEOUT = 240.0, 240.0


class Browser:
    """Headless Chromium with one page; use it in a ``with`` block.

    Attributes:
        console: The messages in the console of the page.
        requested: The URLs that the page has requested.
        statuses: The status of each response, in order.
    """

    def __init__(self, *options: str) -> None:
        self._profile = mkdtemp(prefix="browser-")
        self.console: list[str] = []
        self.requested: list[str] = []
        self.statuses: list[int] = []
        self._number = 0
        self._received = b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        os.set_blocking(self._in, False)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out)),
                *(tool("chromium"), *BROWSER_OPTIONS),
                *(f"--user-data-dir={self._profile}", "--remote-debugging-pipe"),
                *(*options, "about:blank"),
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None

    def __enter__(self) -> Self:
        try:
            self._open_page()
        except BaseException:
            self.close()
            raise
        return self

    def _open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=_FIND_TERMINAL)

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(240)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        while True:
            message = self._receive(deadline)
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            self._observe(message)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert time.monotonic() < deadline, "the browser does not answer"
            try:
                new = os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            assert new, "the browser has ended"
            self._received += new
        message, _, self._received = self._received.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _observe(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                self.console.append(json.dumps(given["args"]))
            case "Runtime.exceptionThrown" | "Log.entryAdded":
                self.console.append(json.dumps(given))
            case "Network.requestWillBeSent":
                self.requested.append(given["request"]["url"])
            case "Network.webSocketCreated":
                self.requested.append(given["url"])
            case "Network.responseReceived":
                self.statuses.append(given["response"]["status"])

    def open(self, url: str) -> None:
        """Open a page."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        return answer["result"].get("value")

    def screen(self) -> str:
        """Return the text of the terminal in the page."""
        return str(self.evaluate(_READ_TERMINAL))

    def wait_for(self, text: str) -> str:
        """Wait for a text on the terminal in the page, and return the screen."""
        return self.wait_until(self.screen, lambda screen: text in screen)

    def wait_until(self, read: Callable[[], str], accept: Callable[[str], bool]) -> str:
        """Read again and again until it is accepted, and return it."""
        deadline = time.monotonic() + _SCREEN_TIMEOUT
        while not accept(found := read()):
            assert time.monotonic() < deadline, f"{found}\n{self.console}"
            time.sleep(0.05)
        return found

    def press(self, text: str) -> None:
        """Type characters into what has the focus."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", text=character)

    def screenshot(self, path: Path) -> None:
        """Save a picture of the page as PNG."""
        picture = self.call("Page.captureScreenshot")["data"]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(base64.b64decode(picture))
