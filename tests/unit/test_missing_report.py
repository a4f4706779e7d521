"""What somebody found who looked at a barrier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.coordination.missing_report import MissingReport

RANKS = st.sets(st.integers(min_value=0, max_value=63)).map(lambda s: tuple(sorted(s)))
COUNTS = st.integers(min_value=0, max_value=64)


def found(
    unnamed: tuple[int, ...] = (), unidentified: int = 0, count: int = 1
) -> MissingReport:
    """Find something in a world of 64, eight on a host."""
    finding = MissingReport(
        world_size=64,
        count=count,
        unnamed=unnamed,
        unidentified=unidentified,
        duplicates=(),
        names={},
    )
    return finding.named_by(lambda rank: f"node{rank // 8}")


class TestPassingOn:
    """One looks, and the others read."""

    @given(COUNTS, RANKS, COUNTS, RANKS)
    def test_round_trip(
        self,
        count: int,
        unnamed: tuple[int, ...],
        unidentified: int,
        twice: tuple[int, ...],
    ) -> None:
        """What was written is what is read."""
        finding = MissingReport(
            world_size=64,
            count=count,
            unnamed=unnamed,
            unidentified=unidentified,
            duplicates=twice,
            names={rank: f"node{rank}" for rank in unnamed},
        )

        assert MissingReport.from_bytes(finding.to_bytes(), 64) == finding

    @pytest.mark.parametrize(
        "written",
        [b"", b"<val_ignored>", b"\xff", b"3", b"{}", b'{"count": 1, "unnamed": "x"}'],
    )
    def test_somebody_elses(self, written: bytes) -> None:
        """What is none of ours is none, and no error."""
        assert MissingReport.from_bytes(written, 4) is None


class TestWords:
    """What people read."""

    @pytest.mark.parametrize(
        ("finding", "words"),
        [
            (
                found((3, *range(8, 16))),
                "missing 9 of 64: node0 (rank 3), node1 (ranks 8-15)",
            ),
            (
                found((1, 2, 3), unidentified=2),
                "1 of ranks 1-3 missing, 2 more arrived without a name",
            ),
            (found(), "everybody arrived after all"),
            (MissingReport.nothing(64), "who is missing could not be found out"),
        ],
        ids=["missing", "nameless", "nobody", "nothing"],
    )
    def test_described(self, finding: MissingReport, words: str) -> None:
        """By host, in ranges, and honest about what is not known."""
        assert finding.described() == words

    @given(RANKS, COUNTS)
    def test_nobody_who_arrived_is_called_missing(
        self, unnamed: tuple[int, ...], unidentified: int
    ) -> None:
        """Where somebody has no name, nobody is accused."""
        finding = found(unnamed, unidentified)

        assert finding.missing == (() if unidentified else unnamed)
        assert set(finding.arrived).isdisjoint(finding.unnamed)
        assert finding.missing_count == max(0, len(unnamed) - unidentified)
