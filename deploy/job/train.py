"""An example job with a straggler and stalls. Run it with torchrun.

All ranks call a barrier at every step, and the straggler arrives late. Every few steps
they call a barrier for a checkpoint, and one rank is missing for minutes: it waits for
a key that is never set. The ranks also compete for a key with compare-and-set, and wait
for missing keys.
"""

import argparse
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

import tracedstore


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument(
        "--straggler", type=int, default=2, help="the rank that arrives late"
    )
    parser.add_argument("--late-seconds", type=float, default=1.5)
    parser.add_argument(
        "--missing", type=int, default=3, help="the rank that is missing at checkpoints"
    )
    parser.add_argument("--stuck-seconds", type=float, default=150.0)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--barrier-timeout", type=float, default=240.0)
    parser.add_argument("--warn-after", type=float, default=10.0)
    return parser.parse_args()


class Rank:
    """One rank of the job."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rank = int(os.environ["RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's agent serves the store, unless the environment disables that.
        serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = tracedstore.wrap(
            dist.TCPStore(host, port, is_master=serves and self._rank == 0)
        )

    def run(self) -> None:
        """Run all steps. Timeouts are part of the example and do not end the job."""
        for step in range(self._options.steps):
            self._use_store(step)
            time.sleep(self._options.step_seconds)
            if self._rank == self._options.straggler:
                time.sleep(self._options.late_seconds)
            self._barrier(f"step/{step}")
            if (step + 1) % self._options.checkpoint_every == 0:
                if self._rank == self._options.missing:
                    self._wait_for_a_missing_key(self._options.stuck_seconds)
                self._barrier(f"checkpoint/{step}")

    def _use_store(self, step: int) -> None:
        """Make the usual Store calls, some of which lose or time out."""
        store, mine = self._store, f"loss/{self._rank}"
        store.set(mine, f"{step}")
        store.get(mine)
        store.check([mine])
        store.add("seen", 1)
        # One rank wins the lease; the others lose the compare-and-set.
        store.compare_set(f"lease/{step}", "", str(self._rank))
        if step % 5 == 0:
            self._wait_for_a_missing_key(0.1)

    def _wait_for_a_missing_key(self, seconds: float) -> None:
        # The type of the exception depends on the store.
        with suppress(Exception):
            self._store.wait(["never/written"], timedelta(seconds=seconds))

    def _barrier(self, prefix: str) -> None:
        try:
            tracedstore.barrier(
                self._store,
                self._world_size,
                prefix,
                self._options.barrier_timeout,
                rank=self._rank,
                warn_after=self._options.warn_after,
            )
        except tracedstore.BarrierTimeout as timeout:
            print(timeout, file=sys.stderr, flush=True)


if __name__ == "__main__":
    Rank(parse_options()).run()
