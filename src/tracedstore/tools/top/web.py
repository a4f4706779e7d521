"""Serves the screen to browsers, with textual-serve.

Each tab has a process of its own, which draws the screen as in a terminal.
textual-serve passes what it draws to the browser, and keys back. Here is what
textual-serve lacks: credentials, a bound for the number of processes, and their end.
"""

import asyncio
import hmac
import os
import secrets
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from html import escape
from typing import Any, Final

from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from tracedstore.common.errors import CommandError
from tracedstore.export.http_server import CHALLENGES, Access, base_url
from tracedstore.tools.top.app import SIGNALS

# Tabs at a time. Each has two processes, which take 280 MB together.
MAX_TABS = 4
# Seconds between two looks at whether a browser is still there.
_HEARTBEAT = 10.0
# Seconds for a process to end by itself, and for a browser to close a websocket.
_STOP_TIMEOUT, _CLOSE_TIMEOUT = 5.0, 2.0
# Columns or lines of the largest screen, and bytes of a message of the browser.
_MAX_SIZE = 1000
_MAX_MESSAGE_BYTES = 64 * 1024

# xterm.js sets styles in the page. The rest comes from files of this server, whatever a
# host name or a key on the screen contains.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline';"
    " font-src 'self'; img-src 'self' data:; connect-src 'self';"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)

