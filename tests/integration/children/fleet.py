"""Ranks as real processes, forked on demand, that meet at a barrier.

Arguments: the kind of store, and where it is. Each line on standard input starts a
rank, or kills one; each rank reports its process id, and how its barrier went.
"""

import json
import os
import signal
import sys
from typing import Any

import etcd
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.elastic.utils import store as torchs

import tracedstore
from integration.harness import report


def connect(kind: str, where: str) -> Any:
    """Make a rank's own store."""
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", int(where), None, is_master=False)
    if kind == "file":
        return dist.FileStore(where, -1)
    port, prefix = where.split(",")
    return EtcdStore(etcd.Client(host="127.0.0.1", port=int(port)), prefix)


def take_part(command: dict[str, Any]) -> None:
    """Be one rank at one barrier."""
    store = connect(sys.argv[1], sys.argv[2])
    if command["flavour"] == "traced":
        store = tracedstore.wrap(store)
    plain = command["flavour"] == "torch"
    rank, timeout = command["rank"], store.timeout
    facts: dict[str, Any] = {"rank": rank, "prefix": command["prefix"]}
    try:
        (torchs.barrier if plain else tracedstore.barrier)(
            store,
            command["world_size"],
            command["prefix"],
            command["timeout"],
            rank=rank,
            rank_tracing_decoder=(lambda n: f"host{n}") if command["decode"] else None,
            trace_timeout=command["trace_timeout"],
            **({} if plain else {"warn_after": command["warn_after"]}),
        )
        facts |= {"result": "completed"}
    except tracedstore.BarrierTimeout as error:
        facts |= {
            "result": "timeout",
            "missing": error.missing_ranks,
            "names": error.missing_names,
            "arrived": error.arrived_ranks,
            "unidentified": error.unidentified_count,
            "signed_twice": error.signed_twice_ranks,
            "text": str(error),
        }
    except Exception as error:
        facts |= {"result": type(error).__name__, "text": str(error)}
    report(**facts, timeout_kept=plain or store.timeout == timeout)


def main() -> None:
    """Do as told, until nobody tells anything any more."""
    tracedstore.configure(log_format="json")
    report(ready=True)
    for line in sys.stdin:
        given = json.loads(line)
        if "kill" in given:
            os.kill(given["kill"], signal.SIGKILL)
            os.waitpid(given["kill"], 0)
            continue
        pid = os.fork()
        if pid == 0:
            try:
                take_part(given)
            finally:
                os._exit(0)
        report(started=given["rank"], prefix=given["prefix"], pid=pid)


if __name__ == "__main__":
    main()
