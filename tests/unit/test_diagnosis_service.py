"""The diagnosis thread of one process, on a HashStore."""

import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from weakref import ref

import pytest
from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    HashStore,
    Store,
    TCPStore,
)

import tracedstore
from integration.harness import forked, in_background, wait_until
from support.native import on_both_bases
from support.stores import KINDS, is_listening
from support.waits import all_wait_as_ranks
from tracedstore.common import procfs
from tracedstore.coordination import rank_registry, store_access
from tracedstore.coordination.rank_registry import Member
from tracedstore.coordination.store_access import close_connection
from tracedstore.diagnosis import service, store_diagnosis
from tracedstore.diagnosis.judgement import inquiry
from tracedstore.diagnosis.judgement.stall_reports import VERDICT, StalledJob
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe import waits
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    publish_blocked,
    read_blocked,
)
from tracedstore.diagnosis.observe.waits import PendingCall, Repeated, Waits
from tracedstore.diagnosis.rounds import Wait
from tracedstore.diagnosis.service import Diagnosis
from tracedstore.diagnosis.store_diagnosis import (
    StoreDiagnoses,
    StoreDiagnosis,
)
from tracedstore.local.facts import ProcessFacts
from tracedstore.recording.counters import handle_of
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.inflight import StallReporter

Events = Callable[[], list[dict[str, Any]]]
STALL_AFTER = 0.4


pytestmark = on_both_bases