# textual-serve's own page loads a style sheet from the internet, and has addresses that
# are wrong behind a tunnel. This one loads only what textual-serve has on disk.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/css/xterm.css">
<style>
@font-face {{
  font-family: "Roboto Mono";
  src: url("/static/fonts/RobotoMono-VariableFont_wght.ttf");
  font-weight: 100 700;
}}
html, body {{ margin: 0; height: 100%; overflow: hidden; background: #000; }}
.notice {{
  position: absolute; inset: 0; display: flex; align-items: center;
  justify-content: center; z-index: 10; color: #fff; background: #000c;
  font: 16px "Roboto Mono", monospace;
}}
.notice a {{ color: inherit; margin-left: 1ch; }}
.closed, body.-first-byte .opening, body.-closed .opening {{ display: none; }}
body.-closed .closed {{ display: flex; }}
</style>
<script src="/static/js/textual.js"></script>
<script src="/page.js"></script>
</head>
<body>
<div class="notice opening">{title}</div>
<div class="notice closed">The screen has ended. <a href="/">Open it again</a></div>
<div id="terminal" class="textual-terminal" data-font-size="16"
 data-session-websocket-url="{websocket}"></div>
</body>
</html>
"""

# Keys work without a click. A phone gets a smaller font, and so 60 columns.
_SCRIPT = """\
addEventListener("DOMContentLoaded", () => {
  const size = Math.min(16, Math.max(9, innerWidth / 60 / 0.61));
  document.getElementById("terminal").dataset.fontSize = size;
});
const focus = () => document.querySelector(".xterm-helper-textarea")?.focus();
addEventListener("load", () => setTimeout(focus));
addEventListener("focus", focus);
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Tab(AppService):
    """The process of one tab."""

    async def set_terminal_size(self, width: int, height: int) -> None:
        """Tell the process the new size of the screen."""
        await super().set_terminal_size(_bounded(width), _bounded(height))

    async def run(self) -> None:
        """Pass on what the process draws; close the tab when it has ended."""
        await super().run()
        await self.remote_close()

    async def stop(self) -> None:
        """End the process; by force if it does not end, as while its pipe is full."""
        process = self._process
        if process is None:
            return
        stopping = asyncio.create_task(super().stop())
        waiting = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({stopping, waiting}, timeout=_STOP_TIMEOUT)
        finally:
            # Also if the server ends, which cancels this.
            if process.returncode is None:
                process.kill()
        await waiting
        await stopping


class TopServer(Server):
    """Serves the screen.

    The page and its files need the credentials of the endpoints. A websocket needs the
    key in its path, which the page contains: not all browsers send credentials with a
    websocket, and a page of another site cannot read it.

    Args:
        command: The command that draws the screen.
        title: The title of the page.
        access: Credentials, TLS, and names of this machine.
    """

    def __init__(self, command: Sequence[str], title: str, access: Access) -> None:
        # textual-serve runs it in a shell, which must not stay between.
        super().__init__(f"exec {shlex.join(command)}", title=title)
        self._access = access
        self._key = secrets.token_urlsafe(32)
        self._tabs: dict[web.WebSocketResponse, _Tab] = {}

    async def run(self, host: str, port: int, ready: Callable[[str], None]) -> int:
        """Serve until a signal arrives, and return its exit code.

        Args:
            host: The address to listen on.
            port: The port; 0 for any free one.
            ready: Is called with the URL.

        Raises:
            CommandError: The address cannot be used.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        for number, code in SIGNALS.items():
            loop.add_signal_handler(number, _end, ended, code)
        runner = web.AppRunner(
            self._make_application(), access_log=None, shutdown_timeout=_STOP_TIMEOUT
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, ssl_context=self._access.tls)
            try:
                await site.start()
            except OSError as error:
                # asyncio's own text repeats the address.
                unknown = isinstance(error, socket.gaierror)
                reason = error.strerror if unknown else os.strerror(error.errno or 0)
                raise CommandError(
                    f"top cannot listen on {host}:{port}: {reason}"
                ) from None
            (_, bound_port, *_) = runner.addresses[0]
            secure = self._access.tls is not None
            ready(base_url(host, bound_port, secure=secure))
            return await ended
        finally:
            await runner.cleanup()

    def _make_application(self) -> web.Application:
        application = web.Application(middlewares=[self._check])
        application.add_routes(
            [
                web.get("/", self.handle_index),
                web.get("/page.js", _send_script),
                web.get("/ws/{key}", self.handle_websocket),
                web.get("/download/{key}", self.handle_download),
                web.static("/static", self.statics_path),
            ]
        )
        application.on_response_prepare.append(_add_headers)
        application.on_shutdown.append(self._close_tabs)
        return application

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Refuse other names of this server, and requests without credentials."""
        host = request.headers.get("Host")
        if not self._access.accepts_host(host):
            text = "unknown name in the Host header: set TRACEDSTORE_HTTP_HOSTS\n"
            return web.Response(status=421, text=text)
        if not self._has_credentials(request):
            text = "credentials needed: the token is the password, with any user\n"
            refusal = web.Response(status=401, text=text)
            for challenge in CHALLENGES:
                refusal.headers.add("WWW-Authenticate", challenge)
            return refusal
        if not self._access.accepts_origin(request.headers.get("Origin"), host):
            return web.Response(status=403, text="from a page of another site\n")
        return await handler(request)

    def _has_credentials(self, request: web.Request) -> bool:
        if request.path.startswith("/ws/"):
            given = request.path.removeprefix("/ws/")
            return hmac.compare_digest(
                given.encode("utf-8", "surrogatepass"), self._key.encode()
            )
        credentials = self._access.credentials
        given = request.headers.get("Authorization", "")
        return credentials is None or credentials(given)

    async def handle_index(self, request: web.Request) -> web.Response:
        """Send the page."""
        self._check_room()
        scheme = "ws" if self._access.tls is None else "wss"
        page = _page(self.title, f"{scheme}://{request.host}/ws/{self._key}")
        return web.Response(text=page, content_type="text/html")

    def _check_room(self) -> None:
        if len(self._tabs) >= MAX_TABS:
            raise web.HTTPServiceUnavailable(
                text=f"{MAX_TABS} tabs are open, which is the maximum: close one\n"
            )

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run the process of a tab until the tab or the process ends."""
        self._check_room()
        websocket = web.WebSocketResponse(
            heartbeat=_HEARTBEAT,
            timeout=_CLOSE_TIMEOUT,
            max_msg_size=_MAX_MESSAGE_BYTES,
        )
        tab = self._tabs[websocket] = _Tab(
            self.command,
            write_bytes=websocket.send_bytes,
            write_str=websocket.send_str,
            close=websocket.close,  # type: ignore[arg-type]
            download_manager=self.download_manager,
        )
        try:
            await websocket.prepare(request)
            width, height = (
                _bounded(to_int(request.query.get(name, ""), 80))
                for name in ("width", "height")
            )
            await tab.start(width, height)
            await self._process_messages(websocket, tab)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError):
            # Not a message of textual-serve's page.
            await websocket.close(code=1003)
        finally:
            await tab.stop()
            del self._tabs[websocket]
        return websocket

    async def _close_tabs(self, _application: web.Application) -> None:
        """Close all tabs, which ends their processes."""
        await asyncio.gather(*(one.close(code=1001) for one in self._tabs))


async def _send_script(_request: web.Request) -> web.Response:
    return web.Response(text=_SCRIPT, content_type="text/javascript")


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Content-Security-Policy"] = _POLICY
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Referrer-Policy"] = "no-referrer"
    # The page has the key, and is of no use later.
    response.headers["Cache-Control"] = "no-store"


def _bounded(size: Any) -> int:
    return max(1, min(_MAX_SIZE, int(size)))


def _end(ended: "asyncio.Future[int]", code: int) -> None:
    if not ended.done():
        ended.set_result(code)


def child_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that draws the screen, with the arguments of `top`."""
    return [sys.executable, "-m", "tracedstore.tools.cli.main", "top", *arguments]


def _page(title: str, websocket: str) -> str:
    """Return the page, which opens a websocket."""
    return _PAGE.format(title=escape(title), websocket=escape(websocket))
