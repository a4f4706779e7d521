"""One rank of a job that reports every Store call that torch makes.

Arguments: how the process group is created (env, tcp, file, store), or another use of a
store (barriers, rpc); the port of a TCPStore or a path; rank; world size; with barriers
a second port.
"""

import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import tracedstore
from integration.harness import report
from support.versions import (
    COUNTS_ALL_GROUPS,
    STORE_BARRIER,
    TORCH,
    WITHOUT_COLLECTIVES,
    has_split_group,
)
from tracedstore.diagnosis.observe import torch_keys
from tracedstore.testing import OperationLog

MINUTE = timedelta(seconds=60)
# The name of a split group; torch uses a SHA-1 hash.
SPLIT = "5" * 40


def connect(port: int) -> dist.Store:
    """Return a traced client of the TCPStore."""
    return tracedstore.wrap(
        dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=MINUTE)
    )


def create_groups(how: str, address: str, rank: int, world_size: int) -> dict[str, Any]:
    """Create the default group and others; return the names and their members."""
    options: dict[str, Any] = {"init_method": f"{how}://"}
    if how == "store":
        options = {"store": connect(int(address))}
    elif how == "tcp":
        options = {"init_method": f"tcp://127.0.0.1:{address}"}
    elif how == "file":
        options = {"init_method": f"file://{address}"}
    if how != "env":
        options |= {"rank": rank, "world_size": world_size}
    tracedstore.instrument()
    # One device: with two, both backends of split_group would use the same keys.
    dist.init_process_group("cpu:gloo", timeout=MINUTE, **options)
    every = list(range(world_size))
    created = [dist.group.WORLD, dist.new_group(every)]
    # The name of a group with local synchronization is a hash of its ranks and of the
    # number of groups that this rank is in. From torch 2.14 on it is that of the groups
    # that the rank has created; ranks outside this group do not count it.
    options_of_both = [(every[:2], True), (every[1:], False)]
    if TORCH >= COUNTS_ALL_GROUPS:
        options_of_both.reverse()
    created += [
        dist.new_group(ranks, use_local_synchronization=is_local)
        for ranks, is_local in options_of_both
    ]
    for group in created:
        if isinstance(group, dist.ProcessGroup):
            dist.barrier(group=group)
    world: Any = dist.group.WORLD
    if has_split_group():
        split = world.split_group(every, MINUTE, None, SPLIT)
        # A rank that frees its group closes connections that another one still sets up.
        dist.barrier()
        del split
    # A process outside a group gets a number or None instead.
    own = [one.group_name for one in created if isinstance(one, dist.ProcessGroup)]
    names = {"0", "1", "2", *own}
    return {"groups": {name: torch_keys.members_of(name) for name in names}}


def use_barriers(_how: str, address: str, rank: int, world_size: int) -> dict[str, Any]:
    """Call the barriers and exchanges of torch that have keys of their own."""
    from torch.distributed.elastic.utils import store as elastic

    store: Any = connect(int(address))
    below_prefix: Any = dist.PrefixStore("prefix", store)
    if TORCH >= STORE_BARRIER:
        below_prefix.barrier("sync", world_size, MINUTE)
    elastic.barrier(store, world_size, "elastic/7", 60)
    elastic.synchronize(store, b"", rank, world_size, "exchange/", 60)
    if TORCH < WITHOUT_COLLECTIVES:
        collectives = dist._StoreCollectives(store, rank, world_size)
        collectives.barrier("collective", MINUTE, True)
    from torch.distributed.checkpoint._experimental import barriers

    checkpoint: Any = barriers.TCPStoreBarrier(
        rank, world_size, "checkpoint", 60, True, int(sys.argv[5]), "127.0.0.1", 60
    )
    checkpoint._tcp_store = tracedstore.wrap(checkpoint._tcp_store)
    checkpoint.execute_barrier()
    # One rank too few: all ranks time out, and rank 0 finds out who is missing.
    with suppress(dist.DistStoreError):
        elastic.barrier(
            store, world_size + 1, "missing/", 0.5, rank=rank, trace_timeout=0.5
        )
    # The servers of both stores end after their clients.
    elastic.synchronize(store, b"", rank, world_size, "end/", 60)
    return {}


def use_rpc(_how: str, address: str, rank: int, world_size: int) -> dict[str, Any]:
    """Start and end torch's RPC."""
    from torch.distributed import rpc

    tracedstore.instrument()
    init_rpc: Any = rpc.init_rpc
    init_rpc(
        f"worker{rank}",
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            init_method=f"tcp://127.0.0.1:{address}"
        ),
    )
    shutdown: Any = rpc.shutdown
    shutdown()
    return {}


def main() -> None:
    """Run, and report the calls."""
    how, address = sys.argv[1:3]
    rank, world_size = int(sys.argv[3]), int(sys.argv[4])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=address)
    log = OperationLog()
    # Every call is slow, and so reaches the observer.
    tracedstore.configure(observers=[log], slow_after=0, log_format="off")
    run = {"barriers": use_barriers, "rpc": use_rpc}.get(how, create_groups)
    fields = run(how, address, rank, world_size)
    calls = [(operation.method.name, operation.keys) for operation in log.operations]
    report(calls=calls, **fields)


if __name__ == "__main__":
    main()
