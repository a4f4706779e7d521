"""What hostile questions cost a process that answers: requests, bytes and answers."""

import json
import tracemalloc
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from tracedstore.coordination.rank_registry import REGISTRY
from tracedstore.diagnosis.ask import questions, responder
from tracedstore.diagnosis.ask.questions import Allowance, Question
from tracedstore.diagnosis.ask.responder import Responder

LARGE = 6_000_000
# One a second.
POLLS = 120


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class CountingStore:
    """Counts the requests to a store, and the bytes that it returns."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name == "has_extended_api":
            return method

        def counted(*args: Any) -> Any:
            self.requests[name] += 1
            found = method(*args)
            values = found if isinstance(found, list) else [found]
            self.bytes_read += sum(len(one) for one in values if type(one) is bytes)
            return found

        return counted


class Job:
    """A rank of a small job that polls, and a client that writes anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 2) -> None:
        self.store = CountingStore()
        self.clock = Clock()
        self.hosts_asked = 0
        self.responder = Responder(
            0, world_size, allowance=Allowance(world_size, self.clock)
        )
        monkeypatch.setattr(responder, "local_processes", self._local_processes)

    def _local_processes(self, *_args: object) -> dict[int, None]:
        self.hosts_asked += 1
        return {}

    @property
    def hostile(self) -> Any:
        """The store, without counting."""
        return self.store._store

    def write_question(self, ranks: str = "1") -> int:
        """Write the next question; return its number."""
        number: int = self.hostile.add(questions.QUESTIONS, 1)
        question = Question(number=number, ranks=frozenset([0]), asked_by="x", time=1.0)
        fields = json.loads(question.to_bytes()) | {"ranks": ranks}
        self.hostile.set(questions.question_key(number), json.dumps(fields))
        return number

    def poll(self) -> None:
        """Poll a second after the last time."""
        self.clock.now += 1.0
        self.responder.poll(self.store)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job of two ranks."""
    return Job(monkeypatch)


def test_idle_job(job: Job) -> None:
    """Without questions every poll is one request."""
    for _ in range(POLLS):
        job.poll()

    assert job.store.requests.total() == POLLS


def test_million_ranks(job: Job) -> None:
    """A question about ranks that the job does not have is not expanded."""
    job.write_question("0-999999")
    tracemalloc.start()
    try:
        job.poll()
        job.poll()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert job.hostile.check([questions.answer_key(1, 0)])
    assert peak < 4_000_000


@pytest.mark.parametrize("many", [",".join(["0-1"] * 9000), "1," * 4000 + "1"])
def test_many_ranges(job: Job, many: str) -> None:
    """A question with more ranges than the job has ranks is none."""
    assert Question.from_bytes(b"") is None
    number = job.write_question(many)
    value = job.hostile.get(questions.question_key(number))

    assert Question.from_bytes(value, 2) is None


def test_questions_without_end(job: Job) -> None:
    """They are answered as often as a healthy job asks: once a second on average."""
    answered = 0
    for _ in range(POLLS):
        for _ in range(4):
            job.write_question("0-1")
        before = job.store.requests["append"]
        job.poll()
        answered += job.store.requests["append"] - before

    assert 0 < answered < POLLS + 20
    assert 0 < job.hosts_asked < POLLS + 20


def test_answers_after_hostile_questions(job: Job) -> None:
    """A question of the job is answered some seconds after they have ended."""
    for _ in range(POLLS):
        for _ in range(4):
            job.write_question("0-1")
        job.poll()
    for _ in range(10):
        job.poll()

    number = job.write_question("0")
    job.poll()

    answer = json.loads(job.hostile.get(questions.answer_key(number, 0)))
    assert answer["question"] == number


def test_counter_that_runs_ahead(job: Job) -> None:
    """Questions that are counted and not written cost two reads a second at most."""
    for _ in range(POLLS):
        job.hostile.add(questions.QUESTIONS, 1000)
        job.poll()

    assert job.store.requests.total() < 3 * POLLS + 40


@pytest.mark.parametrize("length", [100, LARGE])
def test_malformed_question(job: Job, length: int) -> None:
    """It is read once."""
    job.hostile.set(questions.question_key(1), "x" * length)
    job.hostile.add(questions.QUESTIONS, 1)
    for _ in range(POLLS):
        job.poll()

    assert job.store.bytes_read < 2 * length + 2 * POLLS


@pytest.mark.parametrize(
    "key", [questions.QUESTIONS, "tracedstore/QUESTION/1", "tracedstore/ANSWERED/1"]
)
def test_large_value(job: Job, key: str) -> None:
    """A value of six megabytes is read every half minute at most."""
    for number in range(POLLS):
        for slot in range(questions.SLOTS):
            if not key.endswith("S"):
                job.hostile.set(f"{key[:-1]}{slot}", "7," * (LARGE // 2))
        if key == questions.QUESTIONS:
            job.hostile.set(key, "9" * LARGE)
        elif "ANSWERED" in key:
            job.write_question("1")
        else:
            job.hostile.add(questions.QUESTIONS, 1)
        job.poll()
        assert number > 2 or job.store.requests.total() < 20

    assert LARGE <= job.store.bytes_read <= LARGE * (POLLS // 30 + 1) + 100_000


def test_large_registry_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of six megabytes are read every half minute at most."""
    job = Job(monkeypatch)
    job.hostile.set(f"{REGISTRY}/1", "x" * LARGE)
    for _ in range(POLLS):
        job.write_question("1")
        job.poll()

    assert job.store.bytes_read <= LARGE * (POLLS // 30 + 1) + 100_000


class TestAsking:
    """What a process that asks reads."""

    @pytest.mark.parametrize(
        "key", ["tracedstore/ANSWERED/1", "tracedstore/ANSWER/1/0"]
    )
    def test_large_value(self, key: str) -> None:
        """A value that is too large is read once, and rank 1's answer is found."""

        class Hostile(CountingStore):
            """A store in which the value is there as soon as the question is."""

            def set(self, written_key: str, value: bytes) -> None:
                self._store.set(written_key, value)
                if "/QUESTION/" in written_key:
                    Responder(1, 2).poll(self._store)
                    self._store.append("tracedstore/ANSWERED/1", "0,")
                    self._store.set(key, b"1," * (LARGE // 2))

        store = Hostile()

        found = questions.ask(store, "status", [0, 1], 1.0)

        assert found.keys() == {1}
        assert LARGE <= store.bytes_read < LARGE + 200_000
