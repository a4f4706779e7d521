"""Process groups of real processes on traced stores."""

from pathlib import Path
from typing import Any

import pytest

import tracedstore
from integration.conftest import StartChild
from integration.harness import Child, forked, wait_until
from support.native import on_both_bases
from support.versions import has_split_group
from tracedstore.recording.recorder import RECORDER

pytestmark = pytest.mark.processes


def start_ranks(
    start_child: StartChild, kind: str, file: Path, world_size: int
) -> list[Child]:
    """Start all ranks; rank 0 serves a TCPStore."""
    first = start_child("gloo_rank", kind, file if kind == "file" else 0, 0, world_size)
    address = file if kind == "file" else first.next_report()["port"]
    others = [
        start_child("gloo_rank", kind, address, rank, world_size)
        for rank in range(1, world_size)
    ]
    if kind == "tcp":
        for other in others:
            other.next_report()
    return [first, *others]


@on_both_bases
@pytest.mark.parametrize(("kind", "world_size"), [("tcp", 4), ("file", 2)])
class TestGloo:
    """The caller drops the store at once and never closes it."""

    def test_collectives(
        self,
        start_child: StartChild,
        tmp_path: Path,
        kind: str,
        world_size: int,
        core: str,
    ) -> None:
        """Later groups and split groups work and are counted; all ranks exit with 0."""
        ranks = start_ranks(start_child, kind, tmp_path / "store", world_size)

        reports: list[dict[str, Any]] = [rank.next_report() for rank in ranks]
        statuses = [rank.exit_status() for rank in ranks]

        splits = int(has_split_group())
        assert statuses == [0] * world_size
        total = world_size * (world_size + 1) / 2
        for number, report in enumerate(reports):
            at_an_end = number in (0, world_size - 1)
            assert report["everybody"] == report["again"] == total
            assert report["of_ends"] == (1 + world_size if at_an_end else None)
            calls = report["counted"]
            # Each rank writes its address once per group and reads the others'. This
            # includes the calls of the clone, which the split group uses.
            groups = (3 if at_an_end else 2) + splits
            assert calls[f"{kind}_store.set"] >= groups
            assert calls[f"{kind}_store.get"] >= (2 + splits) * (world_size - 1)
            clones = calls.get(f"{kind}_store.clone", 0)
            assert clones >= splits
            # A store keeps its clones. C++ keeps native ones by itself.
            assert report["kept_alive"] == (1 if core == "python" else 0)
            if splits:
                assert report["split"] == total
        for rank in ranks:
            assert "Traceback" not in rank.errors()
            assert not rank.events("telemetry.disabled")


LAZY = {"TORCH_GLOO_LAZY_INIT": "1"}


class TestNativeThreads:
    """Gloo's lazy connections call the store from native threads."""

    @on_both_bases
    def test_in_flight_and_counted(
        self, start_child: StartChild, tcp_server: Child, core: str
    ) -> None:
        """A native thread's call is in flight while it blocks, then counted."""
        port = tcp_server.next_report()["port"]
        first = start_child("lazy_rank", 0, port, env=LAZY)
        (blocked,) = first.next_report()["in_flight"]
        # The watcher's own report has level debug once there is a verdict.
        (stalled, *_) = wait_until(
            lambda: (
                first.events("store.operation.stalled") or first.events("job.stalled")
            )
        )
        second = start_child("lazy_rank", 1, port, env=LAZY)

        reports = [first.next_report(), second.next_report()]
        statuses = [first.exit_status(), second.exit_status()]

        assert blocked["thread"].startswith("native-")
        assert stalled["key"] == blocked["key"]
        if stalled["event"] == "store.operation.stalled":
            assert stalled["thread"] == blocked["thread"]
            assert stalled["operation"] == blocked["operation"]
        for report in reports:
            assert report["sum"] == 3
            if core == "python":
                assert report["native_threads"] >= 1
            assert report["counted"]["tcp_store.wait"] == 1
            assert report["counted"]["tcp_store.get"] == 1
            assert report["in_flight"] == 0
        assert statuses == [0, 0]

    @pytest.mark.parametrize("core", ["python"], indirect=True)
    @pytest.mark.parametrize("telemetry", ["on", "disabled", "shut-down"])
    def test_exit_during_a_call(
        self, start_child: StartChild, telemetry: str, core: str
    ) -> None:
        """A process exits as with a bare store while torch's thread is blocked."""
        bare, traced = (
            start_child("exit_while_blocked", mode, env=LAZY)
            for mode in ("bare", telemetry)
        )
        bare.next_report()
        traced.next_report()

        statuses = {"bare": bare.exit_status(), "traced": traced.exit_status()}

        assert statuses == {"bare": 0, "traced": 0}, traced.errors()[-500:]


@pytest.mark.parametrize("core", ["native"], indirect=True)
class TestNativeBase:
    """The native base, called by threads that Python does not know."""

    def test_calls_wait_in_the_ring(self, start_child: StartChild, core: str) -> None:
        """A failed call is counted and observed when the ring is read."""
        child = start_child("native_ring", "wait", env=LAZY)

        report = child.next_report()

        assert report.pop("thread").startswith("native-")
        assert report == {
            "caught": "DistStoreError",
            "counted": 1,
            "observed": [["wait", "timeout"]],
        }
        assert child.exit_status() == 0

    def test_exit_during_a_call(self, start_child: StartChild, core: str) -> None:
        """A process exits without waiting for Python, and without an abort."""
        child = start_child("native_ring", "exit", env=LAZY)

        assert child.next_report()["thread"].startswith("native-")
        assert child.exit_status() == 0, child.errors()[-500:]


def outside_a_group() -> dict[str, Any]:
    """Create a group without this process, which is instrumented."""
    # torch's backend without communication; the import registers it.
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from torch import distributed as dist

    tracedstore.instrument()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    group = dist.new_group([1])
    return {
        "outside": group is dist.GroupMember.NON_GROUP_MEMBER,
        "failures": RECORDER.failures.counts(),
    }


def test_process_outside_a_new_group() -> None:
    """new_group returns as without instrumentation."""
    assert forked(outside_a_group) == {"outside": True, "failures": {}}
