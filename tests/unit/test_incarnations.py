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
from tracedstore.common import procfs
from tracedstore.common.identity import ProcessIdentity
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.observe.incarnations import (
    Replacement,
    check_earlier,
    check_replaced,
    duplicates_in,
    jobs_in,
    launches_in,
    read_replacements,
)

REPLACED = "tracedstore/REPLACED"
INFO = {"rank": 1, "host": "a", "pid": 7, "world_size": 2, "started": 1.0}
ENTRY = {"earlier": INFO, "later": {**INFO, "pid": 9}, "ended": False}
Events = Callable[[], list[dict[str, Any]]]


def register(store: Any, pid: int, **fields: Any) -> None:
    """Register a process as rank 1, as it does itself."""
    entry = {
        "rank": 1,
        "host": ProcessIdentity().host,
        "pid": pid,
        "local_rank": None,
        "world_size": 2,
        "run_id": None,
        "metrics": None,
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


def duplicates(store: HashStore) -> list[str]:
    """Return the ranks that were started twice."""
    return duplicates_in(read_replacements(store))


def test_no_earlier_process(events: Events) -> None:
    """Neither an empty store nor the own registration is reported."""
    store = HashStore()
    check_earlier(store, 1, 2)
    register(store, os.getpid())
    check_earlier(store, 1, 2)
    assert stale(events) == []
    assert read_replacements(store) == []


def test_living_process_of_this_attempt_is_a_duplicate(events: Events) -> None:
    """Both processes are recorded."""
    store = HashStore()
    host, own = ProcessIdentity().host, os.getpid()
    with process() as pid:
        register(store, pid)
        check_earlier(store, 1, 2)
    assert duplicates(store) == [
        f"rank 1 was started twice: pid {pid} on {host}, and pid {own} on {host}"
    ]
    assert stale(events) == []


def test_processes_that_start_at_the_same_time() -> None:
    """The one whose registration was overwritten finds the other one when it blocks."""
    store = HashStore()
    check_replaced(store, 1, 2)
    register(store, os.getpid())
    check_replaced(store, 1, 2)
    assert read_replacements(store) == []
    with process() as pid:
        register(store, pid)
        check_replaced(store, 1, 2)
    (text,) = duplicates(store)
    assert f"pid {pid} on" in text
    assert f"pid {os.getpid()} on" in text


def test_ended_process_left_stale_keys(events: Events) -> None:
    """The event has the process, and what to do."""
    store = HashStore()
    with process() as pid:
        register(store, pid)
    check_earlier(store, 1, 2)
    (event,) = stale(events)
    assert (event["previous_pid"], event["previous_attempt"]) == (pid, 0)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" in event["remedy"]
    assert duplicates(store) == []
    host = ProcessIdentity().host
    assert launches_in(read_replacements(store)) == [
        f"attempt 0 (ended): rank 1, pid {pid} on {host}",
        f"attempt 0: rank 1, pid {os.getpid()} on {host}",
    ]


def test_earlier_process_is_found_by_the_thread_that_registers(events: Events) -> None:
    """Another thread that comes meanwhile does not hide its entry."""
    store = tracedstore.wrap(HashStore())
    with process() as pid:
        register(store, pid)

    def check(connection: Any, rank: int, world_size: int) -> None:
        # The diagnosis, while a group is being created.
        rank_registry.register(store, rank, world_size, check=check_earlier)
        check_earlier(connection, rank, world_size)

    rank_registry.register(store, 1, 2, check=check)

    (event,) = stale(events)
    assert event["previous_pid"] == pid
    assert rank_registry.read_ranks(store, [1])[1].pid == os.getpid()


def test_rank_registers_although_the_check_fails() -> None:
    """What cannot be checked is registered nevertheless."""
    store = tracedstore.wrap(HashStore())

    def fail(_store: Any, _rank: int, _world_size: int) -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        rank_registry.register(store, 1, 2, check=fail)

    assert rank_registry.read_ranks(store, [1])[1].pid == os.getpid()


def test_earlier_attempt_left_stale_keys(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while its process lives; the first rank of an attempt reports it."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    store = HashStore()
    with process() as pid:
        register(store, pid, attempt=1)
        check_earlier(store, 1, 2)
        check_earlier(store, 1, 2)
    (event,) = stale(events)
    assert (event["attempt"], event["previous_attempt"]) == (2, 1)
    assert duplicates(store) == []


def test_living_process_of_another_run(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs share the store, for as long as both run."""
    monkeypatch.setenv("TRACEDSTORE_RUN_ID", "b")
    store = HashStore()
    host = ProcessIdentity().host
    with process() as pid:
        register(store, pid, run_id="a")
        check_earlier(store, 1, 2)
        assert jobs_in(read_replacements(store), "b") == [
            f"run 'a': rank 1, pid {pid} on {host}",
            f"run 'b': rank 1, pid {os.getpid()} on {host}",
        ]
        assert jobs_in(read_replacements(store), "c") == []
    (event,) = stale(events)
    assert "two jobs share this store; this is run 'b'" in event["message"]
    assert (event["previous_run_id"], event["previous_pid"]) == ("a", pid)
    assert duplicates(store) == []
    assert jobs_in(read_replacements(store), "b") == []


def test_ended_process_of_another_run(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are reported, and no second job."""
    monkeypatch.setenv("TRACEDSTORE_RUN_ID", "b")
    store = HashStore()
    with process() as pid:
        register(store, pid, run_id="a")
    check_earlier(store, 1, 2)
    (event,) = stale(events)
    assert "two jobs" not in event["message"]
    assert jobs_in(read_replacements(store), "b") == []


def test_latest_replacements_are_kept() -> None:
    """Their number is bounded, whatever the number of ranks and restarts."""
    store = HashStore()
    for pid in range(1, 200):
        register(store, pid, host="elsewhere", attempt=pid)
        check_earlier(store, 1, 2)
    found = read_replacements(store)
    assert sorted(one.earlier.pid for one in found) == list(range(136, 200))


@given(values(ENTRY))
def test_hostile_replacement(value: bytes) -> None:
    """It raises nothing, and does not hide the valid one."""
    store: Any = HashStore()
    store.set(REPLACED, "2")
    store.set(f"{REPLACED}/0", value)
    store.set(f"{REPLACED}/1", json.dumps(ENTRY))
    found = read_replacements(store)
    texts = [*duplicates_in(found), *jobs_in(found, None), *launches_in(found)]
    assert all(text.isprintable() for text in texts)
    assert Replacement.from_bytes(json.dumps(ENTRY).encode()) in found
