"""Who reports what many processes find."""

import pytest
from torch.distributed import HashStore

from tracedstore.common.election import (
    first_of,
    is_elected,
    is_first_of_host,
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


@pytest.mark.parametrize(
    ("local_rank", "reports"), [(None, True), ("0", True), ("3", False)]
)
def test_first_of_host(
    local_rank: str | None, reports: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first local rank reports, and a process that was started alone."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)

    assert is_first_of_host() is reports
