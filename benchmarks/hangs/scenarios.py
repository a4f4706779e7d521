"""The hangs, each as what its ranks do.

A rank runs `Scenario.run` in a process of its own, below `tracedstore.instrument()` or
with a wrapped store. Victims call `Hang.here` where the others begin to wait for them.
"""

import json
import pickle
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import torch.distributed as dist

import tracedstore
from hangs import healthy
from hangs.hang import Hang, StoreKind, load_dataset
from tracedstore import names
from tracedstore.common.causes import Cause

# How a victim hangs: it sleeps in Python code, is stopped or killed by a signal, or is
# never started; if it is mixed, each victim in another of the first three ways. Another
# rank may be started twice in its stead, or every rank of the first half. Or all ranks
# are restarted and it is late. Or the server of a store is stopped or killed, or a
# whole node is lost.
Kind = Literal[
    "busy",
    "stopped",
    "gone",
    "mixed",
    "not_started",
    "twice",
    "pairs",
    "restarted",
    "server_stopped",
    "server_killed",
    "second_stopped",
    "node_dead",
    "node_frozen",
    "node_cut_off",
]
ALL_STORES: tuple[StoreKind, ...] = ("tcp", "file", "server", "etcd", "etcd3")
# Stores that init_process_group can be given.
_OWN_STORES: tuple[StoreKind, ...] = ("server", "etcd", "etcd3")
_HUNG: tuple[Kind, ...] = ("busy", "stopped", "gone")
_SEVERAL: tuple[Kind, ...] = (*_HUNG, "mixed")


def before_init(hang: Hang) -> None:
    """A rank does not reach init_process_group."""
    hang.here()
    hang.init()


def new_group(hang: Hang) -> None:
    """A rank does not reach new_group, which all ranks call."""
    hang.init()
    hang.here()
    dist.new_group(list(range(hang.world_size)), timeout=hang.limit)


def new_group_of_some(hang: Hang) -> None:
    """A member of a group that not all ranks are in does not create it."""
    hang.init()
    outsiders = [r for r in range(hang.world_size) if r not in hang.victims][-1:]
    if hang.world_size == 2:
        outsiders = []
    hang.here()
    members = [r for r in range(hang.world_size) if r not in outsiders]
    group = dist.new_group(members, timeout=hang.limit)
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
    barrier("all", hang.world_size, hang.limit)


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
        timeout=hang.limit,
        use_local_synchronization=True,
    )


def init_barrier(hang: Hang) -> None:
    """A rank that is not in a new group does not reach torch's barrier after it."""
    hang.init()
    hang.here()
    members = [r for r in range(hang.world_size) if r not in hang.victims]
    dist.new_group(members, timeout=hang.limit)


def started_twice(hang: Hang) -> None:
    """A rank is started twice, and another one is not started."""
    hang.init()


def all_started_twice(hang: Hang) -> None:
    """The ranks are 0, 0, 1, 1 and so on; the second half is not started."""
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
    # Those that have not registered are not known to the next attempt.
    registered = [f"tracedstore/RANKS/{rank}" for rank in range(hang.world_size)]
    while not store.check(registered):
        time.sleep(0.05)
    hang.reached()


def short_waits(hang: Hang) -> None:
    """The others wait in short slices, with pauses."""
    hang.init()
    hang.here()
    store = hang.store()
    end = time.monotonic() + hang.timeout
    while time.monotonic() < end:
        try:
            return store.wait(["late"], timedelta(seconds=0.3))
        except Exception:
            time.sleep(0.1)
    return None


def polls(hang: Hang) -> None:
    """The others ask again and again whether a key exists."""
    hang.init()
    hang.here()
    store = hang.store()
    end = time.monotonic() + hang.timeout
    while time.monotonic() < end and not store.check(["late"]):
        time.sleep(0.2)


def writes_in_turn(hang: Hang) -> None:
    """Rank N modulo the number of ranks writes epoch N; the victim does so once."""
    hang.init()
    store = hang.store()
    for epoch in range(3 * hang.world_size):
        if epoch % hang.world_size == hang.rank:
            if epoch >= hang.world_size:
                hang.here()
            store.set(f"epoch/{epoch}/go", "")
        store.wait([f"epoch/{epoch}/go"])


def awaits_a_thread(hang: Hang) -> None:
    """The main threads wait for a result of a thread that waits."""
    hang.init()
    hang.here()
    with ThreadPoolExecutor() as pool:
        pool.submit(hang.store().get, "late").result()


