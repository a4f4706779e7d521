"""Spawn a process that creates a store, and try to pass a store to another one.

Argument: the port of a TCPStore's server.
"""

import multiprocessing
import sys
from typing import Any

import torch.distributed as dist
from prometheus_client import REGISTRY

import tracedstore
from integration.harness import operation_counts, report


def client(port: int) -> tracedstore.TracedStore:
    """Return a new traced connection."""
    return tracedstore.wrap(dist.TCPStore("127.0.0.1", port, None, is_master=False))


def work(port: int, results: Any) -> None:
    """Use a store that is created in this process."""
    store = client(port)
    read = store.get("writer").decode()
    store.set("writer", "child")
    results.put({"read": read, "counted": operation_counts(REGISTRY)})


def main(port: int) -> None:
    """Spawn both processes, and report."""
    context = multiprocessing.get_context("spawn")
    store = client(port)
    store.set("writer", "parent")
    results = context.Queue()
    child = context.Process(target=work, args=(port, results))
    child.start()
    try:
        child_report = results.get(timeout=60)
        child.join(60)
    finally:
        child.kill()
    pickle_error = ""
    try:
        context.Process(target=work, args=(store, results)).start()
    except TypeError as error:
        pickle_error = str(error)
    report(
        child=child_report,
        exit_status=child.exitcode,
        pickle_error=pickle_error,
        read=store.get("writer").decode(),
        counted=operation_counts(REGISTRY),
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
