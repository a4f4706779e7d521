"""Why the missing ranks of a barrier do not arrive, on a HashStore."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from torch.distributed import HashStore

from tracedstore.common import procfs
from tracedstore.coordination import rank_registry
from tracedstore.diagnosis.judgement.inquiry import find_causes
from tracedstore.diagnosis.observe.blocked_record import BlockedRecord, publish_blocked

WORLD_SIZE = 6


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until the end of the test."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process


def register(store: HashStore, rank: int, process: subprocess.Popen[bytes]) -> None:
    """Register a process as a rank of attempt 1."""
    info = replace(
        rank_registry.own_entry(rank, WORLD_SIZE),
        pid=process.pid,
        start_ticks=procfs.start_ticks(process.pid),
        attempt=1,
    )
    store.set(f"tracedstore/RANKS/{rank}", json.dumps(asdict(info)))


def publish(
    store: HashStore, rank: int, pid: int, attempt: int, failed: float | None = None
) -> None:
    """Publish that a rank waits for rank 5."""
    record = BlockedRecord(
        rank=rank,
        host="node",
        pid=pid,
        attempt=attempt,
        operation="get",
        keys=("other",),
        phase="key other",
        awaits=(5,),
        started=time.time(),
        failed=failed,
    )
    publish_blocked(store, record, first=True)


def test_causes(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a process that was killed, or of an earlier attempt, is over."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    store = HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    register(store, 1, ended)
    ended.wait(240)
    for rank in (2, 3, 4):
        register(store, rank, process)
    publish(store, 1, ended.pid, attempt=1)
    publish(store, 2, process.pid, attempt=1)
    publish(store, 3, process.pid, attempt=0)
    publish(store, 4, ended.pid, attempt=1)

    found = find_causes(store, (1, 2, 3, 4, 5), WORLD_SIZE)

    causes = {rank: finding.cause for rank, finding in found.items()}
    assert causes == {
        1: "gone",
        2: "diverged",
        3: "busy",
        4: "busy",
        5: "not_started",
    }
    assert found[1].evidence == "its state from /proc of its host"
    assert found[2] == (
        "diverged",
        "waits in key other, for rank 5",
        "its blocked call",
    )
    assert found[5] == (
        "not_started",
        "",
        "it has not registered, and no process answers for it",
    )


@pytest.mark.parametrize(
    ("seconds", "cause"), [(20.0, "diverged"), (600.0, "gone")], ids=["now", "earlier"]
)
def test_rank_that_ended_because_its_call_failed(seconds: float, cause: str) -> None:
    """What it waited for is why it is missing."""
    store = HashStore()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    info = replace(
        rank_registry.own_entry(1, WORLD_SIZE),
        pid=ended.pid,
        start_ticks=procfs.start_ticks(ended.pid),
    )
    store.set("tracedstore/RANKS/1", json.dumps(asdict(info)))
    ended.wait(240)
    publish(store, 1, ended.pid, attempt=0, failed=time.time() - seconds)

    found = find_causes(store, (1,), WORLD_SIZE)

    assert found[1].cause == cause
    assert ("until its call failed" in found[1].doing) is (cause == "diverged")
