"""Registry entries that are not valid are counted, not only skipped."""

import argparse
import json
from dataclasses import replace

import pytest
import torch.distributed as dist

import tracedstore
from support.events import Events
from support.hostile_json import ENTRY
from tracedstore import names
from tracedstore.coordination import rank_registry
from tracedstore.coordination.rank_registry import REGISTRY, RankInfo, parse_entry
from tracedstore.export.discovery import targets
from tracedstore.recording.recorder import RECORDER
from tracedstore.tools.attach import job_reading
from tracedstore.tools.cli import sd

INFO = parse_entry(json.dumps(ENTRY).encode())


class Reachable:
    """An address whose store answers."""

    def __init__(self, url: str) -> None:
        self.url = url

    def probe(self) -> None:
        """Find nothing wrong."""


def test_watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``sd --watch`` reports the number again only when it has changed."""
    assert INFO is not None
    counts = iter([2, 2, 1, 0, 1])

    def registered(_address: object) -> tuple[list[RankInfo], int]:
        count = next(counts, None)
        if count is None:
            raise KeyboardInterrupt
        return [INFO], count

    monkeypatch.setattr(sd, "store_address", Reachable)
    monkeypatch.setattr(job_reading, "registered_ranks", registered)
    arguments = argparse.Namespace(
        store="tcp://h:1", run_id=None, output=None, watch=True, interval=0.0
    )

    with pytest.raises(KeyboardInterrupt):
        sd.run(arguments)

    output = capsys.readouterr()
    assert len(json.loads(output.out)) == 1
    assert output.err.splitlines() == [
        "tracedstore: 2 registry entries are not valid, and left out of the list",
        "tracedstore: 1 registry entry is not valid, and left out of the list",
        "tracedstore: 1 registry entry is not valid, and left out of the list",
    ]


def test_page(events: Events) -> None:
    """/sd counts each reading with invalid entries, and logs the first."""
    tracedstore.configure(log_format="json")
    store = dist.HashStore()
    tracedstore.barrier(store, 1, "b", rank=0)
    store.set(f"{REGISTRY}/0", "nonsense")

    assert targets() == []
    assert targets() == []

    assert RECORDER.failures.counts() == {names.ENDPOINT: 2}
    (event,) = [one for one in events() if one["event"] == names.TELEMETRY_DISABLED]
    assert event["observer"] == names.ENDPOINT
    assert event["error"].startswith("1 registry entry is not valid, and left out")


def register(store: dist.Store, rank: int, world_size: int, port: int) -> None:
    """Write the entry of another process."""
    entry = {
        **ENTRY,
        "rank": rank,
        "world_size": world_size,
        "metrics": f"http://h:{port}/metrics",
    }
    store.set(f"{REGISTRY}/{rank}", json.dumps(entry))


def test_ranks_of_two_stores() -> None:
    """Ranks with the same number are two targets; a process in both stores is one."""
    tracedstore.configure(log_format="off")
    world, others = dist.HashStore(), dist.HashStore()
    # Own entries, so that the stores are read.
    tracedstore.barrier(world, 1, "b", rank=0)
    tracedstore.barrier(others, 1, "b", rank=0)
    for rank in range(3):
        register(world, rank, 3, 27400 + rank)
    register(others, 0, 2, 27402)
    register(others, 1, 2, 27409)
    for store in (world, others):
        known = rank_registry._registered.setdefault(store, {})
        known[0] = replace(known[0], world_size=3)

    found = [(one["targets"][0], one["labels"]["rank"]) for one in targets()]

    assert found == [
        ("h:27400", "0"),
        ("h:27401", "1"),
        ("h:27409", "1"),
        ("h:27402", "2"),
    ]
