"""Many ranks in one process: a thread and a connection each.

Arguments: the server's port, the world size, the ranks that never come, how many
processes share the world, which of them this is. Every line on standard input is a
barrier: its prefix and its timeout. Reported are what the ranks met with, and how long
after its timeout the slowest of them had it, counted from its call.
"""

import resource
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

import tracedstore
from integration.harness import report

port, world_size = int(sys.argv[1]), int(sys.argv[2])
missing = {int(rank) for rank in sys.argv[3].split(",")}
share, own = int(sys.argv[4]), int(sys.argv[5])

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
tracedstore.configure(log_format="off", spans="off")
ranks = range(own, world_size, share)


def connect(_rank: int) -> tracedstore.TracedStore:
    """Make a rank's own connection."""
    return tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False))


with ThreadPoolExecutor(16) as pool:
    stores = dict(zip(ranks, pool.map(connect, ranks), strict=True))


def meet(prefix: str, timeout: float) -> None:
    """Let all ranks of this process come, and report what they met with."""
    outcomes: Counter[str] = Counter()
    late: list[float] = []
    lock = threading.Lock()

    def visit(rank: int) -> None:
        due = time.monotonic() + timeout
        try:
            tracedstore.barrier(
                stores[rank], world_size, prefix, timeout, rank=rank, warn_after=0.5
            )
            outcome = "completed"
        except tracedstore.BarrierTimeout as error:
            outcome = str(error.missing_ranks)
        late.append(time.monotonic() - due)
        with lock:
            outcomes[outcome] += 1

    coming = [rank for rank in ranks if prefix == "all" or rank not in missing]
    threads = [threading.Thread(target=visit, args=(rank,)) for rank in coming]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(outcomes=outcomes, late=max(late))


report(ready=len(stores))
for line in sys.stdin:
    name, seconds = line.split()
    meet(name, float(seconds))
