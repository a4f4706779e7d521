"""The parts of ``tracedstore status`` that need no server."""

import io
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tracedstore.common.errors import CommandError
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    encode_arrival,
)
from tracedstore.coordination.rank_registry import REGISTRY
from tracedstore.tools.attach import store_snapshot as snapshot_module
from tracedstore.tools.attach.job_reading import JobReading
from tracedstore.tools.attach.job_state import (
    MAX_LEDGERS,
    JobState,
    _newest,
    read_job_state,
    select_keys,
)
from tracedstore.tools.attach.job_text import status_lines
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.store_snapshot import StoreSnapshot
from tracedstore.tools.terminal import Screen


class Shrinking:
    """A store from which a key is deleted after it was listed."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.inner.set("stays/num_members", "1")
        self.inner.set("goes/num_members", "1")
        self.inner.set_timeout(timedelta(milliseconds=10))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def set_timeout(self, _timeout: timedelta) -> None:
        """Keep a timeout that a test can wait for."""

    def list_keys(self) -> list[str]:
        """List the keys, and delete one."""
        keys: list[str] = self.inner.list_keys()
        self.inner.delete_key("goes/num_members")
        return keys


class TestSnapshot:
    """Reading without waiting."""

    def test_deleted_key(self) -> None:
        """A key that is deleted after it was listed is absent."""
        snapshot = StoreSnapshot.take(Shrinking(), list)

        assert snapshot.keys == {"stays/num_members"}
        assert snapshot.add("stays/num_members", 0) == 1
        assert snapshot.check(["stays/num_members"])
        assert not snapshot.check(["stays/num_members", "goes/num_members"])

    def test_keys_are_not_listed(self) -> None:
        """A store whose class has no list_keys is reported in one sentence."""

        class OwnStore(dist.Store):
            """A store of the application."""

        with pytest.raises(CommandError, match="a OwnStore, does not list its keys"):
            StoreSnapshot.take(OwnStore(), list)


class TestLedgerLimit:
    """All ledgers of a store together are bounded."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
        """Return a store with 20 barriers; the ledgers of eight exceed the limit."""
        monkeypatch.setattr(snapshot_module, "MAX_LEDGER_BYTES", 8 * 12)
        store = dist.HashStore()
        for number in range(20):
            keys = BarrierKeys(f"step/{number}")
            store.set(keys.num_members, "1")
            store.set(keys.ledger, encode_arrival(0, 1.0 + number).decode("latin-1"))
        return store

    def test_newest_are_read(self, store: dist.Store) -> None:
        """The newest barriers are read, the others are counted."""
        job = job_of(store)

        assert [one.prefix for one in job.in_progress] == [
            f"step/{number}" for number in range(12, 20)
        ]
        assert job.unread_ledgers == 12
        assert job.unreadable_barriers == ()

    def test_incomplete_are_first(self, store: dist.Store) -> None:
        """The ledgers of incomplete barriers are read before those of complete ones."""
        for number in range(8, 20):
            store.set(BarrierKeys(f"step/{number}").last_member, "")

        job = job_of(store)

        assert len(job.in_progress) == 8
        assert job.finished == ()
        assert job.unread_ledgers == 12

    def test_shown(self, store: dist.Store) -> None:
        """The text and the JSON have the number of barriers that were left out."""
        status = status_of(store)

        assert "12 barriers not read: the ledgers of newer ones have" in text_of(status)
        assert status.to_json()["barriers_over_limit"] == 12

    def test_verdict(self, store: dist.Store) -> None:
        """Without the ledgers, a job is not reported as complete."""
        for number in range(20):
            store.set(BarrierKeys(f"step/{number}").last_member, "")

        assert "nothing is missing, as far as can be read" in text_of(status_of(store))


