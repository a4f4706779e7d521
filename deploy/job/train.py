"""A job whose ranks misbehave, to have something to look at. Run it with torchrun.

Every step all ranks meet at a barrier, to which the straggler comes late. Now and then
they meet for a checkpoint, and one of them does not come for long: it is stuck in a
wait for a key that nobody writes. Meanwhile they fight over one key with
compare-and-set, and ask for keys that are not there.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

import tracedstore


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument(
        "--straggler", type=int, default=2, help="the rank that is late"
    )
    parser.add_argument("--late-seconds", type=float, default=1.5)
    parser.add_argument(
        "--missing", type=int, default=3, help="the rank that gets stuck"
    )
    parser.add_argument("--stuck-seconds", type=float, default=150.0)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--barrier-timeout", type=float, default=240.0)
    parser.add_argument("--warn-after", type=float, default=10.0)
    return parser.parse_args()


class Rank:
    """One of them."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._rank = int(os.environ["RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's agent serves the store, unless it is told not to.
        serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = tracedstore.wrap(
            dist.TCPStore(host, port, is_master=serves and self._rank == 0)
        )

    def run(self) -> None:
        """Step by step; what goes wrong is what it is for, and does not end it."""
        for step in range(self._given.steps):
            self._talk(step)
            time.sleep(self._given.step_seconds)
            if self._rank == self._given.straggler:
                time.sleep(self._given.late_seconds)
            self._meet(f"step/{step}")
            if step % self._given.checkpoint_every == self._given.checkpoint_every - 1:
                if self._rank == self._given.missing:
                    self._wait_in_vain(self._given.stuck_seconds)
                self._meet(f"checkpoint/{step}")

    def _talk(self, step: int) -> None:
        """Use the store as jobs do, and a little worse."""
        store, mine = self._store, f"loss/{self._rank}"
        store.set(mine, f"{step}")
        store.get(mine)
        store.check([mine])
        store.add("seen", 1)
        # A lease that one rank can have; the others lose.
        store.compare_set(f"lease/{step}", "", str(self._rank))
        if step % 5 == 0:
            self._wait_in_vain(0.1)

    def _wait_in_vain(self, seconds: float) -> None:
        # Each store raises its own kind of error.
        with suppress(Exception):
            self._store.wait(["never/written"], timedelta(seconds=seconds))

    def _meet(self, prefix: str) -> None:
        try:
            tracedstore.barrier(
                self._store,
                self._world_size,
                prefix,
                self._given.barrier_timeout,
                rank=self._rank,
                warn_after=self._given.warn_after,
            )
        except tracedstore.BarrierTimeout as timeout:
            print(timeout, file=sys.stderr, flush=True)


if __name__ == "__main__":
    Rank(options()).run()
