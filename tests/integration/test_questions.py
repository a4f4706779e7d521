"""Tests of questions and answers through real stores."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from support import stores
from tracedstore.common import procfs
from tracedstore.coordination.rank_registry import RankInfo, register
from tracedstore.diagnosis.ask import questions
from tracedstore.diagnosis.ask.questions import (
    Question,
    ask,
    ask_ranks,
    poll_interval,
    polling_interval_of_rank,
)
from tracedstore.diagnosis.ask.responder import Responder
from tracedstore.local import sockets
from tracedstore.local.sockets import LOCAL_SOCKET

LONG = 60.0
Connect = Callable[[], Any]


@pytest.fixture(autouse=True)
def _private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of other tests do not listen in the directory of this one."""
    folder = tmp_path / "sockets"
    monkeypatch.setattr(sockets, "directory_candidates", lambda: [str(folder)])


@pytest.fixture(params=["tcp", "file", "hash", "python", "etcd"])
def connect(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    etcd_store: Callable[[Path], Store],
) -> Connect:
    """Connect to one store of each kind; a TCPStore gets a connection each time."""
    if request.param == "etcd":
        store = etcd_store(tmp_path)
    else:
        store = stores.KINDS[request.param](tmp_path)
    if request.param == "tcp":
        return lambda: stores.second_client(store)
    return lambda: store


def poll_of(store: Any, rank: int, world_size: int) -> Callable[[], None]:
    """Return a function that answers the questions in a store, as a rank."""
    return partial(Responder(rank, world_size).poll, store)


@contextmanager
def polled(*polls: Callable[[], None]) -> Iterator[None]:
    """Call functions that poll, in a thread."""
    stopping = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not stopping.wait(0.01):
                for poll in polls:
                    poll()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(LONG)
    assert not errors, errors


class TestStores:
    """Questions through every kind of store."""

    def test_ranks_answer(self, connect: Connect) -> None:
        """The named ranks answer; later questions are answered as well."""
        polls = [poll_of(connect(), rank, 4) for rank in range(3)]

        with polled(*polls):
            for _ in range(questions.SLOTS + 2):
                answers = ask(connect(), "status", [0, 2], LONG)
                assert answers.keys() == {0, 2}
            stacks = ask(connect(), "stacks", [1], LONG)

        assert answers[2].rank == 2
        assert answers[2].pid == os.getpid()
        assert answers[2].source == "itself"
        assert "MainThread" in stacks[1].stacks

    def test_answers_so_far(self, connect: Connect) -> None:
        """Who waits for the answers may not want more of them, after any time."""
        assert ask(connect(), "status", [0], 600, hurry=lambda: True) == {}

    def test_rank_that_does_not_answer(self, connect: Connect) -> None:
        """After the timeout, the answers of the others are returned."""
        with polled(poll_of(connect(), 0, 4)):
            answers = ask(connect(), "status", [0, 3], 1.0)

        assert answers.keys() == {0}

    def test_keys_are_deleted(self, connect: Connect) -> None:
        """Only the counter remains, where the store can delete: not in etcd."""
        store = connect()
        with polled(poll_of(connect(), 0, 4)):
            ask(connect(), "status", [0], LONG)

        keys = [questions.question_key(1), questions.answer_key(1, 0)]
        remain = type(store).__name__ == "EtcdStore"
        assert [bool(store.check([key])) for key in keys] == [remain] * 2
        assert questions.read_number(store) == 1

    def test_late_rank(self, connect: Connect) -> None:
        """A rank that starts after the question was asked answers it."""
        waiting = threading.Thread(
            target=lambda: found.update(ask(connect(), "status", [1], LONG))
        )
        found: dict[int, Any] = {}
        waiting.start()
        store = connect()
        deadline = time.monotonic() + LONG
        while not questions.read_question(store, 1):
            assert time.monotonic() < deadline

        with polled(poll_of(connect(), 1, 2)):
            waiting.join(LONG)

        assert found.keys() == {1}

    def test_peek(self, connect: Connect) -> None:
        """Reading a missing key neither waits nor creates it."""
        store = connect()

        assert questions.peek(store, "missing") is None
        assert not store.check(["missing"])
        store.set("there", "value")
        assert questions.peek(store, "there") == b"value"


