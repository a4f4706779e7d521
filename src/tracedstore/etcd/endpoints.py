"""The addresses of an etcd cluster, and the TLS settings for them."""

import os
import random
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tracedstore.common.errors import ConfigurationError
from tracedstore.common.text import host_port

DEFAULT_PORT = 2379
_ACCEPTED = "accepted is HOST:PORT, http://HOST:PORT or https://HOST:PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The files for TLS.

    Attributes:
        ca_cert: The certificate of the authority that signed the server's; by default
            those of the system.
        cert: The client's certificate, where etcd requires one.
        key: The key of the client's certificate, unless ``cert`` has it too.
    """

    ca_cert: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            ConfigurationError: A file cannot be read, or is no certificate or key.
        """
        if self.key is not None and self.cert is None:
            raise self._unusable("there is a key, and no certificate for it")
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca_cert is None else os.fspath(self.ca_cert)
            )
            if self.cert is not None:
                key = None if self.key is None else os.fspath(self.key)
                # Without this, OpenSSL asks for a password on the terminal.
                context.load_cert_chain(os.fspath(self.cert), key, self._refuse)
        except ssl.SSLError as error:
            text = "not a certificate, or not its key"
            raise self._unusable(text) from error
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        return context

    def _refuse(self) -> str:
        raise self._unusable("the key has a password, which is not supported")

    def _unusable(self, text: str) -> ConfigurationError:
        return ConfigurationError(
            f"the files for TLS with etcd cannot be used: {text}"
            f" (ca_cert={self.ca_cert}, cert={self.cert}, key={self.key})"
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member of a cluster.

    Attributes:
        host: Its name or address.
        port: Its port for clients.
        secure: Whether it is reached over TLS.
    """

    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        return host_port(self.host, self.port)


def parse_endpoints(endpoints: str | Sequence[str], *, secure: bool) -> list[Endpoint]:
    """Parse a list of endpoints, or a text with commas between them.

    Args:
        endpoints: The endpoints.
        secure: Whether an endpoint without a scheme is reached over TLS.

    Raises:
        ConfigurationError: There is none, or one is invalid.
    """
    texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    found = [_parse(text.strip(), secure=secure) for text in texts if text.strip()]
    if not found:
        raise ConfigurationError(f"etcd has no endpoints; {_ACCEPTED}")
    return found


def _parse(text: str, *, secure: bool) -> Endpoint:
    scheme = "https" if secure else "http"
    if "@" in text:
        # It may have a password, so it is not in the text.
        raise ConfigurationError(
            "an etcd endpoint has no user: user and password are separate settings"
        )
    try:
        parts = urlsplit(text if "://" in text else f"{scheme}://{text}")
        # As it is in DNS, and in a header.
        host = (parts.hostname or "").encode("idna").decode("ascii")
        port = parts.port or DEFAULT_PORT
    except ValueError:  # UnicodeError is one
        raise _invalid(text) from None
    rest = (parts.path.strip("/"), parts.query, parts.fragment)
    if parts.scheme not in ("http", "https") or not host or any(rest):
        raise _invalid(text)
    return Endpoint(host, port, parts.scheme == "https")


def _invalid(text: str) -> ConfigurationError:
    return ConfigurationError(f"the etcd endpoint {text!r} is invalid; {_ACCEPTED}")


class Rotation:
    """The endpoint in use. It starts at a random one and stays until that fails."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.endpoints = tuple(endpoints)
        self._index = random.SystemRandom().randrange(len(self.endpoints))

    @property
    def current(self) -> Endpoint:
        """The endpoint in use."""
        return self.endpoints[self._index % len(self.endpoints)]

    def leave(self, failed: Endpoint) -> bool:
        """Move on from an endpoint that failed; return whether there is another one.

        Another thread may have moved on already.
        """
        if len(self.endpoints) > 1 and self.current is failed:
            self._index += 1
        return len(self.endpoints) > 1
