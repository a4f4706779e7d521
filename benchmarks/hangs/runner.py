"""Runs one hang in processes of their own, and judges what was reported."""

import json
import os
import random
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import tracedstore
from hangs.scenarios import SCENARIOS, Hang, Kind, Scenario, run_rank

Result = Literal["right", "wrong", "not named"]

STALL_AFTER = 3.0
TIMEOUT = 16.0
# Seconds for a case, beyond the timeout of its waits: ranks start on a busy machine.
_SLACK = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hang.

    Attributes:
        number: Its number in the run; with the seed it determines the rest.
        scenario: What its ranks do.
        kind: How its victims hang.
        world_size: The number of ranks.
        victims: The ranks that cause the hang.
        store: ``tcp`` or ``file``.
    """

    number: int
    scenario: Scenario
    kind: Kind
    world_size: int
    victims: tuple[int, ...]
    store: str

    def __str__(self) -> str:
        victims = ",".join(map(str, self.victims))
        return (
            f"{self.scenario.name} {self.kind} rank {victims} of {self.world_size},"
            f" {self.store}"
        )


def make_case(seed: int, number: int, *, max_world_size: int, name: str = "") -> Case:
    """Return a case; the same for the same seed and number."""
    choose = random.Random(f"{seed}/{number}")
    names = [name] if name else sorted(SCENARIOS)
    scenario = SCENARIOS[names[number % len(names)]]
    world_size = choose.randint(scenario.min_world_size, max_world_size)
    kind = choose.choice(scenario.kinds)
    store = choose.choice(("tcp", "file"))
    count = choose.randint(1, min(scenario.max_victims, world_size - 1))
    candidates = range(world_size)
    if store == "tcp" and kind in ("gone", "stopped"):
        # Rank 0 serves the store: without it there is another hang.
        candidates = range(1, world_size)
    victims = choose.sample(candidates, min(count, len(candidates)))
    if scenario.first_rank_only:
        victims, store = [0], "file"
    return Case(
        number=number,
        scenario=scenario,
        kind=kind,
        world_size=world_size,
        victims=tuple(sorted(victims)),
        store=store,
    )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a case led to.

    Attributes:
        case: The case.
        result: Whether exactly the victims were named.
        seconds: From the hang to the first right name.
        reporters: The ranks that reported.
        with_note: Survivors whose exception had a note with the names.
        survivors: The number of survivors that raised.
        why: Why the result is not right.
    """

    case: Case
    result: Result = "not named"
    seconds: float | None = None
    reporters: int = 0
    with_note: int = 0
    survivors: int = 0
    why: str = ""
    stalls: list[dict[str, Any]] = field(default_factory=list)


def run_case(case: Case) -> Outcome:
    """Run a case; all its processes have ended when it returns."""
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        directory = Path(name)
        processes: dict[int, int] = {}
        try:
            hung_at = _run(case, directory, processes)
        finally:
            for pid in processes.values():
                _kill(pid)
        return _judge(case, directory, hung_at)


def _run(case: Case, directory: Path, processes: dict[int, int]) -> float:
    port = _free_port()
    reading, writing = os.pipe()
    missing = case.victims if case.kind == "not_started" else ()
    for rank in range(case.world_size):
        if rank in missing:
            continue
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(case, rank, directory, port, writing)
        processes[rank] = pid
    os.close(writing)
    try:
        for _ in () if missing else case.victims:
            os.read(reading, 1)
    finally:
        os.close(reading)
    hung_at = time.time()
    for rank in case.victims:
        if case.kind == "stopped":
            os.kill(processes[rank], signal.SIGSTOP)
        elif case.kind == "gone":
            _kill(processes.pop(rank))
    _wait_for_survivors(case, processes)
    return hung_at


def _wait_for_survivors(case: Case, processes: dict[int, int]) -> None:
    """Wait until all ranks but the victims have ended, in bounded time."""
    deadline = time.monotonic() + case_timeout(case) + _SLACK
    while set(processes) - set(case.victims) and time.monotonic() < deadline:
        for rank, pid in list(processes.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                del processes[rank]
        time.sleep(0.05)


def case_timeout(case: Case) -> float:
    """Return the seconds that the waits of a case may take."""
    # A FileStore compares whole seconds, and torch waits for one rank after another.
    return TIMEOUT * (1 + len(case.victims))


def _child(case: Case, rank: int, directory: Path, port: int, writing: int) -> None:
    """Run a rank in this process, which was just forked."""
    log = os.open(directory / f"log.{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.world_size),
        LOCAL_WORLD_SIZE=str(case.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    tracedstore.instrument()
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json", exit_timeout=1)
    hang = Hang(
        rank=rank,
        world_size=case.world_size,
        victims=case.victims,
        init_method="env://" if case.store == "tcp" else f"file://{directory}/store",
        timeout=TIMEOUT,
        reached=lambda: _reached(writing),
    )
    run_rank(case.scenario, hang, directory)
    tracedstore.shutdown(1)
    os._exit(0)


def _reached(writing: int) -> None:
    os.write(writing, b".")


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _judge(case: Case, directory: Path, hung_at: float) -> Outcome:
    outcome = Outcome(case=case)
    reporters = set()
    for rank in range(case.world_size):
        for event in _events(directory / f"log.{rank}"):
            if event.get("event") == "job.stalled":
                reporters.add(rank)
                outcome.stalls.append(event)
        ended = directory / f"outcome.{rank}"
        if ended.exists() and rank not in case.victims:
            kind, *notes = ended.read_text().splitlines()
            if kind != "completed":
                outcome.survivors += 1
                outcome.with_note += any("tracedstore:" in note for note in notes)
    outcome.reporters = len(reporters)
    if case.scenario.harmless:
        outcome.result = "wrong" if outcome.stalls else "right"
        return outcome
    _judge_stalls(case, outcome, hung_at)
    return outcome


def _judge_stalls(case: Case, outcome: Outcome, hung_at: float) -> None:
    causes = case.scenario.causes_of(case.kind)
    for event in sorted(outcome.stalls, key=lambda event: str(event["timestamp"])):
        named = tuple(event["awaited_ranks"])
        if named and not set(named) <= set(case.victims):
            outcome.result, outcome.why = "wrong", f"named {named}"
            return
        if named != case.victims or event["cause"] not in causes:
            outcome.why = f"named {named}, cause {event['cause']}"
        elif outcome.seconds is None:
            at = datetime.fromisoformat(event["timestamp"]).timestamp()
            outcome.seconds = at - hung_at
            outcome.result = "right"


def _events(log: Path) -> list[dict[str, Any]]:
    events = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if line.startswith("{"):
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return events
