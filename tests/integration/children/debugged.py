"""A rank of a job that runs torch's debug server with our page.

Needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Arguments: the port of the
frontend, and the rank's task: "idle", "wait", "barrier", or "plain" for a rank without
the page. Reports when torch's server runs and the task starts. Ends when standard
input is closed.
"""

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

import tracedstore
from integration.harness import report
from tracedstore.auto import debug_page

KEY = "<script>alert(1)</script>/7"


def block(task: str, rank: int) -> None:
    """Make a call that does not return."""
    port = int(os.environ["MASTER_PORT"])
    store = tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False))
    if task == "wait":
        store.wait([KEY], timedelta(seconds=300))
    elif task == "barrier":
        tracedstore.barrier(
            store,
            int(os.environ["WORLD_SIZE"]),
            "epoch/3",
            300,
            rank=rank,
            warn_after=0.2,
        )


def main() -> None:
    """Run one rank."""
    frontend, task = int(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    tracedstore.configure(log_format="json")
    start_debug_server(
        port=frontend,
        start_method="fork",
        **({} if task == "plain" else debug_page.add()),
    )
    threading.Thread(
        target=block, args=(task, rank), name=f"train-{task}", daemon=True
    ).start()
    report(rank=rank)
    sys.stdin.read()
    if rank == 0:
        stop_debug_server()


if __name__ == "__main__":
    main()
