"""The diagnosis thread of one process, on a HashStore."""

import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from torch.distributed import DistStoreError, HashStore, TCPStore

import tracedstore
from integration.harness import forked, in_background, wait_until
from support.stores import KINDS
from tracedstore.coordination import rank_registry
from tracedstore.core.recorder import RECORDER
from tracedstore.diagnosis.blocked_call import Member
from tracedstore.diagnosis.blocked_record import read_blocked
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.diagnosis.session import Session, Sessions
from tracedstore.diagnosis.stalled import VERDICT
from tracedstore.diagnosis.verdict import Verdict

Events = Callable[[], list[dict[str, Any]]]
STALL_AFTER = 0.4


@pytest.fixture(autouse=True)
def rank_0_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of 2; rank 1 was never started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json")


@pytest.fixture
def bare() -> HashStore:
    """The store below the traced one."""
    return HashStore()


def named(events: Events, name: str) -> list[dict[str, Any]]:
    """Return the events of a name."""
    return [event for event in events() if event["event"] == name]


def test_stall_is_published_reported_and_withdrawn(
    bare: HashStore, events: Events
) -> None:
    """The record while the call lasts, one verdict, and the end of the stall."""
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    record = read_blocked(bare, 2)[0]
    verdict = Verdict.from_bytes(bare.get(VERDICT))
    bare.set("go", "")
    waiting.result(20)
    (resumed,) = wait_until(lambda: named(events, "job.resumed"))

    assert (stall["cause"], stall["awaited_ranks"]) == ("not_started", [1])
    assert (stall["phase"], stall["waiting_ranks"]) == ("key go", "0")
    assert (record.keys, record.pid) == (("go",), os.getpid())
    assert verdict is not None
    assert verdict.awaited_ranks == (1,)
    assert resumed["awaited_ranks"] == [1]
    wait_until(lambda: read_blocked(bare, 2) == {})


def test_timeout_before_the_stall_is_explained(bare: HashStore, events: Events) -> None:
    """The exception has the note, and its type, text and arguments are torch's."""
    tracedstore.configure(stall_after=30, log_format="json")
    timeout = timedelta(seconds=1.2)
    with pytest.raises(DistStoreError) as plain:
        bare.wait(["go"], timeout)

    with pytest.raises(DistStoreError) as traced:
        tracedstore.wrap(bare).wait(["go"], timeout)

    assert str(traced.value) == str(plain.value)
    assert traced.value.args == plain.value.args
    (note,) = traced.value.__notes__
    assert note.startswith("tracedstore: waiting in key go for rank 1")
    (failed,) = named(events, "store.operation.failed")
    assert (failed["cause"], failed["awaited_ranks"]) == ("not_started", [1])


def test_short_timeout_is_not_delayed(bare: HashStore) -> None:
    """A wait of less than a second has no diagnosis, which would take longer."""
    with pytest.raises(DistStoreError) as raised:
        tracedstore.wrap(bare).wait(["go"], timedelta(seconds=0.05))
    assert not hasattr(raised.value, "__notes__")


def test_verdict_of_another_rank_is_used(bare: HashStore, events: Events) -> None:
    """Two processes look already: this one reads, and reports nothing itself."""
    bare.add("tracedstore/DIAGNOSING/0", 2)
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=4)))
    wait_until(lambda: read_blocked(bare, 2))
    verdict = Verdict(
        phase="key go",
        cause="busy",
        awaited_ranks=(1,),
        known="",
        waiting_ranks=(0,),
        time=time.time() + 2,
    )
    bare.set(VERDICT, verdict.to_bytes().decode())

    error = waiting.exception(30)

    assert error is not None
    assert error.__notes__ == [f"tracedstore: {verdict.describe()}"]
    assert named(events, "job.stalled") == []


def test_hostile_verdict_is_not_used(bare: HashStore, events: Events) -> None:
    """This process finds its own."""
    bare.set(VERDICT, '{"phase": "key go", "cause": "busy"}')
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("go", "")
    waiting.result(20)
    assert stall["awaited_ranks"] == [1]


def test_call_without_a_rank_is_not_diagnosed(
    bare: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store gets no keys of the telemetry."""
    monkeypatch.delenv("RANK")
    tracedstore.configure(stall_after=0.2)
    with pytest.raises(DistStoreError):
        tracedstore.wrap(bare).wait(["go"], timedelta(seconds=1.5))
    assert bare.num_keys() == 0


def test_server_that_has_ended_is_no_failure() -> None:
    """At the end of a job its server may end first: questions are read later."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False)
    member = Member(rank=0, world_size=2, host_of=lambda _rank: "")
    session = Session(client, member, answers=True)
    session.poll()
    del server
    gc.collect()

    session._poll_at = 0.0
    session.poll()

    assert session._poll_at > time.monotonic() + 10


class HangingStore(HashStore):
    """A store whose checks hang."""

    def __init__(self) -> None:
        super().__init__()
        self.checked, self.released = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        """Hang until the end of the test."""
        self.checked.set()
        self.released.wait(30)
        return False


def test_stop_does_not_wait_for_a_store_that_hangs() -> None:
    """The thread is abandoned after the timeout."""
    inner = HangingStore()
    rank_registry.reset()
    store = tracedstore.wrap(inner)
    diagnosis = Diagnosis(RECORDER, 0.2, answers=False)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=20)))
    diagnosis.start()
    assert inner.checked.wait(20)
    started = time.monotonic()
    diagnosis.stop(0.3)
    took = time.monotonic() - started
    inner.released.set()
    inner.set("go", "")
    waiting.result(30)
    assert 0.2 < took < 5


def test_forked_child_has_a_thread_of_its_own(bare: HashStore) -> None:
    """It diagnoses its own calls, and not those of its parent."""
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    wait_until(lambda: read_blocked(bare, 2))

    def child() -> list[str]:
        tracedstore.configure(stall_after=0.2)
        own = tracedstore.wrap(HashStore())
        try:
            own.wait(["mine"], timedelta(seconds=2))
        except DistStoreError as error:
            return list(error.__notes__)
        return []

    (note,) = forked(child, 40)
    bare.set("go", "")
    waiting.result(20)
    assert note.startswith("tracedstore: waiting in key mine for rank 1")


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_store_is_freed(kind: str, tmp_path: Path) -> None:
    """The diagnosis keeps no store: a TCPStore that is kept keeps its port."""
    store = tracedstore.wrap(KINDS[kind](tmp_path))
    rank_registry.register(store, 0, 2)
    sessions = Sessions(answers=True)
    sessions.poll()
    freed = ref(store)

    store.close()
    del store
    gc.collect()

    assert freed() is None
