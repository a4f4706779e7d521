"""The HTTP endpoint of a process: its pages, access and address."""

import hmac
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.common.identity import ProcessIdentity
from tracedstore.common.validation import MAX_PORT
from tracedstore.coordination import rank_registry
from tracedstore.export import node_endpoint
from tracedstore.export.http_server import Access, Server, base_url
from tracedstore.export.pages import metrics_for_agent, pages
from tracedstore.export.settings import PREFIX, Settings
from tracedstore.local.sockets import LOCAL_SOCKET
from tracedstore.recording.recorder import RECORDER


class Endpoint:
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
        agent = node_endpoint.of_agent() if per_node else None
        if agent is not None:
            RECORDER.failures.guarded(names.ENDPOINT, LOCAL_SOCKET.start)
        if agent is not None and LOCAL_SOCKET.listening:
            LOCAL_SOCKET.metrics = metrics_for_agent(self._registry)
            rank_registry.set_metrics_address(agent.url, agent.pid)
            return
        url = self._listen(settings.http_port, per_node=per_node)
        emit(names.TELEMETRY_SERVING, url=url)
        if per_node:
            node_endpoint.offer(url)
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
        return f"{base_url(host, self._server.port, secure=secure)}/metrics"

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
        LOCAL_SOCKET.metrics = None
        node_endpoint.offer(None)


def access_of(settings: Settings) -> Access:
    """Return the authentication and TLS that the settings ask for.

    Raises:
        ConfigurationError: A certificate or key cannot be used, or one setting needs
            another one.
    """
    return Access(
        tls=_tls(settings),
        credentials=_credentials(settings),
        # A liveness probe has no secret.
        open_pages=frozenset({"/healthz"}),
        hosts=frozenset(settings.http_hosts),
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
