"""A thousand ranks at one barrier, over one TCPStore."""

import time
from collections import Counter

import pytest
import torch.distributed as dist

from integration.conftest import StartChild
from integration.harness import Child, in_background

pytestmark = [
    pytest.mark.processes,
    pytest.mark.exclusive,
    pytest.mark.timeout(120),
]

WORLD, PROCESSES = 1024, 4
MISSING = (0, 500, 1023)
# Seconds after the timeout within which even the slowest survivor knows who is missing.
MOST_LATE = 2.0


@pytest.fixture
def port(tcp_server: Child) -> int:
    """Where the store is."""
    found: int = tcp_server.next_report()["port"]
    return found


@pytest.fixture
def crowd(start_child: StartChild, port: int) -> list[Child]:
    """A thousand connections, in four processes."""
    missing = ",".join(map(str, MISSING))
    children = [
        start_child("crowd", port, WORLD, missing, PROCESSES, number)
        for number in range(PROCESSES)
    ]
    assert sum(child.next_report()["ready"] for child in children) == WORLD
    return children


def meet(
    crowd: list[Child], prefix: str, timeout: float
) -> tuple[dict[str, int], float]:
    """Let them meet; count what they met with, and how late the slowest was."""
    for child in crowd:
        child.write(f"{prefix} {timeout}\n")
    reports = [child.next_report() for child in crowd]
    outcomes: Counter[str] = Counter()
    for report in reports:
        outcomes.update(report["outcomes"])
    return dict(outcomes), max(report["late"] for report in reports)


class TestCrowd:
    """What holds for four ranks holds for a thousand."""

    def test_meets_and_misses(self, crowd: list[Child], port: int) -> None:
        """All come through; then three stay away, and every survivor names them soon.

        The store's server answers others all the while.
        """
        observer = dist.TCPStore("127.0.0.1", port, None, is_master=False)

        assert meet(crowd, "all", 60)[0] == {"completed": WORLD}
        missed = in_background(lambda: meet(crowd, "some", 5))
        slowest = 0.0
        while not missed.done():
            started = time.monotonic()
            observer.check(["nothing"])
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.01)  # not to be a storm of its own

        outcomes, late = missed.result()
        assert outcomes == {str(MISSING): WORLD - len(MISSING)}
        assert late < MOST_LATE
        # Not a measurement: a server that is stormed does not answer at all.
        assert slowest < 5
