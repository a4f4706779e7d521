"""One rank of a job that hangs, or only seems to.

Arguments: the scenario; the port of the store, 0 to serve it; the rank; the number of
ranks. The last rank is late: it does not get to what the others wait for, until its
standard input has a line. Rank 0 ends when its standard input is closed.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import tracedstore
from integration.harness import report

LONG = timedelta(seconds=600)


def load_dataset() -> None:
    """Do what a late rank does instead."""
    sys.stdin.readline()


def listen(store: Any) -> None:
    """Wait in a helper thread for a key that nobody writes while the job runs."""
    threading.Thread(
        target=store.wait, args=(["shutdown"], LONG), daemon=True, name="listener"
    ).start()


def wait(store: Any) -> None:
    """Wait for what the late rank writes."""
    store.wait(["go"], LONG)


def late_with_listener(store: Any, *, late: bool) -> None:
    """All ranks have a listener; the main threads of the others wait for the last."""
    listen(store.clone())
    if late:
        return load_dataset()
    return wait(store)


def healthy_with_listeners(store: Any, *, late: bool) -> None:
    """All ranks have a listener, and work."""
    listen(store.clone())
    # Long enough for a report and its repetition.
    while not any(one.waited_seconds > STALL_AFTER * 4 for one in waiting()):
        threading.Event().wait(0.1)
    report(waited=True)
    load_dataset()


def joins_a_thread(store: Any, *, late: bool) -> None:
    """The main thread waits for the end of a thread, which waits for the last rank."""
    listen(store.clone())
    if late:
        return load_dataset()
    thread = threading.Thread(target=wait, args=(store,))
    thread.start()
    return thread.join()


def awaits_a_future(store: Any, *, late: bool) -> None:
    """The main thread waits for a result of an executor."""
    listen(store.clone())
    if late:
        return load_dataset()
    with ThreadPoolExecutor() as pool:
        pool.submit(wait, store).result()
    return None


def repeats_short_waits(store: Any, *, late: bool) -> None:
    """The others wait in short slices, and pause between them."""
    if late:
        return load_dataset()
    while not arrives(store):
        threading.Event().wait(0.1)
    return None


def arrives(store: Any) -> bool:
    """Wait for a moment; return whether the late rank has arrived."""
    try:
        store.wait(["go"], timedelta(seconds=0.2))
    except dist.DistStoreError:
        return False
    return True


def polls(store: Any, *, late: bool) -> None:
    """The others ask again and again whether a key exists."""
    if late:
        return load_dataset()
    while not store.check(["go"]):
        time.sleep(0.1)
    return None


def healthy_polls(store: Any, *, late: bool) -> None:
    """All ranks but the first ask in each step whether to stop, and work."""
    del late
    until = time.monotonic() + 5 * STALL_AFTER
    while time.monotonic() < until:
        if int(os.environ["RANK"]) > 0:
            store.check(["stop"])
        train()
    report(waited=True)
    load_dataset()


def train() -> None:
    """Take a step."""
    for _ in range(20):
        multiply(torch.ones(256, 256))


def multiply(matrix: torch.Tensor) -> None:
    """Use CPU time."""
    matrix @ matrix


def writes_in_turn(store: Any, *, late: bool) -> None:
    """Rank N % world size writes epoch N, and the others wait for it."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for epoch in range(2 * world_size):
        if epoch % world_size == rank:
            # The late rank does its first turn.
            if late and epoch >= world_size:
                load_dataset()
            time.sleep(0.1)  # its write is observed
            store.set(f"epoch/{epoch}/go", "")
        else:
            store.wait([f"epoch/{epoch}/go"], LONG)


def groups_in_another_order(store: Any, *, late: bool) -> None:
    """Tensor and data parallel groups of 8 ranks; one of them creates the latter first.

    It does not end.
    """
    del late
    rank = int(os.environ["RANK"])
    tensor = [[0, 1, 2, 3], [4, 5, 6, 7]]
    data = [[first, first + 4] for first in range(4)]
    order = [*data, *tensor] if rank == ODD else [*tensor, *data]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=8, timeout=LONG)
    for ranks in order:
        dist.new_group(ranks)


def only_wrapped(store: Any, *, late: bool) -> None:
    """Nothing but torch, or the environment, knows the rank."""
    if late:
        return load_dataset()
    return wait(store)


# The rank that creates groups in another order.
ODD = 5

SCENARIOS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        late_with_listener,
        healthy_with_listeners,
        joins_a_thread,
        awaits_a_future,
        repeats_short_waits,
        polls,
        writes_in_turn,
        only_wrapped,
        healthy_polls,
        groups_in_another_order,
    )
}
STALL_AFTER = float(os.environ.get("TRACEDSTORE_STALL_AFTER", "30"))


def waiting() -> list[Any]:
    """Return the calls in flight."""
    return list(tracedstore.in_flight())


def main() -> None:
    """Run a scenario, and end when it has."""
    scenario, port, rank, world_size = sys.argv[1], *map(int, sys.argv[2:])
    wrapped_only = scenario == "only_wrapped"
    if not wrapped_only:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    tracedstore.configure(log_format="json")
    if not wrapped_only:
        tracedstore.instrument()
    bare = dist.TCPStore(
        "127.0.0.1", port, None, is_master=port == 0, wait_for_workers=False
    )
    report(port=bare.port)
    store = tracedstore.wrap(bare)
    if wrapped_only:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()
    else:
        # All of them register.
        tracedstore.barrier(store, world_size, "start", 600, rank=rank)
    SCENARIOS[scenario](store, late=rank == world_size - 1)
    store.set("go", "")
    if rank == 0:  # it serves the store
        sys.stdin.read()
    tracedstore.shutdown()
    # A listener is in a call: Python would wait for it, or abort.
    os._exit(0)


if __name__ == "__main__":
    main()
