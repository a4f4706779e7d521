"""A rank of a case, as a process."""

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import tracedstore
from hangs.cases import Case
from hangs.hang import Hang
from hangs.scenarios import run_rank

STALL_AFTER = 3.0
TIMEOUT = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """What the process of a rank needs to run.

    Attributes:
        case: The case.
        seat: The number of the process.
        directory: The folder of what it writes.
        port: The port of the store's server.
        second_port: That of the second store's.
        attempt: The number of restarts.
        ready: A pipe that it closes when it is ready.
        gate: A pipe with a byte for each process that may go on.
        reached: A pipe to which it writes when it hangs.
    """

    case: Case
    seat: int
    directory: Path
    port: int
    second_port: int
    attempt: int
    ready: int
    gate: int
    reached: int

    def start(self) -> None:
        """Run the rank in this process, which was just forked, or in its successor."""
        log = os.open(self.directory / f"log.{self.seat}", os.O_WRONLY | os.O_CREAT)
        os.ftruncate(log, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        case = self.case
        rank = {} if case.wraps else {"RANK": str(case.rank_of(self.seat))}
        os.environ.update(
            LOCAL_RANK=str(self.seat),
            WORLD_SIZE=str(case.world_size),
            LOCAL_WORLD_SIZE=str(case.world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
            **rank,
            **case.scenario.environ,
        )
        if case.kind == "restarted":
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.attempt)
        if case.start == "executed":
            self._execute()
        self.run()

    def _execute(self) -> NoReturn:
        for end in (self.ready, self.gate, self.reached):
            os.set_inheritable(end, True)
        file = self.directory / f"process.{self.seat}"
        file.write_bytes(pickle.dumps(self))
        command = ("-W", "ignore", "-m", "hangs.rank_process", str(file))
        os.execv(sys.executable, (sys.executable, *command))

    def run(self) -> None:
        """Run the rank."""
        case = self.case
        if case.start != "forked_later":
            set_up(instrument=not case.wraps)
        hang = Hang(
            rank=case.rank_of(self.seat),
            world_size=case.world_size,
            victims=case.victims,
            store_kind=case.store,
            file=self.directory / "store",
            port=self.port,
            second_port=self.second_port,
            wraps=case.wraps,
            helpers=case.helpers,
            timeout=TIMEOUT,
            stall_after=STALL_AFTER,
            attempt=self.attempt,
            reached=lambda: _write(self.reached),
        )
        os.close(self.ready)
        os.read(self.gate, 1)
        run_rank(case.scenario, hang, self.directory / f"outcome.{self.seat}")
        tracedstore.shutdown(1)
        # Helper threads are in calls.
        os._exit(0)


def set_up(*, instrument: bool) -> None:
    """Set tracedstore up as the program of a job does."""
    if instrument:
        tracedstore.instrument()
    tracedstore.configure(stall_after=STALL_AFTER, log_format="json", exit_timeout=1)


def _write(pipe: int) -> None:
    os.write(pipe, b".")


if __name__ == "__main__":
    # Unpickled below the name that it was pickled with.
    from hangs.rank_process import RankProcess as Saved

    process = pickle.loads(Path(sys.argv[1]).read_bytes())
    assert isinstance(process, Saved)
    process.run()
