"""Every way in which torch comes to a store by itself, one after the other.

Arguments: a folder, and whether to instrument before torch is imported, or after it
and after the job took what it needs by name.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tracedstore

if sys.argv[2] == "before":
    assert "torch" not in sys.modules
    tracedstore.instrument()

import torch.distributed as dist
from prometheus_client import REGISTRY
from torch.distributed import destroy_process_group, init_process_group

if sys.argv[2] == "after":
    tracedstore.instrument()

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils import store as store_util
from torch.distributed.elastic.utils.distributed import create_c10d_store

from integration.harness import all_counted, report
from support.etcd import free_port

found: dict[str, dict[str, float]] = {}


@contextmanager
def seen(path: str) -> Iterator[None]:
    """Note what is counted meanwhile."""
    before = all_counted(REGISTRY)
    yield
    found[path] = {
        name: count - before.get(name, 0)
        for name, count in all_counted(REGISTRY).items()
        if count != before.get(name, 0)
    }


def group(**how: object) -> None:
    """Make a group of one by name, and use its store."""
    init_process_group("gloo", **how)  # type: ignore[arg-type]
    dist.distributed_c10d._get_default_store().set("key", "value")
    destroy_process_group()


def agents(backend: str, **configs: Any) -> Callable[[], None]:
    """Meet as torchrun's agents do, and use what they give their workers."""

    def meet() -> None:
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend, f"localhost:{free_port()}", "run", 1, 1, **configs
            )
        )
        handler.next_rendezvous().store.set("key", "value")
        served = getattr(handler, "_shared_tcp_store_server", None)
        if served is not None:
            assert served.port > 0
            served.set("for workers", "value")
        handler.shutdown()

    return meet


def barriers() -> None:
    """Come to torch's own barrier, as its callers do."""
    store_util.barrier(dist.HashStore(), 1, "by/module")
    create_c10d_store(True, "127.0.0.1", free_port(), 1)


def barriers_counted() -> dict[str, float]:
    """How many barriers were completed, by their family."""
    return {
        sample.labels["barrier"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "tracedstore_barrier_duration_seconds_count" and sample.value
    }


def main(folder: Path) -> None:
    """Go all ways."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    given = dist.HashStore()
    alone = {"rank": 0, "world_size": 1}
    ways: dict[str, Callable[[], None]] = {
        "env": group,
        "tcp": lambda: group(init_method=f"tcp://127.0.0.1:{free_port()}", **alone),
        "file": lambda: group(init_method=f"file://{folder / 'file'}", **alone),
        "store": lambda: group(store=given, **alone),
        "c10d": agents("c10d"),
        "static": agents("static", rank=0, timeout=10),
    }
    for path, go in ways.items():
        with seen(path):
            go()
    barriers()
    report(
        found=found,
        barriers=barriers_counted(),
        given=[type(given).__name__, given.get("0//key").decode()],
    )


main(Path(sys.argv[1]))
