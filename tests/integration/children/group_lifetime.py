"""Process groups created and destroyed in one process, bare or traced.

Reports whether ports, files and keys are freed. Arguments: how to trace ("bare",
"instrument" or "explicit"), and a folder.
"""

import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import tracedstore
from integration.harness import report
from support.etcd import free_port
from support.stores import is_listening

PREFIX = "traced+" if sys.argv[1] == "explicit" else ""
ALONE: Any = {"rank": 0, "world_size": 1}
observations: dict[str, object] = {}


def group_twice_on_one_port(port: int) -> None:
    """Create and destroy a group twice; the second has no keys of the first."""
    for turn in ("first", "second"):
        dist.init_process_group("gloo", f"{PREFIX}env://")
        store = _get_default_store()
        observations[f"{turn}: left over"] = store.check(["key"])
        store.set("key", "value")
        del store
        observations[f"{turn}: during"] = is_listening(port)
        dist.destroy_process_group()
        observations[f"{turn}: after"] = is_listening(port)


def references_after_destroy(port: int) -> None:
    """Keep references to a store and a group after destroy_process_group()."""
    dist.init_process_group("gloo", f"{PREFIX}tcp://127.0.0.1:{port}", **ALONE)
    store, group = _get_default_store(), dist.new_group([0])
    dist.destroy_process_group()
    store.set("key", "value")
    observations["kept store"] = [is_listening(port), store.get("key").decode()]
    del store
    observations["kept group"] = is_listening(port)
    del group
    observations["nothing kept"] = is_listening(port)


def failing_backend(port: int) -> None:
    """Request a backend that fails after the rendezvous.

    A CPU build of torch lacks it; a CUDA build finds no GPU.
    """
    try:
        dist.init_process_group("nccl", f"{PREFIX}tcp://127.0.0.1:{port}", **ALONE)
    except (RuntimeError, ValueError) as error:
        observations["failed"] = str(error)
    observations["after it failed"] = is_listening(port)


def file(path: Path) -> None:
    """Use a file store; the last process that ends removes the file."""
    dist.init_process_group("gloo", f"{PREFIX}file://{path}", **ALONE)
    observations["file during"] = path.exists()
    dist.destroy_process_group()
    observations["file after"] = path.exists()


def store_of_job() -> None:
    """Pass a store that the job created and keeps."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, alive = store.port, weakref.ref(store)
    dist.init_process_group("gloo", store=store, **ALONE)
    dist.destroy_process_group()
    store.set("key", "value")
    observations["given, kept"] = [is_listening(port), store.get("key").decode()]
    del store
    observations["given, dropped"] = [is_listening(port), alive() is None]


if sys.argv[1] == "instrument":
    tracedstore.instrument()
master_port = free_port()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
group_twice_on_one_port(master_port)
references_after_destroy(master_port)
failing_backend(master_port)
file(Path(sys.argv[2]) / "file")
store_of_job()
report(**observations)
