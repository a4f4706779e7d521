"""The pages of a process's HTTP endpoint."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tracedstore.common.identity import process_identity
from tracedstore.export.discovery import targets
from tracedstore.export.family_fields import to_fields
from tracedstore.export.http_server import Page, Response
from tracedstore.export.node_metrics import node_registry
from tracedstore.local.facts import own_facts
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker, ask_workers
from tracedstore.local.sockets import LocalReply

# Seconds for which a response is cached.
_METRICS_MAX_AGE = 0.5
_TARGETS_MAX_AGE = 5.0
# Seconds that a request waits for the rendering that another one has begun.
_RENDER_TIMEOUT = 4.0
# Seconds for the workers of an agent to reply. Clients wait for a second.
_WORKERS_TIMEOUT = 0.7


def pages(registry: CollectorRegistry, *, per_node: bool = False) -> Mapping[str, Page]:
    """Return the pages of this process, by path.

    Args:
        registry: The metrics.
        per_node: The pages of torchrun's agent have those of its workers too.
    """
    source = node_registry(registry) if per_node else registry
    in_flight = node_facts_page if per_node else facts_page

    def metrics(accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(source), content_type)

    def health(_accept: str) -> Response:
        return Response(b"ok\n")

    def discovery(_accept: str) -> Response:
        return _json(targets(per_node=per_node))

    return {
        "/metrics": _Cached(metrics, _METRICS_MAX_AGE),
        "/healthz": health,
        "/inflight": _Cached(in_flight, _METRICS_MAX_AGE),
        "/sd": _Cached(discovery, _TARGETS_MAX_AGE),
    }


def metrics_for_agent(registry: CollectorRegistry) -> Callable[[], Any]:
    """Return what collects the metrics that the agent serves, as JSON values."""
    return lambda: to_fields(registry.collect())


def facts_page(_accept: str) -> Response:
    """Return the page ``/inflight``."""
    return _json(_own_page())


def node_facts_page(_accept: str) -> Response:
    """Return the page ``/inflight`` of an agent, with its workers by rank."""
    page = _own_page()
    if workers := AGENT_WORKERS.workers:
        replies = ask_workers(workers, "status", _WORKERS_TIMEOUT)
        page["workers"] = {
            str(worker.rank): _worker_page(worker, replies.get(worker))
            for worker in workers
        }
    return _json(page)


def _own_page() -> dict[str, Any]:
    identity = process_identity()
    facts = own_facts(identity.rank)
    return {"process": identity.fields()} | facts.to_fields()


def _worker_page(worker: Worker, reply: LocalReply | None) -> dict[str, Any] | None:
    if reply is None or reply.answer is None:
        return None
    known: dict[str, Any] = {
        "run_id": reply.identity.run_id,
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "world_size": reply.identity.world_size,
        "host": reply.answer.host,
        "pid": worker.pid,
    }
    process = {name: value for name, value in known.items() if value is not None}
    return {"process": process} | reply.answer.to_fields()


def _json(value: Any) -> Response:
    return Response(json.dumps(value).encode() + b"\n", "application/json")


class _Cached:
    """A page that is rendered by one thread at a time, and cached for a moment.

    A client that requests it all the time costs no more than one that does not, and a
    page that is stuck (the store does not respond) occupies one thread.
    """

    def __init__(self, page: Page, max_age: float) -> None:
        self._page = page
        self._max_age = max_age
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[float, Response]] = {}

    def __call__(self, accept: str) -> Response:
        if not self._lock.acquire(timeout=_RENDER_TIMEOUT):
            return Response(b"busy\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            return self._current(accept)
        finally:
            self._lock.release()

    def _current(self, accept: str) -> Response:
        now = time.monotonic()
        rendered, response = self._cache.get(accept, (None, None))
        if response is None or rendered is None or now - rendered > self._max_age:
            response = self._page(accept)
            # Clients may send any number of different headers.
            if len(self._cache) >= 8:  # noqa: PLR2004
                self._cache.clear()
            self._cache[accept] = (time.monotonic(), response)
        return response