def encoded(**changes: Any) -> bytes:
    """Return a question to rank 0 with changed fields."""
    question = Question(number=1, ranks=frozenset([0]), asked_by="x", time=1.0)
    return json.dumps(json.loads(question.to_bytes()) | changes).encode()


class TestHostileContents:
    """What any client can write into the store."""

    @pytest.fixture
    def store(self) -> dist.HashStore:
        """A store with a short timeout: nothing may wait for it."""
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=1))
        return store

    @pytest.mark.parametrize(
        "value",
        [
            b"",
            b"null",
            b"[]",
            b"{}",
            b"[" * 100_000,
            encoded(ranks="0-999999999999"),
            encoded(ranks=[0]),
            encoded(kind="shell"),
            encoded(number=2),
            encoded(time="now"),
            encoded(families=None),
            b"x" * 1_000_000,
        ],
    )
    def test_bad_question(self, store: Any, value: bytes) -> None:
        """A malformed question gets no answer, and later ones do."""
        poll = poll_of(store, 0, 2)
        store.add(questions.QUESTIONS, 1)
        store.set(questions.question_key(1), value)
        for _ in range(4):
            poll()

        assert not store.check([questions.answer_key(1, 0)])
        with polled(poll):
            assert ask(store, "status", [0], LONG).keys() == {0}

    @pytest.mark.parametrize("value", [b"-5", b"x", b"9" * 100, b"", b"1.5"])
    def test_bad_counter(self, store: Any, value: bytes) -> None:
        """A counter that is no number is no question."""
        store.set(questions.QUESTIONS, value)

        poll_of(store, 0, 2)()

        assert store.num_keys() == 1

    def test_huge_counter(self, store: dist.HashStore) -> None:
        """Only the newest questions are read."""
        store.set(questions.QUESTIONS, str(2**50))
        counting = CountingStore(store)

        poll_of(counting, 0, 2)()

        assert sum(counting.requests.values()) <= 5

    @pytest.mark.parametrize(
        "value", [b"", b"{}", b'{"question": 1}', b"[" * 1000, b"\xff"]
    )
    def test_bad_answer(self, store: Any, value: bytes) -> None:
        """A malformed answer is no answer."""

        class Injecting(CountingStore):
            """A store in which every rank seems to have answered."""

            def set(self, key: str, written: bytes) -> None:
                super().set(key, written)
                if "/QUESTION/" in key:
                    self._store.set(questions.answer_key(1, 0), value)
                    self._store.append("tracedstore/ANSWERED/1", "0,1,x,-1,99999999,")

        assert ask(Injecting(store), "status", [0, 1], 0.3) == {}

    def test_answer_about_another_rank(self, store: Any) -> None:
        """An answer about a rank that is not in question is dropped."""
        poll = poll_of(store, 5, 8)
        question = Question(number=1, ranks=frozenset([5]), time=1.0)
        store.add(questions.QUESTIONS, 1)
        store.set(questions.question_key(1), question.to_bytes())
        poll()
        answer = json.loads(store.get(questions.answer_key(1, 5)))
        answer["rank"] = 6
        store.set(questions.answer_key(1, 5), json.dumps(answer))

        found = questions._AnswerReader(store, question).read(frozenset([5]))
        assert found == {}


