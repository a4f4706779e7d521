"""Measures one refresh of ``tracedstore top``: reading, sending and drawing.

1,024 ranks are in a real TCPStore, with their registrations and barriers, and are read
through it. 16,384 ranks are simulated: their store is in the memory of this process.
In both, one rank is missing at the last barrier. Exits with 1 if a bar is missed.
"""

import asyncio
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from harness import Bar, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

# The tests write the same keys.
from support.jobs_in_stores import arrive, register
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.job_reading import JobReading
from tracedstore.tools.attach.job_state import read_job_state, select_keys
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.store_snapshot import StoreSnapshot
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.top.live import LiveApp
from tracedstore.tools.top.reader_process import JobReader, ReaderAnswer, ReaderRequest

REAL, SIMULATED = 1024, 16_384
BARRIERS = 20
REFRESHES = 7
MAX_SECONDS = {REAL: 0.5, SIMULATED: 3.0}
MAX_KEY_SECONDS = 0.1
_SIZE = (80, 24)


def fill(store: Any, ranks: int) -> None:
    """Write a job: finished barriers, and one at which a rank is missing."""
    now = time.time()
    for rank in range(ranks):
        register(store, rank, ranks, started=now)
    for number in range(BARRIERS):
        times = {rank: now - 300 + number + rank / ranks for rank in range(ranks)}
        arrive(store, f"step/{number}", times, complete=True)
    missing = ranks // 3
    times = {rank: now - 100 for rank in range(ranks) if rank != missing}
    arrive(store, f"step/{BARRIERS}", times)


class SimulatedJob:
    """Reads a store of this process, as the reader does, and sends the model."""

    source, asks = "simulated", False

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, _request: ReaderRequest) -> ReaderAnswer:
        """Return the job."""
        # As between two processes.
        snapshot = StoreSnapshot.take(self._store, select_keys)
        status = JobReading(
            store=self.source,
            now=time.time(),
            job=read_job_state(pickle.loads(pickle.dumps(snapshot))),
            replies={},
            after=5.0,
        )
        response = ReaderAnswer(job=view_of(status))
        received: ReaderAnswer = pickle.loads(pickle.dumps(response))
        return received

    def close(self) -> None:
        """Do nothing."""


def measure(source: Any, ranks: int) -> dict[str, float]:
    """Return the medians of a refresh, of drawing alone, and of a key."""
    source.read(ReaderRequest())  # imports torch in the reader
    refreshes, drawings, keys = [], [], []

    async def refresh() -> None:
        app = LiveApp(_Idle(), 3600, Path())
        async with app.run_test(size=_SIZE) as pilot:
            for _ in range(REFRESHES):
                started = time.perf_counter()
                response = source.read(ReaderRequest())
                read = time.perf_counter()
                app.post_message(LiveApp.Arrived(ReaderRequest(), response))
                await pilot.pause()
                drawn = time.perf_counter()
                refreshes.append(drawn - started)
                drawings.append(drawn - read)
            assert f"missing 1 of {ranks}" in app.shown_job().headline
            for _ in range(REFRESHES):
                started = time.perf_counter()
                await pilot.press("right")
                keys.append(time.perf_counter() - started)

    asyncio.run(refresh())
    return {
        "refresh_seconds": median(refreshes),
        "drawing_seconds": median(drawings),
        "key_seconds": median(keys),
    }


class _Idle:
    """A source that has nothing new."""

    source, asks = "idle", False

    def __init__(self) -> None:
        self._closed = False

    def read(self, _request: ReaderRequest) -> ReaderAnswer:
        """Return nothing."""
        return ReaderAnswer(error="nothing new")

    def close(self) -> None:
        """Do nothing."""


def in_tcp_store() -> dict[str, float]:
    """Measure a job in a real TCPStore."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True)
    fill(store, REAL)
    address = Address(f"tcp://127.0.0.1:{store.port}")
    reader = JobReader(address, TokenPolicy(), after=5.0)
    try:
        return measure(reader, REAL)
    finally:
        reader.close()


def simulated() -> dict[str, float]:
    """Measure a job in a store of this process."""
    store = dist.HashStore()
    fill(store, SIMULATED)
    return measure(SimulatedJob(store), SIMULATED)


def main() -> int:
    """Measure both."""
    options = parser(__doc__).parse_args()
    works: dict[int, Callable[[], dict[str, float]]] = {
        REAL: in_tcp_store,
        SIMULATED: simulated,
    }
    bars, results = [], {}
    for ranks, work in works.items():
        found = results[str(ranks)] = work()
        print(f"{ranks:,} ranks: {found}")
        seconds = found["refresh_seconds"]
        bars += [
            Bar.at_most(f"refresh of {ranks:,} ranks, s", seconds, MAX_SECONDS[ranks]),
            Bar.at_most(
                f"a key with {ranks:,} ranks, s", found["key_seconds"], MAX_KEY_SECONDS
            ),
        ]
    return finish(bars, results, options.output)


if __name__ == "__main__":
    sys.exit(main())
