"""Compares jobs with the same fault, bare and below ``tracedstore-run``.

A job has two agents of torchrun on this host, with two workers each. A seeded fault
hits a worker or an agent at a seeded step. The bare job and the traced one run
alternately, one at a time. Compared are the exit codes of the agents, the number of
restarts, and the time from the fault to the end of the job.

Agents and workers are forked from a process that has imported torch, bare or below
``tracedstore-run``. In one pair of eight all are interpreters of their own, so imports
and the end of the interpreter are part of the job.
"""

import argparse
import compileall
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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forked_python import OwnProcess, OwnServer, adopt_orphans

import tracedstore
from faults.results import Result, markdown
from tracedstore.auto.command import environment

_AGENT, _WORKER = (
    Path(__file__).with_name(f"pair_{name}.py") for name in ("agent", "worker")
)
_BENCHMARKS = Path(__file__).parents[1]
# What the agents and workers use.
_IMPORTS = (
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
_TRACED_IMPORTS = ("tracedstore.auto.replacements", "tracedstore.native.calls")
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
# Seconds for a whole job; one that takes longer hangs.
_MAX_JOB = 90.0
# A node that is gone is waited for this long. Both kinds of job have it.
_CONF = "join_timeout=10,last_call_timeout=1,timeout=20,keep_alive_interval=2"
_MODES = ("bare", "traced")
# The share of jobs whose attempts share a store.
_SHARED = 0.25
# One pair of this many starts its agents and workers as new interpreters.
_NEW_INTERPRETERS = 8
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
        host: The agent that serves the store of the rendezvous. When its node is gone,
            the others need not wait for it. None if the first one does that is there.
        forked: Agents and workers are forked.
    """

    number: int
    fault: str
    rank: int
    step: int
    shared: bool
    host: int | None = None
    forked: bool = False

    def __str__(self) -> str:
        store = "shared" if self.shared else "new"
        host = "" if self.host is None else f", served by agent {self.host}"
        start = "" if self.forked else ", new interpreters"
        return (
            f"{self.fault}, {store} store, at rank {self.rank}, step {self.step}"
            f"{host}{start}"
        )


@dataclass(frozen=True, slots=True)
class End:
    """How a job ended.

    Attributes:
        codes: The exit codes of the agents, in the order of their start; None for
            one that was killed because it hung.
        restarts: The number of attempts after the first.
        hit: The fault happened; else the job ended before its step.
        seconds: From the fault to the end of the last agent.
        total: From the start of the job to its end.
        cpu: Seconds of processor time of all its processes.
        marks: What the workers wrote.
    """

    codes: list[int | None]
    restarts: int
    hit: bool
    seconds: float
    total: float
    cpu: float
    marks: list[dict[str, Any]]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What must be the same with and without tracing."""
        # Which of two equal agents serves the store is chance.
        return (*sorted(map(str, self.codes)), self.restarts, self.hit)


def make_job(seed: int, number: int) -> Job:
    """Make a job; it depends on the seed and its number alone."""
    draw = random.Random(f"pairs/{seed}/{number}")
    forked = number % _NEW_INTERPRETERS != 0
    return Job(
        number=number,
        fault=draw.choice(_FAULTS),
        rank=draw.randrange(4),
        step=draw.randrange(_STEPS),
        shared=draw.random() < _SHARED,
        host=draw.randrange(2) if forked else None,
        forked=forked,
    )


def run_pair(
    job: Job, order: int, servers: Mapping[str, OwnServer]
) -> dict[str, list[End]]:
    """Run a job bare and traced; again, if they did not end in the same way."""
    ends: dict[str, list[End]] = {mode: [] for mode in _MODES}
    modes = _MODES if order % 2 else tuple(reversed(_MODES))
    for _ in range(1 + _REPEATS):
        for mode in modes:
            ends[mode].append(run_job(job, mode, servers))
        if ends["traced"][0].kind in {end.kind for end in ends["bare"]}:
            break
    return ends


def run_job(job: Job, mode: str, servers: Mapping[str, OwnServer]) -> End:
    """Run one job to its end, and remove what it leaves behind."""
    before = _children()
    with tempfile.TemporaryDirectory(prefix="tracedstore-pairs-") as name:
        folder = Path(name)
        marks = folder / "marks.jsonl"
        marks.touch()
        env = {
            **_environment(mode),
            "FAULTS_MARKS": str(marks),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0" if job.shared else "1",
        }
        cpu = _cpu_of_children()
        began = time.monotonic()
        agents = _start_agents(job, env, folder, servers[mode])
        try:
            codes = _wait(agents, began + _MAX_JOB)
            ended = time.monotonic()
        finally:
            _end_job(before)
        cpu = _cpu_of_children() - cpu
        lines = [json.loads(line) for line in marks.read_text().splitlines()]
    faults = [mark["at"] for mark in lines if mark["kind"] == "fault"]
    groups = [mark for mark in lines if mark["kind"] == "group"]
    if any(group["traced"] != (mode == "traced") for group in groups):
        raise RuntimeError(f"a worker of a {mode} job is not {mode}")
    attempts = {group["attempt"] for group in groups}
    return End(
        codes,
        max(len(attempts) - 1, 0),
        bool(faults),
        round(ended - min(faults, default=began), 3),
        round(ended - began, 3),
        round(cpu, 3),
        lines,
    )


def _environment(mode: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRACEDSTORE_")}
    folders = [str(_BENCHMARKS), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    return environment(env) if mode == "traced" else env


def start_server(mode: str) -> OwnServer:
    """Start the process from which the agents of one kind of job are forked."""
    control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    imports = (*_IMPORTS, *(_TRACED_IMPORTS if mode == "traced" else ()))
    command = (sys.executable, "-W", "ignore", "-m", "forked_python")
    with remote:
        subprocess.Popen(
            [*command, str(remote.fileno()), *imports],
            env=_environment(mode),
            pass_fds=[remote.fileno()],
            start_new_session=True,
        )
    return OwnServer(control)


def _start_agents(
    job: Job, env: dict[str, str], folder: Path, server: OwnServer
) -> list["OwnProcess | subprocess.Popen[bytes]"]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    agents: list[OwnProcess | subprocess.Popen[bytes]] = []
    for number in range(2):
        host = "" if job.host is None else f",is_host={int(job.host == number)}"
        command = [
            *(
                str(_AGENT),
                "--nnodes",
                "2",
                "--nproc-per-node",
                "2",
                "--rdzv-backend",
                "c10d",
            ),
            *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"pair{job.number}"),
            *("--rdzv-conf", _CONF + host, "--max-restarts", str(_RESTARTS)),
            *("--monitor-interval", "0.1", str(_WORKER)),
            *(job.fault, str(job.rank), str(job.step), str(_STEPS)),
        ]
        with (
            (folder / f"agent{number}.log").open("wb") as log,
            Path(os.devnull).open("rb") as nothing,
        ):
            if job.forked:
                streams = (nothing.fileno(), log.fileno(), log.fileno())
                agents.append(server.start(command, env, streams))
            else:
                agents.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", *command],
                        env=env,
                        stdin=nothing,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
    return agents


def _wait(
    agents: Iterable["OwnProcess | subprocess.Popen[bytes]"], deadline: float
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


def _children() -> set[int]:
    """Return the children of this process, which has adopted all orphans below it."""
    own = Path("/proc/self/task") / str(os.getpid()) / "children"
    return set(map(int, own.read_text().split()))


def _end_job(before: set[int]) -> None:
    """Kill what is left of a job, and wait for all of it.

    The workers of an agent that was killed are children of this process, so their
    processor time counts.
    """
    while left := _children() - before:
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # it was not waited for
        for pid in left:
            os.waitpid(pid, 0)


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
        "forked": job.forked,
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
    adopt_orphans()
    # As an installation does. Otherwise every process of a traced job compiles it, if
    # the environment forbids to write the result (PYTHONDONTWRITEBYTECODE).
    compileall.compile_dir(Path(tracedstore.__file__).parent, quiet=1)
    servers = {mode: start_server(mode) for mode in _MODES}
    for number in range(options.pairs):
        if number not in done:
            job = make_job(options.seed, number)
            yield judge(job, run_pair(job, number, servers))


def table(results: list[Result]) -> str:
    """Return a row for each fault, with the times of both jobs of each pair."""
    rows = [
        [
            *("fault", "pairs", "hung", "unlike", "different ends"),
            *("bare p50", "traced p50", "difference p10", "p50", "p90"),
            *("bare CPU p50", "traced CPU p50", "difference p50"),
        ]
    ]
    parts: dict[str, list[Result]] = {
        name: [] for name in sorted(map(_fault_of, results))
    }
    parts |= {"forked": [], "new interpreters": [], "all": results}
    for result in results:
        parts[_fault_of(result)].append(result)
        parts["forked" if result["forked"] else "new interpreters"].append(result)
    rows += [_row(name, chosen) for name, chosen in parts.items() if chosen]
    return markdown(rows) + "".join(map(_difference_in, results))


def _row(name: str, results: list[Result]) -> list[str]:
    firsts = [(result["bare"][0], result["traced"][0]) for result in results]
    # A time is known of jobs that the fault hit.
    hit = [pair for pair in firsts if all(end["hit"] for end in pair)]
    seconds = [(bare["seconds"], traced["seconds"]) for bare, traced in hit]
    differences = sorted(traced - bare for bare, traced in seconds)
    cpu = [(bare["cpu"], traced["cpu"]) for bare, traced in hit]

    def median(values: Iterable[float], text: str) -> str:
        found = list(values)
        return text.format(statistics.median(found)) if found else ""

    return [
        *(name, str(len(results))),
        str(sum(len(result["findings"]["deadlocks"]) for result in results)),
        str(sum(result["unlike"] for result in results)),
        str(sum(bool(result["findings"]["different ends"]) for result in results)),
        median((bare for bare, _ in seconds), "{:.1f} s"),
        median((traced for _, traced in seconds), "{:.1f} s"),
        *(
            f"{differences[int(share * (len(differences) - 1))]:+.1f} s" if hit else ""
            for share in (0.1, 0.5, 0.9)
        ),
        median((bare for bare, _ in cpu), "{:.2f} s"),
        median((traced for _, traced in cpu), "{:.2f} s"),
        median((traced - bare for bare, traced in cpu), "{:+.2f} s"),
    ]


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
