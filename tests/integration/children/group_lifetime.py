"""Process groups that come and go in one process, bare or traced, and their ports.

Arguments: how to trace (bare, instrument, explicit), and a folder.
"""

import os
import socket
import sys
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import tracedstore
from integration.harness import report
from support.etcd import free_port

PREFIX = "traced+" if sys.argv[1] == "explicit" else ""
ALONE: Any = {"rank": 0, "world_size": 1}
found: dict[str, object] = {}


def taken(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def again_at_one_port(port: int) -> None:
    """Make a group, destroy it, make it anew: nothing is left of the first."""
    for turn in ("first", "second"):
        dist.init_process_group("gloo", f"{PREFIX}env://")
        store = _get_default_store()
        found[f"{turn}: left over"] = store.check(["key"])
        store.set("key", "value")
        del store
        found[f"{turn}: during"] = taken(port)
        dist.destroy_process_group()
        found[f"{turn}: after"] = taken(port)


def what_is_kept_works_on(port: int) -> None:
    """A store, and a group, that the job keeps beyond the end."""
    dist.init_process_group("gloo", f"{PREFIX}tcp://127.0.0.1:{port}", **ALONE)
    store, group = _get_default_store(), dist.new_group([0])
    dist.destroy_process_group()
    store.set("key", "value")
    found["kept store"] = [taken(port), store.get("key").decode()]
    del store
    found["kept group"] = taken(port)
    del group
    found["nothing kept"] = taken(port)


def that_fails(port: int) -> None:
    """A backend that this torch does not have is noticed after the rendezvous."""
    try:
        dist.init_process_group("nccl", f"{PREFIX}tcp://127.0.0.1:{port}", **ALONE)
    except RuntimeError as error:
        found["failed"] = str(error)
    found["after it failed"] = taken(port)


def file(path: Path) -> None:
    """The last one to leave removes the file."""
    dist.init_process_group("gloo", f"{PREFIX}file://{path}", **ALONE)
    found["file during"] = path.exists()
    dist.destroy_process_group()
    found["file after"] = path.exists()


def given() -> None:
    """A store that the job made is the job's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, alive = store.port, weakref.ref(store)
    dist.init_process_group("gloo", store=store, **ALONE)
    dist.destroy_process_group()
    store.set("key", "value")
    found["given, kept"] = [taken(port), store.get("key").decode()]
    del store
    found["given, dropped"] = [taken(port), alive() is None]


if sys.argv[1] == "instrument":
    tracedstore.instrument()
own = free_port()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own)}
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
again_at_one_port(own)
what_is_kept_works_on(own)
that_fails(own)
file(Path(sys.argv[2]) / "file")
given()
report(**found)
