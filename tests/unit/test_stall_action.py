"""When a process ends because its job hangs: after a verdict of its own that held."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tracedstore.common.causes import CAUSES, Cause
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis import stall_action
from tracedstore.diagnosis.judgement.verdict import AwaitedRank, Verdict
from tracedstore.diagnosis.observe.waits import Repeated
from tracedstore.diagnosis.rounds import Wait
from tracedstore.diagnosis.stall_action import LASTING, StallAction

STALL_AFTER = 30.0
MEMBER = Member(rank=0, world_size=4, host_of=lambda _rank: "")


def verdict_of(cause: Cause = "mismatch", rank: int = 2) -> Verdict:
    """Return a verdict on a rank."""
    awaited = (AwaitedRank(rank=rank, cause=cause),)
    return Verdict(phase="p", cause=cause, awaited=awaited, awaited_ranks=(rank,))


class Stall:
    """A process in a wait, its clock, and what it has ended with.

    Attributes:
        again: What it finds when it looks once more.
        still: For how long nothing has moved in it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> None:
        self.now = 1000.0
        self.again: Verdict | None = verdict
        self.confirmed = True
        self.still = 0.0
        self.ended: list[Verdict] = []
        self.store: Any = SimpleNamespace(
            member=MEMBER,
            connection=None,
            find_verdict=lambda _wait: self.again,
            lasts=lambda _wait: True,
        )
        pending: Any = SimpleNamespace(thread_id=threading.main_thread().ident)
        repeated = Repeated(since=time.monotonic() - 3 * STALL_AFTER)
        store: Any = self.store
        self.wait = Wait(pending, repeated, store)
        self.wait.verdict = verdict
        self.wait.elected = self.wait.reported = True
        self.action = StallAction(STALL_AFTER, lambda: self.still, self._end)
        monkeypatch.setattr(
            stall_action, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        monkeypatch.setattr(stall_action, "is_confirmed", lambda *_: self.confirmed)

    def _end(self, verdict: Verdict, lasts: Any) -> None:
        assert lasts()
        self.ended.append(verdict)

    def step(self, seconds: float = 0.0) -> list[Verdict]:
        """Take a step after some seconds; return what the process has ended with."""
        self.now += seconds
        self.action.consider(self.store, self.wait)
        return self.ended


@pytest.fixture
def stall(monkeypatch: pytest.MonkeyPatch) -> Stall:
    """Return a process that has just reported a mismatch."""
    return Stall(monkeypatch, verdict_of())


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_that_do_not_pass(cause: Cause, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process ends because another one is busy, late or unknown."""
    stall = Stall(monkeypatch, verdict_of(cause))
    stall.step()

    ended = stall.step(10 * STALL_AFTER)

    assert LASTING == ("gone", "mismatch", "diverged")
    assert [one.cause for one in ended] == [cause] * (cause in LASTING)


def test_verdict_has_to_hold(stall: Stall) -> None:
    """For as long again as it took to be reported."""
    stall.step()

    assert not stall.step(STALL_AFTER - 0.1)
    (ended,) = stall.step(0.2)
    assert ended.waited_seconds >= 3 * STALL_AFTER


@pytest.mark.parametrize(
    "change",
    [
        {"elected": False},
        {"reported": False},
        {"failed": True},
        {"refuted": True},
        {"verdict": replace(verdict_of(), awaited=(), awaited_ranks=())},
    ],
)
def test_verdict_of_another_process(change: dict[str, Any], stall: Stall) -> None:
    """Any client can write one into the store; one that does not hold is none."""
    for name, value in change.items():
        setattr(stall.wait, name, value)
    stall.step()

    assert not stall.step(10 * STALL_AFTER)


def test_verdict_that_another_process_replaces(stall: Stall) -> None:
    """What this process has found counts, whatever the store has since."""
    stall.step()
    stall.wait.verdict, stall.wait.elected = verdict_of("gone", 1), False

    (ended,) = stall.step(STALL_AFTER)
    assert (ended.cause, ended.awaited_ranks) == ("mismatch", (2,))


@pytest.mark.parametrize("again", [verdict_of("gone"), verdict_of(rank=3)])
def test_another_verdict_at_the_second_look(again: Verdict, stall: Stall) -> None:
    """The time begins again."""
    stall.step()
    stall.again = again

    assert not stall.step(STALL_AFTER)
    stall.again = verdict_of()
    stall.step(1.0)
    assert not stall.step(STALL_AFTER - 1.0)
    assert stall.step(1.0)


def test_no_verdict_at_the_second_look(stall: Stall) -> None:
    """A rank is about to publish something: there is another look soon."""
    stall.step()
    stall.again = None

    assert not stall.step(STALL_AFTER)
    stall.again = verdict_of()
    assert not stall.step(1.0)
    assert stall.step(STALL_AFTER / 4)


def test_processes_have_to_confirm_it(stall: Stall) -> None:
    """A record in the store may be anyone's."""
    stall.step()
    stall.confirmed = False

    assert not stall.step(STALL_AFTER)


def test_wait_of_twice_that_long(stall: Stall) -> None:
    """This process has waited itself."""
    stall.wait.repeated = Repeated(since=time.monotonic() - STALL_AFTER)
    stall.step()

    assert not stall.step(STALL_AFTER)


def test_thread_beside_the_program(stall: Stall) -> None:
    """A checkpoint in the background hangs, and the program goes on."""
    stall.wait.pending = SimpleNamespace(thread_id=1)  # type: ignore[assignment]
    stall.step()

    assert not stall.step(STALL_AFTER)
    stall.still = STALL_AFTER
    stall.step(1.0)
    assert stall.step(STALL_AFTER)


def test_agents_are_not_ended(stall: Stall) -> None:
    """Torchrun's agents restart the job."""
    stall.store.member = replace(MEMBER, agents={0: ("node", 1)})
    stall.step()

    assert not stall.step(STALL_AFTER)
