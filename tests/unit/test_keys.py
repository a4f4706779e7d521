"""Keys become printable, and fold into families."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.core.keys import KeyFamilies, fold, printable, shown


class TestFold:
    """The variable parts of a key are folded away."""

    @pytest.mark.parametrize(
        ("key", "family"),
        [
            ("default_pg/0//worker/3", "default_pg/*//worker/*"),
            ("default_pg/0//cuda//0", "default_pg/*//cuda//*"),
            ("torch.rendezvous.job42.state", "torch.rendezvous.job*.state"),
            ("barrier12/TRACE", "barrier*/TRACE"),
            ("run/6f1c2a90-7d4e-4b0e-9a52-0c8a3f6f2c11/x", "run/*/x"),
            ("blob/9f86d081884c7d65", "blob/*"),
            ("deadbeef/feedface", "deadbeef/feedface"),
            ("plain", "plain"),
            ("", ""),
        ],
    )
    def test_folds(self, key: str, family: str) -> None:
        """Numbers, uuids and hashes are variable; words are not."""
        assert family == fold(key)

    @given(st.text(), st.integers(min_value=0), st.integers(min_value=0))
    def test_numbers_never_matter(self, text: str, one: int, other: int) -> None:
        """Keys that differ in a number only are of one family."""
        assert fold(f"{text}/{one}/x") == fold(f"{text}/{other}/x")


class TestPrintable:
    """A key in a log line is text, short, and never undecodable."""

    @given(st.one_of(st.binary(), st.text(), st.integers(), st.none()))
    def test_always_encodable_and_bounded(self, key: object) -> None:
        """Whatever a caller passes can be written to a UTF-8 log."""
        text = printable(key)

        assert len(text) <= 256
        text.encode("utf-8")

    def test_non_utf8_shows_its_bytes(self) -> None:
        """Bytes that are no text are escaped, not dropped."""
        assert printable(b"a\xff") == "a\\xff"

    def test_what_is_no_key_is_not_shown(self) -> None:
        """An argument of another type might be a value: only its type is told."""
        assert printable(["secret"]) == "<list>"

    def test_long_keys_are_cut(self) -> None:
        """A key of ten million characters takes 256 in a log line."""
        text = printable("k" * 10_000_000)

        assert len(text) == 256
        assert text.endswith("…")

    def test_only_the_first_keys_are_shown(self) -> None:
        """A call with many keys shows sixteen."""
        assert len(shown(str(n) for n in range(100))) == 16


class TestKeyFamilies:
    """A process has a bounded number of families."""

    def test_bounded(self) -> None:
        """Beyond 64 families everything is `other`, and the first ones stay."""
        families = KeyFamilies()
        letters = "abcdefghijklmnopqrstuvwxyz"

        found = {families.of(a + b) for a in letters for b in letters}

        assert len(found) == 65
        assert "other" in found
        assert families.of("aa") == "aa"

    def test_shared_family(self) -> None:
        """Keys share a family or they do not."""
        families = KeyFamilies()

        assert families.of_all(["w/1", "w/2"]) == "w/*"
        assert families.of_all(["w/1", "v/2"]) == ""
        assert families.of_all([]) == ""
