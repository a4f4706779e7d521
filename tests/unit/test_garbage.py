"""Telemetry leaves no cycles that only garbage collection frees.

Such a cycle keeps what it refers to until a collection runs, which may be in a forked
child. Where that is a process group, its destructor aborts or hangs there.
"""

import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist

import tracedstore
from tracedstore.local.facts import all_stacks, own_facts


class _Kept:
    """A variable of the job."""


@pytest.fixture
def garbage() -> Iterator[Callable[[], list[Any]]]:
    """Return a function for the objects that only garbage collection found."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    before = len(gc.garbage)

    def collect() -> list[Any]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = gc.garbage[before:]
        del gc.garbage[before:]
        return found

    yield collect
    gc.set_debug(0)
    del gc.garbage[before:]
    if enabled:
        gc.enable()


@pytest.mark.parametrize("look", [all_stacks, lambda: own_facts(0)])
def test_stacks_keep_no_frame(
    look: Callable[[], object], garbage: Callable[[], list[Any]]
) -> None:
    """A process that is asked what it does drops the variables of its threads."""

    def job() -> "weakref.ref[_Kept]":
        kept = _Kept()
        look()
        return weakref.ref(kept)

    assert job()() is None
    assert not [found for found in garbage() if isinstance(found, FrameType)]


@pytest.mark.usefixtures("registry")
def test_groups_leave_no_cycle(garbage: Callable[[], list[Any]]) -> None:
    """Groups that were created and destroyed are freed by their last reference."""
    tracedstore.configure(log_format="off")
    tracedstore.instrument()
    try:
        _make_group()  # what is made once
        garbage()
        for _ in range(2):
            _make_group()
        found = [type(one) for one in garbage()]
    finally:
        tracedstore.uninstrument()
    ours = [kind for kind in found if kind.__module__.startswith("tracedstore")]
    assert not ours


def _make_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.init_process_group(
        "gloo",
        f"tcp://127.0.0.1:{port}",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=30),
    )
    dist.destroy_process_group()
