"""A rendezvous backend over etcd's v3 API, for torchrun's dynamic rendezvous."""

import time
from typing import Any
from urllib.parse import quote

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
)

from tracedstore.etcd import EtcdError, EtcdLeaseError, EtcdV3Store, Tls
from tracedstore.etcd.gateway import (
    Gateway,
    KeyValue,
    Message,
    compare,
    key_values,
    range_of,
    read,
    responses,
    revision,
    text,
)
from tracedstore.etcd.namespace import rendezvous_key
from tracedstore.export.settings import read_password

# Seconds, as torch's etcd-v2 backend has them.
_STATE_TTL = 7200
_READ_TIMEOUT = 60
# Seconds for the read of a lease, for a report.
_LEASE_TIMEOUT = 2
_FAILED = "The connection to etcd has failed. See inner exception for details."


class EtcdV3RendezvousBackend(RendezvousBackend):
    """Keeps the state of a rendezvous in one key of etcd.

    The key has a lease of two hours, which each write refreshes, so no thread has to.

    Args:
        transport: The connection to etcd.
        namespace: The namespace of the job.
        timeout: Seconds for one call.
    """

    def __init__(
        self, transport: Gateway, namespace: str, timeout: float = _READ_TIMEOUT
    ) -> None:
        self._transport = transport
        self._key = rendezvous_key(namespace)
        self._timeout = timeout
        self._lease = ""

    @property
    def name(self) -> str:
        """See base class."""
        return "etcd"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        answer = self._call("kv/range", range_of(self._key.encode()))
        found = key_values(answer)
        return (found[0].value, found[0].modified) if found else None

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """See base class."""
        try:
            expected = int(token) if token else 0
        except (TypeError, ValueError):
            current = self.get_state()
            return None if current is None else (*current, False)
        if not self._lease_is_alive():
            self._lease = self._grant()
        try:
            return self._swap(state, expected)
        except EtcdLeaseError:  # it has expired since
            self._lease = self._grant()
            return self._swap(state, expected)

    def written_seconds_ago(self) -> float | None:
        """Return when the state was last written; None if that is not known."""
        deadline = time.monotonic() + _LEASE_TIMEOUT
        answer = self._transport.call(
            "kv/range", range_of(self._key.encode()), deadline, repeatable=True
        )
        lease = next((found.get("lease") for found in answer.get("kvs", ())), None)
        if lease is None:
            return None
        # A write refreshes the lease.
        answer = self._transport.call(
            "lease/timetolive", {"ID": lease}, deadline, repeatable=True
        )
        granted, left = int(answer.get("grantedTTL", 0)), int(answer.get("TTL", 0))
        return float(granted - left) if granted and left > 0 else None

    def _swap(self, state: bytes, expected: int) -> tuple[bytes, Token, bool] | None:
        key = self._key.encode()
        request = {
            "compare": [compare(key, "MOD", "EQUAL", expected)],
            "success": [
                {
                    "request_put": {
                        "key": text(key),
                        "value": text(state),
                        "lease": self._lease,
                    }
                }
            ],
            "failure": [read(key)],
        }
        # The condition holds once, so the request can be repeated.
        answer = self._call("kv/txn", request)
        if answer.get("succeeded"):
            return state, revision(answer), True
        try:
            (response,) = responses(answer, 1)
        except EtcdError as error:
            raise RendezvousConnectionError(_FAILED) from error
        found: list[KeyValue] = key_values(response)
        if not found:
            return None
        # The write of a request whose answer was lost: states have heartbeats, so no
        # two nodes write the same one.
        written = found[0].value == state
        return found[0].value, found[0].modified, written

    def _grant(self) -> str:
        answer = self._call("lease/grant", {"TTL": _STATE_TTL})
        return str(answer.get("ID", ""))

    def _lease_is_alive(self) -> bool:
        """Refresh the lease; return whether it still exists."""
        if not self._lease:
            return False
        answer = self._call("lease/keepalive", {"ID": self._lease})
        # etcd reports a lease that does not exist without a TTL, and not as an error.
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def _call(self, method: str, request: Message) -> Message:
        deadline = time.monotonic() + self._timeout
        try:
            return self._transport.call(method, request, deadline, repeatable=True)
        except EtcdLeaseError:
            raise
        except EtcdError as error:
            raise RendezvousConnectionError(_FAILED) from error


def create_backend(
    params: RendezvousParameters,
) -> tuple[EtcdV3RendezvousBackend, Store]:
    """Create the backend and the agents' store from torchrun's parameters.

    They are named as those of torch's etcd-v2 backend: ``read_timeout``, ``protocol``,
    ``ssl_cert``, ``ssl_cert_key`` and ``ca_cert``; and ``user``, ``password`` and
    ``password_file``.

    Raises:
        RendezvousConnectionError: etcd cannot be reached.
        ValueError: A parameter cannot be used.
    """
    timeout = params.get_as_int("read_timeout", _READ_TIMEOUT)
    if timeout is None or timeout <= 0:
        raise ValueError("The read timeout must be a positive integer.")
    endpoint = params.endpoint or "localhost"
    # A run id may have any characters.
    namespace = quote(params.run_id, safe=" ") or "default"
    store = EtcdV3Store(
        endpoint,
        namespace,
        tls=_tls(params, secure="https://" in endpoint),
        user=str(params.get("user", "")),
        password=_password(params),
    )
    backend = EtcdV3RendezvousBackend(store.transport, namespace, float(timeout))
    # An endpoint that cannot be used is reported now.
    backend.get_state()
    return backend, store


def _tls(params: RendezvousParameters, *, secure: bool) -> Tls | None:
    files = {name: params.get(name) for name in ("ca_cert", "ssl_cert", "ssl_cert_key")}
    # Files without a protocol mean TLS: a password must not be sent without it.
    default = "https" if secure or any(files.values()) else "http"
    protocol = str(params.get("protocol", default)).strip().lower()
    if protocol not in ("http", "https"):
        raise ValueError("The protocol must be HTTP or HTTPS.")
    if protocol == "https":
        return Tls(
            ca_cert=files["ca_cert"],
            cert=files["ssl_cert"],
            key=files["ssl_cert_key"],
        )
    if secure or any(files.values()):
        raise ValueError(
            "The protocol is HTTP, and the endpoint or a file is for HTTPS."
        )
    return None


def _password(params: RendezvousParameters) -> str:
    path: Any = params.get("password_file")
    password = read_password(path) if path else str(params.get("password", ""))
    if password and not params.get("user"):
        raise ValueError("There is a password for etcd, and no user.")
    return password
