"""Who arrived at a barrier, what is written about it, and the report of the missing."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from support.stores import KINDS
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    MissingReport,
    confirm_arrival,
    encode_arrival,
    last_arrival,
    last_rank,
    read_arrivals,
    record_arrival,
)
from tracedstore.coordination.store_access import etcd_keys, find_absent
from tracedstore.testing import FlakyStore

KEYS = BarrierKeys("barrier/7")


def arrive(store: Any, rank: int, *, ledger: bool) -> None:
    """Record an arrival, in the ledger or with a TRACE key."""
    if ledger:
        store.append(KEYS.ledger, encode_arrival(rank, 1000.0 + rank))
    else:
        store.set(KEYS.trace(rank), "here")
    store.add(KEYS.num_members, 1)


class TestFindAbsent:
    """Bisection finds exactly the absent items, with few checks."""

    @given(
        st.integers(min_value=1, max_value=3000).flatmap(
            lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=20))
        )
    )
    def test_exact_and_bounded(self, case: tuple[int, set[int]]) -> None:
        """The result is ordered and complete, after about m·log2(N) checks."""
        world_size, absent = case
        checks: list[int] = []

        def all_present(ranks: Sequence[int]) -> bool:
            checks.append(len(ranks))
            return absent.isdisjoint(ranks)

        assert find_absent(all_present, range(world_size)) == sorted(absent)
        depth = math.ceil(math.log2(world_size)) + 1
        assert len(checks) <= 1 + 2 * len(absent) * depth

    def test_three_of_16384(self) -> None:
        """Three absent ranks of 16,384 take tens of checks, not thousands."""
        absent = {0, 5000, 16_383}
        checks = 0

        def all_present(ranks: Sequence[int]) -> bool:
            nonlocal checks
            checks += 1
            return absent.isdisjoint(ranks)

        assert find_absent(all_present, range(16_384)) == [0, 5000, 16_383]
        assert checks < 100

    def test_no_items(self) -> None:
        """An empty world has no absent ranks."""
        assert find_absent(lambda _ranks: False, []) == []


@pytest.fixture(params=[*KINDS, "etcd"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_store: Callable[[Path], Store]
) -> Callable[[], Any]:
    """Make a store of each kind."""
    kind = etcd_store if request.param == "etcd" else KINDS[request.param]
    return lambda: kind(tmp_path)


class TestReadArrivals:
    """Arrivals are read on every kind of store."""

    @pytest.mark.parametrize("wrapped", [False, True])
    @pytest.mark.parametrize("ledger", [False, True])
    def test_same_result(
        self, make: Callable[[], Any], ledger: bool, wrapped: bool
    ) -> None:
        """Ledger or TRACE keys, bare or traced store: the result is the same."""
        tracedstore.configure(log_format="off")
        store = tracedstore.wrap(make()) if wrapped else make()
        # A store without append has no ledger.
        ledger = ledger and store.has_extended_api()
        for rank in (1, 2, 5):
            arrive(store, rank, ledger=ledger)

        arrivals = read_arrivals(store, KEYS, 8)

        assert arrivals.unseen_ranks == (0, 3, 4, 6, 7)
        assert (arrivals.arrived_count, arrivals.unidentified_count) == (3, 0)
        assert arrivals.duplicate_ranks == ()

    def test_no_arrivals(self, make: Callable[[], Any]) -> None:
        """A barrier without arrivals is no error, and reading it does not block."""
        arrivals = read_arrivals(make(), KEYS, 4)

        assert (arrivals.arrived_count, arrivals.unseen_ranks) == (0, (0, 1, 2, 3))

    def test_ledger_and_trace_keys(self) -> None:
        """Ranks of both kinds are seen: traced ones, and plain torch ranks."""
        store = HashStore()
        arrive(store, 0, ledger=True)
        arrive(store, 3, ledger=False)

        arrivals = read_arrivals(store, KEYS, 4)

        assert arrivals.unseen_ranks == (1, 2)
        assert arrivals.unidentified_count == 0

    def test_unidentified(self) -> None:
        """Plain torch ranks are counted before they can be identified."""
        store = HashStore()
        arrive(store, 0, ledger=True)
        store.add(KEYS.num_members, 2)

        assert read_arrivals(store, KEYS, 4).unidentified_count == 2

    def test_stopped_while_arriving(self, make: Callable[[], Any]) -> None:
        """A rank that recorded its arrival and was not counted is missing."""
        store = make()
        for rank in range(3):
            record_arrival(store, KEYS, rank)
            store.add(KEYS.num_members, 1)
        record_arrival(store, KEYS, 3)

        unsure = read_arrivals(store, KEYS, 4)
        for rank in range(3):
            confirm_arrival(store, KEYS, rank)
        sure = read_arrivals(store, KEYS, 4)

        # Which of them it is shows when the others confirm that they were counted.
        assert unsure.unseen_ranks == (0, 1, 2, 3)
        assert (unsure.arrived_count, unsure.unidentified_count) == (3, 3)
        assert unsure.uncounted_ranks == ()
        assert sure.unseen_ranks == sure.uncounted_ranks == (3,)
        assert (sure.arrived_count, sure.unidentified_count) == (3, 0)

    def test_arrives_between_reads(self) -> None:
        """A rank that arrives while another one is stuck is never missing."""
        inner = HashStore()
        store = FlakyStore(inner)
        arrive(inner, 0, ledger=True)
        record_arrival(inner, KEYS, 3)  # and dies before it is counted
        # The count is read, then the ledger, then the count again.
        store.before("add", lambda: None)
        store.before("add", lambda: arrive(inner, 1, ledger=True))

        arrivals = read_arrivals(store, KEYS, 4)

        assert arrivals.arrived_count == 2
        assert arrivals.unidentified_count > 0 or 1 not in arrivals.unseen_ranks

    def test_plain_rank_and_rank_in_between(self) -> None:
        """A rank that is not counted yet does not accuse a plain rank that is."""
        inner = HashStore()
        store = FlakyStore(inner)
        arrive(inner, 0, ledger=True)
        inner.add(KEYS.num_members, 1)  # plain torch rank 1
        record_arrival(inner, KEYS, 2)

        def count_rank() -> None:
            inner.add(KEYS.num_members, 1)

        # The count is read, then the ledger, then the count again.
        store.before("add", lambda: None)
        store.before("add", count_rank)

        arrivals = read_arrivals(store, KEYS, 4)

        assert (arrivals.arrived_count, arrivals.unidentified_count) == (3, 1)
        assert arrivals.unseen_ranks == (1, 3)

    def test_duplicate_rank(self) -> None:
        """A rank that arrives again is a duplicate, not an unidentified arrival."""
        store = HashStore()
        for rank in (0, 2, 2, 2):
            arrive(store, rank, ledger=True)

        arrivals = read_arrivals(store, KEYS, 4)

        assert arrivals.duplicate_ranks == (2,)
        assert (arrivals.arrived_count, arrivals.unidentified_count) == (4, 0)

    def test_rank_beyond_the_world_size(self) -> None:
        """The arrival of such a rank does not hide a missing one."""
        store = HashStore()
        arrive(store, 99, ledger=True)

        assert read_arrivals(store, KEYS, 2).unseen_ranks == (0, 1)


class TestEtcdKeys:
    """One listing of an EtcdStore costs as much as one check."""

    def test_all_keys(
        self, etcd_store: Callable[[Path], Store], tmp_path: Path
    ) -> None:
        """The keys of a bare and of a traced EtcdStore are listed, decoded."""
        bare: Any = etcd_store(tmp_path)
        store = tracedstore.wrap(bare)
        store.set("a/0", "x")
        store.set("ä", "x")

        expected = frozenset({"a/0", "ä"})
        assert etcd_keys(bare) == expected
        assert etcd_keys(store) == expected

    def test_other_stores(self) -> None:
        """Other stores are not listed."""
        assert etcd_keys(HashStore()) is None


RANKS = st.integers(min_value=0, max_value=2**32 - 1)


class TestBarrierKeys:
    """Traced ranks and plain torch ranks use the same keys."""

    def test_equal_torch(self) -> None:
        """They are built from torch's constants, which are private."""
        keys = BarrierKeys("torchelastic/exit")

        assert keys.num_members == "torchelastic/exit" + torch_store._NUM_MEMBERS
        assert (
            keys.last_member == "torchelastic/exit" + torch_store._LAST_MEMBER_CHECKIN
        )
        assert keys.trace(3) == "torchelastic/exit3" + torch_store._TRACE
        assert keys.tracing_gate == "torchelastic/exit" + torch_store._TRACING_GATE


