"""Many ranks in one process, each with a thread and a connection.

Arguments: the server's port, the world size, the ranks that never arrive, the number
of processes that share the ranks, the index of this process. Every line on standard
input is a barrier: its key prefix and its timeout. Reports the outcomes of the ranks,
and how many seconds after its timeout the slowest call ended.
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
process_count, process_index = int(sys.argv[4]), int(sys.argv[5])

_, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
tracedstore.configure(log_format="off", spans="off")
ranks = range(process_index, world_size, process_count)


def connect(_rank: int) -> tracedstore.TracedStore:
    """Return a new connection for a rank."""
    return tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False))


with ThreadPoolExecutor(16) as pool:
    stores = dict(zip(ranks, pool.map(connect, ranks), strict=True))


def run_barrier(prefix: str, timeout: float) -> None:
    """Call the barrier from all ranks of this process, and report the outcomes."""
    outcomes: Counter[str] = Counter()
    lateness: list[float] = []
    lock = threading.Lock()

    def call(rank: int) -> None:
        due = time.monotonic() + timeout
        try:
            tracedstore.barrier(
                stores[rank], world_size, prefix, timeout, rank=rank, warn_after=0.5
            )
            outcome = "completed"
        except tracedstore.BarrierTimeout as error:
            outcome = str(error.missing_ranks)
        lateness.append(time.monotonic() - due)
        with lock:
            outcomes[outcome] += 1

    present = [rank for rank in ranks if prefix == "all" or rank not in missing]
    threads = [threading.Thread(target=call, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(outcomes=outcomes, late=max(lateness))


report(ready=len(stores))
for line in sys.stdin:
    name, seconds = line.split()
    run_barrier(name, float(seconds))
