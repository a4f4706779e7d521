"""Runs cases at the same time, each in a process that is forked from this one."""

import argparse
import json
import os
import selectors
import shutil
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults import plan
from faults.cases import Case
from faults.director import Director
from faults.oracle import judge_barrier
from faults.rendezvous_oracle import judge_rendezvous
from faults.results import Result, ResultsFile, faults_in
from tracedstore.tools.attach.child_process import die_with_parent

# Seconds after which a case is given up: more than all bounds of a case together.
_MAX_CASE = 300.0
_PROGRESS_INTERVAL = 30.0


def run_case(case: Case, folder: Path, etcd_port: int) -> Result:
    """Run one case in this process and judge it."""
    began = time.monotonic()
    records = Director(case, folder, etcd_port).run()
    if case.protocol == "rendezvous":
        judgement = judge_rendezvous(records, case.min_nodes, case.timeout)
    else:
        judgement = judge_barrier(records, case.world_size, case.timeout)
    result: Result = {
        "number": case.number,
        "class": case.fault_class,
        "text": case.describe(),
        # A rank that never starts is a fault, and so is a bad log, exporter or client.
        "faults": len(case.faults)
        + len(case.absent)
        + (case.log != "file")
        + bool(case.exporter)
        + (case.http_clients > 0),
        "findings": judgement.findings,
        "verdict_seconds": [round(s, 3) for s in judgement.verdict_seconds],
        "seconds": round(time.monotonic() - began, 2),
        "skewed": judgement.skewed,
        "undecidable": judgement.undecidable,
        "outcomes": {r.rank: r.outcome or "ended by the case" for r in records},
    }
    if not judgement.good:
        result["records"] = [asdict(record) for record in records]
    return result


@dataclass(slots=True)
class _Running:
    case: Case
    pid: int
    reading: int
    folder: Path
    deadline: float
    output: bytes = b""


@dataclass(slots=True)
class Runner:
    """Runs the cases of one run.

    Attributes:
        options: The command line.
        folder: A folder for the files of the cases.
        etcd_port: The port of a running etcd.
        file: The results file.
        done: The results so far, by number; results are added to it.
    """

    options: argparse.Namespace
    folder: Path
    etcd_port: int
    file: ResultsFile
    done: dict[int, Result]
    _running: dict[int, _Running] = field(default_factory=dict)
    _broken: int = 0

    def run_one(self, number: int) -> int:
        """Run one case and print all that its ranks did."""
        self._start(number)
        self._collect(lambda: bool(self._running))
        for result in self.done.values():
            print(json.dumps(result, indent=1))
        return self._broken

    def run(self) -> int:
        """Run cases until enough faults are injected; return how many did not run."""
        injected = sum(map(faults_in, self.done.values()))
        numbers = (n for n in range(sys.maxsize) if n not in self.done)
        began = reported = time.monotonic()
        at_start = injected

        def more() -> bool:
            nonlocal reported, injected
            injected = sum(map(faults_in, self.done.values()))
            while injected < self.options.faults and (
                len(self._running) < self.options.jobs
            ):
                self._start(next(numbers))
            now = time.monotonic()
            if now - reported > _PROGRESS_INTERVAL:
                reported = now
                rate = (injected - at_start) / (now - began)
                print(f"{injected} faults, {rate:.1f} a second", flush=True)
            return bool(self._running)

        self._collect(more)
        return self._broken

    def _start(self, number: int) -> None:
        case = plan.make_case(self.options.seed, number, self.options.only)
        folder = self.folder / str(number)
        folder.mkdir()
        reading, writing = os.pipe()
        sys.stdout.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                die_with_parent(parent)
                result = run_case(case, folder, self.etcd_port)
                data = json.dumps(result).encode()
                while data:
                    data = data[os.write(writing, data) :]
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        deadline = time.monotonic() + _MAX_CASE
        self._running[reading] = _Running(case, pid, reading, folder, deadline)

    def _collect(self, more: Any) -> None:
        """Read results while there are more."""
        while more():
            with selectors.DefaultSelector() as selector:
                for reading in self._running:
                    selector.register(reading, selectors.EVENT_READ)
                for key, _ in selector.select(1.0):
                    running = self._running[key.fd]
                    data = os.read(key.fd, 65536)
                    running.output += data
                    if not data:
                        self._finish(running)
            for running in list(self._running.values()):
                if time.monotonic() > running.deadline:
                    os.kill(running.pid, signal.SIGKILL)

    def _finish(self, running: _Running) -> None:
        del self._running[running.reading]
        os.close(running.reading)
        os.waitpid(running.pid, 0)
        with suppress(ProcessLookupError):  # what the case left behind
            os.killpg(running.pid, signal.SIGKILL)
        shutil.rmtree(running.folder, ignore_errors=True)
        try:
            result = json.loads(running.output)
        except ValueError:
            self._broken += 1
            print(f"NOT RUN {self._repeat(running.case)}", flush=True)
            return
        self.done[running.case.number] = result
        if self.options.case is None:
            self.file.append(result)
        for column, findings in result["findings"].items():
            for finding in findings:
                print(f"{column.upper()} {finding} ({result['text']})")
        if any(result["findings"].values()):
            print(f"  {self._repeat(running.case)}", flush=True)

    def _repeat(self, case: Case) -> str:
        only = f" --only {self.options.only}" if self.options.only else ""
        return (
            "make bench-faults"
            f" ARGS='--seed {self.options.seed} --case {case.number}{only}'"
        )
