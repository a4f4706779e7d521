"""What ``tracedstore status`` makes of what it reads."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tracedstore.attach.collect import MAX_LEDGERS, JobState, _latest, wanted
from tracedstore.attach.job_status import Status, _ago
from tracedstore.attach.snapshot import StoreSnapshot
from tracedstore.coordination.protocol import (
    BarrierKeys,
    Ledger,
    encode_arrival,
    encode_traceparent,
)
from tracedstore.coordination.rank_registry import REGISTRY
from tracedstore.core.errors import CommandError


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
        """Keep the one that a test can wait for."""

    def list_keys(self) -> list[str]:
        """List them, and delete one."""
        keys: list[str] = self.inner.list_keys()
        self.inner.delete_key("goes/num_members")
        return keys


class TestSnapshot:
    """Reading without waiting."""

    def test_a_key_that_goes(self) -> None:
        """Is one that was not there."""
        snapshot = StoreSnapshot.of(Shrinking(), list)

        assert snapshot.keys == {"stays/num_members"}
        assert snapshot.add("stays/num_members", 0) == 1
        assert snapshot.check(["stays/num_members"])
        assert not snapshot.check(["stays/num_members", "goes/num_members"])

    def test_a_torch_without_listing(self) -> None:
        """Is told of in one sentence."""

        class Old:
            pass

        with pytest.raises(CommandError, match="too old to list the keys"):
            StoreSnapshot.of(Old(), list)


class TestLatest:
    """Which of many barriers are read."""

    def test_by_number(self) -> None:
        """Nine is before ten, and every family has its share."""
        steps = [f"step/{n}" for n in range(1000)]

        found = _latest([*reversed(steps), "start", "epoch/3"])

        assert found[0] == "start"
        assert "epoch/3" in found
        assert [one for one in found if one[:4] == "step"] == steps[-21:]

    def test_as_many_families_as_barriers(self) -> None:
        """Bounded all the same."""
        names = [f"{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(600)]

        assert len(_latest(names)) == MAX_LEDGERS


def test_times_of_a_ledger() -> None:
    """One for each that signed; a traceparent and a torn entry are none."""
    entries = (
        encode_arrival(3, 7.5)
        + encode_traceparent("00-" + "a" * 52)
        + encode_arrival(1, 9.0)
    )

    ledger = Ledger(entries + b"\0\0")

    assert ledger.times() == [7.5, 9.0]
    assert list(ledger.ranks()) == [3, 1]


def survey_of(store: Any) -> JobState:
    """Look at a store."""
    return JobState.of(StoreSnapshot.of(store, wanted))


@pytest.mark.parametrize("anew", [True, False])
def test_started_anew(anew: bool) -> None:
    """Who was ended at a barrier waits no more, and a process that goes on may."""
    store: Any = dist.HashStore()
    for attempt, came in ((0, [0]), (1, [0, 1])):
        under: Any = dist.PrefixStore(f"attempt_{attempt}", store)
        keys = BarrierKeys("b")
        for rank in (0, 1):
            pid = 100 * attempt * anew + rank
            told = {"rank": rank, "host": "a", "pid": pid, "world_size": 2}
            under.set(f"{REGISTRY}/{rank}", json.dumps(told | {"started": attempt}))
        for rank in came:
            under.append(keys.ledger, encode_arrival(rank, 10.0 * attempt + rank + 1))
            under.add(keys.num_members, 1)
    dist.PrefixStore("attempt_1", store).set("b/last_member", "")

    survey = survey_of(store)
    status = Status(store="s", now=30.0, survey=survey, replies={})

    assert [one.prefix for one in survey.abandoned] == ["attempt_0/b"] * anew
    assert [one.prefix for one in survey.waiting] == ["attempt_0/b"] * (not anew)
    assert bool(status.missing()) == (not anew)


class TestText:
    """What people read."""

    def test_keys_are_anybodys(self) -> None:
        """A terminal obeys none of them."""
        store = dist.HashStore()
        store.add("\x1b[2Jb\n/num_members", 1)

        status = Status(store="s", now=0.0, survey=survey_of(store), replies={})

        assert status.text(80).endswith("\n  \\x1b[2Jb\\n: 1 arrived")
        assert "\x1b" not in status.text(80)

    def test_long_keys(self) -> None:
        """Their ends are shown."""
        store = dist.HashStore()
        store.add(f"first{'x' * 5000}/7/num_members", 1)

        status = Status(store="s", now=0.0, survey=survey_of(store), replies={})

        for width in (80, 20):
            lines = status.text(width).splitlines()
            assert max(map(len, lines)) <= width
            assert any(line.startswith("  first") for line in lines)
            assert any("x/7:" in line for line in lines)

    def test_many_barriers(self) -> None:
        """All are counted, and few are shown."""
        store = dist.HashStore()
        for n in range(101):
            store.add(f"{'long/' * 8}{n}/num_members", 1)

        status = Status(store="s", now=0.0, survey=survey_of(store), replies={})
        text = status.text(80)

        assert "  37 older ones without an end, not looked at\n" in text
        assert "  48 more before these\n" in text
        assert max(map(len, text.splitlines())) <= 80
        assert status.missing() == [f"{MAX_LEDGERS} barriers not complete"]
        assert len(text.splitlines()) < 30

    def test_not_looked_at(self) -> None:
        """Barriers that nobody looked at are no reason for an alarm, but are told."""
        survey = replace(survey_of(dist.HashStore()), more_waiting=6)
        status = Status(store="s", now=0.0, survey=survey, replies={})

        assert status.missing() == []
        assert status.text(80).endswith(
            "\nbarriers in progress:\n  6 older ones without an end, not looked at"
        )

    def test_an_empty_store(self) -> None:
        """Lacks nothing, but that is because nothing is known."""
        survey = survey_of(dist.HashStore())
        status = Status(store="s", now=0.0, survey=survey, replies={})

        assert status.text(80).splitlines() == [
            "nothing is known: no rank, no barrier and no rendezvous is here",
            "store: s",
            "",
            "ranks: none registered",
        ]

    def test_more_than_registered(self) -> None:
        """How many a barrier is for is not guessed."""
        store = dist.HashStore()
        store.set(
            "tracedstore/RANKS/0",
            '{"rank": 0, "host": "a", "pid": 1, "world_size": 2, "started": 1.0}',
        )
        store.add("b/num_members", 3)
        store.add("c/num_members", 2)

        early, late = survey_of(store).waiting

        assert (early.world_size, early.short) == (None, True)
        # All came, and the last one has not said so yet.
        assert (late.world_size, late.short) == (2, False)

    @pytest.mark.parametrize(
        ("seconds", "said"),
        [(-1, "0.0 s"), (59.9, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
    )
    def test_times(self, seconds: float, said: str) -> None:
        """In units that people can take in."""
        assert _ago(seconds) == said
