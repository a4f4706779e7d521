"""Measures what watching collectives costs: each of them, the thread, and the store.

- An ``all_reduce`` of 1 kB on gloo: two jobs of two processes, one traced and one bare,
  make one call after the other in turns.
- The diagnosis thread of a process with 64 groups, of which one is used.
- The requests and bytes of a hung collective, with simulated ranks on a HashStore.

Exits with 1 if a bar is missed.
"""

import multiprocessing
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

import forking_environment  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from harness import Bar, finish, parser
from simulated_ranks import CountingStore

import tracedstore
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.judgement.inquiry import inquire
from tracedstore.diagnosis.observe.blocked_record import (
    CollectivePosition,
    publish_blocked,
)
from tracedstore.diagnosis.observe.collectives import Collectives, StuckCall
from tracedstore.diagnosis.observe.pending_collectives import PendingCollective
from tracedstore.diagnosis.observe.waits import Repeated

RANKS, GROUPS = 2, 64
WORLDS: Final = (4, 64, 16_384)
# A quarter of that at the beginning does not count: caches and connections.
TURNS: Final = 4000
IDLE_SECONDS: Final = 20.0
# Within noise.
MAX_RATIO: Final = 1.05
MAX_SHARE_OF_CORE: Final = 0.001
MAX_REQUESTS_OF_A_RANK, MAX_KILOBYTES_OF_A_RANK = 8, 8
_LATE: Final = 1


def _join(rank: int, port: int, *, traced: bool) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    if traced:
        tracedstore.configure(log_format="off")
        tracedstore.instrument()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def _call_in_turns(
    rank: int, port: int, traced: bool, pipe: "Connection[Any, Any]"
) -> None:
    _join(rank, port, traced=traced)
    tensor = torch.ones(256)
    dist.all_reduce(tensor)
    pipe.send(0.0)
    while pipe.recv():
        began = time.perf_counter()
        dist.all_reduce(tensor)
        pipe.send(time.perf_counter() - began)


