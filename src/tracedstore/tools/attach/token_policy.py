"""Decides which endpoints get the bearer token.

The addresses of endpoints are in the job's store, and any client of the store can write
them. So an address in the store is no reason to send a secret there.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import SplitResult

_LOOPBACK = "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPolicy:
    """The token, and the endpoints that may get it.

    It is sent over TLS with a verified certificate. Over plain HTTP it is sent only to
    hosts that the user has named, and among them only to loopback addresses unless the
    user has accepted that it can be read on the network.

    Attributes:
        token: The token; None if there is none.
        hosts: The hosts that the user has named.
        insecure: The user has accepted plain HTTP.
    """

    token: str | None = field(default=None, repr=False)
    hosts: Iterable[str] = ()
    insecure: bool = False

    def refusal(self, url: SplitResult) -> str | None:
        """Return why the token is not sent to a URL, with the remedy; None if it is.

        Without a token there is no refusal.
        """
        if self.token is None or url.scheme == "https":
            return None
        host = url.hostname or ""
        options = []
        if _canonical(host) not in set(map(_canonical, self.hosts)):
            options.append(f"--token-host {host}")
        if not is_loopback(host) and not self.insecure:
            options.append("--insecure-token")
        if not options:
            return None
        target = f"{url.scheme}://{url.netloc}"
        return f"token not sent to {target} (not TLS): use {' '.join(options)}"

    def headers(self, url: SplitResult) -> dict[str, str]:
        """Return the headers that authenticate a request for a URL."""
        if self.token is None or self.refusal(url) is not None:
            return {}
        return {"Authorization": f"Bearer {self.token}"}


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine alone; other names are not looked up."""
    return _canonical(host) == _LOOPBACK


def _canonical(host: str) -> str:
    """Return a host in lower case; all loopback addresses are ``localhost``."""
    name = host.lower().strip("[]").rstrip(".")
    try:
        return _LOOPBACK if ip_address(name).is_loopback else name
    except ValueError:
        return name
