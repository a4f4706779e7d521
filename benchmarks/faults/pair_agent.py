"""torchrun's agent in a job of `pairs`; it does not import tracedstore.

If it is forked itself, it forks its workers.
"""

from functools import partialmethod
from typing import Any

from forked_python import fork_workers, in_forked_process

# Seconds that an agent which is done waits for the other one; five minutes by default.
_EXIT_BARRIER_TIMEOUT = 15.0


def main() -> None:
    """Run torchrun."""
    if in_forked_process():
        fork_workers()
    from torch.distributed.elastic.agent.server.local_elastic_agent import (  # noqa: PLC0415 - after the fork
        LocalElasticAgent,
    )
    from torch.distributed.run import main as torchrun  # noqa: PLC0415 - as above

    # torchrun has no option for this.
    agent: Any = LocalElasticAgent
    agent.__init__ = partialmethod(
        agent.__init__, exit_barrier_timeout=_EXIT_BARRIER_TIMEOUT
    )
    torchrun()


if __name__ == "__main__":
    main()
