"""Earlier processes of a rank in the same store."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from torch.distributed import HashStore

import tracedstore
from support.hostile_json import values
from tracedstore.coordination import rank_registry
from tracedstore.core import procfs
from tracedstore.core.identity import ProcessIdentity
from tracedstore.diagnosis.incarnations import (
    Duplicate,
    check_earlier,
    check_replaced,
    read_duplicates,
)

DUPLICATES = "tracedstore/DUPLICATES"
ENTRY = {"rank": 1, "hosts": ["a", "b"], "pids": [7, 9]}
Events = Callable[[], list[dict[str, Any]]]


def register(store: HashStore, pid: int, **fields: Any) -> None:
    """Register a process as rank 1, as it does itself."""
    entry = {
        "rank": 1,
        "host": ProcessIdentity().host,
        "pid": pid,
        "local_rank": None,
        "world_size": 2,
        "run_id": None,
        "metrics": None,
        "answers": None,
        "started": 1.0,
        "attempt": 0,
        "start_ticks": procfs.start_ticks(pid),
        "namespace": procfs.own_namespace(),
    }
    store.set(f"{rank_registry.REGISTRY}/1", json.dumps(entry | fields))


@contextmanager
def process() -> Iterator[int]:
    """Run a process that waits; yield its process id."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        yield child.pid


def stale(events: Events) -> list[dict[str, Any]]:
    """Return the reports of stale keys."""
    return [one for one in events() if one["event"] == "store.stale_keys"]


@pytest.fixture(autouse=True)
def json_events() -> None:
    """Write events as JSON."""
    tracedstore.configure(log_format="json")


def test_no_earlier_process(events: Events) -> None:
    """Neither an empty store nor the own registration is reported."""
    store = HashStore()
    check_earlier(store, 1)
    register(store, os.getpid())
    check_earlier(store, 1)
    assert stale(events) == []
    assert read_duplicates(store) == []


def test_living_process_of_this_attempt_is_a_duplicate(events: Events) -> None:
    """Both processes are recorded."""
    store = HashStore()
    with process() as pid:
        register(store, pid)
        check_earlier(store, 1)
    (duplicate,) = read_duplicates(store)
    assert (duplicate.rank, duplicate.pids) == (1, (pid, os.getpid()))
    assert str(duplicate).startswith("rank 1 was started twice: pid ")
    assert stale(events) == []


def test_processes_that_start_at_the_same_time() -> None:
    """The one whose registration was overwritten finds the other one when it blocks."""
    store = HashStore()
    check_replaced(store, 1)
    register(store, os.getpid())
    check_replaced(store, 1)
    assert read_duplicates(store) == []
    with process() as pid:
        register(store, pid)
        check_replaced(store, 1)
    (duplicate,) = read_duplicates(store)
    assert set(duplicate.pids) == {pid, os.getpid()}


def test_ended_process_left_stale_keys(events: Events) -> None:
    """The event has the process, and what to do."""
    store = HashStore()
    with process() as pid:
        register(store, pid)
    check_earlier(store, 1)
    (event,) = stale(events)
    assert (event["previous_pid"], event["previous_attempt"]) == (pid, 0)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in event["remedy"]
    assert read_duplicates(store) == []


def test_earlier_attempt_left_stale_keys(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while its process lives; the first rank of an attempt reports it."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    store = HashStore()
    with process() as pid:
        register(store, pid, attempt=1)
        check_earlier(store, 1)
        check_earlier(store, 1)
    (event,) = stale(events)
    assert (event["attempt"], event["previous_attempt"]) == (2, 1)
    assert read_duplicates(store) == []


@given(values(ENTRY))
def test_hostile_duplicates(value: bytes) -> None:
    """They raise nothing, and do not hide the valid one."""
    store: Any = HashStore()
    store.set(DUPLICATES, value + b"\n" + json.dumps(ENTRY).encode() + b"\n")
    found = read_duplicates(store)
    assert all(str(one).isprintable() for one in found)
    if len(value) < 10_000:
        assert Duplicate(rank=1, hosts=("a", "b"), pids=(7, 9)) in found
