"""Reads the job in a process of its own, for a screen that never waits for it.

Importing torch takes seconds, torch holds the GIL while it lists the keys of a store,
and the reader forks. None of that happens in the process that draws.
"""

import gc
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from tracedstore.common.errors import CommandError
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.job_view import JobView, Rates
from tracedstore.tools.top.rates import RateMeter

if TYPE_CHECKING:
    from tracedstore.coordination.rank_registry import RankInfo
    from tracedstore.tools.attach.local_ranks import UsageMeter

# Ranks whose metrics are read. A scrape costs a rank 10 ms.
MAX_SCRAPED = 32
# Seconds between two looks at whether the screen still wants the answer.
_POLL = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """What the screen wants to know.

    Attributes:
        rates: Read the metrics of the ranks, too.
        stacks_of: Ask the ranks for their stacks through the store, and return what
            this one answers, which is its key prefix and number; None for no question.
    """

    rates: bool = False
    stacks_of: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderAnswer:
    """What the reader found.

    Attributes:
        job: The job; None if the store cannot be read.
        stacks: The lines about the stacks that were asked for.
        error: Why the store cannot be read.
    """

    job: JobView | None = None
    stacks: tuple[str, ...] = ()
    error: str = ""


class ReaderLostError(Exception):
    """The process that reads has ended."""


class JobReader:
    """The screen's side of the process.

    Args:
        address: The job's store.
        tokens: The token of the ranks' endpoints.
        run_id: Only this job.
        after: Seconds a barrier may take before its absent ranks are awaited.
        ask: Ask all ranks through the store at each reading.
    """

    def __init__(
        self,
        address: Address,
        tokens: TokenPolicy,
        *,
        run_id: str | None = None,
        after: float = 0.0,
        ask: bool = False,
    ) -> None:
        self.source = address.url
        self.asks = ask
        self._connection, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._connection.close()
                _serve(
                    theirs, _Job(address, tokens, run_id=run_id, after=after, ask=ask)
                )
            finally:
                os._exit(0)
        theirs.close()
        self._closing = False

    def read(self, request: ReaderRequest) -> ReaderAnswer:
        """Return what the reader finds; blocks until then, or until `close`.

        Raises:
            ReaderLostError: The process has ended, or `close` was called.
        """
        try:
            self._connection.send(request)
            while not self._connection.poll(_POLL):
                if self._closing:
                    raise ReaderLostError
            response: ReaderAnswer = self._connection.recv()
        except (EOFError, OSError):
            raise ReaderLostError from None
        return response

    def close(self) -> None:
        """End the process, whatever it waits for."""
        if self._closing:
            return
        self._closing = True
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Job:
    """Reads the job."""

    def __init__(self, address: Address, tokens: TokenPolicy, **options: Any) -> None:
        self._address = address
        self._tokens = tokens
        self._options = options
        self._meter = RateMeter()
        self._usage: UsageMeter | None = None
        self._probed = False

    def answer(self, request: ReaderRequest) -> ReaderAnswer:
        try:
            if not self._probed:
                # Finds what can be found without torch, which takes seconds to import.
                self._address.probe()
                self._probed = True
            if request.stacks_of is not None:
                return ReaderAnswer(stacks=self._stacks(request.stacks_of[1]))
            return ReaderAnswer(job=self._read(request))
        except CommandError as error:
            return ReaderAnswer(error=str(error))

    def _read(self, request: ReaderRequest) -> JobView:
        from tracedstore.tools.attach.job_reading import read_job  # noqa: PLC0415
        from tracedstore.tools.attach.live_view import view_of  # noqa: PLC0415
        from tracedstore.tools.attach.local_ranks import UsageMeter  # noqa: PLC0415

        self._usage = self._usage or UsageMeter()
        reading = read_job(self._address, self._tokens, **self._options)
        rates = self._rates(reading.replies) if request.rates else None
        return view_of(reading, rates, self._usage.read(reading.replies))

    def _rates(self, infos: "Iterable[RankInfo]") -> Rates:
        from tracedstore.tools.attach.rank_endpoints import scrape_ranks  # noqa: PLC0415

        # A process may have registered several times.
        served = {
            (info.metrics, info.rank if info.agent else None): info
            for info in infos
            if info.metrics
        }
        # At most `MAX_SCRAPED`, from all over the job.
        serving = list(served.values())
        step = -(-len(serving) // MAX_SCRAPED) or 1
        pages = scrape_ranks(serving[::step], self._tokens)
        by_process = {
            (info.rank, info.host, info.pid): page for info, page in pages.items()
        }
        return self._meter.update(by_process, time.time(), len(serving))

    def _stacks(self, rank: int) -> tuple[str, ...]:
        from tracedstore.tools.attach import job_reading  # noqa: PLC0415
        from tracedstore.tools.attach.job_text import rank_lines  # noqa: PLC0415

        groups = job_reading.ask_job(
            self._address,
            "stacks",
            self._options["run_id"],
            job_reading.ANSWER_TIMEOUT,
        )
        return tuple(line for group in groups for line in rank_lines(group, rank))


def _serve(connection: Connection, job: _Job) -> None:
    # The screen belongs to the other process: what torch writes must not reach it.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            request = connection.recv()
        except EOFError:  # the screen has ended
            return
        connection.send(job.answer(request))
