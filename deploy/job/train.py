"""An example job with what jobs have. Run it with torchrun, which restarts it.

- One rank reads its data set for long, and the others wait in `init_process_group`.
- One rank is a straggler in every step.
- One rank writes a checkpoint for minutes, and the others wait at a barrier.
- In every other attempt that rank skips an `all_reduce`: the others wait until the
  process group times out, and torchrun restarts the job.
- In the attempts between, a rank is killed.

The ranks also compete for a key with compare-and-set, and wait for missing keys.
"""

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
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
        "--missing",
        type=int,
        default=3,
        help="the rank that is missing at the start, at checkpoints and in all_reduce",
    )
    parser.add_argument("--load-seconds", type=float, default=150.0)
    parser.add_argument("--stuck-seconds", type=float, default=150.0)
    parser.add_argument("--killed", type=int, default=1, help="the rank that is killed")
    parser.add_argument("--fault-at", type=int, default=50, metavar="STEP")
    parser.add_argument("--group-timeout", type=float, default=240.0)
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
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # A new prefix for each attempt, as torch has for its own keys.
        store = dist.TCPStore(host, port, is_master=serves and self._rank == 0)
        prefix = f"attempt_{self._attempt}"
        self._store = tracedstore.wrap(dist.PrefixStore(prefix, store))

    def run(self) -> None:
        """Run all steps. Timeouts of barriers do not end the job."""
        options = self._options
        self._load_dataset()
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=options.group_timeout),
        )
        gradients = torch.ones(1024)
        for step in range(options.steps):
            self._use_store(step)
            self._compute()
            self._barrier(f"step/{step}")
            if not self._fails_at(step):
                dist.all_reduce(gradients)
            if (step + 1) % options.checkpoint_every == 0:
                self._save_checkpoint()
                self._barrier(f"checkpoint/{step}")

    def _load_dataset(self) -> None:
        if self._rank == self._options.missing:
            time.sleep(self._options.load_seconds)

    def _compute(self) -> None:
        time.sleep(self._options.step_seconds)
        if self._rank == self._options.straggler:
            time.sleep(self._options.late_seconds)

    def _save_checkpoint(self) -> None:
        if self._rank == self._options.missing:
            time.sleep(self._options.stuck_seconds)

    def _fails_at(self, step: int) -> bool:
        """Return whether this rank skips the all_reduce; or be killed."""
        if step != self._options.fault_at:
            return False
        if self._attempt % 2 and self._rank == self._options.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return not self._attempt % 2 and self._rank == self._options.missing

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
