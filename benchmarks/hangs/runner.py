"""Runs one hang in processes of their own."""

import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from hangs.cases import LAUNCHERS, Case
from hangs.nodes import run_launched
from hangs.oracle import Outcome, judge
from hangs.rank_process import STALL_AFTER, TIMEOUT, RankProcess, set_up
from tracedstore.tools.attach.child_process import die_with_parent

# Seconds for a case, beyond the timeouts of its waits: ranks start on a busy machine.
_SLACK = 90.0
# Seconds that ranks get to report a server that does not respond. Their calls do not
# return, whatever their timeout.
_SERVER_STOPPED = STALL_AFTER + 15
# The numbers of the servers among the processes.
_SERVER, _SECOND_SERVER = -1, -2
_LISTENING = "0A"  # the state in /proc/net/tcp


def run_case(case: Case, etcd_port: int = 0) -> Outcome:
    """Run a case in this process, which no other case uses.

    All its processes have ended when it returns.

    Args:
        case: The case.
        etcd_port: The port of a running etcd, for a case that needs one.
    """
    # Not TemporaryDirectory, which a rank would remove at its exit.
    directory = Path(tempfile.mkdtemp(prefix="hangs-"))
    run = _Run(case, directory, etcd_port)
    try:
        if case.start in LAUNCHERS:
            return judge(case, directory, run_launched(case, directory))
        return judge(case, directory, run.run())
    except TimeoutError as error:
        return Outcome(case=case, result="not made", why=str(error))
    finally:
        run.kill()
        shutil.rmtree(directory, ignore_errors=True)


def end_with_parent() -> None:
    """Let this process end when its parent does."""
    die_with_parent(os.getppid())


class _Run:
    """One run of a case, with its processes by number."""

    def __init__(self, case: Case, directory: Path, etcd_port: int) -> None:
        self._case = case
        self._directory = directory
        self._port = etcd_port
        self._second_port = 0
        self._processes: dict[int, int] = {}

    def run(self) -> float:
        """Run the case; return when the victims hung, in seconds since the epoch."""
        if self._case.store == "server":
            self._port = self._serve(_SERVER)
        elif self._case.store == "tcp":
            self._port = _free_port()
        if self._case.second_store:
            self._second_port = self._serve(_SECOND_SERVER)
        if self._case.start == "forked_later":
            set_up(instrument=True)
        everyone = tuple(range(self._case.world_size))
        if self._case.kind == "restarted":
            self._start(everyone, attempt=0)
            self.kill(everyone)
        self._start(self._case.hung, attempt=int(self._case.kind == "restarted"))
        hung_at = time.time()
        self._hang()
        self._wait_for_survivors()
        return hung_at

    def kill(self, seats: Iterable[int] | None = None) -> None:
        """Kill these processes; all without any given."""
        for seat in list(self._processes) if seats is None else seats:
            pid = self._processes.pop(seat)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _serve(self, number: int) -> int:
        """Start a server; return its port."""
        reading, writing = os.pipe()
        self._processes[number] = _fork(lambda: _serve_store(writing))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return int(pipe.read())

    def _start(self, hung: tuple[int, ...], attempt: int) -> None:
        """Start all ranks; return when these have hung."""
        seats = [n for n in range(self._case.world_size) if n not in self._case.absent]
        ready, gate, reached = os.pipe(), os.pipe(), os.pipe()
        for seat in seats:
            process = RankProcess(
                case=self._case,
                seat=seat,
                directory=self._directory,
                port=self._port,
                second_port=self._second_port,
                attempt=attempt,
                ready=ready[1],
                gate=gate[0],
                reached=reached[1],
            )
            self._processes[seat] = _fork(process.start)
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
        """Do to the processes what the case says."""
        case = self._case
        if case.second_store == "stopped":
            self._signal(_SECOND_SERVER, signal.SIGSTOP)
        elif case.second_store == "refusing":
            self._signal(_SECOND_SERVER, signal.SIGUSR1)
        if case.kind == "server_stopped":
            self._signal(_SERVER, signal.SIGSTOP)
        elif case.kind == "server_killed":
            self.kill((_SERVER,))
        for rank in case.victims if case.hung else ():
            if case.kind_of(rank) == "gone":
                self.kill((rank,))
            elif case.kind_of(rank) == "stopped":
                self._signal(rank, signal.SIGSTOP)

    def _signal(self, number: int, number_of_signal: int) -> None:
        os.kill(self._processes[number], number_of_signal)

    def _wait_for_survivors(self) -> None:
        """Wait until all survivors have ended, in bounded time."""
        # torch waits for one rank after another.
        seconds = TIMEOUT * (1 + len(self._case.victims)) + _SLACK
        if self._case.kind == "server_stopped":
            seconds = _SERVER_STOPPED
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for seat in [one for one in self._processes if one >= 0]:
                if os.waitpid(self._processes[seat], os.WNOHANG)[0]:
                    del self._processes[seat]
            if self._processes.keys().isdisjoint(self._case.survivors):
                return
            time.sleep(0.05)


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


def _serve_store(writing: int) -> None:
    """Serve a store. After SIGUSR1 it refuses connections."""
    signal.signal(signal.SIGUSR1, lambda *_: _refuse_connections())
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    os.close(writing)
    while True:
        signal.pause()


def _refuse_connections() -> None:
    """Close the sockets of this process that listen; connections stay open."""
    listening = {
        f"socket:[{fields[9]}]"
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in map(str.split, Path(table).read_text().splitlines())
        if fields[3] == _LISTENING
    }
    for link in list(Path("/proc/self/fd").iterdir()):
        # One of them was the folder itself.
        if link.is_symlink() and str(link.readlink()) in listening:
            os.close(int(link.name))


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
