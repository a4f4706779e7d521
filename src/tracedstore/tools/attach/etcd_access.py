"""How the commands log in to etcd, and where a job has its keys there.

torch is imported only where a function says so.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tracedstore import names
from tracedstore.common.errors import CommandError


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess:
    """The files for TLS, and the user; named as in ``--rdzv-conf``.

    Attributes:
        ca_cert: The certificate of the authority that signed the server's.
        ssl_cert: The client's certificate.
        ssl_cert_key: The key of the client's certificate.
        user: The user; "" without one.
        password: The password of the user.
    """

    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    def context(self) -> ssl.SSLContext:
        """Read the files. Imports torch.

        Raises:
            ConfigurationError: One cannot be used.
        """
        from tracedstore.etcd import Tls  # noqa: PLC0415 - imports torch

        return Tls(
            ca_cert=self.ca_cert, cert=self.ssl_cert, key=self.ssl_cert_key
        ).context()


def find_namespace(
    url: str,
    path: str,
    count_keys: Callable[[str], int | None],
    answers_v2: Callable[[], bool],
) -> str:
    """Find out which API the store of a job uses: the one that has its keys.

    Args:
        url: The address, for the errors.
        path: Its path.
        count_keys: Returns the number of keys below a prefix; None without the v3 API.
        answers_v2: Returns whether the server has the v2 API.

    Returns:
        The namespace of an EtcdV3Store; "" if it is torch's EtcdStore.

    Raises:
        CommandError: It is neither.
    """
    root = names.ETCD_ROOT
    namespace = path.strip("/").removeprefix(root.lstrip("/"))
    found = count_keys(f"{root}{namespace}/") if namespace else None
    if found:
        return namespace
    if answers_v2():
        return ""
    if found is None:
        raise not_an_etcd(url)
    raise CommandError(
        f"the etcd of {url} has no keys under {root}{namespace}/, where an EtcdV3Store"
        " has them, and its v2 API, which torch's EtcdStore uses, is off"
    )


def count_keys(transport: Any, prefix: str, deadline: float) -> int:
    """Return the number of keys below a prefix, over the v3 API. Imports torch.

    Raises:
        EtcdError: The server, its certificate or the user is not accepted.
    """
    from tracedstore.etcd import gateway  # noqa: PLC0415 - imports torch

    # The character after a slash ends the range.
    keys = prefix.encode(), (prefix[:-1] + "0").encode()
    request = gateway.range_of(keys, count_only=True)
    return gateway.count(transport.call("kv/range", request, deadline, repeatable=True))


def not_an_etcd(url: str) -> CommandError:
    """Return the error for another server at an etcd:// address."""
    return CommandError(f"the server at {url} does not answer as an etcd does")
