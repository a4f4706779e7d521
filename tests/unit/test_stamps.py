"""Stamps of process groups: keys of an earlier attempt are found."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from torch.distributed import HashStore

from support.hostile_json import values
from tracedstore.diagnosis.observe import incarnations

STAMP = {"rank": 1, "attempt": 0, "host": "node1", "pid": 7, "time": 1.0}


@pytest.fixture
def store() -> HashStore:
    """A store in which ranks 0 and 1 created group 0 in attempt 0."""
    store = HashStore()
    for rank in (0, 1):
        incarnations.write_stamp(store, "0", rank, range(3))
    return store


def test_same_attempt_is_not_stale(store: HashStore) -> None:
    """Nor are ranks without a stamp."""
    assert incarnations.find_stale(store, "0", (0, 1, 2)) is None


def test_rank_of_an_earlier_attempt_is_named(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has created the group again, rank 1 has not."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    incarnations.write_stamp(store, "0", 0, range(3))

    verdict = incarnations.find_stale(store, "0", (0, 1))

    assert verdict is not None
    assert (verdict.cause, verdict.awaited_ranks) == ("stale", (1,))
    assert verdict.phase == "init_process_group"
    assert "its keys are of attempt 0" in verdict.describe()
    assert "this is attempt 1" in verdict.describe()


def test_groups_have_their_own_stamps(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank has created group 1."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert incarnations.find_stale(store, "1", (0, 1)) is None


@given(values(STAMP))
def test_hostile_stamp(value: bytes) -> None:
    """It raises nothing, and the text has no control characters."""
    store: Any = HashStore()
    store.set("tracedstore/STAMPS/0/1", value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
        verdict = incarnations.find_stale(store, "0", (0, 1))
    if verdict is not None:
        assert verdict.describe().isprintable()
        assert json.dumps(verdict.event_fields())


def test_stamp_of_another_rank(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is no member of the group is not named."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    incarnations.write_stamp(store, "0", 0, range(3))
    store.set("tracedstore/STAMPS/0/1", json.dumps(STAMP | {"rank": 999}))

    assert incarnations.find_stale(store, "0", (0, 1)) is None


@pytest.mark.parametrize(
    ("members", "awaited", "text"),
    [
        ({4: (4, 5), 5: (1, 5), 6: (4, 5)}, (5,), "created group 2 with ranks 1,5"),
        ({4: (4, 5), 5: (1, 5)}, (), "different members"),
        ({4: (4, 5), 5: (4, 5)}, None, ""),
    ],
)
def test_groups_of_one_name_with_different_members(
    members: dict[int, tuple[int, ...]], awaited: tuple[int, ...] | None, text: str
) -> None:
    """The ranks that fewer others agree with are named; of two, none is."""
    store = HashStore()
    for rank, ranks in members.items():
        incarnations.write_stamp(store, "2", rank, ranks)

    found = incarnations.find_diverged(store, ["2"], range(8), (4, 6))

    assert (None if found is None else found.awaited_ranks) == awaited
    assert text in ("" if found is None else found.describe())


def test_earlier_groups_show_which_of_two_ranks_is_odd() -> None:
    """Ranks 3 and 7 disagree on group 6; on group 4 rank 7 disagrees with another."""
    store = HashStore()
    incarnations.write_stamp(store, "6", 3, (3, 7))
    incarnations.write_stamp(store, "6", 7, range(4, 8))
    incarnations.write_stamp(store, "4", 1, (1, 5))
    incarnations.write_stamp(store, "4", 7, (3, 7))

    found = incarnations.find_diverged(store, ["2", "6"], range(8), range(8))

    assert found is not None
    assert found.awaited_ranks == (7,)
    assert re.search(r"created group \d with ranks [-4,37]+ ", found.describe())


def test_innocent_minority_is_not_named() -> None:
    """Of two pairs of ranks with different members, either pair may be right."""
    store = HashStore()
    for rank, ranks in {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}.items():
        incarnations.write_stamp(store, "1", rank, ranks)

    found = incarnations.find_diverged(store, ["1"], range(4), range(4))

    assert found is not None
    assert found.awaited_ranks == ()


def test_earlier_groups_alone_are_no_reason() -> None:
    """What is created now has the same members everywhere."""
    store = HashStore()
    incarnations.write_stamp(store, "1", 0, (0, 1))
    incarnations.write_stamp(store, "1", 2, (2, 3))
    incarnations.write_stamp(store, "2", 0, range(4))

    assert incarnations.find_diverged(store, ["2"], range(4), range(4)) is None


def test_groups_of_an_earlier_default_group() -> None:
    """The program has destroyed all groups, and torch counts from the beginning."""
    store = HashStore()
    incarnations.write_stamp(store, "1", 0, (0, 1))
    for rank in range(3):
        incarnations.write_stamp(store, "0", rank, range(3))
    incarnations.write_stamp(store, "1", 2, (1, 2))

    assert incarnations.find_diverged(store, ["1"], range(3), (2,)) is None


def test_stamp_of_a_large_group() -> None:
    """It is short, and still differs from that of another one."""
    store = HashStore()
    incarnations.write_stamp(store, "2", 0, range(0, 16_384, 2))
    incarnations.write_stamp(store, "2", 1, range(0, 16_386, 2))

    found = incarnations.find_diverged(store, ["2"], (0, 1), (0, 1))

    assert found is not None
    assert len(store.get("tracedstore/STAMPS/2/0")) < 1024
