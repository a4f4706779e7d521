"""Compares jobs with the same fault, bare and below ``tracedstore-run``.

A job has two agents of torchrun on this host, with two workers each. A seeded fault
hits a worker or an agent at a seeded step. The bare job and the traced one run
alternately, one at a time. Compared are the exit codes of the agents, the number of
restarts, and the time from the fault to the end of the job.
"""

import argparse
import compileall
import ctypes
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tracedstore
from faults.results import Result, markdown
from tracedstore.auto.command import environment

_WORKER = Path(__file__).with_name("pair_worker.py")
_FAULTS = (
    "kill worker",
    "terminate worker",
    "stop worker",
    "raise worker",
    "slow worker",
    "kill agent",
    "terminate agent",
    "stop agent",
)
_STEPS = 20
_RESTARTS = 2
# Seconds for a whole job; one that takes longer hangs. So does the agent of a job whose
# other agent was killed after its last step: it waits 300 s for it, bare as well.
_MAX_JOB = 90.0
# A node that is gone is waited for this long. Both kinds of job have it.
_CONF = "join_timeout=15,last_call_timeout=1,timeout=30"
_MODES = ("bare", "traced")
# The share of jobs whose attempts share a store.
_SHARED = 0.25
# How often both jobs of a pair run again, if they ended in different ways.
_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same in both jobs of a pair.

    Attributes:
        number: The number of the pair.
        fault: What happens, and to whom.
        rank: The rank at which it happens.
        step: The step at which it happens.
        shared: The workers of a restart use the store of the attempt before, as they do
            by default. They find its keys, so most restarts fail, with a bare store
            too, and chance decides how soon.
    """

    number: int
    fault: str
    rank: int
    step: int
    shared: bool

    def __str__(self) -> str:
        store = "shared" if self.shared else "new"
        return f"{self.fault}, {store} store, at rank {self.rank}, step {self.step}"


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended.

    Attributes:
        codes: The exit codes of the agents, in the order of their start; None for
            one that was killed because it hung.
        restarts: The number of attempts after the first.
        seconds: From the fault to the end of the last agent.
        total: From the start of the job to its end.
        cpu: Seconds of processor time of all its processes.
        marks: What the workers wrote.
    """

    codes: list[int | None]
    restarts: int
    seconds: float
    total: float
    cpu: float
    marks: list[dict[str, Any]]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same with and without tracing."""
        # Which of two equal agents serves the store is chance.
        return (*sorted(map(str, self.codes)), self.restarts)


def make_job(seed: int, number: int) -> Job:
    """Make a job; it depends on the seed and its number alone."""
    draw = random.Random(f"pairs/{seed}/{number}")
    return Job(
        number=number,
        fault=draw.choice(_FAULTS),
        rank=draw.randrange(4),
        step=draw.randrange(_STEPS),
        shared=draw.random() < _SHARED,
    )


def run_pair(job: Job, order: int) -> dict[str, list[End]]:
    """Run a job bare and traced; again, if they did not end in the same way."""
    ends: dict[str, list[End]] = {mode: [] for mode in _MODES}
    modes = _MODES if order % 2 else tuple(reversed(_MODES))
    for _ in range(1 + _REPEATS):
        for mode in modes:
            ends[mode].append(run_job(job, mode))
        if ends["traced"][0].kind in {end.kind for end in ends["bare"]}:
            break
    return ends


def run_job(job: Job, mode: str) -> End:
    """Run one job to its end, and remove what it leaves behind."""
    with tempfile.TemporaryDirectory(prefix="tracedstore-pairs-") as name:
        folder = Path(name)
        marks = folder / "marks.jsonl"
        marks.touch()
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("TRACEDSTORE_")},
            "FAULTS_MARKS": str(marks),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if job.shared else "1",
        }
        if mode == "traced":
            env = environment(env)
        cpu = _cpu_of_children()
        began = time.monotonic()
        agents = _start_agents(job, env, folder)
        try:
            codes = _wait(agents, began + _MAX_JOB)
            ended = time.monotonic()
        finally:
            _end_job(str(marks))
        cpu = _cpu_of_children() - cpu
        lines = [json.loads(line) for line in marks.read_text().splitlines()]
    fault_at = min((m["at"] for m in lines if m["kind"] == "fault"), default=began)
    attempts = {mark["attempt"] for mark in lines if mark["kind"] == "group"}
    return End(
        codes,
        max(len(attempts) - 1, 0),
        round(ended - fault_at, 3),
        round(ended - began, 3),
        round(cpu, 3),
        lines,
    )


def _start_agents(
    job: Job, env: dict[str, str], folder: Path
) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [
        *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"pair{job.number}"),
        *("--rdzv-conf", _CONF, "--max-restarts", str(_RESTARTS)),
        *("--monitor-interval", "0.1", str(_WORKER)),
        *(job.fault, str(job.rank), str(job.step), str(_STEPS)),
    ]
    agents = []
    for number in range(2):
        with (folder / f"agent{number}.log").open("wb") as log:
            agents.append(
                subprocess.Popen(
                    command,
                    env={**env, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return agents


def _wait(
    agents: Iterable[subprocess.Popen[bytes]], deadline: float
) -> list[int | None]:
    codes: list[int | None] = []
    for agent in agents:
        try:
            codes.append(agent.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            agent.kill()
            agent.wait()
    return codes


def _kill_job(marks: str) -> None:
    """Kill what is left of a job: the workers of an agent that was killed."""
    wanted = f"FAULTS_MARKS={marks}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _adopt_orphans() -> None:
    """Become the parent of the workers of an agent that is killed.

    Their processor time counts only when this process waits for them.
    """
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _end_job(marks: str) -> None:
    """Kill what is left of a job, and wait for all of it."""
    with suppress(ChildProcessError):
        while True:
            _kill_job(marks)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.02)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(job: Job, ends: dict[str, list[End]]) -> Result:
    """Return the result of a pair."""
    bare, traced = ends["bare"], ends["traced"]
    usual = {end.kind for end in bare}
    hung = sum(None in end.codes for end in traced)
    hung_bare = sum(None in end.codes for end in bare)
    findings: dict[str, list[str]] = {
        "deadlocks": [f"{hung} jobs hang, bare {hung_bare}"]
        if hung > hung_bare
        else [],
        "different ends": [
            f"ended as {end.kind}, bare as {sorted(map(str, usual))}"
            for end in traced
            if end.kind not in usual
        ],
    }
    # One traced job that differs once may be a rare end of the bare one too.
    if len(findings["different ends"]) < len(traced):
        findings["different ends"] = []
    return {
        "number": job.number,
        "class": "pairs",
        "text": str(job),
        "faults": 1,
        "findings": findings,
        "bare": [_without_marks(end) for end in bare],
        "traced": [_without_marks(end) for end in traced],
        "unlike": traced[0].kind != bare[0].kind,
    }


def _without_marks(end: End) -> dict[str, Any]:
    fields = asdict(end)
    del fields["marks"]
    return fields


def run(options: argparse.Namespace, done: dict[int, Result]) -> Iterator[Result]:
    """Run the pairs that have no result yet, and yield their results."""
    _adopt_orphans()
    # As an installation does. Otherwise every process of a traced job compiles it, if
    # the environment forbids to write the result (PYTHONDONTWRITEBYTECODE).
    compileall.compile_dir(Path(tracedstore.__file__).parent, quiet=1)
    for number in range(options.pairs):
        if number not in done:
            job = make_job(options.seed, number)
            yield judge(job, run_pair(job, number))


def table(results: list[Result]) -> str:
    """Return a row for each fault, with the times of both jobs of each pair."""
    rows = [
        [
            *("fault", "pairs", "hung", "unlike", "different ends"),
            *("bare p50", "traced p50", "difference p10", "p50", "p90"),
            *("bare CPU p50", "traced CPU p50", "difference p50"),
        ]
    ]
    faults = sorted({_fault_of(result) for result in results})
    for fault in [*faults, "all"]:
        chosen = [r for r in results if fault in ("all", _fault_of(r))]
        bare = [r["bare"][0]["seconds"] for r in chosen]
        traced = [r["traced"][0]["seconds"] for r in chosen]
        differences = sorted(t - b for t, b in zip(traced, bare, strict=True))
        cpu = [(r["bare"][0]["cpu"], r["traced"][0]["cpu"]) for r in chosen]
        rows.append(
            [
                *(fault, str(len(chosen))),
                str(sum(len(r["findings"]["deadlocks"]) for r in chosen)),
                str(sum(r["unlike"] for r in chosen)),
                str(sum(bool(r["findings"]["different ends"]) for r in chosen)),
                f"{statistics.median(bare):.1f} s",
                f"{statistics.median(traced):.1f} s",
                *(
                    f"{differences[int(share * (len(differences) - 1))]:+.1f} s"
                    for share in (0.1, 0.5, 0.9)
                ),
                f"{statistics.median(b for b, _ in cpu):.2f} s",
                f"{statistics.median(t for _, t in cpu):.2f} s",
                f"{statistics.median(t - b for b, t in cpu):+.2f} s",
            ]
        )
    return markdown(rows) + "".join(map(_difference_in, results))


def _difference_in(result: Result) -> str:
    """Return a line on a pair whose jobs did not end in the same way, else ""."""
    if not result["unlike"]:
        return ""
    ends = {
        mode: "; ".join(
            f"codes {end['codes']}, {end['restarts']} restarts" for end in result[mode]
        )
        for mode in _MODES
    }
    return f"\n{result['text']}: bare {ends['bare']}; traced {ends['traced']}"


def _fault_of(result: Result) -> str:
    return str(result["text"]).partition(", at ")[0]
