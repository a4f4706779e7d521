"""The HTTP endpoint of a process: its address, its pages, and who may read them."""

import hmac
import json
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.common.identity import ProcessIdentity, process_identity
from tracedstore.common.validation import MAX_PORT
from tracedstore.coordination import rank_registry
from tracedstore.export import node_metrics
from tracedstore.export.discovery import targets
from tracedstore.export.http_server import Access, Page, Response, Server, base_url
from tracedstore.export.settings import PREFIX, Settings
from tracedstore.local.facts import own_facts
from tracedstore.local.host_ranks import AGENT_WORKERS, Worker, ask_workers
from tracedstore.local.sockets import LOCAL_SOCKET, LocalReply
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.metrics import for_node

# Seconds for which a response is cached.
_METRICS_MAX_AGE = 0.5
_TARGETS_MAX_AGE = 5.0
# Seconds that a request waits for the rendering that another one has begun.
_RENDER_TIMEOUT = 4.0
# Seconds for the workers of an agent to reply. Clients wait for a second.
_WORKERS_TIMEOUT = 0.7


class HttpEndpoint:
    """Serves the pages of one process, or lets torchrun's agent serve them.

    Raises:
        ConfigurationError: A certificate or key cannot be used, or one setting needs
            another one.
    """

    def __init__(
        self, settings: Settings, registry: CollectorRegistry, identity: ProcessIdentity
    ) -> None:
        self._settings = settings
        self._access = access_of(settings)
        self._registry = registry
        self._local_rank = identity.local_rank or 0
        self._server: Server | None = None
        self._started = False

    def start(self, emit: Callable[..., None]) -> None:
        """Serve, if the settings ask for it, and register the address.

        Args:
            emit: Emits an event.

        Raises:
            OSError: The process cannot listen.
            ConfigurationError: There is no port for this local rank.
        """
        settings = self._settings
        if settings.http_port is None or settings.disabled:
            return
        self._started = True
        per_node = settings.http_scope == "node"
        agent = node_metrics.of_agent() if per_node else None
        if agent is not None:
            RECORDER.failures.guarded(names.ENDPOINT, LOCAL_SOCKET.start)
        if agent is not None and LOCAL_SOCKET.listening:
            LOCAL_SOCKET.metrics = metrics_for_agent(self._registry)
            LOCAL_SOCKET.node_metrics = metrics_for_agent(self._registry, of_node=True)
            rank_registry.set_metrics_address(agent.url, agent.pid)
            return
        url = self._listen(settings.http_port, per_node=per_node)
        emit(names.TELEMETRY_SERVING, url=url)
        if per_node:
            node_metrics.offer(url)
        rank_registry.set_metrics_address(url)

    def _listen(self, port: int, *, per_node: bool) -> str:
        host = self._settings.http_host
        own_port = port and port + self._local_rank
        if own_port > MAX_PORT:
            raise ConfigurationError(
                f"{PREFIX}HTTP_PORT is {port}, and with the local rank"
                f" {self._local_rank} the port is {own_port}; set it to"
                f" {MAX_PORT - self._local_rank} or less"
            )
        self._server = Server(
            pages(self._registry, per_node=per_node), host, own_port, self._access
        )
        secure = self._access.tls is not None
        advertised = self._settings.http_advertised_host or host
        return f"{base_url(advertised, self._server.port, secure=secure)}/metrics"

    def stop(self, timeout: float) -> None:
        """Serve no more."""
        if not self._started:
            return
        self._withdraw()
        if self._server is not None:
            self._server.stop(timeout)
        rank_registry.set_metrics_address(None)

    def reset(self) -> None:
        """Close the socket in a forked child: the port is the parent's."""
        self._withdraw()
        if self._server is not None:
            self._server.reset()
        self._server, self._started = None, False

    @staticmethod
    def _withdraw() -> None:
        LOCAL_SOCKET.metrics = LOCAL_SOCKET.node_metrics = None
        node_metrics.offer(None)


def pages(registry: CollectorRegistry, *, per_node: bool = False) -> Mapping[str, Page]:
    """Return the pages of this process, by path.

    Args:
        registry: The metrics.
        per_node: The pages of torchrun's agent have those of its workers too.
    """
    in_flight = node_facts_page if per_node else facts_page

    def metrics(source: CollectorRegistry, accept: str) -> Response:
        encode, content_type = choose_encoder(accept)
        return Response(encode(source), content_type)

    sources: Mapping[str, CollectorRegistry] = {"/metrics": registry}
    if per_node:
        sources = node_metrics.node_registries(registry)

    def health(_accept: str) -> Response:
        return Response(b"ok\n")

    def discovery(_accept: str) -> Response:
        return _json(targets(per_node=per_node))

    return {
        **{
            path: _Cached(partial(metrics, source), _METRICS_MAX_AGE)
            for path, source in sources.items()
        },
        "/healthz": health,
        "/inflight": _Cached(in_flight, _METRICS_MAX_AGE),
        "/sd": _Cached(discovery, _TARGETS_MAX_AGE),
    }


def metrics_for_agent(
    registry: CollectorRegistry, *, of_node: bool = False
) -> Callable[[], Any]:
    """Return what collects the metrics that the agent serves, as JSON values.

    Args:
        registry: The metrics.
        of_node: Histograms have the buckets that the agent sums.
    """

    def collect() -> Any:
        with for_node() if of_node else nullcontext():
            return node_metrics.to_fields(registry.collect())

    return collect


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


def access_of(settings: Settings) -> Access:
    """Return the authentication and TLS that the settings ask for.

    Raises:
        ConfigurationError: A certificate or key cannot be used, or one setting needs
            another one.
    """
    advertised = settings.http_advertised_host or ""
    return Access(
        tls=_tls(settings),
        credentials=_credentials(settings),
        # A liveness probe has no secret.
        open_pages=frozenset({"/healthz"}),
        hosts=frozenset({*settings.http_hosts, advertised.lower()} - {""}),
    )


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.http_cert is None:
        for name in ("http_key", "http_client_ca"):
            if getattr(settings, name) is not None:
                raise ConfigurationError(
                    f"{PREFIX}{name.upper()} is {getattr(settings, name)!r}, but there"
                    f" is no {PREFIX}HTTP_CERT; set that too, to serve HTTPS"
                )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.http_cert, settings.http_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"{PREFIX}HTTP_CERT is {settings.http_cert!r} and {PREFIX}HTTP_KEY is"
            f" {settings.http_key!r}, which cannot be used: {error}; give PEM files"
            " that belong together"
        ) from None
    if settings.http_client_ca is not None:
        try:
            context.load_verify_locations(settings.http_client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"{PREFIX}HTTP_CLIENT_CA is {settings.http_client_ca!r}, which cannot"
                f" be used: {error}; give a PEM file of authorities"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _credentials(settings: Settings) -> Callable[[str], bool] | None:
    accepted = []
    if settings.http_token is not None:
        accepted.append(f"Bearer {settings.http_token}")
    if settings.http_basic_auth is not None:
        encoded = b64encode(settings.http_basic_auth.encode()).decode()
        accepted.append(f"Basic {encoded}")
    if not accepted:
        return None

    def valid(given: str) -> bool:
        tried = [given]
        if settings.http_token is not None:
            # A browser can only ask for a user and a password.
            tried.append(f"Bearer {_password(given)}")
        # All are compared, so that the time taken reveals nothing.
        matches = [
            hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode())
            for one in tried
            for other in accepted
        ]
        return any(matches)

    return valid


def _password(given: str) -> str:
    """Return the password of HTTP basic authentication, "" if there is none."""
    scheme, _, encoded = given.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
