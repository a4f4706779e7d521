"""Who speaks: which store a call went to, and which process made it."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch.distributed import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """What a store is called in every signal.

    Attributes:
        kind: Its class in snake case, of what is below any PrefixStore: the
            ``store`` label.
        system: OpenTelemetry's ``db.system.name``.
        address: Host, or path of the file.
        port: Port of its server, where it has one.
        namespace: What every key is put under, where that can be read.
        in_process: No other process can see it (HashStore).
    """

    kind: str
    system: str
    address: str = ""
    port: int | None = None
    namespace: str = ""
    in_process: bool = False

    @property
    def server(self) -> str:
        """Where it is, for people: host:port, or a path."""
        return self.address if self.port is None else f"{self.address}:{self.port}"


def bottom_of(store: Store) -> Store:
    """Peel PrefixStores off a store, down to what holds the data."""
    # Older torch has no _underlying_non_prefix_store; underlying_store is enough.
    while type(store).__name__ == "PrefixStore":
        store = store.underlying_store  # type: ignore[attr-defined]
    return store


def identify(bottom: Store) -> StoreIdentity:
    """Tell what a store, peeled of its PrefixStores, says about itself.

    The prefix of a PrefixStore cannot be read from Python, so it is not told.
    """
    kind = _snake_case(type(bottom).__name__)
    is_etcd = kind == "etcd_store"
    client = getattr(bottom, "client", None) if is_etcd else None
    port = getattr(client or bottom, "port", None)
    address = getattr(client or bottom, "host", None) or getattr(bottom, "path", "")
    namespace = getattr(bottom, "prefix", "") if is_etcd else ""
    return StoreIdentity(
        kind=kind,
        system="etcd" if is_etcd else f"pytorch.{kind}",
        address=address if isinstance(address, str) else "",
        port=port if isinstance(port, int) else None,
        namespace=namespace,
        in_process=kind == "hash_store",
    )


def _snake_case(name: str) -> str:
    # TCPStore -> tcp_store, MyHTTPStore -> my_http_store
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return words.lower().strip("_")


@dataclass(frozen=True)
class ProcessIdentity:
    """Which process of which job speaks; what is not known is None.

    Attributes:
        run_id: The job: ``TRACEDSTORE_RUN_ID``, else torchrun's.
        rank: Its rank, as torchrun and ``env://`` have it in ``RANK``.
        local_rank: Its rank on this host.
        world_size: How many ranks there are.
    """

    run_id: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "ProcessIdentity":
        """Read what torchrun and ``env://`` put into the environment."""
        return cls(
            run_id=environ.get("TRACEDSTORE_RUN_ID")
            or environ.get("TORCHELASTIC_RUN_ID")
            or None,
            rank=_number(environ.get("RANK")),
            local_rank=_number(environ.get("LOCAL_RANK")),
            world_size=_number(environ.get("WORLD_SIZE")),
        )

    @cached_property
    def host(self) -> str:
        """This machine's name."""
        return socket.gethostname()

    def fields(self) -> dict[str, Any]:
        """Give what is known, flat, as it goes on every event."""
        known = {key: value for key, value in asdict(self).items() if value is not None}
        # Not a field of the record: a forked child has a pid of its own.
        return known | {"host": self.host, "pid": os.getpid()}


def _number(text: str | None) -> int | None:
    # These are torch's variables: whether a strange one is an error is for torch
    # to say.
    return int(text) if text is not None and text.strip().isdecimal() else None