def _idle(rank: int, port: int, pipe: "Connection[Any, Any]") -> None:
    _join(rank, port, traced=True)
    groups = [dist.new_group() for _ in range(GROUPS)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    (thread,) = (
        one for one in threading.enumerate() if one.name == "tracedstore-diagnosis"
    )
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    began, used = time.monotonic(), time.clock_gettime(clock)
    # Once a second something moves, as in a job that works.
    while time.monotonic() < began + IDLE_SECONDS:
        dist.all_reduce(torch.ones(1))
        time.sleep(1.0)
    share = (time.clock_gettime(clock) - used) / (time.monotonic() - began)
    pipe.send(share)
    pipe.recv()


class _Job:
    """The ranks of a job, as processes, and the server of their store."""

    def __init__(self, target: Any, *args: Any) -> None:
        self._server = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self.pipes = []
        for rank in range(RANKS):
            ours, theirs = multiprocessing.Pipe()
            multiprocessing.get_context("fork").Process(
                target=target,
                args=(rank, self._server.port, *args, theirs),
                daemon=True,
            ).start()
            theirs.close()
            self.pipes.append(ours)

    def send(self, value: object) -> None:
        """Send something to all ranks."""
        for pipe in self.pipes:
            pipe.send(value)

    def receive(self) -> list[float]:
        """Receive something of all ranks."""
        return [pipe.recv() for pipe in self.pipes]


def measure_calls() -> dict[str, float]:
    """Return the median duration of a call in microseconds, traced and bare."""
    jobs = {name: _Job(_call_in_turns, name == "traced") for name in ("traced", "bare")}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for job in jobs.values():
        job.receive()
    for _ in range(TURNS):
        for name, job in jobs.items():
            job.send(True)
            # The last of them to come waits for nobody.
            found[name].append(min(job.receive()))
    for job in jobs.values():
        job.send(False)
    return {name: median(some[TURNS // 4 :]) * 1e6 for name, some in found.items()}


def measure_thread() -> float:
    """Return the share of a core that the diagnosis thread uses."""
    job = _Job(_idle)
    share = max(job.receive())
    job.send(None)
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class HangTraffic:
    """What a hung collective costs the store.

    Attributes:
        ranks: The number of ranks; one does not come.
        requests: Of a rank that waits, at most.
        kilobytes: The same in kilobytes.
        looker_requests: Of a rank that looks for the verdict, besides.
        looker_kilobytes: The same in kilobytes.
        named: The ranks that the verdict names.
    """

    ranks: int
    requests: int
    kilobytes: float
    looker_requests: int
    looker_kilobytes: float
    named: tuple[int, ...]


class _Lasting(Collectives):
    """A process whose call lasts."""

    def lasts(self, _call: StuckCall) -> bool:
        """Return that it does."""
        return True


def measure_traffic(world_size: int) -> HangTraffic:
    """Let all ranks but one wait in a collective; return the traffic."""
    store = dist.HashStore()
    waiting = [rank for rank in range(world_size) if rank != _LATE]
    counted = {rank: CountingStore(store) for rank in waiting}
    pending = {rank: _pending(world_size) for rank in waiting}
    started = time.time() - 40
    for rank in waiting:
        record = pending[rank].describe(
            counted[rank], _member(rank, world_size), started
        )
        if record is not None:
            publish_blocked(counted[rank], record, first=True)
    looker = CountingStore(store)
    describe = partial(
        pending[0].describe, looker, _member(0, world_size), started, complete=True
    )
    verdict = inquire(
        looker,
        _member(0, world_size),
        0.5,
        call_connection=looker,
        describe=describe,
        records_until=0.0,
    )
    return HangTraffic(
        ranks=world_size,
        requests=max(one.requests for one in counted.values()),
        kilobytes=round(max(one.bytes for one in counted.values()) / 1000, 2),
        looker_requests=looker.requests,
        looker_kilobytes=round(looker.bytes / 1000, 1),
        named=() if verdict is None else verdict.awaited_ranks,
    )


def _member(rank: int, world_size: int) -> Member:
    return Member(rank=rank, world_size=world_size, host_of=lambda _rank: "")


def _pending(world_size: int) -> PendingCollective:
    position = CollectivePosition(
        group="0",
        description="default_pg",
        number=2501,
        operation="all_reduce",
        sizes="[256]",
        dtype="Float",
        place="train.py:88 step",
    )
    call = StuckCall(
        position=position, members=tuple(range(world_size)), started=time.time()
    )
    return PendingCollective(
        key=call.identity,
        repeated=Repeated(since=time.monotonic()),
        thread_id=0,
        order=0,
        state=None,
        timeout=1800.0,
        call=call,
        collectives=_Lasting(30.0),
    )


def main() -> int:
    """Measure everything and print the bars."""
    options = parser(__doc__).parse_args()
    calls = measure_calls()
    share = measure_thread()
    traffic = [measure_traffic(world_size) for world_size in WORLDS]
    print(f"all_reduce of 1 kB: {calls['traced']:.1f} us, bare {calls['bare']:.1f} us")
    bars = [
        Bar.at_most(
            "all_reduce, traced / bare", calls["traced"] / calls["bare"], MAX_RATIO
        ),
        Bar.at_most(
            f"share of a core of the thread, {GROUPS} groups", share, MAX_SHARE_OF_CORE
        ),
    ]
    for one in traffic:
        print(one)
        bars += [
            Bar.at_most(
                f"requests of a rank of {one.ranks}",
                one.requests,
                MAX_REQUESTS_OF_A_RANK,
            ),
            Bar.at_most(
                f"kB of a rank of {one.ranks}", one.kilobytes, MAX_KILOBYTES_OF_A_RANK
            ),
            Bar.at_most(
                f"wrong names of {one.ranks}", float(one.named != (_LATE,)), 0.0
            ),
        ]
    results = {
        "all_reduce_us": calls,
        "thread_share_of_core": share,
        "traffic": [asdict(one) for one in traffic],
    }
    return finish(bars, results, options.output)


if __name__ == "__main__":
    sys.exit(main())
