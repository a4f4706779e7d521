"""A pager for the example: prints the notifications of Alertmanager's webhook."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def lines(page: dict[str, Any]) -> list[str]:
    """Format one notification: for each alert its name, text and runbook section."""
    head = " ".join(f"{name}={value}" for name, value in page["groupLabels"].items())
    printed = [f"PAGE {page['status']} {head}: {len(page['alerts'])} alerts"]
    for alert in page["alerts"]:
        labels, annotations = alert["labels"], alert["annotations"]
        title = f"{alert['status']} {labels['alertname']} ({labels.get('severity')})"
        text = annotations.get("description", "").splitlines()
        link = annotations.get("runbook_url", "")
        printed += [f"  {title}", *(f"    {line}" for line in (*text, link))]
    return printed


class Pager(BaseHTTPRequestHandler):
    """Receives the requests of Alertmanager's webhook."""

    def do_GET(self) -> None:
        """Answer the health check."""
        self._answer()

    def do_POST(self) -> None:
        """Print a notification."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        print("\n".join(lines(json.loads(body))), flush=True)
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """Do not log requests."""


if __name__ == "__main__":
    address = ("0.0.0.0", int(sys.argv[1]))  # noqa: S104 - inside a container
    ThreadingHTTPServer(address, Pager).serve_forever()
