"""A pager for trying things out: prints the alerts that Alertmanager sends it."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def lines(page: dict[str, Any]) -> list[str]:
    """Say one page in words, a line an alert."""
    head = " ".join(f"{name}={value}" for name, value in page["groupLabels"].items())
    return [f"PAGE {page['status']} {head}: {len(page['alerts'])} alerts"] + [
        f"  {alert['status']} {alert['labels']['alertname']}:"
        f" {alert['annotations'].get('description', '')}"
        f" [{alert['annotations'].get('runbook_url', '')}]"
        for alert in page["alerts"]
    ]


class Pager(BaseHTTPRequestHandler):
    """Takes what Alertmanager's webhook sends."""

    def do_GET(self) -> None:
        """Say that it lives."""
        self._answer()

    def do_POST(self) -> None:
        """Print a page."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        print("\n".join(lines(json.loads(body))), flush=True)
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """Print nothing but pages."""


if __name__ == "__main__":
    address = ("0.0.0.0", int(sys.argv[1]))  # noqa: S104 - the container's own network
    ThreadingHTTPServer(address, Pager).serve_forever()
