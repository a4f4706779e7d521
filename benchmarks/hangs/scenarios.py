"""The hangs, each as what its ranks do.

A rank runs `Scenario.run` in a process of its own, below `tracedstore.instrument()`.
Victims call `Hang.here` where the others begin to wait for them.
"""

import json
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import etcd
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore

import tracedstore
from tracedstore import names
from tracedstore.common.causes import Cause

# How a victim hangs: it sleeps in Python code, is stopped or killed by a signal, or is
# never started. Another rank may be started twice in its stead, or all ranks may be
# restarted and it is late. Or the server of the store is stopped or killed.
Kind = Literal[
    "busy",
    "stopped",
    "gone",
    "not_started",
    "twice",
    "restarted",
    "server_stopped",
    "server_killed",
]
# A TCPStore that rank 0 serves, a FileStore, and stores that the program gives to
# init_process_group: a TCPStore with a server of its own, and an EtcdStore.
StoreKind = Literal["tcp", "file", "server", "etcd"]
_ALL_STORES: tuple[StoreKind, ...] = ("tcp", "file", "server", "etcd")


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
        timeout: Seconds after which waits time out.
        attempt: The number of restarts.
        reached: Called by a victim at the point where it hangs.
    """

    rank: int
    world_size: int
    victims: tuple[int, ...]
    store_kind: StoreKind
    file: Path
    port: int
    timeout: float
    attempt: int
    reached: Callable[[], None]

    def here(self) -> None:
        """Hang, if this rank is a victim."""
        if self.rank in self.victims:
            self.reached()
            load_dataset(self.timeout)

    def init(self) -> None:
        """Create the default process group."""
        where: dict[str, Any] = {"init_method": "env://"}
        if self.store_kind == "file":
            where = {"init_method": f"file://{self.file}"}
        elif self.store_kind != "tcp":
            where = {"store": self.open_store()}
        dist.init_process_group(
            "gloo",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout),
            **where,
        )
        # A victim that is killed while others still connect to it takes them with it.
        dist.barrier()

    def open_store(self) -> dist.Store:
        """Return a store of the program's own."""
        timeout = timedelta(seconds=self.timeout)
        if self.store_kind == "server":
            return dist.TCPStore("127.0.0.1", self.port, None, False, timeout)
        client = etcd.Client(port=self.port, read_timeout=60)
        # A folder for each case in one etcd.
        return EtcdStore(client, f"/{self.file.parent.name}/", timeout=timeout)

    def store(self) -> dist.Store:
        """Return the default group's store, with the timeout of the case."""
        store: dist.Store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public function
        store.set_timeout(timedelta(seconds=self.timeout))
        return store


def load_dataset(timeout: float) -> None:
    """Be busy elsewhere, for longer than the others wait."""
    time.sleep(3 * timeout)


def before_init(hang: Hang) -> None:
    """A rank does not reach init_process_group."""
    hang.here()
    hang.init()


def new_group(hang: Hang) -> None:
    """A rank does not reach new_group, which all ranks call."""
    hang.init()
    hang.here()
    dist.new_group(
        list(range(hang.world_size)), timeout=timedelta(seconds=hang.timeout)
    )


def new_group_of_some(hang: Hang) -> None:
    """A member of a group that not all ranks are in does not create it."""
    hang.init()
    outsiders = [r for r in range(hang.world_size) if r not in hang.victims][-1:]
    if hang.world_size == 2:
        outsiders = []
    hang.here()
    members = [r for r in range(hang.world_size) if r not in outsiders]
    group = dist.new_group(members, timeout=timedelta(seconds=hang.timeout))
    del group


def one_key_a_rank(hang: Hang) -> None:
    """Every rank writes a key with its rank in it, and waits for all of them."""
    hang.init()
    store = hang.store()
    store.set(f"ready/0/{hang.rank}", "")
    store.wait([f"ready/0/{rank}" for rank in range(hang.world_size)])
    hang.here()
    store.set(f"ready/1/{hang.rank}", "")
    store.wait([f"ready/1/{rank}" for rank in range(hang.world_size)])


