"""The HTTP endpoint of a process: its pages, access and address."""

import hmac
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from tracedstore.core.errors import ConfigurationError
from tracedstore.core.identity import ProcessIdentity
from tracedstore.export.pages import pages
from tracedstore.export.server import ANY_ADDRESS, Access, Server
from tracedstore.export.settings import PREFIX, Settings


class Endpoint:
    """Serves the pages of one process.

    Attributes:
        url: The URL of its metrics, for clients.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        registry: CollectorRegistry,
        identity: ProcessIdentity,
    ) -> None:
        port = settings.http_port or 0
        self._server = Server(
            pages(registry),
            settings.http_host,
            port + (identity.local_rank or 0) if port else 0,
            access,
        )
        host = settings.http_host
        if host in ANY_ADDRESS:
            host = socket.gethostname()
        scheme = "http" if access.tls is None else "https"
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown}:{self._server.port}/metrics"
        self.stop = self._server.stop
        self.reset = self._server.reset


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
        # All are compared, so that the time taken reveals nothing.
        matches = [
            hmac.compare_digest(given.encode(), one.encode()) for one in accepted
        ]
        return any(matches)

    return valid
