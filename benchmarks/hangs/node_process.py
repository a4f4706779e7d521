"""An agent of torchrun, a worker of one, or a program that spawns its ranks.

Arguments: ``agent`` and the options of torchrun; or ``worker`` or ``spawn`` and the
number of ranks, and then the name of a scenario, how its victims hang, and the folder
of what the ranks write.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch.multiprocessing

import tracedstore
from hangs.hang import Hang
from hangs.rank_process import STALL_AFTER, set_up
from hangs.scenarios import SCENARIOS, Scenario, run_rank

TIMEOUT = 60.0


def run_worker(rank: int, world_size: int, name: str, kind: str, folder: str) -> None:
    """Run a scenario; the victims are the ranks of a lost node, or the last rank."""
    scenario, directory = _scenario(name), Path(folder)

    def reached() -> None:
        (directory / f"reached.{rank}").touch()
        if kind == "gone":
            os.kill(os.getpid(), signal.SIGKILL)

    first_victim = world_size // 2 if scenario.nodes else world_size - 1
    hang = Hang(
        rank=rank,
        world_size=world_size,
        victims=tuple(range(first_victim, world_size)),
        store_kind="tcp",
        file=directory / "store",
        port=0,
        second_port=0,
        wraps=False,
        helpers=False,
        timeout=TIMEOUT,
        stall_after=STALL_AFTER,
        attempt=0,
        reached=reached,
    )
    run_rank(scenario, hang, directory / f"outcome.{rank}")
    tracedstore.shutdown(1)


def _scenario(name: str) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    from hangs.collective_scenarios import COLLECTIVES  # noqa: PLC0415 - takes seconds

    return COLLECTIVES[name]


def run_spawned(rank: int, world_size: int, *arguments: str) -> None:
    """Run a rank that torch.multiprocessing has spawned."""
    set_up(instrument=True)
    run_worker(rank, world_size, *arguments)


def _spawn(world_size: int, *arguments: str) -> None:
    # The rank is known from init_process_group alone.
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spawn: Any = torch.multiprocessing.spawn
    spawn(run_spawned, (world_size, *arguments), nprocs=world_size)


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        _spawn(int(sys.argv[2]), *sys.argv[3:])
    else:
        set_up(instrument=True)
        if sys.argv[1] == "agent":
            from torch.distributed.run import main

            main(sys.argv[2:])
        else:
            ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            run_worker(*ranks, *sys.argv[2:])
