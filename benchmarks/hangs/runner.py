"""Runs one hang in processes of their own."""

import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

import tracedstore
from hangs.cases import Case
from hangs.oracle import Outcome, judge
from hangs.scenarios import Hang, run_rank
from tracedstore.tools.attach.child_process import die_with_parent

STALL_AFTER = 3.0
TIMEOUT = 12.0
# Seconds for a case, beyond the timeouts of its waits: ranks start on a busy machine.
_SLACK = 90.0
# Seconds that ranks get to report a server that does not respond. Their calls do not
# return, whatever their timeout.
_SERVER_STOPPED = STALL_AFTER + 15


def run_case(case: Case, etcd_port: int = 0) -> Outcome:
    """Run a case; all its processes have ended when it returns.

    Args:
        case: The case.
        etcd_port: The port of a running etcd, for a case that needs one.
    """
    # Not TemporaryDirectory, which a rank would remove at its exit.
    directory = Path(tempfile.mkdtemp(prefix="hangs-"))
    run = _Run(case, directory, etcd_port)
    try:
        return judge(case, directory, run.run())
    finally:
        run.kill()
        shutil.rmtree(directory, ignore_errors=True)


class _Run:
    """One run of a case, with its processes by number; -1 is the server."""

    def __init__(self, case: Case, directory: Path, etcd_port: int) -> None:
        self._case = case
        self._directory = directory
        self._port = etcd_port
        self._processes: dict[int, int] = {}

    def run(self) -> float:
        """Run the case; return when the victims hung, in seconds since the epoch."""
        if self._case.store == "server":
            self._serve()
        elif self._case.store == "tcp":
            self._port = _free_port()
        if self._case.kind == "restarted":
            self._start(range(self._case.world_size), attempt=0)
            self.kill(range(self._case.world_size))
        hung: range | tuple[int, ...] = self._case.victims
        if self._case.absent or self._case.kind == "twice":
            hung = ()
        elif self._case.kind in ("server_stopped", "server_killed"):
            hung = range(self._case.world_size)
        self._start(hung, attempt=int(self._case.kind == "restarted"))
        hung_at = time.time()
        self._hang()
        self._wait_for_survivors()
        return hung_at

    def kill(self, seats: "range | tuple[int, ...] | None" = None) -> None:
        """Kill these processes; all without any given."""
        for seat in list(self._processes) if seats is None else seats:
            pid = self._processes.pop(seat)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _serve(self) -> None:
        reading, writing = os.pipe()
        self._processes[-1] = _fork(lambda: _serve_store(writing))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            self._port = int(pipe.read())

    def _start(self, hung: "range | tuple[int, ...]", attempt: int) -> None:
        """Start all ranks; return when these have hung."""
        seats = [n for n in range(self._case.world_size) if n not in self._case.absent]
        ready, gate, reached = os.pipe(), os.pipe(), os.pipe()

        def wait_for_all() -> None:
            os.close(ready[1])
            os.read(gate[0], 1)

        for seat in seats:
            rank = partial(self._be_rank, seat, wait_for_all, reached[1], attempt)
            self._processes[seat] = _fork(rank)
        os.close(ready[1])
        os.close(reached[1])
        try:
            # A rank that starts seconds later than the others is awaited too. The pipe
            # ends when every rank is ready, or has ended.
            os.read(ready[0], 1)
            os.write(gate[1], b"." * len(seats))
            for _ in hung:
                os.read(reached[0], 1)
        finally:
            for end in (ready[0], *gate, reached[0]):
                os.close(end)

    def _hang(self) -> None:
        kind = self._case.kind
        if kind == "server_stopped":
            os.kill(self._processes[-1], signal.SIGSTOP)
        elif kind == "server_killed":
            self.kill((-1,))
        elif kind == "gone":
            self.kill(self._case.victims)
        elif kind == "stopped":
            for seat in self._case.victims:
                os.kill(self._processes[seat], signal.SIGSTOP)

    def _wait_for_survivors(self) -> None:
        """Wait until all survivors have ended, in bounded time."""
        # torch waits for one rank after another.
        seconds = TIMEOUT * (1 + len(self._case.victims)) + _SLACK
        if self._case.kind == "server_stopped":
            seconds = _SERVER_STOPPED
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for seat in self._processes.keys() - {-1}:
                if os.waitpid(self._processes[seat], os.WNOHANG)[0]:
                    del self._processes[seat]
            if self._processes.keys().isdisjoint(self._case.survivors):
                return
            time.sleep(0.05)

    def _be_rank(
        self, seat: int, wait_for_all: Callable[[], None], reached: int, attempt: int
    ) -> None:
        """Run a rank in this process, which was just forked."""
        case = self._case
        log = os.open(self._directory / f"log.{seat}", os.O_WRONLY | os.O_CREAT)
        os.ftruncate(log, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(case.rank_of(seat)),
            LOCAL_RANK=str(seat),
            WORLD_SIZE=str(case.world_size),
            LOCAL_WORLD_SIZE=str(case.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._port),
            **case.scenario.environ,
        )
        if case.kind == "restarted":
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        tracedstore.instrument()
        tracedstore.configure(
            stall_after=STALL_AFTER, log_format="json", exit_timeout=1
        )
        hang = Hang(
            rank=case.rank_of(seat),
            world_size=case.world_size,
            victims=case.victims,
            store_kind=case.store,
            file=self._directory / "store",
            port=self._port,
            timeout=TIMEOUT,
            attempt=attempt,
            reached=lambda: _reached(reached),
        )
        wait_for_all()
        run_rank(case.scenario, hang, self._directory / f"outcome.{seat}")
        tracedstore.shutdown(1)


def _fork(work: Callable[[], None]) -> int:
    """Call a function in a forked process; return its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _reached(pipe: int) -> None:
    os.write(pipe, b".")


def _serve_store(writing: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    os.close(writing)
    while True:
        signal.pause()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
