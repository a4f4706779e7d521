"""torchrun, with a report of its metrics when it ends.

If it is forked itself, it forks its workers.
"""

import os
import sys
from datetime import datetime, timedelta, tzinfo
from functools import partialmethod
from typing import Any

from forked_python import fork_workers, in_forked_process
from prometheus_client import generate_latest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import main

from integration.harness import report


class WrongClock(datetime):
    """The time of a machine whose clock is wrong."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Any:
        """Return the wrong time."""
        skew = timedelta(seconds=float(os.environ["CLOCK_SKEW"]))
        return datetime.now(tz) + skew


if __name__ == "__main__":
    if in_forked_process():
        fork_workers()
    if "CLOCK_SKEW" in os.environ:
        vars(dynamic_rendezvous)["datetime"] = WrongClock
    if "EXIT_BARRIER_TIMEOUT" in os.environ:
        # torchrun has no option for this timeout, which is five minutes by default.
        agent: Any = LocalElasticAgent
        agent.__init__ = partialmethod(
            agent.__init__,
            exit_barrier_timeout=float(os.environ["EXIT_BARRIER_TIMEOUT"]),
        )
    try:
        main(sys.argv[1:])
    finally:
        report(metrics=generate_latest().decode())
