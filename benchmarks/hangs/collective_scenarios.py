"""Hangs in collectives of gloo, each as what its ranks do.

`hangs.scenarios` has the waits in the store, and `Hang`. The last rank is the victim,
unless a case has others.
"""

import ctypes
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hangs.hang import Hang
from hangs.scenarios import Scenario

_STEPS = 3
# Collectives in the background, and seconds of a step in a healthy job, as a share of
# the timeout: three times `stall_after` is three quarters.
_IN_FLIGHT, _LONG = 8, 0.75


def _tensor() -> torch.Tensor:
    return torch.ones(64)


def _begin(hang: Hang) -> None:
    """Join the job, and make some steps."""
    torch.set_num_threads(1)
    hang.init()
    for _ in range(_STEPS):
        dist.all_reduce(_tensor())
        dist.broadcast(_tensor(), src=0)


def _late_to(hang: Hang, call: Callable[[Hang], object]) -> None:
    _begin(hang)
    hang.here()
    call(hang)


def barrier(hang: Hang) -> None:
    """A rank does not come to a barrier."""
    _late_to(hang, lambda _: dist.barrier())


def all_reduce(hang: Hang) -> None:
    """A rank does not come to an all_reduce."""
    _late_to(hang, lambda _: dist.all_reduce(_tensor()))


def broadcast(hang: Hang) -> None:
    """The source of a broadcast does not come."""
    _late_to(hang, lambda hang: dist.broadcast(_tensor(), src=hang.victims[0]))


def reduce_scatter(hang: Hang) -> None:
    """A rank does not come to a reduce_scatter."""

    def call(hang: Hang) -> None:
        parts = [_tensor() for _ in range(hang.world_size)]
        dist.reduce_scatter(_tensor(), parts)

    _late_to(hang, call)


def all_gather_object(hang: Hang) -> None:
    """A rank does not come to an exchange of objects."""
    _late_to(
        hang,
        lambda hang: dist.all_gather_object([None] * hang.world_size, hang.rank),
    )


def broadcast_object_list(hang: Hang) -> None:
    """The source of a broadcast of objects does not come."""
    _late_to(
        hang,
        lambda hang: dist.broadcast_object_list([hang.rank], src=hang.victims[0]),
    )


def asynchronous(hang: Hang) -> None:
    """A rank does not come to what the others have started in the background."""

    def call(_hang: Hang) -> None:
        work = dist.all_reduce(_tensor(), async_op=True)
        if work is not None:
            work.wait()

    _late_to(hang, call)


def monitored_barrier(hang: Hang) -> None:
    """A rank does not come to a barrier that is not recorded."""
    _late_to(
        hang,
        lambda hang: dist.monitored_barrier(timeout=timedelta(seconds=hang.timeout)),
    )


def ddp_constructor(hang: Hang) -> None:
    """A rank does not come to the constructor of DistributedDataParallel."""
    _begin(hang)
    # What it imports when it is used first takes seconds on a busy machine.
    DistributedDataParallel(torch.nn.Linear(3, 3))
    hang.here()
    DistributedDataParallel(torch.nn.Linear(3, 3))


def fsdp_forward(hang: Hang) -> None:
    """A rank does not come to the forward of a sharded module."""
    _begin(hang)
    mesh = dist.init_device_mesh("cpu", (hang.world_size,))
    # Else a module that is no part of another one keeps its parameters.
    module: Any = fully_shard(
        torch.nn.Linear(16, 16), mesh=mesh, reshard_after_forward=True
    )
    module(torch.ones(2, 16))
    hang.here()
    module(torch.ones(2, 16))


def checkpoint_in_thread(hang: Hang) -> None:
    """A rank does not come to an asynchronous checkpoint, which a thread writes."""
    _checkpoint(hang, AsyncCheckpointerType.THREAD)


def checkpoint_in_process(hang: Hang) -> None:
    """The same; a process writes it, which the ranks start together."""
    # The ranks are children of a pool, whose children may have none.
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # noqa: SLF001 - has no public name
    try:
        _checkpoint(hang, AsyncCheckpointerType.PROCESS)
    finally:
        for child in multiprocessing.active_children():
            child.kill()


def _checkpoint(hang: Hang, kind: AsyncCheckpointerType) -> None:
    _begin(hang)
    hang.here()
    saved: Any = dcp.async_save(
        {"weight": _tensor()},
        checkpoint_id=hang.file.parent / "checkpoint",
        async_checkpointer_type=kind,
    )
    done: Future[Any] = getattr(saved, "upload_completion", saved)
    done.result()


def recv_without_send(hang: Hang) -> None:
    """Rank 0 receives what the victim does not send; the others wait for rank 0."""
    _begin(hang)
    hang.here()
    if hang.rank == 0:
        dist.recv(_tensor(), src=hang.victims[0])
    dist.barrier()