@pytest.fixture(autouse=True)
def rank_0_of_2(monkeypatch: pytest.MonkeyPatch, core: str) -> None:
    """This process is rank 0 of 2; rank 1 was never started."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Processes of other tests on this host are of other jobs.
    monkeypatch.setenv(
        "TRACEDSTORE_RUN_ID", f"test-{os.getpid()}-{time.monotonic_ns()}"
    )
    all_wait_as_ranks(monkeypatch)
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json")


@pytest.fixture
def bare() -> HashStore:
    """The store below the traced one."""
    return HashStore()


def named(events: Events, name: str) -> list[dict[str, Any]]:
    """Return the events of a name."""
    return [event for event in events() if event["event"] == name]


def diagnosis_of(
    handle: Any, *, world_size: int = 2, answers: bool = False
) -> StoreDiagnosis:
    """Return the diagnosis of a store in which this process is rank 0."""
    member = Member(rank=0, world_size=world_size, host_of=lambda _rank: "")
    return StoreDiagnosis(handle, member, RECORDER, 30.0, answers=answers)


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
    waiting.result(60)
    (resumed,) = wait_until(lambda: named(events, "job.resumed"))

    assert (stall["cause"], stall["awaited_ranks"]) == ("not_started", [1])
    assert (stall["phase"], stall["waiting_ranks"]) == ("key go", "0")
    assert (record.keys, record.pid) == (("go",), os.getpid())
    assert verdict is not None
    assert verdict.awaited_ranks == (1,)
    assert resumed["awaited_ranks"] == [1]
    # Of the whole wait, not of the report.
    assert resumed["waited_seconds"] > stall["waited_seconds"]
    wait_until(lambda: read_blocked(bare, 2) == {})


@pytest.mark.parametrize("arrives", ["while it is asked", "after the verdict"])
def test_rank_that_arrives_meanwhile_is_not_named(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    """Looking takes seconds: who arrives in them is not awaited, the other one is."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json")
    where, name = {
        "while it is asked": (inquiry, "ask_ranks"),
        "after the verdict": (StoreDiagnosis, "publish_verdict"),
    }[arrives]
    slow = getattr(where, name)

    def arrive_meanwhile(*args: Any, **kwargs: Any) -> Any:
        result = slow(*args, **kwargs)
        bare.set("ready/2", "")
        return result

    monkeypatch.setattr(where, name, arrive_meanwhile)
    store = tracedstore.wrap(bare)
    bare.set("ready/0", "")
    keys = ["ready/0", "ready/1", "ready/2"]
    waiting = in_background(lambda: store.wait(keys, timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("ready/1", "")
    waiting.result(60)

    assert stall["awaited_ranks"] == [1]
    wait_until(lambda: read_blocked(bare, 3) == {})


def test_stalled_call_shows_an_absent_key(bare: HashStore) -> None:
    """The first key of the wait exists."""
    # Long after the call is examined, so that its record is there.
    tracedstore.configure(stall_after=600, log_format="off")
    store = tracedstore.wrap(bare)
    bare.set("here", "")
    timeout = timedelta(seconds=60)
    waiting = in_background(lambda: store.wait(["here", "absent"], timeout))
    diagnosis = Diagnosis(RECORDER, 0.1, answers=False)
    emitted = wait_until(RECORDER.counters.calls)

    def keys() -> list[str]:
        diagnosis.visit_stores()
        return [diagnosis.absent_key(active.call) for active in emitted]

    wait_until(lambda: keys() == ["absent"])
    fields: dict[str, Any] = {}
    telemetry: Any = SimpleNamespace(emit=lambda _event, **kw: fields.update(kw))
    StallReporter(RECORDER, telemetry, 0.001, absent_key=diagnosis.absent_key).report()
    bare.set("absent", "")
    waiting.result(60)

    assert (fields["operation"], fields["key"]) == ("wait", "absent")


def test_rank_that_arrives_late_is_not_in_the_note(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last report names two ranks. One of them arrives before the timeout."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json")
    store = tracedstore.wrap(bare)
    bare.set("ready/0", "")
    keys = ["ready/0", "ready/1", "ready/2"]
    timeout = 4.0
    waiting = in_background(lambda: store.wait(keys, timedelta(seconds=timeout)))

    def last_report() -> list[dict[str, Any]]:
        # The next one is due when the wait has doubled.
        stalls = named(events, "job.stalled")
        return [one for one in stalls if one["waited_seconds"] > timeout / 2]

    (stall, *_) = wait_until(last_report)
    bare.set("ready/2", "")
    with pytest.raises(DistStoreError) as caught:
        waiting.result(60)

    assert stall["awaited_ranks"] == [1, 2]
    (note,) = caught.value.__notes__
    assert "rank 1: never registered" in note
    assert "rank 2" not in note


def test_rank_that_was_killed_in_a_wait_is_named(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record stays in the store, and says that it waits for a busy rank."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    start_ticks = procfs.start_ticks(ended.pid)
    ended.wait(240)
    killed = replace(
        rank_registry.own_entry(1, 3), pid=ended.pid, start_ticks=start_ticks
    )
    bare.set("tracedstore/RANKS/1", json.dumps(asdict(killed)))
    record = BlockedRecord(
        rank=1,
        host=killed.host,
        pid=killed.pid,
        operation="wait",
        keys=("other",),
        phase="key other",
        awaits=(2,),
        started=time.time(),
    )
    publish_blocked(bare, record, first=True)
    store = tracedstore.wrap(bare)
    for rank in (0, 2):
        bare.set(f"ready/{rank}", "")
    keys = ["ready/0", "ready/1", "ready/2"]
    waiting = in_background(lambda: store.wait(keys, timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("ready/1", "")
    waiting.result(60)

    assert (stall["cause"], stall["awaited_ranks"]) == ("gone", [1])


def test_rank_whose_record_is_on_the_way_is_not_named(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 answers that it is in a call. Its record says that it waits for rank 0."""
    monkeypatch.setattr(store_diagnosis, "_RECORDS_TIMEOUT", 60.0)
    looked = threading.Semaphore(0)

    def examine(*_args: Any, **_kwargs: Any) -> dict[int, ProcessFacts]:
        looked.release()
        answer = ProcessFacts(
            rank=1, host="node", pid=1, state="running", operation="get back"
        )
        return {1: answer}

    monkeypatch.setattr(inquiry, "ask_ranks", examine)
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    for _ in range(3):
        assert looked.acquire(timeout=60)
    too_early = named(events, "job.stalled")
    record = BlockedRecord(
        rank=1,
        host="node",
        pid=1,
        operation="get",
        keys=("back",),
        phase="key back",
        started=time.time(),
    )
    publish_blocked(bare, record, first=True)

    (stall, *_) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("go", "")
    waiting.result(60)

    assert too_early == []
    assert (stall["cause"], stall["awaited_ranks"]) == ("circular", [0, 1])


def test_rank_in_a_call_without_a_record_is_named_in_time(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in another store: the report is not put off for ever."""
    answer = ProcessFacts(
        rank=1, host="node", pid=1, state="running", operation="get back"
    )
    monkeypatch.setattr(inquiry, "ask_ranks", lambda *_args, **_kwargs: {1: answer})
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("go", "")
    waiting.result(60)

    assert (stall["cause"], stall["awaited_ranks"]) == ("busy", [1])
    assert stall["waited_seconds"] >= store_diagnosis._RECORDS_TIMEOUT


def test_record_of_a_failed_call_is_marked(
    bare: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the caller has the exception: the process may end then.

    A process that does not end withdraws it.
    """
    # A busy machine gets the time that it needs.
    monkeypatch.setattr(service, "_EXPLAIN_BOUNDS", (20.0, 20.0))
    store = tracedstore.wrap(bare)
    before = time.time()
    with pytest.raises(DistStoreError):
        store.wait(["go"], timedelta(seconds=1.2))
    marked = read_blocked(bare, 2)[0]

    # A wait that is repeated replaces the mark.
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    wait_until(lambda: read_blocked(bare, 2)[0] != marked)
    again = read_blocked(bare, 2)[0]
    bare.set("go", "")
    waiting.result(60)
    wait_until(lambda: read_blocked(bare, 2) == {})
    monkeypatch.setattr(store_diagnosis, "_OUTLIVED", 0.5)
    with pytest.raises(DistStoreError):
        store.wait(["never"], timedelta(seconds=1.2))

    wait_until(lambda: read_blocked(bare, 2) == {})
    assert marked.keys == ("go",)
    assert marked.failed is not None
    assert before < marked.failed < time.time()
    assert again.failed is None


WAITING_RANK = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
import tracedstore
from tracedstore.diagnosis import service

# A busy machine gets the time that it needs.
service._EXPLAIN_BOUNDS = (20.0, 20.0)
tracedstore.configure(stall_after=30)
client = TCPStore("127.0.0.1", int(sys.argv[1]), None, False)
tracedstore.wrap(client).wait(["of/0"], timedelta(seconds=2))
"""


def test_rank_that_ended_because_its_call_failed_is_not_gone(
    events: Events, tmp_path: Path
) -> None:
    """Rank 1 waited for rank 0, gave up and has ended. Rank 0 waits for rank 1."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script = tmp_path / "rank.py"
    script.write_text(WAITING_RANK)
    ended = subprocess.run(
        [sys.executable, str(script), str(server.port)],
        env={**os.environ, "RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    store = tracedstore.wrap(TCPStore("127.0.0.1", server.port, None, False))
    waiting = in_background(lambda: store.wait(["of/1"], timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    server.set("of/1", "")
    waiting.result(60)

    assert "DistStoreError: wait timeout" in ended.stderr
    assert (stall["cause"], stall["awaited_ranks"]) == ("circular", [0, 1])
    assert "waited in key of/0, until its call failed" in stall["awaited"]


def test_server_that_ends_resumes_nothing(events: Events) -> None:
    """A reported wait whose server ends emits no job.resumed, and has both causes."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = tracedstore.wrap(TCPStore("127.0.0.1", server.port, None, False))
    waiting = in_background(lambda: client.wait(["go"], timedelta(seconds=60)))
    wait_until(lambda: named(events, "job.stalled"))

    del server
    with pytest.raises(DistNetworkError) as failed:
        waiting.result(60)

    (note,) = failed.value.__notes__
    assert "server_gone" in note
    assert "before that rank 1: never registered in this store was awaited" in note
    wait_until(lambda: not RECORDER.cold.states(StalledJob))
    assert not named(events, "job.resumed")


@pytest.mark.parametrize("timeout", [0.05, 0.6])
def test_repeated_wait_is_reported_when_it_has_doubled(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """A wait that a program repeats after each timeout is one wait."""
    # A busy machine makes waits and pauses longer, so the measured times count.
    monkeypatch.setattr(waits, "PAUSE", 60.0)
    monkeypatch.setattr(service, "PAUSE", 60.0)
    is_due = Repeated.is_due
    reported: list[tuple[float, float]] = []

    def timed(repeated: Repeated) -> bool:
        before = repeated.waited()
        due = is_due(repeated)
        if due:
            reported.append((before, repeated.waited()))
        return due

    monkeypatch.setattr(Repeated, "is_due", timed)
    store = tracedstore.wrap(bare)
    count = 0
    while count < 8 or len(reported) < 2:
        with pytest.raises(DistStoreError):
            store.wait(["go"], timedelta(seconds=timeout))
        count += 1

    stalls = named(events, "job.stalled")
    assert 2 <= len(stalls) == len(reported) < count
    assert reported[0][0] >= STALL_AFTER
    for (before, _), (_, after) in pairwise(reported):
        assert after >= (1 + waits._DOUBLED) * before
    assert [one["waited_seconds"] for one in stalls] == pytest.approx(
        [after for _, after in reported], abs=1
    )
    assert not named(events, "job.resumed")


def test_wait_after_one_that_returned_is_reported(
    bare: HashStore, events: Events
) -> None:
    """A stall that is over does not hide the next one of the same key."""
    store = tracedstore.wrap(bare)
    for number in (1, 2):
        # On a busy machine the first wait is reported again before it ends.
        before = len(named(events, "job.stalled"))
        waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
        wait_until(lambda: len(named(events, "job.stalled")) > before)  # noqa: B023 - called in this turn
        bare.set("go", "")
        waiting.result(60)
        wait_until(lambda: len(named(events, "job.resumed")) == number)  # noqa: B023 - called in this turn
        bare.delete_key("go")


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
    assert named(events, "job.stalled") == []


def test_stall_that_is_explained_at_its_timeout_is_reported(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine no verdict is found before the call times out."""
    monkeypatch.setattr(service, "examine_after", lambda *_args: math.inf)
    with pytest.raises(DistStoreError) as raised:
        tracedstore.wrap(bare).wait(["go"], timedelta(seconds=1.2))

    (stall,) = named(events, "job.stalled")
    assert stall["awaited_ranks"] == [1]
    assert len(raised.value.__notes__) == 1


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

    error = waiting.exception(60)

    assert error is not None
    assert error.__notes__ == [f"tracedstore: {verdict.describe()}"]
    assert named(events, "job.stalled") == []


@pytest.mark.parametrize("reported_here", [True, False])
def test_rank_that_has_not_reported_looks_later(
    bare: HashStore, reported_here: bool
) -> None:
    """The wait has doubled since one rank reported it: this one, or another one."""
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (call,) = wait_until(Waits(RECORDER).pending)
    call.repeated.since -= 1000.0
    # Later than what this process does by itself.
    tracedstore.configure(stall_after=600, log_format="off")
    diagnosis = diagnosis_of(bare)
    wait = Wait(call, call.repeated, diagnosis)
    wait.elected, wait.reported = reported_here, True
    bare.add("tracedstore/VERDICTS", 1000)
    lookers = "tracedstore/DIAGNOSING/1000"
    diagnosis.advance(wait)  # publishes the record
    wait.look_at = 0.0

    diagnosis.advance(wait)
    at_first = bare.add(lookers, 0)
    wait.round_started -= 1000.0
    wait.look_at = 0.0
    diagnosis.advance(wait)

    bare.set("go", "")
    waiting.result(60)
    assert at_first == int(reported_here)
    assert bare.add(lookers, 0) == 1


@pytest.mark.parametrize("found", ["while this rank asks", "at the same time"])
def test_two_ranks_find_the_same(
    bare: HashStore, events: Events, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """One of them reports it: the one whose verdict is in the store."""

    def publish_another(verdict: Verdict) -> None:
        theirs = replace(verdict, time=verdict.time + 0.001)
        bare.set(VERDICT, theirs.to_bytes().decode())
        bare.add("tracedstore/VERDICTS", 1)

    inquire, publish = inquiry.inquire, StoreDiagnosis.publish_verdict

    def asks(*args: Any, **keywords: Any) -> Verdict | None:
        verdict = inquire(*args, **keywords)
        if verdict is not None:
            publish_another(verdict)
        return verdict

    def publishes(self: StoreDiagnosis, verdict: Verdict) -> None:
        publish(self, verdict)
        publish_another(verdict)

    if found == "while this rank asks":
        monkeypatch.setattr(store_diagnosis, "inquire", asks)
    else:
        monkeypatch.setattr(StoreDiagnosis, "publish_verdict", publishes)
    store = tracedstore.wrap(bare)
    error = in_background(
        lambda: store.wait(["go"], timedelta(seconds=4 * STALL_AFTER))
    ).exception(60)

    assert error is not None
    assert "waiting in key go for rank 1" in error.__notes__[0]
    assert named(events, "job.stalled") == []


def test_ranks_that_have_come_since_do_not_make_it_another_verdict(
    bare: HashStore,
) -> None:
    """The record of this rank still awaits rank 2, which has come: rank 1 has not."""
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (call,) = wait_until(Waits(RECORDER).pending)
    diagnosis = diagnosis_of(bare, world_size=3)
    record = diagnosis._describe(Wait(call, call.repeated, diagnosis), time.time() - 9)
    assert record is not None
    own = Verdict(phase="key go", cause="busy", awaited_ranks=(1,), time=time.time())
    wait = Wait(call, call.repeated, diagnosis)
    wait.record, wait.verdict = replace(record, awaits=(1, 2)), own

    found = {}
    for awaited in ((1,), (2,)):
        theirs = replace(own, awaited_ranks=awaited, time=own.time + 1)
        bare.set(VERDICT, theirs.to_bytes().decode())
        found[awaited] = diagnosis._is_replaced(wait)

    bare.set("go", "")
    waiting.result(60)
    assert found == {(1,): True, (2,): False}


def test_hostile_verdict_is_not_used(bare: HashStore, events: Events) -> None:
    """This process finds its own."""
    bare.set(VERDICT, '{"phase": "key go", "cause": "busy"}')
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("go", "")
    waiting.result(60)
    assert stall["awaited_ranks"] == [1]


FORGED = Verdict(
    phase="key go",
    cause="gone",
    awaited=(AwaitedRank(rank=1, host="evil", pid=7, cause="gone", doing="forged"),),
    awaited_ranks=(1,),
    waiting_ranks=(0,),
    evidence=("forged",),
)


def forge(store: HashStore, **changes: Any) -> None:
    """Write a verdict on a stall that any client made up."""
    forged = replace(FORGED, **{"time": time.time() + 30, **changes})
    store.set(VERDICT, forged.to_bytes().decode())


def test_forged_verdict_in_a_healthy_job(bare: HashStore, events: Events) -> None:
    """No event, no gauge, and no note; a call that just takes long is not explained."""
    bare.add("tracedstore/DIAGNOSING/0", 2)
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    wait_until(lambda: read_blocked(bare, 2))
    # Rank 1 waits too, for another key: it is not the one that this rank waits for.
    own = read_blocked(bare, 2)[0]
    publish_blocked(bare, replace(own, rank=1, pid=own.pid + 1), first=True)
    looked = threading.Event()
    read = StoreDiagnosis.read_verdict

    def counted(*args: Any) -> Any:
        found = read(*args)
        looked.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreDiagnosis, "read_verdict", counted)
        forge(bare, cause="busy")
        looked.clear()
        assert looked.wait(60)
        bare.set("go", "")
        waiting.result(60)
    store.set("next", "")

    assert named(events, "job.stalled") == named(events, "job.resumed") == []
    assert not RECORDER.cold.states(StalledJob)
    assert "forged" not in json.dumps(events())


@pytest.mark.parametrize(
    "changes",
    [
        {"awaited_ranks": (5,), "awaited": (replace(FORGED.awaited[0], rank=5),)},
        {"awaited": (replace(FORGED.awaited[0], rank=2),)},
        {"waiting_ranks": (0, 2)},
        {"time": 1e10},
    ],
    ids=["named", "described", "waiting", "future"],
)
def test_forged_verdict_in_a_stalled_job(
    bare: HashStore, events: Events, changes: dict[str, Any]
) -> None:
    """One with ranks that do not exist, or from the future, is not used."""
    forge(bare, **changes)
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))

    (stall,) = wait_until(lambda: named(events, "job.stalled"))
    bare.set("go", "")
    waiting.result(60)

    assert (stall["cause"], stall["awaited_ranks"]) == ("not_started", [1])
    assert "forged" not in json.dumps(events())


def test_long_verdict_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a value is known when it is read."""
    bare = HashStore()
    traced = tracedstore.wrap(bare)
    found = diagnosis_of(handle_of(traced))
    bare.set(VERDICT, "x" * 6_000_000)
    reads: list[str] = []
    read = store_access.read_key

    def counted(store: Any, key: str) -> bytes:
        reads.append(key)
        return read(store, key)

    monkeypatch.setattr(store_diagnosis, "read_key", counted)
    record = BlockedRecord(
        rank=0, host="h", pid=1, operation="get", keys=(), phase="key go", started=0
    )

    assert [found.read_verdict(record, 0.0) for _ in range(5)] == [None] * 5
    assert reads == [VERDICT]


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
    polled = diagnosis_of(client, answers=True)
    polled.poll()
    del server
    gc.collect()

    polled._poll_at = 0.0
    polled.poll()

    assert polled._poll_at > time.monotonic() + 10


def test_description_is_progress(bare: HashStore) -> None:
    """A store that is slow, but responds, is not reported as one that does not."""
    store = tracedstore.wrap(bare)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (call,) = wait_until(Waits(RECORDER).pending)
    diagnosis = diagnosis_of(bare)
    before = time.monotonic()

    record = diagnosis._describe(Wait(call, call.repeated, diagnosis), 0.0)

    bare.set("go", "")
    waiting.result(60)
    assert record is not None
    assert diagnosis.busy_since >= before


@pytest.mark.parametrize(
    ("world_size", "expected"), [(2048, False), (16_384, None), (65_536, None)]
)
def test_verdict_of_a_large_job_takes_longer(
    bare: HashStore, world_size: int, expected: bool | None
) -> None:
    """Its ranks read the verdict less often; until then none reports by itself."""
    store = tracedstore.wrap(bare)
    diagnosis = Diagnosis(RECORDER, 30.0, answers=False)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    (call,) = wait_until(Waits(RECORDER).pending)
    diagnosis._advance(diagnosis_of(bare, world_size=world_size), call, failed=False)
    diagnosis._waits[call.key].round_started -= 10.0

    assert isinstance(call, PendingCall)
    covered = diagnosis.covers(call.active.call)

    bare.set("go", "")
    waiting.result(60)
    assert covered is expected


class HangingStore(HashStore):
    """A store whose checks hang."""

    def __init__(self) -> None:
        super().__init__()
        self.checked, self.released = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        """Hang until the end of the test."""
        self.checked.set()
        self.released.wait()
        return False


def test_stop_does_not_wait_for_a_store_that_hangs() -> None:
    """The thread is abandoned after the timeout."""
    # Without the package's own, which may come first.
    tracedstore.configure(stall_after=0)
    inner = HangingStore()
    rank_registry.reset()
    store = tracedstore.wrap(inner)
    diagnosis = Diagnosis(RECORDER, 0.2, answers=False)
    waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=60)))
    diagnosis.start()
    assert inner.checked.wait(60)
    started = time.monotonic()
    diagnosis.stop(0.3)
    took = time.monotonic() - started
    inner.released.set()
    inner.set("go", "")
    waiting.result(60)
    assert took > 0.2


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

    (note,) = forked(child, 240)
    bare.set("go", "")
    waiting.result(60)
    assert note.startswith("tracedstore: waiting in key mine for rank 1")


@pytest.mark.parametrize("wrap", [tracedstore.wrap, lambda store: store])
@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_store_is_freed(
    kind: str, wrap: Callable[[Store], Any], tmp_path: Path
) -> None:
    """The diagnosis keeps no store, traced or bare.

    A TCPStore that is kept keeps its port, and a FileStore its file.
    """
    store = wrap(KINDS[kind](tmp_path))
    rank_registry.register(store, 0, 2)
    for found in StoreDiagnoses(RECORDER, 30.0, answers=True).registered():
        found.poll()
    # C++ frees the state of a native store with the store.
    freed = ref(handle_of(store))

    close_connection(store)
    del store

    def is_freed() -> bool:
        gc.collect()
        return freed() is None

    # The thread of the process's own diagnosis refers to a store while it polls it.
    wait_until(is_freed)


@pytest.mark.parametrize("wrap", [tracedstore.wrap, lambda store: store])
def test_store_is_freed_while_the_diagnosis_connects(
    wrap: Callable[[Store], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process group of the job at that port does not get its keys."""
    stores = [wrap(KINDS["tcp"](tmp_path))]
    port = stores[0].port
    polled = diagnosis_of(handle_of(stores[0]), answers=True)
    listening = [is_listening(port)]

    def free(*_args: Any, **_kwargs: Any) -> NoReturn:
        close_connection(stores.pop())
        listening.append(is_listening(port))
        raise DistNetworkError("refused")

    monkeypatch.setattr(TCPStore, "__init__", free)

    polled.poll()

    assert listening == [True, False]
