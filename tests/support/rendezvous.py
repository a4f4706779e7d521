"""torch's rendezvous backends on real servers, and states for them."""

import itertools
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import (
    EtcdRendezvousBackend,
)

from support.etcd import EtcdServer
from support.stores import tcp
from tracedstore.etcd import EtcdV3Store
from tracedstore.rendezvous.etcd_v3 import EtcdV3RendezvousBackend

_runs = itertools.count()

# Connects another node to a rendezvous.
Connect = Callable[[], RendezvousBackend]
BACKENDS = ("c10d-tcp", "c10d-file", "etcd-v2", "etcd")


def new_run_id() -> str:
    """Return a run id that no other test uses."""
    return f"run-{next(_runs)}"


class Rendezvous:
    """One rendezvous that any number of backends connect to.

    Attributes:
        run_id: Its run id.
        kind: One of `BACKENDS`.
    """

    def __init__(self, kind: str, folder: Path, etcd: EtcdServer) -> None:
        self.kind = kind
        self.run_id = new_run_id()
        self._folder = folder
        self._etcd = etcd
        self._server = tcp(folder) if kind == "c10d-tcp" else None
        self._client = etcd.client()

    def connect(self) -> RendezvousBackend:
        """Return a backend of another node."""
        if self.kind == "etcd-v2":
            client = self._etcd.client()
            return EtcdRendezvousBackend(client, self.run_id, key_prefix="/rdzv")
        if self.kind == "etcd":
            store = EtcdV3Store(self._etcd.address, self.run_id)
            return EtcdV3RendezvousBackend(store.transport, self.run_id)
        return C10dRendezvousBackend(self._store(), self.run_id)

    def corrupt(self) -> None:
        """Write a state that no backend can read."""
        if self.kind == "etcd-v2":
            self._client.set(f"/rdzv/{self.run_id}", "x")
        else:
            self._store().set(f"torch.rendezvous.{self.run_id}", "x")

    def _store(self) -> dist.Store:
        if self._server is not None:
            return dist.TCPStore("127.0.0.1", self._server.port, None, is_master=False)
        return dist.FileStore(str(self._folder / f"{self.run_id}.store"), -1)


def pickled_state(
    joined: dict[str, float] | None = None,
    waiting: dict[str, float] | None = None,
    *,
    now: datetime | None = None,
    **fields: Any,
) -> bytes:
    """Return torch's pickled state.

    `joined` and `waiting` map each node's address to the age of its last heartbeat
    in seconds, from `now` or the current time; `fields` are set on the state.
    """
    state = dynamic._RendezvousState()
    for name, value in fields.items():
        setattr(state, name, value)
    now = now or datetime.now(UTC)
    for rank, (addr, heartbeat_age) in enumerate((joined or {}).items()):
        node = dynamic._NodeDesc(addr, 100 + rank, 0)
        state.participants[node] = rank
        state.last_heartbeats[node] = now - timedelta(seconds=heartbeat_age)
    for addr, heartbeat_age in (waiting or {}).items():
        node = dynamic._NodeDesc(addr, 200, 0)
        state.wait_list.add(node)
        state.last_heartbeats[node] = now - timedelta(seconds=heartbeat_age)
    return pickle.dumps(state)


def handler(
    backend: str,
    endpoint: str,
    run_id: str,
    *,
    nodes: Any = (2, 2),
    addr: Any = None,
    **config: Any,
) -> RendezvousHandler:
    """Return a handler by its backend's name, as torchrun creates it."""
    params = RendezvousParameters(
        backend, endpoint, run_id, nodes[0], nodes[1], local_addr=addr, **config
    )
    return rendezvous_handler_registry.create_handler(params)
