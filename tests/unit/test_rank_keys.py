"""Users' keys of which every rank writes one."""

from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from tracedstore.diagnosis.observe.blocked_calls import awaited_in, find_awaited


class TestAwaitedIn:
    """A call that waits for the keys of all ranks."""

    @pytest.mark.parametrize(
        "key_of",
        ["epoch/2/rank{}".format, "ready_{}".format, "pg/0//{}/x".format],
    )
    def test_absent_keys(self, key_of: Callable[[int], str]) -> None:
        """The number that differs is the rank."""
        keys = [key_of(rank) for rank in range(5)]
        assert awaited_in(keys, [keys[3], keys[1]], 5) == (1, 3)

    @pytest.mark.parametrize(
        "keys",
        [
            ["a/0", "a/1", "a/2"],  # of fewer ranks
            ["a/1", "a/2", "a/3", "a/4"],  # from 1 on
            ["a/0", "a/1", "b/2", "a/3"],  # of two families
            ["a/0/3", "a/1/2", "a/2/1", "a/3/0"],  # two numbers differ
            ["a/0", "a/1", "a/1", "a/3"],
            ["a/0", "a/1", "a/2", "a/x"],
        ],
    )
    def test_other_keys(self, keys: list[str]) -> None:
        """The writers are not known."""
        assert awaited_in(keys, keys[-1:], 4) is None


class TestFindAwaited:
    """A call that waits for the key of one rank after the other."""

    @staticmethod
    def find(
        present: list[str], key: str, blocked: set[int], world_size: int
    ) -> tuple[int, ...] | None:
        """Return what is found in a store with these keys."""
        store = HashStore()
        for one in present:
            store.set(one, "")
        return find_awaited(store, key, blocked, world_size)

    @pytest.mark.parametrize("key", ["e/2/address/{}", "address_{:02}_of_8", "r{}"])
    def test_keys_of_all_others_exist(self, key: str) -> None:
        """All ranks without a key are named, not only the first."""
        present = [key.format(rank) for rank in (0, 2, 4)]
        assert self.find(present, key.format(1), {0, 2, 4}, 5) == (1, 3)

    @pytest.mark.parametrize(
        ("present", "key", "blocked"),
        [
            # Epochs: 0 to 2 are over, no matter who wrote them.
            (["go/0", "go/1", "go/2"], "go/3", {0, 1, 2}),
            # Rank 4 wrote its key, and does not wait.
            (["a/0", "a/2", "a/4"], "a/1", {0, 2}),
            # Rank 2 waits, and did not write its key.
            (["a/0", "a/4"], "a/1", {0, 2, 4}),
            # One blocked rank is no evidence.
            (["a/3"], "a/1", {3}),
            (["go"], "go/now", {0, 2, 4}),
        ],
    )
    def test_other_keys(self, present: list[str], key: str, blocked: set[int]) -> None:
        """The number need not be a rank."""
        assert self.find(present, key, blocked, 5) is None
