"""Printable keys and key families."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.common.keys import KeyFamilies, fold, key_text, shown


class TestFold:
    """fold() replaces the variable parts of a key by `*`."""

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
        """Numbers, UUIDs and hashes are variable; other text is not."""
        assert family == fold(key)

    @given(st.text(), st.integers(min_value=0), st.integers(min_value=0))
    def test_numbers_do_not_matter(self, text: str, one: int, other: int) -> None:
        """Keys that differ only in a number have the same family."""
        assert fold(f"{text}/{one}/x") == fold(f"{text}/{other}/x")


class TestPrintable:
    """A printable key is valid UTF-8 and has a bounded length."""

    @given(st.one_of(st.binary(), st.text(), st.integers(), st.none()))
    def test_always_encodable_and_bounded(self, key: object) -> None:
        """The text of any argument can be encoded and has at most 256 characters."""
        text = key_text(key)

        assert len(text) <= 256
        text.encode("utf-8")

    def test_undecodable_bytes_are_escaped(self) -> None:
        """Bytes that are not UTF-8 are escaped, not dropped."""
        assert key_text(b"a\xff") == "a\\xff"

    def test_other_types_are_not_shown(self) -> None:
        """Only the type of another argument is shown, as it may be a value."""
        assert key_text(["secret"]) == "<list>"

    def test_long_keys_are_cut(self) -> None:
        """A key of ten million characters is cut to 256."""
        text = key_text("k" * 10_000_000)

        assert len(text) == 256
        assert text.endswith("…")

    def test_only_first_keys_are_shown(self) -> None:
        """At most 16 keys of a call are shown."""
        assert len(shown(str(n) for n in range(100))) == 16


class TestKeyFamilies:
    """The number of key families is limited."""

    def test_bounded(self) -> None:
        """After 64 families new ones are `other`; the first 64 stay."""
        families = KeyFamilies()
        letters = "abcdefghijklmnopqrstuvwxyz"

        labels = {families.of(a + b) for a in letters for b in letters}

        assert len(labels) == 65
        assert "other" in labels
        assert families.of("aa") == "aa"

    def test_shared_family(self) -> None:
        """of_all() returns the common family of keys, or empty text without one."""
        families = KeyFamilies()

        assert families.of_all(["w/1", "w/2"]) == "w/*"
        assert families.of_all(["w/1", "v/2"]) == ""
        assert families.of_all([]) == ""
