"""1024 ranks at one barrier over one TCPStore."""

import time
from collections import Counter

import pytest
import torch.distributed as dist

from integration.conftest import StartChild
from integration.harness import Child, in_background

pytestmark = [
    pytest.mark.processes,
    pytest.mark.exclusive,
]

WORLD_SIZE, PROCESSES = 1024, 4
MISSING = (0, 500, 1023)
# How many times as long as the first barrier, which all complete, the slowest rank
# takes after the timeout to report the missing ones, on a machine that is busy or
# not. Ranks that all read the arrivals would take minutes.
MAX_RATIO = 20.0
# The part of the ranks that may reach the bound for the names.
MAX_UNNAMED = 0.02


@pytest.fixture
def port(tcp_server: Child) -> int:
    """Return the port of the store's server."""
    number: int = tcp_server.next_report()["port"]
    return number


@pytest.fixture
def processes(start_child: StartChild, port: int) -> list[Child]:
    """Start the ranks, which have a connection each, in four processes."""
    missing = ",".join(map(str, MISSING))
    children = [
        start_child("many_ranks", port, WORLD_SIZE, missing, PROCESSES, number)
        for number in range(PROCESSES)
    ]
    assert sum(child.next_report()["ready"] for child in children) == WORLD_SIZE
    return children


def run_barrier(
    processes: list[Child], prefix: str, timeout: float
) -> tuple[dict[str, int], float]:
    """Call the barrier from all ranks; return outcome counts and the lateness."""
    for child in processes:
        child.write(f"{prefix} {timeout}\n")
    reports = [child.next_report() for child in processes]
    outcomes: Counter[str] = Counter()
    for report in reports:
        outcomes.update(report["outcomes"])
    return dict(outcomes), max(report["late"] for report in reports)


class TestManyRanks:
    """A barrier of 1024 ranks behaves like one of four."""

    def test_completes_and_times_out(self, processes: list[Child], port: int) -> None:
        """The first barrier completes; in the second the ranks report three missing.

        A rank on a busy machine may reach the bound for the names. It names none then,
        and the others are most. The store's server answers another client all the
        time.
        """
        observer = dist.TCPStore("127.0.0.1", port, None, is_master=False)

        began = time.monotonic()
        assert run_barrier(processes, "all", 300)[0] == {"completed": WORLD_SIZE}
        reference = time.monotonic() - began
        second = in_background(lambda: run_barrier(processes, "some", 5))
        slowest = 0.0
        while not second.done():
            started = time.monotonic()
            observer.check(["nothing"])
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.01)  # limits the load that this client adds

        outcomes, late = second.result()
        unnamed = outcomes.pop("()", 0)
        assert outcomes == {str(MISSING): WORLD_SIZE - len(MISSING) - unnamed}
        assert unnamed < WORLD_SIZE * MAX_UNNAMED
        assert late < MAX_RATIO * reference
        # Not a measurement: an overloaded server would not answer at all.
        assert slowest < MAX_RATIO * reference, (reference, late)
