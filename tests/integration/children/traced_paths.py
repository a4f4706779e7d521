"""Every path on which torch creates a store itself, one after the other.

Arguments: a folder; "before" to call instrument() before torch is imported, or "after"
to call it after the job has imported torch's functions by name.
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

from integration.harness import operation_counts, report
from support.etcd import free_port

counts_by_path: dict[str, dict[str, float]] = {}


@contextmanager
def recorded(path: str) -> Iterator[None]:
    """Record the calls that are counted inside the block."""
    before = operation_counts(REGISTRY)
    yield
    counts_by_path[path] = {
        name: count - before.get(name, 0)
        for name, count in operation_counts(REGISTRY).items()
        if count != before.get(name, 0)
    }


def group(**options: object) -> None:
    """Create a group of one through the imported function, and use its store."""
    init_process_group("gloo", **options)  # type: ignore[arg-type]
    dist.distributed_c10d._get_default_store().set("key", "value")
    destroy_process_group()


def agents(backend: str, **configs: Any) -> Callable[[], None]:
    """Return a rendezvous like torchrun's agents, which uses their workers' store."""

    def rendezvous() -> None:
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend, f"localhost:{free_port()}", "run", 1, 1, **configs
            )
        )
        handler.next_rendezvous().store.set("key", "value")
        shared_store = getattr(handler, "_shared_tcp_store_server", None)
        if shared_store is not None:
            assert shared_store.port > 0
            shared_store.set("for workers", "value")
        handler.shutdown()

    return rendezvous


def barriers() -> None:
    """Call torch's barrier as its callers do."""
    store_util.barrier(dist.HashStore(), 1, "by/module")
    create_c10d_store(True, "127.0.0.1", free_port(), 1)


def barrier_counts() -> dict[str, float]:
    """Return the number of barriers by family."""
    return {
        sample.labels["barrier"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "tracedstore_barrier_duration_seconds_count" and sample.value
    }


def main(folder: Path) -> None:
    """Run all paths, and report the counted calls."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    job_store = dist.HashStore()
    alone = {"rank": 0, "world_size": 1}
    paths: dict[str, Callable[[], None]] = {
        "env": group,
        "tcp": lambda: group(init_method=f"tcp://127.0.0.1:{free_port()}", **alone),
        "file": lambda: group(init_method=f"file://{folder / 'file'}", **alone),
        "store": lambda: group(store=job_store, **alone),
        "c10d": agents("c10d"),
        "static": agents("static", rank=0, timeout=10),
    }
    for path, run in paths.items():
        with recorded(path):
            run()
    barriers()
    report(
        found=counts_by_path,
        barriers=barrier_counts(),
        given=[type(job_store).__name__, job_store.get("0//key").decode()],
    )


main(Path(sys.argv[1]))
