"""The report of a barrier's missing ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.coordination.arrivals import MissingReport

RANKS = st.sets(st.integers(min_value=0, max_value=63)).map(lambda s: tuple(sorted(s)))
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

    @given(COUNTS, RANKS, COUNTS, RANKS)
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

    @given(RANKS, COUNTS)
    def test_an_arrived_rank_is_never_missing(
        self, unseen_ranks: tuple[int, ...], unidentified_count: int
    ) -> None:
        """With unidentified arrivals, no rank is reported missing."""
        report = make_report(unseen_ranks, unidentified_count)

        assert report.missing_ranks == (() if unidentified_count else unseen_ranks)
        assert set(report.arrived_ranks).isdisjoint(report.unseen_ranks)
        assert report.missing_count == max(0, len(unseen_ranks) - unidentified_count)
