"""One reading of a running job: its store, and the endpoints of its ranks."""

import time
from dataclasses import dataclass

from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.asking import ask_job
from tracedstore.tools.attach.job_discovery import collect_job
from tracedstore.tools.attach.job_status import Status
from tracedstore.tools.attach.rank_endpoints import query_ranks
from tracedstore.tools.attach.token_policy import TokenPolicy

# Seconds to wait for the answers of all ranks.
ANSWER_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What to read of a job.

    Attributes:
        address: The job's store.
        tokens: The token of the ranks' endpoints.
        run_id: Only this job; None for everything in the store.
        after: Seconds a barrier may take, or a rank may be blocked, before it counts
            as missing.
        ask: Ask all ranks through the store, which writes to it.
    """

    address: Address
    tokens: TokenPolicy
    run_id: str | None = None
    after: float = 0.0
    ask: bool = False

    def read(self) -> Status:
        """Read the job once.

        Raises:
            CommandError: The store cannot be read.
        """
        job = collect_job(self.address, self.run_id)
        infos = [info for group in job.groups for info in group.ranks]
        # A job without registered ranks cannot be asked.
        ask = self.ask and bool(infos)
        return Status(
            store=self.address.url,
            now=time.time(),
            job=job,
            replies=query_ranks(infos, self.tokens),
            after=self.after,
            answers=ask_job(self.address, "status", self.run_id, ANSWER_TIMEOUT)
            if ask
            else (),
        )
