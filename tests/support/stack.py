"""Real Prometheus and Alertmanager servers, and HTTP receivers for their output."""

import json
import os
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

from integration.harness import wait_until
from support.etcd import free_port
from support.processes import kill_tree
from support.tools import ROOT, tool


def get(url: str, **params: Any) -> Any:
    """Send a GET request and return the JSON of the response."""
    query = f"?{urllib.parse.urlencode(params)}" if params else ""
    with urllib.request.urlopen(url + query, timeout=60) as response:
        return json.load(response)


class Program:
    """A program that runs until it is stopped.

    Its output goes to a log file, which `check` quotes when the program has exited.
    """

    def __init__(
        self,
        folder: Path,
        *command: object,
        env: Mapping[str, str] | None = None,
    ) -> None:
        arguments = [str(part) for part in command]
        self._log = folder / f"{Path(arguments[0]).name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                arguments,
                cwd=folder,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self) -> str:
        """Return what the program has written so far."""
        return self._log.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name from the log."""
        # The last line may be incomplete.
        lines = [
            line for line in self.log().splitlines() if line[:1] + line[-1:] == "{}"
        ]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def check(self) -> None:
        """Fail if the program has exited."""
        assert self._process.poll() is None, self.log()[-4000:]

    def stop(self) -> None:
        """Kill the program and its descendants."""
        if self._process.poll() is None:
            kill_tree(self._process.pid)
        self._process.wait(240)


class Server(Program):
    """A Prometheus or Alertmanager server on a free loopback port."""

    def __init__(self, folder: Path, name: str, *args: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            folder, tool(name), f"--web.listen-address=127.0.0.1:{self.port}", *args
        )

    def ready(self) -> bool:
        """Return whether the server answers on /-/ready; fail if it has exited."""
        self.check()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=60):
                return True
        except OSError:
            return False


class Prometheus(Server):
    """A real Prometheus server."""

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
        """Run an instant query and return its result."""
        response = get(f"{self.url}/api/v1/query", query=expr)
        result: list[dict[str, Any]] = response["data"]["result"]
        return result

    def exemplars(self, series: str, start: float, end: float) -> list[dict[str, str]]:
        """Return the labels of the exemplars of a series."""
        response = get(
            f"{self.url}/api/v1/query_exemplars", query=series, start=start, end=end
        )
        return [
            exemplar["labels"]
            for matched in response["data"]
            for exemplar in matched["exemplars"]
        ]

    def targets(self, job: str) -> list[dict[str, Any]]:
        """Return the targets of a scrape job that are up."""
        response = get(f"{self.url}/api/v1/targets", state="active")
        return [
            target
            for target in response["data"]["activeTargets"]
            if target["scrapePool"] == job and target["health"] == "up"
        ]


class Alertmanager(Server):
    """A real Alertmanager server."""

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
    """An HTTP server that passes the body of every POST request to `take`."""

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
        """Store what a test needs of one body."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


class Webhook(Listener):
    """A webhook receiver for Alertmanager's notifications."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []
        super().__init__()

    def take(self, body: bytes) -> None:
        """Store one notification."""
        self.pages.append(json.loads(body))

    def wait_for(self, alertname: str) -> dict[str, Any]:
        """Wait for a notification that contains an alert, and return it."""

        def matching_page() -> dict[str, Any] | None:
            for page in list(self.pages):
                if any(a["labels"]["alertname"] == alertname for a in page["alerts"]):
                    return page
            return None

        return wait_until(matching_page)


class OtlpReceiver(Listener):
    """An OTLP/HTTP receiver for the spans that ranks export."""

    def __init__(self) -> None:
        # Span ids, by trace id.
        self.spans: dict[str, set[str]] = {}
        super().__init__()

    def take(self, body: bytes) -> None:
        """Store the ids of the spans."""
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    ids = self.spans.setdefault(span.trace_id.hex(), set())
                    ids.add(span.span_id.hex())


def configured(source: str, target: Path, **changes: Any) -> Path:
    """Copy a committed configuration with some top-level keys replaced."""
    config = yaml.safe_load((ROOT / source).read_text("utf-8"))
    target.write_text(yaml.safe_dump(config | changes))
    return target


def alertmanager_config(folder: Path, webhook: str) -> Path:
    """Copy compose's configuration with short intervals and a webhook receiver."""
    source = "deploy/alertmanager/alertmanager.yml"
    route = yaml.safe_load((ROOT / source).read_text())["route"]
    return configured(
        source,
        folder / "alertmanager.yml",
        route=route | {"group_wait": "500ms", "group_interval": "1s"},
        receivers=[
            {"name": "on-call", "webhook_configs": [{"url": webhook}]},
            {"name": "discard"},
        ],
    )
