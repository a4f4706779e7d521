"""What a rank of a case gets: its store, its group, and the point to hang at."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import etcd
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

import tracedstore
from tracedstore.etcd import EtcdV3Store

# A TCPStore that rank 0 serves, a FileStore, and stores that the program gives to
# init_process_group: a TCPStore with a server of its own, an EtcdStore over etcd's v2
# API, and an EtcdV3Store.
StoreKind = Literal["tcp", "file", "server", "etcd", "etcd3"]
# What becomes of the server of a second store, in which helper threads wait.
SecondStore = Literal["", "stopped", "refusing"]
_LONG = timedelta(hours=1)
# Seconds in which a rank registers that only torch knows.
_REGISTRATION = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What a rank of a case gets.

    Attributes:
        rank: The rank.
        world_size: The number of ranks.
        victims: The ranks that cause the hang.
        store_kind: Where the ranks meet.
        file: The file of a FileStore.
        port: The port of the store's server.
        second_port: The port of the second store's server; 0 if there is none.
        wraps: The program calls `tracedstore.wrap` only, and the rank is an argument of
            init_process_group.
        helpers: Every rank has threads that wait for keys which nobody writes.
        timeout: Seconds after which waits time out.
        stall_after: Seconds after which waits are reported.
        attempt: The number of restarts.
        reached: Called by a victim at the point where it hangs.
    """

    rank: int
    world_size: int
    victims: tuple[int, ...]
    store_kind: StoreKind
    file: Path
    port: int
    second_port: int
    wraps: bool
    helpers: bool
    timeout: float
    stall_after: float
    attempt: int
    reached: Callable[[], None]

    @property
    def limit(self) -> timedelta:
        """The timeout of waits."""
        return timedelta(seconds=self.timeout)

    def here(self) -> None:
        """Hang, if this rank is a victim."""
        if self.rank in self.victims:
            self.reached()
            load_dataset(self.timeout)

    def init(self) -> None:
        """Create the default process group, and start the threads of the case."""
        where: dict[str, Any] = {"init_method": "env://"}
        if self.wraps:
            where = {"store": tracedstore.wrap(self.open_store())}
        elif self.store_kind == "file":
            where = {"init_method": f"file://{self.file}"}
        elif self.store_kind != "tcp":
            where = {"store": self.open_store()}
        dist.init_process_group(
            "gloo",
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.limit,
            **where,
        )
        if self.second_port:
            _start(_await_results, self.open_second_store(), self.rank)
        if self.helpers:
            for target in (_listen, _serve_tasks):
                _start(target, tracedstore.wrap(self.open_store()), self.rank)
        if self.wraps:
            time.sleep(_REGISTRATION)
        # A victim that is killed while others still connect to it takes them with it.
        dist.barrier()

    def open_store(self) -> dist.Store:
        """Return a store of the program's own."""
        if self.store_kind in ("server", "tcp"):
            return dist.TCPStore("127.0.0.1", self.port, None, False, self.limit)
        if self.store_kind == "file":
            return dist.FileStore(str(self.file), self.world_size)
        # A folder for each case in one etcd.
        folder = self.file.parent.name
        if self.store_kind == "etcd3":
            return EtcdV3Store(f"127.0.0.1:{self.port}", folder, timeout=self.limit)
        client = etcd.Client(port=self.port, read_timeout=60)
        return EtcdStore(client, f"/{folder}/", timeout=self.limit)

    def open_second_store(self) -> dist.Store:
        """Return a store of another server."""
        bare = dist.TCPStore("127.0.0.1", self.second_port, None, False, self.limit)
        return tracedstore.wrap(bare)

    def store(self) -> dist.Store:
        """Return the default group's store, with the timeout of the case."""
        store: dist.Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public function
        store.set_timeout(self.limit)
        return store


def load_dataset(timeout: float) -> None:
    """Be busy elsewhere, for longer than the others wait."""
    time.sleep(20 * timeout)


def _start(target: Callable[[Any, int], None], store: dist.Store, rank: int) -> None:
    Thread(target=target, args=(store, rank), daemon=True).start()


def _listen(store: dist.Store, rank: int) -> None:
    """Wait for the end of the job."""
    del rank
    store.wait(["shutdown"], _LONG)


def _serve_tasks(store: dist.Store, rank: int) -> None:
    """Wait for tasks, in slices."""
    while True:
        try:
            store.wait([f"tasks/{rank}/0"], timedelta(seconds=1))
        except Exception:
            continue


def _await_results(store: dist.Store, rank: int) -> None:
    """Use another store as long as its server lives."""
    store.set(f"results/{rank}", "")
    store.wait(["results/merged"], _LONG)
