"""One rank of a job of gloo that hangs in a collective, or only seems to.

Arguments: the scenario; the port of the store, 0 to serve it; the rank; the number of
ranks. The last rank is the odd one. Each rank ends when its standard input is closed.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tracedstore
from integration.harness import report

LONG = timedelta(seconds=600)
TENSOR = torch.ones(10)


def load_dataset() -> None:
    """Do what a late rank does instead."""
    sys.stdin.readline()


def all_reduce() -> None:
    """Call what most scenarios hang in."""
    dist.all_reduce(TENSOR)


def late(rank: int, last: int) -> None:
    """Come late to a collective."""
    if rank == last:
        load_dataset()
    all_reduce()


def late_to_barrier(rank: int, last: int) -> None:
    """Come late to a barrier of torch.distributed."""
    if rank == last:
        load_dataset()
    dist.barrier()


def late_to_objects(rank: int, last: int) -> None:
    """Come late to an exchange of objects, which is several collectives."""
    if rank == last:
        load_dataset()
    dist.broadcast_object_list([rank], src=0)
    dist.all_gather_object([None] * (last + 1), rank)


def late_to_ddp(rank: int, last: int) -> None:
    """Come late to the constructor of DistributedDataParallel."""
    if rank == last:
        load_dataset()
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))


def late_to_asynchronous(rank: int, last: int) -> None:
    """Come late to a collective that the others have started in the background."""
    if rank == last:
        load_dataset()
    work = dist.all_reduce(TENSOR, async_op=True)
    if work is not None:
        work.wait()


def late_to_monitored_barrier(rank: int, last: int) -> None:
    """Come late to a barrier that is not recorded."""
    if rank == last:
        load_dataset()
    dist.monitored_barrier(timeout=LONG)


def late_to_send(rank: int, last: int) -> None:
    """Let rank 0 receive what the last one does not send yet."""
    if rank == last:
        load_dataset()
        dist.send(TENSOR, 0)
    elif rank == 0:
        dist.recv(TENSOR, src=last)


def skips(rank: int, last: int) -> None:
    """Skip one collective of a step that was made several times."""
    for _ in range(3):
        all_reduce()
        dist.barrier()
    if rank != last:
        all_reduce()
    dist.barrier()


def another_collective(rank: int, last: int) -> None:
    """Call another one than the others."""
    if rank == last:
        dist.monitored_barrier(timeout=LONG)
    else:
        all_reduce()


def another_order(rank: int, last: int) -> None:
    """Use two groups in another order than the other rank."""
    groups = [dist.new_group([0, last]) for _ in range(2)]
    if rank in (0, last):
        for group in groups[:: 1 if rank == 0 else -1]:
            dist.all_reduce(TENSOR, group=group)


def creates_a_group(rank: int, last: int) -> None:
    """Create a group while the others are in a collective."""
    if rank == last:
        dist.new_group(list(range(last + 1)))
    else:
        all_reduce()


def in_a_thread(rank: int, last: int) -> None:
    """Use a group of its own in a thread, as a checkpoint in the background does."""
    group = dist.new_group(list(range(last + 1)))

    def save() -> None:
        if rank == last:
            load_dataset()
        dist.barrier(group=group)

    thread = threading.Thread(target=save, name="checkpoint")
    thread.start()
    thread.join()


def times_out(rank: int, last: int) -> None:
    """Let a collective fail because one rank does not come."""
    group = dist.new_group(list(range(last + 1)), timeout=timedelta(seconds=8))
    if rank == last:
        load_dataset()
    else:
        dist.all_reduce(TENSOR, group=group)


def uneven(rank: int, _last: int) -> None:
    """Make steps that take longer on higher ranks, with calls in the background."""
    work: list[Any] = []
    for _ in range(8):
        time.sleep(0.3 * rank)
        work.append(dist.all_reduce(TENSOR, async_op=True))
        dist.barrier()
    for one in work:
        one.wait()


def computes(_rank: int, _last: int) -> None:
    """Let all ranks compute for long, after a collective."""
    all_reduce()
    report(computes=True)
    load_dataset()
    all_reduce()


SCENARIOS: dict[str, Callable[[int, int], None]] = {
    one.__name__: one
    for one in (
        late,
        late_to_barrier,
        late_to_objects,
        late_to_ddp,
        late_to_asynchronous,
        late_to_monitored_barrier,
        late_to_send,
        skips,
        another_collective,
        another_order,
        creates_a_group,
        in_a_thread,
        times_out,
        uneven,
        computes,
    )
}


def main() -> None:
    """Join the job, make some healthy steps, and then those of the scenario."""
    scenario, port, rank, world_size = sys.argv[1], *map(int, sys.argv[2:5])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    tracedstore.configure(log_format="json")
    tracedstore.instrument()
    serves = rank == 0
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=serves, wait_for_workers=False, timeout=LONG
    )
    report(port=store.port, pid=os.getpid())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for _ in range(3):
        all_reduce()
    report(joined=True)
    try:
        SCENARIOS[scenario](rank, world_size - 1)
    except RuntimeError as error:
        report(error=str(error), notes=getattr(error, "__notes__", []))
    report(done=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