class CountingStore:
    """Counts the requests to a store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def counted(*args: Any) -> Any:
            self.requests[name] += 1
            return method(*args)

        return counted

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.requests["set"] += 1
        self._store.set(key, value)


class TestTraffic:
    """Requests to the store."""

    @pytest.mark.parametrize("world_size", [4, 64])
    def test_between_questions(self, world_size: int) -> None:
        """A poll without a new question is one request, before and after the first."""
        store = dist.HashStore()
        counted = [CountingStore(store) for _ in range(world_size)]
        polls = [poll_of(c, rank, world_size) for rank, c in enumerate(counted)]
        for poll in polls:
            poll()

        assert {sum(one.requests.values()) for one in counted} == {1}
        with polled(*polls):
            asked = ask(store, "status", range(world_size), LONG)
        assert len(asked) == world_size
        for poll in polls:
            # The question is over; then there is nothing to do.
            poll()
            poll()
        for one in counted:
            one.requests.clear()
        for poll in polls:
            poll()
        assert {sum(one.requests.values()) for one in counted} == {1}

    def test_one_question(self) -> None:
        """A rank that answers makes a handful of requests."""
        store = dist.HashStore()
        counted = CountingStore(store)
        poll = poll_of(counted, 0, 64)
        poll()
        counted.requests.clear()

        with polled(poll):
            ask(store, "status", [0], LONG)

        assert counted.requests["set"] == 1
        assert counted.requests["append"] == 1

    @pytest.mark.parametrize(
        ("world_size", "pollers"),
        [(1, 1), (4, 4), (64, 64), (2_500, 313), (16_384, 2_048), (16_384, 16_384)],
    )
    def test_poll_interval(self, world_size: int, pollers: int) -> None:
        """The whole job makes at most 500 requests a second; small ones poll each."""
        interval = poll_interval(world_size, pollers)

        assert pollers / interval <= 500
        assert interval == max(1.0, pollers / 500)

    def test_who_polls(self) -> None:
        """Up to 64 ranks all do; then the agent, else local rank 0 of each host."""
        every = [
            polling_interval_of_rank(64, rank % 8, 8, has_agent=True)
            for rank in range(64)
        ]
        large = [
            polling_interval_of_rank(16_384, rank % 8, 8, has_agent=False)
            for rank in range(16_384)
        ]
        below_agents = polling_interval_of_rank(16_384, 0, 8, has_agent=True)
        unknown = polling_interval_of_rank(16_384, None, None, has_agent=False)

        assert every == [1.0] * 64
        polling = [interval for interval in large if interval is not None]
        assert len(polling) == 2_048
        assert sum(1 / interval for interval in polling) <= 500
        assert below_agents is None
        assert unknown is not None
        assert 16_384 / unknown <= 500


class TestExamine:
    """The function that the diagnosis calls."""

    def test_local_and_other_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranks of this host answer over their sockets, the others in the store."""
        monkeypatch.setenv("RANK", "0")
        store = dist.HashStore()
        LOCAL_SOCKET.start()
        try:
            register(store, 0, 4)
            here = RankInfo(
                rank=0,
                host="here",
                pid=os.getpid(),
                world_size=4,
                started=1.0,
                start_ticks=procfs.own_start_ticks(),
                namespace=procfs.own_namespace(),
            )
            there = RankInfo(
                rank=1,
                host="there",
                pid=1,
                world_size=4,
                started=1.0,
                start_ticks=1,
                namespace="other/pid:[1]",
            )
            with polled(poll_of(store, 1, 4)):
                found = ask_ranks(store, {0: here, 1: there}, [0, 1], 4, LONG)
        finally:
            LOCAL_SOCKET.stop(5)

        assert found.keys() == {0, 1}
        assert found[0].registered
        assert {answer.source for answer in found.values()} == {"itself"}

    def test_store_that_hangs(self) -> None:
        """A store that does not respond costs no more than the timeout."""
        released = threading.Event()

        class Hanging:
            """A store whose calls do not return."""

            def __getattr__(self, _name: str) -> Any:
                return lambda *_args: released.wait()

        try:
            assert ask_ranks(Hanging(), {}, [0, 1], 4, 0.2) == {}
        finally:
            released.set()

    def test_store_that_fails(self) -> None:
        """A store that raises is no error: nothing is known."""

        class Failing:
            """A store that is gone."""

            def __getattr__(self, _name: str) -> Any:
                raise ConnectionError

        assert ask_ranks(Failing(), {}, [0], 4, 0.2) == {}

    def test_no_ranks(self) -> None:
        """Ranks outside of the job are not asked about."""
        assert ask_ranks(None, {}, [-1, 4, 99], 4, LONG) == {}
