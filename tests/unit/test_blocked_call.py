"""What a blocked call of torch waits for, on a HashStore."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from tracedstore.common.identity import identify
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.observe import torch_keys
from tracedstore.diagnosis.observe.blocked_calls import describe_call
from tracedstore.recording.counters import ActiveCall, StoreState
from tracedstore.recording.recorder import RECORDER
from tracedstore.recording.store_proxy import RECORDED

WORLD_SIZE = 100
ABSENT = (33, 50, 99)
KEY = "default_pg/0//cpu//0/{}"


class CheckedStore(HashStore):
    """Counts the keys that are checked."""

    checked = 0

    def check(self, keys: Any) -> bool:
        """Check, and count."""
        self.checked += len(keys)
        return super().check(keys)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """All ranks are members of the default group."""
    torch_keys.record_members("0", (), WORLD_SIZE)
    yield
    torch_keys.forget_groups()


def waiting() -> tuple[CheckedStore, ActiveCall]:
    """Return a store in which a rank waits for the first absent one."""
    store = CheckedStore()
    for rank in range(WORLD_SIZE):
        if rank not in ABSENT:
            store.set(KEY.format(rank), "an address")
    state = StoreState(store, identify(store), RECORDER)
    call = (RECORDED["get"], state, (KEY.format(ABSENT[0]),), 0, None)
    return store, ActiveCall(*call, threading.get_ident(), call)


MEMBER = Member(rank=0, world_size=WORLD_SIZE, host_of=lambda _rank: "")


def test_rank_of_a_large_group_checks_its_own_key() -> None:
    """All ranks of a large group do this in every second of a stall."""
    store, call = waiting()

    record = describe_call(store, call, MEMBER, 0.0)

    assert record is not None
    assert record.awaits == (33,)
    assert store.checked == 1


def test_complete_description_has_all_absent_ranks() -> None:
    """The ranks that look find all of them."""
    store, call = waiting()

    record = describe_call(store, call, MEMBER, 0.0, complete=True)

    assert record is not None
    assert record.awaits == ABSENT


def test_named_ranks_are_checked_alone() -> None:
    """All ranks do this when their calls time out: it must not read a key per rank."""
    store, call = waiting()
    store.set(KEY.format(50), "an address")

    record = describe_call(store, call, MEMBER, 0.0, also=ABSENT)

    assert record is not None
    assert record.awaits == (33, 99)
    assert store.checked <= 10
