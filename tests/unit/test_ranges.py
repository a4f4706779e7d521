"""Folding ranks into ranges, and grouping them by host."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.common.ranges import (
    fold,
    unfold,
    unfold_below,
)
from tracedstore.naming.decoders import by_host, default_name, describe_missing


def eight_per_node(rank: int) -> str:
    """Name the host of a rank, with eight ranks per node."""
    return f"node{rank // 8}"


class TestFold:
    """Ranks as ranges in text."""

    @pytest.mark.parametrize(
        ("ranks", "text"),
        [
            ([], ""),
            ([0], "0"),
            ([0, 1], "0-1"),
            ([8, 7, 5, 2, 1, 0, 5], "0-2,5,7-8"),
            (range(98_304), "0-98303"),
        ],
    )
    def test_folds(self, ranks: list[int], text: str) -> None:
        """The text is sorted, without duplicates, with adjacent ranks joined."""
        assert text == fold(ranks)

    @given(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 10**17))))
    def test_unfold_is_the_inverse(self, ranks: list[int]) -> None:
        """Only order and duplicates are lost."""
        assert sorted(set(ranks)) == unfold(fold(ranks))

    @given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9))))
    def test_fold_is_canonical(self, ranges: list[tuple[int, int]]) -> None:
        """A set of ranks has one folded text."""
        text = ",".join(f"{first}-{first + length}" for first, length in ranges)
        ranks = {
            rank
            for first, length in ranges
            for rank in range(first, first + length + 1)
        }

        assert fold(ranks) == fold(unfold(text))

    def test_takes_any_iterable(self) -> None:
        """Ranks may be a generator."""
        assert fold(rank for rank in (3, 2, 1)) == "1-3"


class TestUnfold:
    """Malformed and huge texts are refused."""

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a", "'a' is not a rank or a range of ranks"),
            ("1,", "'' is not a rank or a range of ranks"),
            ("-1", "'-1' is not a rank or a range of ranks"),
            ("1-2-3", "'1-2-3' is not a rank or a range of ranks"),
            ("1 -2", "'1 -2' is not a rank or a range of ranks"),
            ("²", "'²' is not a rank or a range of ranks"),
            ("3-1", "'3-1' is a descending range"),
            ("0-1000000", "more than 1000000 ranks"),
            ("0-999999999999999999", "more than 1000000 ranks"),
            ("0-999999,0-999999", "more than 1000000 ranks"),
        ],
    )
    def test_malformed(self, text: str, message: str) -> None:
        """A malformed or huge text is refused before it is expanded."""
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            unfold(text)

    def test_a_million_is_allowed(self) -> None:
        """The limit itself is allowed."""
        assert len(unfold("0-999999")) == 1_000_000


class TestByHost:
    """Ranks are grouped by name."""

    def test_order_of_first_rank(self) -> None:
        """Hosts are in the order of their first ranks, whatever the input order."""
        hosts = by_host([9, 3, 16, 8, 3], eight_per_node)

        assert list(hosts.items()) == [
            ("node0", [3]),
            ("node1", [8, 9]),
            ("node2", [16]),
        ]

    def test_scattered_ranks(self) -> None:
        """The ranks of a host need not be adjacent."""
        assert by_host(range(5), lambda rank: "ab"[rank % 2]) == {
            "a": [0, 2, 4],
            "b": [1, 3],
        }

    def test_decoder_raises(self) -> None:
        """Ranks without a name get the default name."""
        assert by_host([0, 1, 2], {1: "one"}.__getitem__) == {
            "rank 0": [0],
            "one": [1],
            "rank 2": [2],
        }

    def test_one_call_per_rank(self) -> None:
        """The decoder, which may be slow, is called once per rank."""
        calls: list[int] = []

        def decoder(rank: int) -> str:
            calls.append(rank)
            return "host"

        describe_missing([2, 1, 2], 8, decoder)

        assert calls == [1, 2]


class TestDescribe:
    """The text for the operator."""

    @pytest.mark.parametrize(
        ("ranks", "text"),
        [
            ([], "missing 0 of 2048"),
            ([136], "missing 1 of 2048: node17 (rank 136)"),
            (
                range(136, 152),
                "missing 16 of 2048: node17 (ranks 136-143), node18 (ranks 144-151)",
            ),
            (
                [0, 2, 3, 9, 9],
                "missing 4 of 2048: node0 (ranks 0,2-3), node1 (rank 9)",
            ),
        ],
    )
    def test_hosts(self, ranks: list[int], text: str) -> None:
        """Each host is listed with its ranks."""
        assert text == describe_missing(ranks, 2048, eight_per_node)

    def test_many_hosts(self) -> None:
        """Hosts after the sixteenth are counted."""
        text = describe_missing(range(136, 136 + 256), 2048, eight_per_node)

        assert text.startswith("missing 256 of 2048: node17 (ranks 136-143), node18")
        assert text.endswith(", node32 (ranks 256-263), ... and 16 more hosts")

    @pytest.mark.parametrize(
        ("max_hosts", "text"),
        [
            (1, "missing 17 of 32: node0 (ranks 0-7), ... and 2 more hosts"),
            (
                2,
                (
                    "missing 17 of 32: node0 (ranks 0-7), node1 (ranks 8-15), ... and 1"
                    " more host"
                ),
            ),
            (
                3,
                (
                    "missing 17 of 32: node0 (ranks 0-7), node1 (ranks 8-15), node2"
                    " (rank 16)"
                ),
            ),
        ],
    )
    def test_max_hosts(self, max_hosts: int, text: str) -> None:
        """The caller sets the number of hosts that are listed."""
        assert text == describe_missing(range(17), 32, eight_per_node, max_hosts)

    @pytest.mark.parametrize(
        ("ranks", "text"),
        [
            ([5, 4, 1], "missing 3 of 8: ranks 1,4-5"),
            ([3], "missing 1 of 8: rank 3"),
            (range(8), "missing 8 of 8: ranks 0-7"),
        ],
    )
    def test_no_hosts_known(self, ranks: list[int], text: str) -> None:
        """Ranks with the default name are folded into ranges."""
        assert text == describe_missing(ranks, 8, default_name)

    def test_some_hosts_known(self) -> None:
        """Hosts are listed first, then the ranks without a host."""
        decoder = {1: "one", 4: "four", 5: "four"}.__getitem__

        assert describe_missing(range(8), 8, decoder) == (
            "missing 8 of 8: one (rank 1), four (ranks 4-5), ranks 0,2-3,6-7"
        )

    def test_host_named_like_a_rank(self) -> None:
        """All its ranks are listed."""
        assert describe_missing([5, 7], 8, lambda _: "rank 5") == (
            "missing 2 of 8: rank 5 (ranks 5,7)"
        )

    @pytest.mark.parametrize("decoder", [default_name, lambda _: "host", str])
    def test_bounded(self, decoder: object) -> None:
        """The text for every second of 98,304 ranks is short and counts all."""
        assert callable(decoder)
        text = describe_missing(range(0, 98_304, 2), 98_304, decoder)

        assert text.startswith("missing 49152 of 98304: ")
        assert "... and " in text
        assert len(text) < 1000

    @given(st.sets(st.integers(0, 500)), st.integers(1, 9))
    def test_counts_add_up(self, ranks: set[int], max_hosts: int) -> None:
        """The count is the number of ranks, however many hosts are listed."""
        text = describe_missing(ranks, 501, eight_per_node, max_hosts)

        assert text.startswith(f"missing {len(ranks)} of 501")
        hosts = {rank // 8 for rank in ranks}
        assert text.count("node") == min(len(hosts), max_hosts)


class TestUnfoldBelow:
    """unfold_below."""

    @given(st.sets(st.integers(0, 60)), st.integers(61, 80))
    def test_all_ranks(self, ranks: set[int], below: int) -> None:
        """It is the inverse of fold for the ranks of a job."""
        assert unfold_below(fold(ranks), below) == tuple(sorted(ranks))

    def test_ranks_that_a_job_does_not_have(self) -> None:
        """They are omitted."""
        assert unfold_below("1-999999", 4) == (1, 2, 3)
        assert unfold_below("4-999999", 4) == ()

    @pytest.mark.parametrize("text", ["0-1000000", "0-3,0-3", "0,0,0,0,0", "x", "3-1"])
    def test_not_of_a_job(self, text: str) -> None:
        """What fold returns for no job is refused."""
        with pytest.raises(ValueError, match=r"rank|range"):
            unfold_below(text, 4)
