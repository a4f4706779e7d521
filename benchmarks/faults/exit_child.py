"""A process that ends while threads are in Store calls."""

import argparse
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Threads that wait for longer than the process lives, that wait again and again, and
# that read.
WORK = ("wait", "waits", "get")
# The exit code for a forked child that was ended by a signal.
ABORTED = 70
_LONG, _SHORT = timedelta(seconds=30), timedelta(milliseconds=200)
# Ranks of the barrier, those that do not arrive, and its timeout.
_RANKS, _MISSING, _TIMEOUT = 100, 3, 1.0

# The store of a process that keeps it in a global.
kept: Any = None


def main() -> None:
    """Start threads, wait for a moment and return."""
    global kept  # noqa: PLW0603 - modules free globals at another time than locals
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("work")
    parser.add_argument("place", choices=("local", "global"))
    parser.add_argument("start", choices=("fresh", "forked"))
    parser.add_argument("delay", type=float)
    options = parser.parse_args()
    if options.start == "forked" and (pid := os.fork()):
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(ABORTED if code < 0 else code)
    store = _store(options.base)
    if options.place == "global":
        kept = store
    if options.work == "barrier":
        _barriers(store, traced=options.base != "bare")
        return
    begun = threading.Barrier(4)
    for number in range(3):
        threading.Thread(
            target=_call, args=(store, options.work, number, begun), daemon=True
        ).start()
    begun.wait()
    # Not to synchronise: the process ends at any step of their calls.
    time.sleep(options.delay)


def _store(base: str) -> Any:
    store = dist.TCPStore(
        "127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=_LONG
    )
    if base == "bare":
        return store
    import tracedstore  # noqa: PLC0415 - a bare process does not import it

    tracedstore.configure(core=base, log_format="off")
    return tracedstore.wrap(store)


def _call(store: Any, work: str, number: int, begun: threading.Barrier) -> None:
    # A connection of a TCPStore makes one call at a time.
    own = store.clone()
    own.set(f"key{number}", "value")
    begun.wait()
    while True:
        if work == "get":
            own.get(f"key{number}")
        else:
            with suppress(dist.DistStoreError):
                own.wait([f"absent{number}"], _LONG if work == "wait" else _SHORT)


def _barriers(store: Any, *, traced: bool) -> None:
    """Let a hundred ranks be threads of this process, without three of them."""
    from torch.distributed.elastic.utils import store as torch_store  # noqa: PLC0415

    call: Any = torch_store.barrier
    if traced:
        import tracedstore  # noqa: PLC0415

        call = tracedstore.barrier

    def arrive(rank: int) -> None:
        with suppress(dist.DistError):
            call(
                *(store.clone(), _RANKS, "barrier"),
                barrier_timeout=_TIMEOUT,
                rank=rank,
                trace_timeout=_TIMEOUT,
            )
        ended.release()

    ended = threading.Semaphore(0)
    for rank in range(_RANKS - _MISSING):
        threading.Thread(target=arrive, args=(rank,), daemon=True).start()
    # The process ends while the others still read who is missing.
    ended.acquire()


if __name__ == "__main__":
    main()
