"""The keys of a barrier and the layout of their values."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils import store as torch_store

from tracedstore.coordination.arrivals import (
    BarrierKeys,
    Ledger,
    encode_arrival,
    last_arrival,
    last_rank,
)

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
