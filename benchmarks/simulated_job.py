"""A job of simulated ranks for benchmarks/job_traffic.py: requests and log lines.

Each rank runs the code of a rank in turn, in one process, against a real TCPStore
through a relay that counts. What waits for seconds is driven by a simulated clock.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from log_lines import LogLines
from simulated_ranks import CLOCK, as_rank, simulate_time, take_turns
from stall_traffic import stalled_ranks
from store_requests import CountingRelay

from tracedstore.coordination import rank_registry
from tracedstore.coordination.barrier import BarrierCall
from tracedstore.coordination.rank_registry import Member
from tracedstore.diagnosis.ask.questions import polling_interval_of_rank
from tracedstore.diagnosis.judgement.inquiry import find_causes
from tracedstore.diagnosis.observe import incarnations
from tracedstore.diagnosis.store_diagnosis import StoreDiagnosis
from tracedstore.recording.recorder import RECORDER

RANKS_PER_NODE = 8
IDLE_SECONDS = 60.0
STALL_AFTER = 30.0
# The share of it after which a call is examined: nothing happens before.
_WAITED = 0.8 * STALL_AFTER
_ABSENT = 3
# Seconds. The ranks wait one after the other, and each for a key that does not come.
_BARRIER_TIMEOUT = 0.001


def measure(relay: CountingRelay, ranks: int, hang_seconds: float) -> dict[str, Any]:
    """Run the job; return its requests and its log lines by phase."""
    simulate_time()
    store = dist.TCPStore("127.0.0.1", relay.port, None, is_master=False)
    lines = LogLines()
    phases: dict[str, Callable[[], None]] = {
        "start": lambda: _start(store, ranks),
        "idle": lambda: _idle(store, ranks),
        "barriers": lambda: _complete_barrier(store, ranks),
        "stalled barrier": lambda: _stalled_barrier(store, ranks, lines),
        "hang": lambda: _hang(store, ranks, hang_seconds, lines),
    }
    results = {}
    for phase, run in phases.items():
        relay.begin(phase)
        # No line of the phase before is one of this.
        CLOCK.elapsed += 1.0 + _WAITED
        began = CLOCK.time() - (_WAITED if phase == "hang" else 0.0)
        run()
        results[phase] = {
            "seconds": CLOCK.time() - began,
            "barriers": int(phase == "barriers"),
            "requests": relay.requests().summary(phase),
            "log": lines.summary(began, CLOCK.time() + 0.5),
        }
    return results


def _start(store: dist.Store, ranks: int) -> None:
    for rank in range(ranks):
        incarnations.check_earlier(store, rank, ranks)
        rank_registry.register(store, rank, ranks)
        incarnations.write_stamp(store, "0", rank, range(ranks))


def _idle(store: dist.Store, ranks: int) -> None:
    """Let one process a node read questions."""
    pollers = []
    for rank in range(0, ranks, RANKS_PER_NODE):
        member = Member(rank=rank, world_size=ranks, host_of=lambda _rank: "")
        poller = StoreDiagnosis(store, member, RECORDER, STALL_AFTER, answers=True)
        poller._poll_interval = polling_interval_of_rank(  # noqa: SLF001 - this host is one
            ranks, 0, RANKS_PER_NODE, has_agent=False
        )
        pollers.append(poller)
    ends = CLOCK.elapsed + IDLE_SECONDS
    while CLOCK.elapsed < ends:
        for poller in pollers:
            poller.poll()
        CLOCK.elapsed += 1.0


def _calls(
    store: dist.Store, ranks: int, present: int, timeout: float
) -> list[BarrierCall]:
    return [
        BarrierCall(
            store,
            ranks,
            f"barrier/{present}",
            timeout,
            rank,
            None,
            10.0,
            find_causes,
            warn_after=0.0,
        )
        for rank in range(present)
    ]


def _arrive(store: dist.Store, calls: list[BarrierCall]) -> None:
    for call in calls:
        call.meeting = call._new_meeting(store)  # noqa: SLF001 - drives it
        call.meeting.arrive(store)


def _complete_barrier(store: dist.Store, ranks: int) -> None:
    calls = _calls(store, ranks, ranks, 60.0)
    _arrive(store, calls)
    # The last rank releases the others.
    for call in reversed(calls):
        call._wait_or_complete(store, call.meeting)  # noqa: SLF001 - drives it


def _stalled_barrier(store: dist.Store, ranks: int, lines: LogLines) -> None:
    calls = _calls(store, ranks, ranks - _ABSENT, _BARRIER_TIMEOUT)
    _arrive(store, calls)
    for rank, call in enumerate(calls):
        as_rank(rank, ranks, lines)
        if rank < 2:
            call._read_and_warn()  # noqa: SLF001 - drives it
    for rank, call in enumerate(calls):
        as_rank(rank, ranks, lines)
        with suppress(dist.DistStoreError):
            call._wait_or_complete(store, call.meeting)  # noqa: SLF001 - drives it
        call._timed_out(call._store)  # noqa: SLF001 - drives it


def _hang(store: dist.Store, ranks: int, hang_seconds: float, lines: LogLines) -> None:
    _, waiting = stalled_ranks(store, ranks, STALL_AFTER, waited=_WAITED, lines=lines)
    take_turns(waiting, 1.0, hang_seconds - _WAITED, until=lambda: False)
