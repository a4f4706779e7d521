"""Start a process by spawn, with a store of its own, and try to hand one over.

Argument: the port of a TCPStore's server.
"""

import multiprocessing
import sys
from typing import Any

import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import all_counted, report


def client(port: int) -> tracedstore.TracedStore:
    """A traced connection of its own."""
    return tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False))


def work(port: int, answers: Any) -> None:
    """Use a store that was made here."""
    store = client(port)
    read = store.get("whose").decode()
    store.set("whose", "child's")
    answers.put({"read": read, "counted": all_counted(REGISTRY)})


def main(port: int) -> None:
    """Do both, and report."""
    context = multiprocessing.get_context("spawn")
    store = client(port)
    store.set("whose", "parent's")
    answers = context.Queue()
    child = context.Process(target=work, args=(port, answers))
    child.start()
    try:
        of_child = answers.get(timeout=30)
        child.join(30)
    finally:
        child.kill()
    refusal = ""
    try:
        context.Process(target=work, args=(store, answers)).start()
    except TypeError as error:
        refusal = str(error)
    report(
        child=of_child,
        exit_status=child.exitcode,
        refusal=refusal,
        read=store.get("whose").decode(),
        counted=all_counted(REGISTRY),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
