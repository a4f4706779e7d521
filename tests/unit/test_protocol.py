"""What stands under the keys of a barrier."""

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.utils import store as torchs

from tracedstore.coordination.protocol import Keys, signature, signatures

RANKS = st.integers(min_value=0, max_value=2**32 - 1)


class TestKeys:
    """Traced and plain ranks meet under the same keys."""

    def test_are_torchs(self) -> None:
        """Torch's own constants, which are not public but are the wire format."""
        keys = Keys("torchelastic/exit")

        assert keys.num_members == "torchelastic/exit" + torchs._NUM_MEMBERS
        assert keys.last_member == "torchelastic/exit" + torchs._LAST_MEMBER_CHECKIN
        assert keys.trace(3) == "torchelastic/exit3" + torchs._TRACE
        assert keys.tracing_gate == "torchelastic/exit" + torchs._TRACING_GATE


class TestLedger:
    """Signatures are appended by many, and read by whoever looks."""

    @given(st.lists(st.tuples(RANKS, st.floats(allow_nan=False))))
    def test_round_trip(self, signed: list[tuple[int, float]]) -> None:
        """What was signed is what is read, in order."""
        ledger = b"".join(signature(*one) for one in signed)

        assert list(signatures(ledger)) == signed

    def test_twelve_bytes(self) -> None:
        """The ledger of 16,384 ranks is 196,608 bytes."""
        assert len(signature(0, 0.0)) == 12

    def test_a_torn_one_is_left_out(self) -> None:
        """Whatever is not a whole signature is nobody's."""
        assert list(signatures(signature(3, 1.0) + b"torn")) == [(3, 1.0)]
