"""``tracedstore status`` and ``sd`` with a store that has one of each bad value."""

import json
import os
import subprocess
import sys
from base64 import b64encode
from typing import Any

import pytest
import torch.distributed as dist

from support.hostile_pickles import hostile_pickles
from support.rendezvous import pickled_state
from tracedstore.coordination.arrivals import BarrierKeys, encode_arrival
from tracedstore.coordination.rank_registry import REGISTRY

Store = Any
ENTRY: dict[str, object] = {"host": "node0", "pid": 7, "world_size": 2, "started": 1.0}
BAD_FIELDS: list[dict[str, object]] = [
    {"rank": -1},
    {"rank": 10**15},
    {"world_size": 10**15, "started": 2.0},
    {"world_size": "many"},
    {"metrics": "http://h:99999"},
    {"metrics": "no URL"},
    {"agent": "no pid"},
    {"host": "x" * 10_000},
    {"started": float("nan")},
    {"started": float("inf")},
    {"pid": []},
]
# A TCPStore accepts values of up to 8 MiB.
BAD_ENTRIES = [
    b"",
    b"nonsense",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"9" * 100_000,
    b"x" * 7_000_000,
    *(json.dumps(ENTRY | {"rank": 0} | fields).encode() for fields in BAD_FIELDS),
]
REPORT: dict[str, object] = {
    "arrived_count": 1,
    "unidentified_count": 0,
    "duplicate_ranks": "",
    "uncounted_ranks": "",
    "names": {},
}
BAD_BARRIERS = {
    "count/word": {"num_members": b"abc"},
    "count/huge": {"num_members": b"9" * 400},
    "count/digits": {"num_members": b"9" * 1_000_000},
    "ledger/large": {"ARRIVALS": encode_arrival(0, 1.0) * 600_000},
    "ledger/times": {"ARRIVALS": encode_arrival(0, float("nan"))},
    "ledger/ranks": {"ARRIVALS": encode_arrival(2**31, 1.0)},
}


@pytest.fixture
def hostile_store() -> Store:
    """Serve a TCPStore with a good job and one of each bad value."""
    store: Store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    for rank in (0, 1):
        metrics = {"rank": rank, "metrics": f"http://127.0.0.1:1/{rank}/metrics"}
        store.set(f"{REGISTRY}/{rank}", json.dumps(ENTRY | metrics))
    good = BarrierKeys("checkpoint/7")
    store.append(good.ledger, encode_arrival(0, 1.0))
    store.add(good.num_members, 1)
    store.set("torch.rendezvous.good", b64encode(pickled_state({"node0": 0})))

    for number, entry in enumerate(BAD_ENTRIES, 2):
        store.set(f"{REGISTRY}/{number}", entry)
    for prefix, values in BAD_BARRIERS.items():
        for name, value in ({"num_members": b"1"} | values).items():
            store.set(f"{prefix}/{name}", value)
    reports: dict[str, dict[str, object]] = {
        "ranks": {"unseen_ranks": "0-999999999999"},
        "count": {"unseen_ranks": "1", "arrived_count": 10**15},
    }
    for name, fields in reports.items():
        store.set(f"report/{name}/num_members", "1")
        store.set(f"report/{name}/MISSING", json.dumps(REPORT | fields))
    store.set("last/num_members", "2")
    store.set("last/last_member", "[" * 100_000)
    for name, state in hostile_pickles().items():
        if len(state) < 2_000_000:
            store.set(f"torch.rendezvous.{name}", b64encode(state))
    store.set("torch.rendezvous.good.1/MASTER_ADDR", "not a host")
    store.set("torch.rendezvous.good.1/MASTER_PORT", "99999")
    store.set(f"torch.rendezvous.good.{'9' * 5000}/MASTER_ADDR", "node1")
    store.set(f"torch.rendezvous.good.{'9' * 5000}/MASTER_PORT", "1")
    return store


def run(
    command: str, store: Store, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process; it may use 10 seconds of the processor."""
    before = os.times()
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tracedstore.tools.cli.main",
                command,
            ),
            *("--store", f"tcp://127.0.0.1:{store.port}", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    after = os.times()
    assert after.children_user - before.children_user < 10
    assert "Traceback" not in done.stderr
    return done


def test_status(hostile_store: Store) -> None:
    """The good job is shown, and the bad values are counted or listed."""
    done = run("status", hostile_store)
    lines = [line.strip() for line in done.stdout.splitlines()]

    assert (done.returncode, done.stderr) == (2, "")
    assert "ranks: 2 of 2 registered" in lines
    assert f"{len(BAD_ENTRIES)} registry entries are not valid" in lines
    assert "missing 1 of 2: node0 (rank 1)" in lines
    assert any(line.startswith("checkpoint/7: 1 of 2 arrived") for line in lines)
    assert f"barriers that cannot be read: {len(BAD_BARRIERS)}, the last 4:" in lines
    assert "joined: node0 (pid 100)" in lines
    assert any(line.startswith("worker store: its MASTER_ADDR and") for line in lines)
    assert "rendezvous hashed nested tuples: its state cannot be read" in lines
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_status_as_json(hostile_store: Store) -> None:
    """The JSON has the same, and no NaN."""
    done = run("status", hostile_store, "--json")
    document = json.loads(done.stdout, parse_constant=pytest.fail)

    assert (done.returncode, done.stderr) == (2, "")
    assert document["invalid_entries"] == len(BAD_ENTRIES)
    assert sorted(document["barriers_unreadable"]) == sorted(BAD_BARRIERS)
    assert [info["rank"] for info in document["groups"][0]["ranks"]] == [0, 1]
    barriers = {one["barrier"]: one for one in document["barriers_in_progress"]}
    assert barriers["checkpoint/7"]["missing_ranks"] == [1]
    assert barriers.keys() == {"checkpoint/7", "report/ranks", "report/count"}
    assert {one["run_id"] for one in document["rendezvous"] if one["readable"]} == {
        "good"
    }


def test_sd(hostile_store: Store) -> None:
    """The ranks of the good job are listed, and the bad entries are counted."""
    done = run("sd", hostile_store)

    assert done.returncode == 0
    assert done.stderr == (
        f"tracedstore: {len(BAD_ENTRIES)} registry entries are not valid, and left out"
        " of the list\n"
    )
    ranks = [one["labels"]["rank"] for one in json.loads(done.stdout)]
    assert ranks == ["0", "1"]
