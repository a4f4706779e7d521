"""An agent of torchrun, or one of its workers, on one of two nodes.

Arguments: ``agent`` and the options of torchrun; or the name of a scenario and the
folder of what the worker writes.
"""

import os
import sys
from pathlib import Path

import tracedstore
from hangs.hang import Hang
from hangs.rank_process import STALL_AFTER, set_up
from hangs.scenarios import SCENARIOS, run_rank

TIMEOUT = 60.0


def run_worker(name: str, directory: Path) -> None:
    """Run a scenario; the victims are the ranks of the second node."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def reached() -> None:
        (directory / f"reached.{rank}").touch()

    hang = Hang(
        rank=rank,
        world_size=world_size,
        victims=tuple(range(world_size // 2, world_size)),
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
    run_rank(SCENARIOS[name], hang, directory / f"outcome.{rank}")
    tracedstore.shutdown(1)


if __name__ == "__main__":
    set_up(instrument=True)
    if sys.argv[1] == "agent":
        from torch.distributed.run import main

        main(sys.argv[2:])
    else:
        run_worker(sys.argv[1], Path(sys.argv[2]))
