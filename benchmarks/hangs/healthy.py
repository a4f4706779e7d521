"""Jobs in which nothing hangs: nothing may be reported of them."""

import time
from datetime import timedelta

import torch.distributed as dist

from hangs.hang import Hang


def slow(hang: Hang) -> None:
    """A rank is late, but not for long."""
    hang.init()
    if hang.rank in hang.victims:
        time.sleep(hang.timeout / 8)
    dist.new_group(list(range(hang.world_size)))


def works(hang: Hang) -> None:
    """Steps with a barrier at the end of each, one rank slower than the others."""
    hang.init()
    for _ in range(8):
        time.sleep(hang.stall_after / (2 if hang.rank in hang.victims else 4))
        dist.barrier()


def retries(hang: Hang) -> None:
    """Waits in short slices, which succeed before they are long."""
    hang.init()
    store = hang.store()
    for step in range(4):
        if hang.rank in hang.victims[:1]:
            time.sleep(hang.stall_after / 2)
            store.set(f"step/{step}", "")
        while True:
            try:
                store.wait([f"step/{step}"], timedelta(seconds=0.2))
                break
            except Exception:
                time.sleep(0.1)


def asks_each_step(hang: Hang) -> None:
    """Every rank asks in each step whether to stop."""
    hang.init()
    store = hang.store()
    end = time.monotonic() + 4 * hang.stall_after
    while time.monotonic() < end and not store.check(["stop"]):
        _train()


def _train() -> None:
    time.sleep(0.1)


def ends_apart(hang: Hang) -> None:
    """Some ranks end long before the others."""
    hang.init()
    dist.destroy_process_group()
    if hang.rank in hang.victims:
        time.sleep(3 * hang.stall_after)


def first_node_ends(hang: Hang) -> None:
    """The first node ends long before the second one: its agent waits for that."""
    hang.reached()
    if hang.rank in hang.victims:
        time.sleep(5 * hang.stall_after)


def second_node_ends(hang: Hang) -> None:
    """The second node ends long before the first one."""
    hang.reached()
    if hang.rank not in hang.victims:
        time.sleep(5 * hang.stall_after)