def key_of_one_writer(hang: Hang) -> None:
    """One rank writes the same family of keys each time."""
    hang.init()
    store = hang.store()
    for epoch in range(3):
        if epoch == 2:
            hang.here()
        if hang.rank == hang.victims[0]:
            store.set(f"epoch/{epoch}/go", "")
        store.wait([f"epoch/{epoch}/go"])


def unknown_key(hang: Hang) -> None:
    """A key that was never written before; all other ranks wait for it."""
    hang.init()
    hang.here()
    hang.store().get("an unknown key")


def store_barrier(hang: Hang) -> None:
    """Torch's generic barrier, below PrefixStores."""
    hang.init()
    hang.here()
    barrier = getattr(hang.store(), "barrier")  # noqa: B009 - torch's stubs lack it
    barrier("all", hang.world_size, timedelta(seconds=hang.timeout))


def elastic_barrier(hang: Hang) -> None:
    """This package's barrier, in place of torch's."""
    hang.init()
    hang.here()
    tracedstore.barrier(
        hang.store(),
        hang.world_size,
        "checkpoint/7",
        barrier_timeout=hang.timeout,
        rank=hang.rank,
        warn_after=2,
    )


def unique_id(hang: Hang) -> None:
    """The exchange of the NCCL unique id, with its key: rank 0 is the victim."""
    hang.init()
    store = dist.PrefixStore("0//cuda/", hang.store())
    hang.here()
    if hang.rank == 0:
        store.set("0", "id")
    store.get("0")


def diverged(hang: Hang) -> None:
    """A victim has created one group more than the others."""
    hang.init()
    if hang.rank in hang.victims:
        # A group of its own, without the others: its next group has another name.
        dist.new_group([hang.rank], use_local_synchronization=True)
        hang.reached()
    dist.new_group(
        list(range(hang.world_size)),
        timeout=timedelta(seconds=hang.timeout),
        use_local_synchronization=True,
    )


def init_barrier(hang: Hang) -> None:
    """A rank that is not in a new group does not reach torch's barrier after it."""
    hang.init()
    hang.here()
    members = [r for r in range(hang.world_size) if r not in hang.victims]
    dist.new_group(members, timeout=timedelta(seconds=hang.timeout))


def started_twice(hang: Hang) -> None:
    """A rank is started twice, and another one is not started."""
    hang.init()


def stale_attempt(hang: Hang) -> None:
    """A rank is late after a restart: the others read its address of attempt 0."""
    if hang.attempt:
        hang.here()
    hang.init()
    hang.reached()
    load_dataset(hang.timeout)


def too_many(hang: Hang) -> None:
    """A restart with fewer ranks: torch's barrier counts those of attempt 0 too.

    In attempt 0 the last rank is not started, and the others wait at the barrier.
    """
    if not hang.attempt:
        Thread(target=_arrive, args=(hang,), daemon=True).start()
        hang = replace(hang, world_size=hang.world_size + 1)
    hang.init()


def _arrive(hang: Hang) -> None:
    """Wait until all ranks that were started have arrived at torch's barrier."""
    store = hang.open_store()
    while store.add("store_based_barrier_key:0", 0) < hang.world_size:
        time.sleep(0.05)
    hang.reached()


def server_stopped(hang: Hang) -> None:
    """The server of the store is stopped while all ranks wait for a key."""
    hang.init()
    store = hang.store()
    hang.reached()
    store.wait(["an unknown key"])


def server_killed(hang: Hang) -> None:
    """The server of the store is killed while all ranks wait for a key."""
    server_stopped(hang)


