"""Looking who arrived."""

import math
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore, Store

import tracedstore
from support.stores import KINDS, tcp
from tracedstore import store as store_module
from tracedstore.coordination.arrivals import (
    bisect,
    listing,
    read_arrivals,
    side_connection,
)
from tracedstore.coordination.protocol import Keys, signature

KEYS = Keys("barrier/7")


def arrive(store: Any, rank: int, *, ledger: bool) -> None:
    """Do what a rank does that arrives, in one of the two ways."""
    if ledger:
        store.append(KEYS.ledger, signature(rank, 1000.0 + rank))
    else:
        store.set(KEYS.trace(rank), "here")
    store.add(KEYS.num_members, 1)


class TestBisect:
    """Halving finds exactly those that are not there, in few questions."""

    @given(
        st.integers(min_value=1, max_value=3000).flatmap(
            lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=20))
        )
    )
    def test_exact_and_bounded(self, case: tuple[int, set[int]]) -> None:
        """In order, complete, and in about m·log2(N) questions."""
        world_size, missing = case
        asked: list[int] = []

        def all_there(ranks: Sequence[int]) -> bool:
            asked.append(len(ranks))
            return missing.isdisjoint(ranks)

        assert bisect(all_there, range(world_size)) == sorted(missing)
        depth = math.ceil(math.log2(world_size)) + 1
        assert len(asked) <= 1 + 2 * len(missing) * depth

    def test_three_of_many(self) -> None:
        """Three missing of 16,384 take tens of questions, not thousands."""
        missing = {0, 5000, 16_383}
        asked = 0

        def all_there(ranks: Sequence[int]) -> bool:
            nonlocal asked
            asked += 1
            return missing.isdisjoint(ranks)

        assert bisect(all_there, range(16_384)) == [0, 5000, 16_383]
        assert asked < 100

    def test_nobody(self) -> None:
        """A world of nobody misses nobody."""
        assert bisect(lambda _ranks: False, []) == []


@pytest.fixture(params=[*KINDS, "etcd"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_store: Callable[[Path], Store]
) -> Callable[[], Any]:
    """Make a store of each kind."""
    kind = etcd_store if request.param == "etcd" else KINDS[request.param]
    return lambda: kind(tmp_path)


class TestLook:
    """Who arrived, on every store."""

    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize("ledger", [False, True])
    def test_names(self, make: Callable[[], Any], ledger: bool, wrapped: bool) -> None:
        """By ledger or by key, bare or traced: the same answer on the same state."""
        tracedstore.configure(log_format="off")
        store = tracedstore.wrap(make()) if wrapped else make()
        # Without an append of its own a store has no ledger.
        ledger = ledger and store.has_extended_api()
        for rank in (1, 2, 5):
            arrive(store, rank, ledger=ledger)

        arrivals = read_arrivals(store, KEYS, 8)

        assert arrivals.missing == (0, 3, 4, 6, 7)
        assert (arrivals.count, arrivals.unidentified) == (3, 0)
        assert arrivals.duplicates == ()

    def test_nobody_yet(self, make: Callable[[], Any]) -> None:
        """A barrier that nobody came to is no error, and blocks on nothing."""
        arrivals = read_arrivals(make(), KEYS, 4)

        assert (arrivals.count, arrivals.missing) == (0, (0, 1, 2, 3))

    def test_both_ways_at_once(self) -> None:
        """In a mixed fleet some sign, and some write their key as torch does."""
        store = HashStore()
        arrive(store, 0, ledger=True)
        arrive(store, 3, ledger=False)

        arrivals = read_arrivals(store, KEYS, 4)

        assert arrivals.missing == (1, 2)
        assert arrivals.unidentified == 0

    def test_counted_without_a_name(self) -> None:
        """Plain torch's ranks count before they can be named."""
        store = HashStore()
        arrive(store, 0, ledger=True)
        store.add(KEYS.num_members, 2)

        assert read_arrivals(store, KEYS, 4).unidentified == 2

    def test_signed_twice(self) -> None:
        """A rank that was restarted on an old prefix is told, and no stranger."""
        store = HashStore()
        for rank in (0, 2, 2, 2):
            arrive(store, rank, ledger=True)

        arrivals = read_arrivals(store, KEYS, 4)

        assert arrivals.duplicates == (2,)
        assert (arrivals.count, arrivals.unidentified) == (4, 0)

    def test_a_rank_beyond_the_world(self) -> None:
        """A signature of another world is not taken for one of this."""
        store = HashStore()
        arrive(store, 99, ledger=True)

        assert read_arrivals(store, KEYS, 2).missing == (0, 1)


class TestListing:
    """An EtcdStore answers every check by reading its whole directory."""

    def test_one_request(
        self, etcd_store: Callable[[Path], Store], tmp_path: Path
    ) -> None:
        """So all keys are had for the price of one."""
        bare: Any = etcd_store(tmp_path)
        store = tracedstore.wrap(bare)
        store.set("a/0", "x")
        store.set("ä", "x")

        expected = frozenset({"a/0", "ä"})
        assert listing(bare) == expected
        assert listing(store) == expected

    def test_not_of_others(self) -> None:
        """Other stores are asked with check."""
        assert listing(HashStore()) is None


class TestBeside:
    """Looking does not wait behind whoever waits."""

    @pytest.mark.parametrize(
        "shape",
        [
            lambda store: store,
            tracedstore.wrap,
            lambda store: PrefixStore("p", tracedstore.wrap(store)),
            lambda store: tracedstore.wrap(PrefixStore("p", store)),
        ],
        ids=["bare", "wrapped", "under-prefix", "over-prefix"],
    )
    def test_tcp(self, shape: Callable[[Any], Any], tmp_path: Path) -> None:
        """A TCPStore that is in a wait is looked at through another connection."""
        tracedstore.configure(log_format="off")
        server = tcp(tmp_path)
        store = shape(server)
        store.set("there", "x")
        kept = len(store_module._kept_alive)
        released = threading.Thread(
            target=store.wait, args=(["later"], timedelta(seconds=20))
        )
        released.start()
        with side_connection(store) as other:
            assert other is not store
            assert other.check(["there"])
            other.set("later", "x")
        released.join(20)

        assert not released.is_alive()
        assert len(store_module._kept_alive) == kept

    def test_others_as_they_are(self) -> None:
        """A store without such a lock needs no second connection."""
        store = HashStore()

        with side_connection(store) as other:
            assert other is store
