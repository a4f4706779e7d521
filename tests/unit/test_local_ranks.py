"""What this host has about the ranks of a job that run on it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tracedstore.common import procfs
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.tools.attach.local_ranks import UsageMeter, ask_local

BUSY = "import sys, time\nprint('epoch 3, loss 0.2', flush=True)\nwhile True: pass"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file to which the busy process logs."""
    return tmp_path / "rank2.log"


@pytest.fixture
def busy(log: Path) -> Iterator[RankInfo]:
    """A process that uses a core, as rank 2 of 4."""
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=file)
    try:
        while not log.stat().st_size:
            time.sleep(0.01)
        yield info_of(process.pid)
    finally:
        process.kill()
        process.wait()


def info_of(pid: int, rank: int = 2) -> RankInfo:
    """Return what a process of this host has registered."""
    return RankInfo(
        rank=rank,
        host="node1",
        pid=pid,
        world_size=4,
        started=1.0,
        start_ticks=procfs.start_ticks(pid),
        namespace=procfs.own_namespace(),
    )


class TestUsage:
    """CPU time, memory, and the last line of the log."""

    def test_busy(self, busy: RankInfo, log: Path) -> None:
        """A process that computes uses CPU time, from the second reading on."""
        meter = UsageMeter()
        first = meter.read([busy])["node1", busy.pid]
        before = procfs.read_stat(busy.pid)
        assert before is not None
        while True:
            now = procfs.read_stat(busy.pid)
            assert now is not None
            if now.cpu_ticks > before.cpu_ticks:
                break
        log.write_text("epoch 3, loss 0.2\nepoch 4, \x1b[31mloss 0.1\n\n")
        second = meter.read([busy])["node1", busy.pid]

        assert first.cpu is None
        assert second.cpu is not None
        assert 0 < second.cpu < 1.5
        assert first.memory > 1_000_000
        assert first.log == "epoch 3, loss 0.2"
        assert second.log == "epoch 4, \N{REPLACEMENT CHARACTER}[31mloss 0.1"

    def test_shared_log(self, busy: RankInfo, log: Path) -> None:
        """The last line of a file that two ranks write is of neither."""
        with log.open("a") as file:
            other = subprocess.Popen(
                [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=file
            )
        try:
            used = UsageMeter().read([busy, info_of(other.pid, 3)])
        finally:
            other.kill()
            other.communicate()

        assert [one.log for one in used.values()] == ["", ""]

    def test_other_process(self, busy: RankInfo) -> None:
        """A process that has the pid since, or of another host, is not the rank."""
        others = [
            replace(busy, start_ticks=1),
            replace(busy, namespace="another host"),
            replace(busy, namespace=None),
        ]

        assert UsageMeter().read(others) == {}


class TestAsk:
    """What the ranks of this host do."""

    def test_gone_and_stopped(self, busy: RankInfo) -> None:
        """A process that has ended, or is stopped, cannot answer: /proc has that."""
        os.kill(busy.pid, 19)
        gone = replace(busy, rank=1, start_ticks=1)
        while (stat := procfs.read_stat(busy.pid)) and stat.letter != "T":
            time.sleep(0.01)

        found = ask_local({1: gone, 2: busy}, 4)

        assert {rank: facts.state for rank, facts in found.items()} == {
            1: "gone",
            2: "stopped",
        }

    def test_elsewhere(self, busy: RankInfo) -> None:
        """Nothing is known about ranks of other hosts, and nobody is asked."""
        assert ask_local({2: replace(busy, namespace="another host")}, 4) == {}
