"""Values in a shared store that an agent reads when it starts."""

import json
import time
from base64 import b64encode
from typing import Any

import pytest
from torch.distributed import HashStore

from support.rendezvous import pickled_state
from tracedstore.coordination import store_access
from tracedstore.rendezvous import server_checks
from tracedstore.rendezvous.server_checks import INDEX, find_other_runs

OWN = "torch.rendezvous.own"


def test_long_index_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the index is parsed, and two megabytes of states at most."""
    store: Any = HashStore()
    keys = [f"torch.rendezvous.run{number}" for number in range(16)]
    entries = "".join(f"{json.dumps(key)}\n" for key in keys)
    store.set(INDEX, '"x"\n' * 1_000_000 + entries)
    for key in keys[:-1]:
        store.set(key, b64encode(b"x" * 700_000))
    store.set(keys[-1], "x" * 2_000_000)
    lines: list[int] = []
    states: list[int] = []
    read_index = server_checks._read_index

    def read(value: bytes) -> Any:
        lines.append(len(value))
        return read_index(value)

    def parse(value: bytes) -> None:
        states.append(len(value))

    monkeypatch.setattr(server_checks, "_read_index", read)
    monkeypatch.setattr(server_checks, "parse_state", parse)

    assert find_other_runs(store, OWN, is_first=False, now=1.0) == []
    assert sum(lines) <= 128 * 1024
    assert 0 < sum(states) <= 2 << 20


def test_run_is_found() -> None:
    """A valid state of a run that is alive."""
    store: Any = HashStore()
    store.set(INDEX, f'"{OWN}"\n"torch.rendezvous.other"\n')
    store.set("torch.rendezvous.other", b64encode(pickled_state({"node0": 0})))

    (run,) = find_other_runs(store, OWN, is_first=False, now=time.time())

    assert run.run_id == "other"


def test_first_agent_adds_its_run() -> None:
    """Later jobs find the run whose first agent has looked for others."""
    store: Any = HashStore()
    find_other_runs(store, "torch.rendezvous.ä\n", is_first=False, now=1.0)
    assert not store.check([INDEX])

    find_other_runs(store, "torch.rendezvous.ä\n", is_first=True, now=1.0)
    store.set("torch.rendezvous.ä\n", b64encode(pickled_state({"node0": 0})))

    (run,) = find_other_runs(store, OWN, is_first=True, now=time.time())
    assert run.run_id == "ä\n"


def test_hostile_index() -> None:
    """Malformed entries are omitted."""
    hostile = b'"a"\n{"a": 1}\n"\\ud800"\n\xff\n""\n' + b"[" * 100_000
    longer = b'\n"%s"\n"b"\n' % (b"x" * 10_000)

    assert list(server_checks._read_index(hostile + longer)) == ["a", "b"]


def test_long_address_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the other key does not exist, no value is read."""
    store: Any = HashStore()
    store.set("MASTER_ADDR", "x" * 1_000_000)
    reads: list[object] = []
    read = store_access.read_existing

    def counted(*args: Any) -> Any:
        reads.append(args)
        return read(*args)

    def pause(_seconds: float) -> bool:
        if not store.check(["MASTER_PORT"]):
            store.set("MASTER_PORT", "1")
        return True

    monkeypatch.setattr(server_checks, "read_existing", counted)
    monkeypatch.setattr(server_checks, "pause", pause)

    published = server_checks._read_published(store)

    assert len(published) < 1024
    assert len(reads) == 1