class TestLastArrival:
    """The value of the last_member key."""

    @pytest.mark.parametrize("rank", [3, None])
    def test_round_trip(self, rank: int | None) -> None:
        """Parsing returns the encoded value."""
        value = last_arrival(rank)

        assert last_rank(value.encode()) == rank
        assert value == json.dumps({"rank": rank})

    @pytest.mark.parametrize(
        "value", [b"<val_ignored>", b"", b"{}", b"[]", b"null", b"\xff"]
    )
    def test_other_values(self, value: bytes) -> None:
        """The value of a plain torch rank has no rank, and is no error."""
        assert last_rank(value) is None


class TestLedger:
    """Many ranks append entries to the ledger; others read it at any time."""

    @given(st.lists(st.tuples(RANKS, st.floats(allow_nan=False))))
    def test_round_trip(self, arrivals: list[tuple[int, float]]) -> None:
        """The ranks are read in the order of arrival."""
        ledger = b"".join(encode_arrival(*arrival) for arrival in arrivals)

        assert list(Ledger(ledger).ranks()) == [rank for rank, _ in arrivals]

    def test_twelve_bytes_per_rank(self) -> None:
        """The ledger of 16,384 ranks has 196,608 bytes."""
        assert len(encode_arrival(0, 0.0)) == 12

    def test_incomplete_entry(self) -> None:
        """An incomplete entry at the end is ignored."""
        assert list(Ledger(encode_arrival(3, 1.0) + b"torn").ranks()) == [3]

    @given(st.binary(max_size=200))
    def test_any_bytes(self, entries: bytes) -> None:
        """Arbitrary bytes neither raise nor loop without end."""
        list(Ledger(entries).ranks())


