"""Registry entries that are not valid are counted, not only skipped."""

import argparse
import json

import pytest
import torch.distributed as dist

import tracedstore
from support.events import Events
from support.hostile_json import ENTRY
from tracedstore import names
from tracedstore.attach import job_discovery
from tracedstore.attach.job_discovery import RegisteredRanks
from tracedstore.cli import sd
from tracedstore.coordination.rank_registry import REGISTRY, parse_entry
from tracedstore.core.recorder import RECORDER
from tracedstore.export.discovery import targets

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

    def registered(_address: object) -> RegisteredRanks:
        count = next(counts, None)
        if count is None:
            raise KeyboardInterrupt
        return RegisteredRanks(infos=[INFO], invalid_count=count)

    monkeypatch.setattr(sd, "store_address", Reachable)
    monkeypatch.setattr(job_discovery, "registered_ranks", registered)
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
