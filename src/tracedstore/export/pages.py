"""What the HTTP endpoint of a process has to show."""

import json
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tracedstore.export import process_status
from tracedstore.export.discovery import targets
from tracedstore.export.server import Page, Response

# Seconds for which an answer is good enough: whoever asks more often gets the last.
_METRICS_HOLD = 0.5
_TARGETS_HOLD = 5.0
# Seconds that a request waits for another one that is being answered.
_PATIENCE = 4.0


def pages(registry: CollectorRegistry) -> Mapping[str, Page]:
    """Give the pages of this process, by their paths."""

    def metrics(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), content_type)

    def health(_accept: str) -> Response:
        return Response(b"ok\n")

    def discovery(_accept: str) -> Response:
        return _json(targets())

    return {
        "/metrics": _Held(metrics, _METRICS_HOLD),
        "/healthz": health,
        "/inflight": _Held(process_status.page, _METRICS_HOLD),
        "/sd": _Held(discovery, _TARGETS_HOLD),
    }


def _json(found: Any) -> Response:
    return Response(json.dumps(found).encode() + b"\n", "application/json")


class _Held:
    """A page that is made once at a time, and kept for a moment.

    So a client that asks all the time costs no more than one that asks now and then,
    and one that is stuck (the store does not answer) holds up one thread.
    """

    def __init__(self, page: Page, seconds: float) -> None:
        self._page = page
        self._seconds = seconds
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, Response]] = {}

    def __call__(self, accept: str) -> Response:
        if not self._lock.acquire(timeout=_PATIENCE):
            return Response(b"busy\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            return self._current(accept)
        finally:
            self._lock.release()

    def _current(self, accept: str) -> Response:
        now = time.monotonic()
        made, answer = self._kept.get(accept, (None, None))
        if answer is None or made is None or now - made > self._seconds:
            answer = self._page(accept)
            # As many different headers as there are clients, and clients may be odd.
            if len(self._kept) >= 8:  # noqa: PLR2004
                self._kept.clear()
            self._kept[accept] = (time.monotonic(), answer)
        return answer