def groups_in_another_order(hang: Hang) -> None:
    """The victim creates the data parallel groups before the tensor parallel ones."""
    hang.init()
    half = hang.world_size // 2
    tensor = [list(range(half)), list(range(half, hang.world_size))]
    data = [[first, first + half] for first in range(half)]
    is_odd = hang.rank in hang.victims
    if is_odd:
        hang.reached()
    for ranks in [*data, *tensor] if is_odd else [*tensor, *data]:
        dist.new_group(ranks, timeout=hang.limit)
    # Gloo may connect ranks of different groups: these go on, and rank 0 serves.
    time.sleep(2 * hang.timeout)


def second_node(hang: Hang) -> None:
    """The ranks of the second node do not come to what those of the first wait for."""
    hang.init()
    hang.here()
    hang.reached()
    store = hang.store()
    store.set(f"ready/{hang.rank}", "")
    store.wait([f"ready/{rank}" for rank in range(hang.world_size)])


def second_server_stopped(hang: Hang) -> None:
    """A victim is in a call of another store, whose server is stopped."""
    hang.init()
    if hang.rank in hang.victims:
        store = hang.open_second_store()
        hang.reached()
        store.get("results/merged")
    hang.store().get("late")


def server_stopped(hang: Hang) -> None:
    """The server of the store is stopped while all ranks wait for a key."""
    hang.init()
    store = hang.store()
    hang.reached()
    store.wait(["an unknown key"])


def server_killed(hang: Hang) -> None:
    """The server of the store is killed while all ranks wait for a key."""
    server_stopped(hang)


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
        max_world_size: The largest one.
        wraps: Calling `tracedstore.wrap` alone is enough for it.
        helpers: Its ranks always have helper threads.
        nodes: Its ranks are on two nodes, below torchrun; the victims on the second.
        harmless: Nothing hangs, and nothing may be reported.
    """

    run: Callable[[Hang], None]
    kinds: tuple[Kind, ...] = _HUNG
    stores: tuple[StoreKind, ...] = ALL_STORES
    causes: tuple[Cause, ...] = ()
    event: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    max_victims: int = 3
    first_rank_only: bool = False
    min_world_size: int = 2
    max_world_size: int = 1 << 20
    wraps: bool = False
    helpers: bool = False
    nodes: bool = False
    harmless: bool = False

    @property
    def name(self) -> str:
        """The name of the scenario."""
        return self.run.__name__


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            run=before_init,
            kinds=("busy", "stopped", "not_started"),
            causes=("late", "not_started", "stopped", "gone"),
        ),
        Scenario(run=new_group, kinds=_SEVERAL, wraps=True),
        Scenario(run=new_group_of_some, max_victims=1),
        Scenario(run=one_key_a_rank, kinds=_SEVERAL, wraps=True),
        Scenario(run=key_of_one_writer, max_victims=1, wraps=True),
        Scenario(run=unknown_key, max_victims=1, wraps=True),
        Scenario(run=short_waits, max_victims=1, wraps=True),
        Scenario(run=polls, max_victims=1, wraps=True),
        Scenario(run=writes_in_turn, max_victims=1, wraps=True),
        Scenario(run=awaits_a_thread, max_victims=1, wraps=True),
        *(
            # From torch 2.12 on.
            [Scenario(run=store_barrier, max_victims=1)]
            if hasattr(dist.Store, "barrier")
            else []
        ),
        Scenario(run=elastic_barrier, kinds=_SEVERAL),
        Scenario(
            run=unique_id,
            stores=("file", *_OWN_STORES),
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
            run=all_started_twice,
            kinds=("pairs",),
            stores=_OWN_STORES,
            causes=("duplicate",),
            min_world_size=4,
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
            stores=_OWN_STORES,
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
        Scenario(
            run=groups_in_another_order,
            kinds=("busy",),
            causes=("diverged",),
            max_victims=1,
            min_world_size=8,
            max_world_size=8,
        ),
        Scenario(
            run=second_server_stopped,
            kinds=("second_stopped",),
            causes=("busy", "server_unreachable"),
            max_victims=1,
        ),
        Scenario(
            run=second_node,
            kinds=("busy", "node_dead", "node_frozen", "node_cut_off"),
            nodes=True,
        ),
        *(
            Scenario(run=run, kinds=("busy",), nodes=True, harmless=True)
            for run in (healthy.first_node_ends, healthy.second_node_ends)
        ),
        Scenario(run=healthy.slow, kinds=("busy",), max_victims=1, harmless=True),
        *(
            Scenario(run=run, kinds=("busy",), harmless=True, helpers=True, wraps=True)
            for run in (healthy.works, healthy.retries, healthy.asks_each_step)
        ),
        Scenario(
            run=healthy.ends_apart, kinds=("busy",), stores=_OWN_STORES, harmless=True
        ),
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
