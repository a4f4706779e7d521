"""What stands under the keys of a barrier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils import store as torchs

from tracedstore.coordination.protocol import Keys, Last, Ledger, signature, spelled

# The highest sixteen spell a traceparent.
RANKS = st.integers(min_value=0, max_value=2**32 - 17)


class TestKeys:
    """Traced and plain ranks meet under the same keys."""

    def test_are_torchs(self) -> None:
        """Torch's own constants, which are not public but are the wire format."""
        keys = Keys("torchelastic/exit")

        assert keys.num_members == "torchelastic/exit" + torchs._NUM_MEMBERS
        assert keys.last_member == "torchelastic/exit" + torchs._LAST_MEMBER_CHECKIN
        assert keys.trace(3) == "torchelastic/exit3" + torchs._TRACE
        assert keys.tracing_gate == "torchelastic/exit" + torchs._TRACING_GATE


TRACEPARENT = "00-" + "0af7651916cd43dd8448eb211c80319c" + "-b7ad6b7169203331-03"


class TestLast:
    """What the last one says."""

    def test_round_trip(self) -> None:
        """What was written is what is read."""
        last = Last(3, TRACEPARENT)

        assert Last.from_bytes(last.to_json().encode()) == last

    @pytest.mark.parametrize(
        "written", [b"<val_ignored>", b"", b"{}", b"[]", b"null", b"\xff"]
    )
    def test_something_else(self, written: bytes) -> None:
        """Plain torch's last rank says nothing, and nobody minds."""
        assert Last.from_bytes(written) == Last()


class TestLedger:
    """Signatures are appended by many, and read by whoever looks."""

    @given(st.lists(st.tuples(RANKS, st.floats(allow_nan=False))))
    def test_round_trip(self, signed: list[tuple[int, float]]) -> None:
        """Who signed is who is read, in order."""
        ledger = b"".join(signature(*one) for one in signed)

        assert list(Ledger(ledger).ranks()) == [rank for rank, _ in signed]

    def test_twelve_bytes(self) -> None:
        """The ledger of 16,384 ranks is 196,608 bytes."""
        assert len(signature(0, 0.0)) == 12

    def test_a_torn_one_is_left_out(self) -> None:
        """Whatever is not a whole signature is nobody's."""
        assert list(Ledger(signature(3, 1.0) + b"torn").ranks()) == [3]

    @given(st.lists(RANKS), st.lists(RANKS))
    def test_has_the_first_ones_trace(
        self, before: list[int], after: list[int]
    ) -> None:
        """Whoever signed before or after it; and it is nobody's signature."""
        signed = [[signature(rank, 1.0) for rank in some] for some in (before, after)]
        ledger = Ledger(b"".join([*signed[0], spelled(TRACEPARENT), *signed[1]]))

        assert ledger.traceparent() == TRACEPARENT
        assert list(ledger.ranks()) == before + after

    @given(st.binary(max_size=200))
    def test_anything_can_be_read(self, entries: bytes) -> None:
        """Bytes that nobody of us wrote are no reason to fail, or to go on for ever."""
        Ledger(entries).traceparent()
        list(Ledger(entries).ranks())

    @pytest.mark.parametrize("kept", [0, 12, 83])
    def test_half_a_trace_is_none(self, kept: int) -> None:
        """Nor is what only looks like one, between two entries."""
        entries = signature(0xFFFF, 0.0)[:6] + b"\xff\xff\xff\xf0\0\0"

        assert Ledger(entries + spelled(TRACEPARENT)[:kept]).traceparent() == ""
