"""Real programs around a job: Prometheus, Alertmanager, and who listens to them."""

import json
import os
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from integration.harness import wait_until
from support.etcd import free_port
from support.tools import ROOT, tool


def get(url: str, **params: Any) -> Any:
    """Ask for JSON."""
    query = f"?{urllib.parse.urlencode(params)}" if params else ""
    with urllib.request.urlopen(url + query, timeout=10) as answer:
        return json.load(answer)


class Program:
    """A program that runs until it is stopped, and says what it wrote when it fails."""

    def __init__(
        self,
        folder: Path,
        *command: object,
        env: Mapping[str, str] | None = None,
    ) -> None:
        words = [str(word) for word in command]
        self._log = folder / f"{Path(words[0]).name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        """What it wrote so far."""
        return self._log.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name among it."""
        # The last line may not be there to its end.
        lines = [
            line for line in self.log().splitlines() if line[:1] + line[-1:] == "{}"
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def check(self) -> None:
        """Fail where it has ended."""
        assert self._process.poll() is None, self.log()[-4000:]

    def stop(self) -> None:
        """End it and all it started, torchrun's ranks too, which lead their groups."""
        every = [self._process.pid, *_descendants(self._process.pid)]
        if self._process.poll() is None:
            for pid in every:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait(10)


def _descendants(pid: int) -> list[int]:
    """Give the processes that one has started, and those that they have."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [
        found for child in children for found in (int(child), *_descendants(int(child)))
    ]


class Server(Program):
    """One that listens at a port, and is there when it says so."""

    def __init__(self, folder: Path, name: str, *args: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            folder, tool(name), f"--web.listen-address=127.0.0.1:{self.port}", *args
        )

    def ready(self) -> bool:
        """Tell whether it answers."""
        self.check()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


class Prometheus(Server):
    """The real one."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(
            folder,
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            "--enable-feature=exemplar-storage",
            "--log.level=warn",
        )

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Ask for one moment."""
        found = get(f"{self.url}/api/v1/query", query=expr)
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def exemplars(self, series: str, start: float, end: float) -> list[dict[str, str]]:
        """Give the labels of exemplars."""
        found = get(
            f"{self.url}/api/v1/query_exemplars", query=series, start=start, end=end
        )
        return [one["labels"] for of in found["data"] for one in of["exemplars"]]

    def targets(self, job: str) -> list[dict[str, Any]]:
        """Give the targets of a job that it reaches."""
        found = get(f"{self.url}/api/v1/targets", state="active")["data"]
        return [
            target
            for target in found["activeTargets"]
            if target["scrapePool"] == job and target["health"] == "up"
        ]


class Alertmanager(Server):
    """The real one."""

    def __init__(self, folder: Path, config: Path) -> None:
        super().__init__(
            folder,
            "alertmanager",
            f"--config.file={config}",
            f"--storage.path={folder / 'alertmanager'}",
            "--cluster.listen-address=",
            "--log.level=warn",
        )


class Listener:
    """Keeps what is sent to it over HTTP: `take` says what to keep of a body."""

    def __init__(self) -> None:
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        """Keep what came."""
        raise NotImplementedError

    def stop(self) -> None:
        """Listen no longer."""
        self._server.shutdown()
        self._server.server_close()


class Webhook(Listener):
    """Whom Alertmanager pages."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        super().__init__()

    def take(self, body: bytes) -> None:
        """Keep a page."""
        self.pages.append(json.loads(body))

    def wait_for(self, alertname: str) -> dict[str, Any]:
        """Give the page that has such an alert."""

        def found() -> dict[str, Any] | None:
            for page in list(self.pages):
                if any(a["labels"]["alertname"] == alertname for a in page["alerts"]):
                    return page
            return None

        return wait_until(found, timeout=20)


class OtlpReceiver(Listener):
    """Where ranks export their spans to."""

    def __init__(self) -> None:
        # Span ids, by trace id.
        self.spans: dict[str, set[str]] = {}
        super().__init__()

    def take(self, body: bytes) -> None:
        """Keep the ids."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = self.spans.setdefault(span.trace_id.hex(), set())
                    ids.add(span.span_id.hex())


def configured(source: str, target: Path, **changes: Any) -> Path:
    """Write a committed configuration with some of its keys changed."""
    config = yaml.safe_load((ROOT / source).read_text("utf-8"))
    target.write_text(yaml.safe_dump(config | changes))
    return target


def alertmanager_config(folder: Path, webhook: str) -> Path:
    """Take the configuration of compose, in a hurry, and with a pager of our own."""
    source = "deploy/alertmanager/alertmanager.yml"
    route = yaml.safe_load((ROOT / source).read_text())["route"]
    return configured(
        source,
        folder / "alertmanager.yml",
        route=route | {"group_wait": "500ms", "group_interval": "1s"},
        receivers=[
            {"name": "on-call", "webhook_configs": [{"url": webhook}]},
            {"name": "nobody"},
        ],
    )