def slow(hang: Hang) -> None:
    """Nothing hangs: a rank is late, but not for long."""
    hang.init()
    if hang.rank in hang.victims:
        hang.reached()
        time.sleep(hang.timeout / 8)
    dist.new_group(list(range(hang.world_size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A hang.

    Attributes:
        run: What every rank does.
        kinds: How its victims may hang.
        stores: Where the ranks may meet.
        causes: The causes that a right verdict has; those of the kind if empty.
        event: An event that is emitted besides `job.stalled`.
        environ: Environment variables of the ranks.
        max_victims: How many victims it may have; 0 if no rank causes it.
        first_rank_only: Rank 0 is the victim.
        min_world_size: The smallest number of ranks.
        harmless: Nothing hangs, and no rank may be named.
    """

    run: Callable[[Hang], None]
    kinds: tuple[Kind, ...] = ("busy", "stopped", "gone")
    stores: tuple[StoreKind, ...] = _ALL_STORES
    causes: tuple[Cause, ...] = ()
    event: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    max_victims: int = 3
    first_rank_only: bool = False
    min_world_size: int = 2
    harmless: bool = False

    @property
    def name(self) -> str:
        """The name of the scenario."""
        return self.run.__name__

    def causes_of(self, kind: Kind) -> tuple[str, ...]:
        """Return the right causes for victims of a kind."""
        return self.causes or (kind,)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            run=before_init,
            kinds=("busy", "stopped", "not_started"),
            causes=("late", "not_started", "stopped", "gone"),
        ),
        Scenario(run=new_group),
        Scenario(run=new_group_of_some, max_victims=1),
        Scenario(run=one_key_a_rank),
        Scenario(run=key_of_one_writer, max_victims=1),
        Scenario(run=unknown_key, max_victims=1),
        *(
            # From torch 2.12 on.
            [Scenario(run=store_barrier, max_victims=1)]
            if hasattr(dist.Store, "barrier")
            else []
        ),
        Scenario(run=elastic_barrier),
        Scenario(
            run=unique_id,
            stores=("file", "server", "etcd"),
            max_victims=1,
            first_rank_only=True,
        ),
        Scenario(
            run=init_barrier,
            environ={"TORCH_DIST_INIT_BARRIER": "1"},
            max_victims=1,
        ),
        Scenario(
            run=started_twice, kinds=("twice",), causes=("duplicate",), min_world_size=3
        ),
        Scenario(
            run=stale_attempt,
            kinds=("restarted",),
            stores=("server",),
            causes=("stale",),
            event=names.STORE_STALE,
            max_victims=1,
        ),
        Scenario(
            run=too_many,
            kinds=("restarted",),
            stores=("server", "etcd"),
            causes=("too_many",),
            event=names.STORE_STALE,
            # Without lazy connections gloo waits for the last rank before the barrier.
            environ={"TORCH_DIST_INIT_BARRIER": "1", "TORCH_GLOO_LAZY_INIT": "1"},
            max_victims=0,
        ),
        Scenario(
            run=server_stopped,
            kinds=("server_stopped",),
            stores=("server",),
            causes=("server_unreachable",),
        ),
        Scenario(run=server_killed, kinds=("server_killed",), stores=("server",)),
        Scenario(
            run=diverged,
            kinds=("busy",),
            causes=("diverged",),
            max_victims=1,
            min_world_size=3,
        ),
        Scenario(run=slow, kinds=("busy",), max_victims=1, harmless=True),
    )
}


def run_rank(scenario: Scenario, hang: Hang, file: Path) -> None:
    """Run one rank; write how it ended to a file."""
    ended: dict[str, Any] = {"type": ""}
    try:
        scenario.run(hang)
    except Exception as error:
        copy = pickle.loads(pickle.dumps(error))
        ended = {
            "type": type(error).__name__,
            "message": str(error),
            "args": [str(argument) for argument in error.args],
            "notes": getattr(error, "__notes__", []),
            "pickled": (type(copy), copy.args) == (type(error), error.args),
        }
    file.write_text(json.dumps(ended))
