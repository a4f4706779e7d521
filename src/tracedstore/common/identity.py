"""The identity of stores and of this process, as every signal carries it."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracedstore.common.keys import key_text
from tracedstore.common.text import host_port

if TYPE_CHECKING:
    # Processes that have not finished importing torch load this module too.
    from torch.distributed import Store

_ETCD = "etcd"
# EtcdStore, EtcdV3Store, and the backends of torchrun's rendezvous in etcd.
_ETCD_KINDS = frozenset(
    {"etcd_store", "etcd_v3_store", "rendezvous_etcd", "rendezvous_etcd_v2"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """What a store is called in every signal.

    Attributes:
        kind: The class of the store below any PrefixStore, in snake case: the
            ``store`` label.
        system: OpenTelemetry's ``db.system.name``.
        address: Host, or path of the file.
        port: Port of its server, where it has one.
        namespace: The prefix of every key, where it can be read.
        in_process: Its content is visible to this process only (HashStore).
        from_torch: Its class is torch's, or EtcdV3Store. Texts of its exceptions hold
            no values.
        secure: It is an etcd that is reached over TLS.
    """

    kind: str
    system: str
    address: str = ""
    port: int | None = None
    namespace: str = ""
    in_process: bool = False
    from_torch: bool = False
    secure: bool = False

    @property
    def server(self) -> str:
        """Its location as text: host:port, or a path."""
        return self.address if self.port is None else f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        """Its address as ``tracedstore status --store`` takes it; "" without one."""
        if self.kind == "file_store" and self.address:
            return f"file://{os.path.realpath(self.address)}"
        if self.port is None or not self.address:
            return ""
        server = host_port(self.address, self.port)
        if self.system == _ETCD:
            scheme = "etcds" if self.secure else "etcd"
            return f"{scheme}://{server}/{self.namespace.strip('/')}"
        return f"tcp://{server}" if self.kind == "tcp_store" else ""


def bottom_of(store: "Store") -> "Store":
    """Return the store below all PrefixStores.

    It is a PrefixStore itself if this torch has no ``underlying_store``.
    """
    while is_prefix_store(store) and hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def is_prefix_store(store: object) -> bool:
    """Return whether a store is torch's PrefixStore."""
    return type(store).__name__ == "PrefixStore"


def identify(bottom: "Store") -> StoreIdentity:
    """Return the identity of a store that is no PrefixStore.

    The prefix of a PrefixStore cannot be read from Python and is not part of it.
    """
    kind = _snake_case(type(bottom).__name__)
    is_etcd = system_of(kind) == _ETCD
    client = getattr(bottom, "client", None) if is_etcd else None
    port = getattr(client or bottom, "port", None)
    address = getattr(client or bottom, "host", None) or getattr(bottom, "path", "")
    namespace = getattr(bottom, "prefix", getattr(bottom, "namespace", ""))
    return StoreIdentity(
        kind=kind,
        system=system_of(kind),
        address=address if isinstance(address, str) else "",
        port=port if isinstance(port, int) else None,
        namespace=namespace if is_etcd and isinstance(namespace, str) else "",
        in_process=kind == "hash_store",
        from_torch=is_from_torch(bottom),
        secure=is_etcd and _uses_tls(client or bottom),
    )


def _uses_tls(client: object) -> bool:
    # python-etcd's client has the name of the protocol, EtcdV3Store a property.
    return "https" in (getattr(client, "protocol", ""), getattr(client, "scheme", ""))


def system_of(kind: str) -> str:
    """Return OpenTelemetry's ``db.system.name`` of a kind of store."""
    return _ETCD if kind in _ETCD_KINDS else f"pytorch.{kind}"


def is_from_torch(instance: object) -> bool:
    """Return whether an object's class is one of torch's, or EtcdV3Store."""
    return type(instance).__module__.startswith(("torch.", "tracedstore.etcd."))


def _snake_case(name: str) -> str:
    # TCPStore -> tcp_store, MyHTTPStore -> my_http_store
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.lower().strip("_")


@dataclass(frozen=True)
class ProcessIdentity:
    """The identity of a process in its job; what is unknown is None.

    Attributes:
        run_id: The job: ``TRACEDSTORE_RUN_ID``, else torchrun's run id.
        rank: The rank: the process group's, else ``RANK``.
        local_rank: The rank on this host, ``LOCAL_RANK``.
        world_size: The number of ranks: the process group's, else ``WORLD_SIZE``.
        attempt: How often torchrun has restarted the workers of this run before.
    """

    run_id: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ProcessIdentity":
        """Read the variables that torchrun and ``env://`` set."""
        return cls(
            run_id=run_id_of(environ),
            rank=number(environ.get("RANK")),
            local_rank=number(environ.get("LOCAL_RANK")),
            world_size=number(environ.get("WORLD_SIZE")),
            attempt=number(environ.get("TORCHELASTIC_RESTART_COUNT")),
        )

    @cached_property
    def host(self) -> str:
        """The name of this host, as in `host_name`."""
        return host_name()

    def fields(self) -> dict[str, Any]:
        """Return what is known, as the fields of every event."""
        # The pid is read each time: a forked child has another one.
        return self._known | {"pid": os.getpid()}

    @cached_property
    def _known(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self).items() if value is not None}
        return known | {"host": self.host}


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this host: in a pod, ``pod@node``.

    A pod's manifest passes both names (docs/kubernetes.md). Without them it is the
    host name, which in a pod is neither the pod's full name nor that of a machine.
    """
    pod = environ.get("TRACEDSTORE_POD_NAME") or socket.gethostname()
    node = environ.get("TRACEDSTORE_NODE_NAME")
    return key_text(f"{pod}@{node}" if node else pod)


def run_id_of(environ: Mapping[str, str]) -> str | None:
    """Return the run id of the job: ours, else torchrun's; None without one."""
    return (
        environ.get("TRACEDSTORE_RUN_ID") or environ.get("TORCHELASTIC_RUN_ID") or None
    )


def restart_count(environ: Mapping[str, str]) -> int:
    """Return the attempt of torchrun that a process belongs to, 0 without torchrun."""
    return number(environ.get("TORCHELASTIC_RESTART_COUNT")) or 0


def number(text: str | None) -> int | None:
    """Parse a variable of torch's; None if it is not set, or no number."""
    # These are torch's variables; torch raises for bad values.
    return int(text) if text is not None and text.strip().isdecimal() else None


# Rank and world size of the default process group. They are more reliable than the
# environment, which may have none (``tcp://``, mp.spawn). A process has one rank.
_group: tuple[int, int] | None = None


def set_group_identity(rank: int | None, world_size: int = 0) -> None:
    """Set the rank and world size that the process group has; None for no group."""
    global _group  # noqa: PLW0603 - see above
    _group = None if rank is None else (rank, world_size)


def process_identity() -> ProcessIdentity:
    """Return the identity of this process, as far as it is known now."""
    identity = ProcessIdentity.from_environment(os.environ)
    if _group is None:
        return identity
    rank, world_size = _group
    return replace(identity, rank=rank, world_size=world_size)