NUMBERS = st.sets(st.integers(min_value=0, max_value=63)).map(
    lambda s: tuple(sorted(s))
)
COUNTS = st.integers(min_value=0, max_value=64)


def make_report(
    unseen_ranks: tuple[int, ...] = (),
    unidentified_count: int = 0,
    arrived_count: int = 1,
) -> MissingReport:
    """Make a report for 64 ranks, eight per host."""
    report = MissingReport(
        world_size=64,
        arrived_count=arrived_count,
        unseen_ranks=unseen_ranks,
        unidentified_count=unidentified_count,
        duplicate_ranks=(),
        names={},
    )
    return report.with_names(lambda rank: f"node{rank // 8}")


class TestEncoding:
    """A report is published in the store by one rank and read by the others."""

    @given(COUNTS, NUMBERS, COUNTS, NUMBERS)
    def test_round_trip(
        self,
        arrived_count: int,
        unseen_ranks: tuple[int, ...],
        unidentified_count: int,
        duplicate_ranks: tuple[int, ...],
    ) -> None:
        """Decoding returns the encoded report."""
        report = MissingReport(
            world_size=64,
            arrived_count=arrived_count,
            unseen_ranks=unseen_ranks,
            unidentified_count=unidentified_count,
            duplicate_ranks=duplicate_ranks,
            names={rank: f"node{rank}" for rank in unseen_ranks},
        )

        assert MissingReport.from_bytes(report.to_bytes(), 64) == report

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"<val_ignored>",
            b"\xff",
            b"3",
            b"{}",
            b'{"arrived_count": 1, "unseen_ranks": "x"}',
        ],
    )
    def test_other_values(self, value: bytes) -> None:
        """A value that is not a report is None, not an error."""
        assert MissingReport.from_bytes(value, 4) is None


class TestContent:
    """What a report states about ranks."""

    @pytest.mark.parametrize(
        ("report", "text"),
        [
            (
                make_report((3, *range(8, 16))),
                "missing 9 of 64: node0 (rank 3), node1 (ranks 8-15)",
            ),
            (
                make_report((1, 2, 3), unidentified_count=2),
                "1 of ranks 1-3 missing, 2 arrivals unidentified",
            ),
            (make_report(), "all ranks have arrived"),
            (
                MissingReport.unknown(64),
                "the missing ranks could not be determined",
            ),
        ],
        ids=["missing", "unidentified", "complete", "unknown"],
    )
    def test_describe(self, report: MissingReport, text: str) -> None:
        """Ranks are grouped by host; what is not known is not claimed."""
        assert report.describe() == text

    @given(NUMBERS, COUNTS)
    def test_an_arrived_rank_is_never_missing(
        self, unseen_ranks: tuple[int, ...], unidentified_count: int
    ) -> None:
        """With unidentified arrivals, no rank is reported missing."""
        report = make_report(unseen_ranks, unidentified_count)

        assert report.missing_ranks == (() if unidentified_count else unseen_ranks)
        assert set(report.arrived_ranks).isdisjoint(report.unseen_ranks)
        assert report.missing_count == max(0, len(unseen_ranks) - unidentified_count)