class TestNewest:
    """The selection of barriers to read."""

    def test_numeric_order(self) -> None:
        """Nine is before ten, and every family has its share."""
        steps = [f"step/{n}" for n in range(1000)]

        newest = _newest([*reversed(steps), "start", "epoch/3"])

        assert newest[0] == "start"
        assert "epoch/3" in newest
        assert [one for one in newest if one[:4] == "step"] == steps[-21:]

    def test_many_families(self) -> None:
        """The limit holds with as many families as barriers."""
        names = [f"{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(600)]

        assert len(_newest(names)) == MAX_LEDGERS


def test_ledger_times() -> None:
    """Each arrival has a time; a torn entry has none."""
    entries = encode_arrival(3, 7.5) + encode_arrival(1, 9.0)

    ledger = Ledger(entries + b"\0\0")

    assert ledger.times() == [7.5, 9.0]
    assert list(ledger.ranks()) == [3, 1]


def job_of(store: Any) -> JobState:
    """Read the state of a job from a store in this process."""
    return read_job_state(StoreSnapshot.take(store, select_keys))


def status_of(store: Any) -> JobReading:
    """Make the status of a job whose ranks cannot be queried."""
    return JobReading(store="s", now=0.0, job=job_of(store), replies={})


def text_of(status: JobReading, width: int = 80) -> str:
    """Print a status as a command does, on a pipe of some width."""
    stream = io.StringIO()
    with Screen(stream) as screen:
        screen.console.width = width
        screen.print(*status_lines(view_of(status)))
    return stream.getvalue().removesuffix("\n")


@pytest.mark.parametrize("restarted", [True, False])
def test_restart(restarted: bool) -> None:
    """A barrier of an earlier attempt is abandoned if the processes are others."""
    store: Any = dist.HashStore()
    for attempt, arrived in ((0, [0]), (1, [0, 1])):
        under: Any = dist.PrefixStore(f"attempt_{attempt}", store)
        keys = BarrierKeys("b")
        for rank in (0, 1):
            pid = 100 * attempt * restarted + rank
            entry = {"rank": rank, "host": "a", "pid": pid, "world_size": 2}
            under.set(f"{REGISTRY}/{rank}", json.dumps(entry | {"started": attempt}))
        for rank in arrived:
            under.append(keys.ledger, encode_arrival(rank, 10.0 * attempt + rank + 1))
            under.add(keys.num_members, 1)
    dist.PrefixStore("attempt_1", store).set("b/last_member", "")

    job = job_of(store)
    status = JobReading(store="s", now=30.0, job=job, replies={})

    assert [one.prefix for one in job.abandoned] == ["attempt_0/b"] * restarted
    assert [one.prefix for one in job.in_progress] == ["attempt_0/b"] * (not restarted)
    assert bool(status.missing()) == (not restarted)


def test_barrier_of_agents() -> None:
    """The agents' barrier at the end of a job is none of its 16 ranks."""
    store: Any = dist.HashStore()
    for rank in range(16):
        entry = {"rank": rank, "host": "a", "pid": 1, "world_size": 16, "started": 1.0}
        store.set(f"{REGISTRY}/{rank}", json.dumps(entry))
    store.add("torch.rendezvous.job.0/torchelastic/agent/terminal_state/num_members", 1)

    status = status_of(store)

    assert status.missing() == []
    (barrier,) = status.job.in_progress
    assert (barrier.of_agents, barrier.world_size) == (True, None)
    assert "terminal_state: 1 agents arrived" in " ".join(text_of(status).split())
    assert {rank.state.label for rank in view_of(status).ranks} == {"running"}


class TestText:
    """The text for people."""

    def test_hostile_keys(self) -> None:
        """A terminal executes and reorders nothing, and rich interprets no markup."""
        store = dist.HashStore()
        store.add("\x1b[2Jb\n\u202e[red]x[/]/num_members", 1)

        text = text_of(status_of(store))

        assert text.endswith("\n  \\x1b[2Jb\\n\\u202e[red]x[/]: 1 arrived")
        assert "\x1b" not in text

    def test_long_keys(self) -> None:
        """A long key is shortened to its ends."""
        store = dist.HashStore()
        store.add(f"first{'x' * 5000}/7/num_members", 1)

        for width in (80, 20):
            lines = text_of(status_of(store), width).splitlines()
            assert max(map(len, lines)) <= width
            assert any(line.startswith("  first") for line in lines)
            assert any("x/7:" in line for line in lines)

    def test_many_barriers(self) -> None:
        """All barriers are counted, and few are shown."""
        store = dist.HashStore()
        for n in range(101):
            store.add(f"{'long/' * 8}{n}/num_members", 1)

        status = status_of(store)
        text = text_of(status)

        assert "  37 older barriers not complete, not read\n" in text
        assert "  48 more, not shown\n" in text
        assert max(map(len, text.splitlines())) <= 80
        assert status.missing() == [f"{MAX_LEDGERS} barriers not complete"]
        assert len(text.splitlines()) < 30

    def test_unread_barriers(self) -> None:
        """Barriers that were not read are mentioned, and nothing is missing."""
        job = replace(job_of(dist.HashStore()), unread_in_progress=6)
        status = JobReading(store="s", now=0.0, job=job, replies={})

        assert status.missing() == []
        assert text_of(status).endswith(
            "\nbarriers in progress:\n  6 older barriers not complete, not read"
        )

    def test_store_of_which_nothing_can_be_read(self) -> None:
        """It is neither healthy nor is something missing, and the reason is there."""
        job = replace(
            job_of(dist.HashStore()), unreadable_stores={"tcp://h:1": "refused"}
        )
        status = JobReading(store="s", now=0.0, job=job, replies={})

        assert status.missing() == []
        assert status.unknown() == "tcp://h:1: refused"
        assert status.to_json()["healthy"] is False
        assert status.to_json()["unknown"] == "tcp://h:1: refused"
        assert text_of(status).startswith("nothing is known: ")

    def test_empty_store(self) -> None:
        """Nothing is missing from an empty store, because nothing is known."""
        assert text_of(status_of(dist.HashStore())).splitlines() == [
            "nothing is known: the store has no rank, no barrier and no rendezvous",
            "store: s",
            "",
            "ranks: none registered",
        ]

    def test_more_arrivals_than_ranks(self) -> None:
        """The world size of a barrier is unknown if more ranks arrive than exist."""
        store = dist.HashStore()
        store.set(
            "tracedstore/RANKS/0",
            '{"rank": 0, "host": "a", "pid": 1, "world_size": 2, "started": 1.0}',
        )
        store.add("b/num_members", 3)
        store.add("c/num_members", 2)

        early, late = job_of(store).in_progress

        assert (early.world_size, early.awaits_ranks) == (None, True)
        # All ranks are counted, and the last one has not set last_member yet.
        assert (late.world_size, late.awaits_ranks) == (2, False)