def send_without_recv(hang: Hang) -> None:
    """Rank 0 sends what the victim does not receive; the others wait for rank 0."""
    _begin(hang)
    hang.here()
    if hang.rank == 0:
        # gloo buffers what is small.
        dist.send(torch.ones(1 << 22), dst=hang.victims[0])
    dist.barrier()


def busy_with_gil(hang: Hang) -> None:
    """A rank is in C code that holds the GIL."""
    _begin(hang)
    if hang.rank in hang.victims:
        hang.reached()
        load_with_gil(hang)
    dist.all_reduce(_tensor())


def load_with_gil(hang: Hang) -> None:
    """Sleep in C, as an extension does that does not release the GIL."""
    ctypes.PyDLL(None).sleep(int(3 * hang.timeout))


def skips_one(hang: Hang) -> None:
    """A rank skips one collective of a step, and calls the next one."""
    _begin(hang)
    if hang.rank in hang.victims:
        hang.reached()
    else:
        dist.all_reduce(_tensor())
    dist.broadcast(_tensor(), src=0)
    dist.barrier()


def another_collective(hang: Hang) -> None:
    """A rank calls another collective than the others."""
    _begin(hang)
    if hang.rank in hang.victims:
        hang.reached()
        dist.barrier()
    dist.all_reduce(_tensor())


def another_order(hang: Hang) -> None:
    """Two ranks use two groups in another order; the others wait for them."""
    _begin(hang)
    first, last = hang.victims
    groups = [dist.new_group([first, last]) for _ in range(2)]
    if hang.rank in hang.victims:
        hang.reached()
        for group in groups[:: 1 if hang.rank == first else -1]:
            dist.all_reduce(_tensor(), group=group)
    dist.barrier()


def creates_a_group(hang: Hang) -> None:
    """A rank is in new_group while the others are in an all_reduce."""
    _begin(hang)
    if hang.rank in hang.victims:
        hang.reached()
        dist.new_group(
            list(range(hang.world_size)), timeout=timedelta(seconds=hang.timeout)
        )
    dist.all_reduce(_tensor())


def killed(hang: Hang) -> None:
    """A rank is killed: gloo notices that at once, and nothing hangs."""
    all_reduce(hang)


def uneven_steps(hang: Hang) -> None:
    """Nothing hangs: ranks with larger numbers take longer for each step."""
    _begin(hang)
    for _ in range(_STEPS):
        time.sleep(hang.timeout / 8 * hang.rank / hang.world_size)
        dist.all_reduce(_tensor())


def long_steps(hang: Hang) -> None:
    """Nothing hangs: all ranks compute for three times `stall_after`."""
    _begin(hang)
    time.sleep(_LONG * hang.timeout)
    dist.all_reduce(_tensor())


def in_flight(hang: Hang) -> None:
    """Nothing hangs: collectives are in the background while all ranks compute."""
    _begin(hang)
    works = [dist.all_reduce(_tensor(), async_op=True) for _ in range(_IN_FLIGHT)]
    time.sleep(_LONG * hang.timeout)
    for work in works:
        if work is not None:
            work.wait()


def _scenario(run: Callable[[Hang], None], **fields: Any) -> Scenario:
    fields = {"kinds": ("busy",), "stores": ("server",), "max_victims": 1, **fields}
    return Scenario(run=run, **fields)


COLLECTIVES = {
    scenario.name: scenario
    for scenario in (
        _scenario(barrier),
        _scenario(all_reduce, kinds=("busy", "stopped")),
        _scenario(broadcast),
        _scenario(reduce_scatter),
        _scenario(all_gather_object),
        _scenario(broadcast_object_list),
        _scenario(asynchronous),
        _scenario(monitored_barrier),
        _scenario(ddp_constructor),
        _scenario(fsdp_forward),
        _scenario(checkpoint_in_thread),
        _scenario(checkpoint_in_process),
        _scenario(recv_without_send),
        _scenario(send_without_recv),
        # It cannot answer, so that what it does is not known.
        _scenario(busy_with_gil, causes=("busy", "unknown")),
        _scenario(skips_one, causes=("mismatch",), min_world_size=3),
        _scenario(another_collective, causes=("mismatch",), min_world_size=3),
        _scenario(another_order, causes=("diverged",), max_victims=2, min_world_size=3),
        _scenario(creates_a_group, causes=("diverged",), min_world_size=3),
        _scenario(killed, kinds=("gone",), harmless=True),
        *(
            _scenario(run, max_victims=0, harmless=True)
            for run in (uneven_steps, long_steps, in_flight)
        ),
    )
}
