"""Who reports what many processes find."""

from torch.distributed import HashStore

from tracedstore.common.election import (
    first_of,
    is_elected,
    take_position,
)


def test_first_to_count_themselves() -> None:
    """Two of those that share a store report, whoever comes first; keys are apart."""
    store = HashStore()

    positions = [take_position(store, "found/0") for _ in range(4)]

    assert [is_elected(position) for position in positions] == [
        True,
        True,
        False,
        False,
    ]
    assert is_elected(take_position(store, "found/1"), reporters=1)
    assert not is_elected(take_position(store, "found/1"), reporters=1)


def test_unknown_position() -> None:
    """A process that could not count itself does not report."""
    assert not is_elected(0)


def test_first_of_list() -> None:
    """Those that are reported do not report themselves."""
    assert first_of(range(4)) == [0, 1]
    assert first_of(range(4), without=(0, 2)) == [1, 3]
    assert first_of((7, 3, 5), reporters=1) == [7]
    assert first_of((7,), without=(7,)) == []
