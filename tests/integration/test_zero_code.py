"""tracedstore-run with torchrun, and with jobs that start their ranks themselves."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.conftest import StartCommand
from integration.harness import wait_until
from support.etcd import free_port
from support.events import check
from support.metrics import exported_calls
from support.torchrun import one_node

pytestmark = pytest.mark.processes

JOBS = Path(__file__).parent / "jobs"
TORCH_ABORTS = "terminate called without an active exception"


def counted(folder: Path, rank: int) -> dict[str, float]:
    """Return the number of calls of each operation in a rank's metrics."""
    page = (folder / f"{rank}.prom").read_text()
    calls = exported_calls(text_string_to_metric_families(page))
    return {
        f"{store}.{operation}": number
        for (store, operation, _), number in calls.items()
    }


class TestTorchrun:
    """One agent, two workers, DistributedDataParallel."""

    @pytest.mark.exclusive
    def test_agent_and_workers(
        self, start_command: StartCommand, tmp_path: Path
    ) -> None:
        """Both are traced, and the result of the training is bit-identical."""
        folders = tmp_path / "bare", tmp_path / "traced"
        for folder in folders:
            folder.mkdir()
        torchrun = ("torchrun", "--nproc-per-node", 2, JOBS / "train.py")
        # One after the other: torch looks for a free port, and binds it later.
        for _ in range(3):
            bare = start_command(*torchrun, folders[0], **one_node())
            # torch alone aborts at the end of some processes.
            if bare.exit_status() == 0 or TORCH_ABORTS not in bare.errors():
                break
        assert bare.exit_status() == 0, bare.errors()
        traced = start_command("tracedstore-run", *torchrun, folders[1], **one_node())
        assert traced.exit_status() == 0, traced.errors()

        assert bare.events() == []
        events = traced.events()
        for event in events:
            check(event)
        assert {event["event"] for event in events} == {"store.operation.slow"}
        for rank in range(2):
            weights = [
                json.loads((folder / f"{rank}.json").read_text()) for folder in folders
            ]
            assert weights[0] == weights[1]
            assert counted(folders[0], rank) == {}
            calls = counted(folders[1], rank)
            # Its registry entry and address; the addresses of the others.
            assert calls["tcp_store.set"] >= 2
            assert calls["tcp_store.get"] >= 1
            own = [event for event in events if event.get("rank") == rank]
            assert "set" in {event["operation"] for event in own}
            assert len({event["run_id"] for event in own}) == 1
            for event in own:
                assert event["local_rank"] == rank
                assert event["world_size"] == 2
                assert event["host"] == socket.gethostname()
        agents = [event for event in events if "rank" not in event]
        assert len({event["pid"] for event in agents}) == 1
        keys = " ".join(event["key"] for event in agents)
        # The rendezvous, the worker ranks and the exit barrier.
        assert "compare_set" in {event["operation"] for event in agents}
        assert "torchelastic/role_info/0" in keys
        assert "torchelastic/agent/terminal_state/num_members" in keys

    def test_missing_node(self, start_command: StartCommand) -> None:
        """The rendezvous of torch's backend is traced, and names the joined nodes."""
        agent = start_command(
            *("tracedstore-run", "torchrun", "--nnodes", 2, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job-7"),
            *("--rdzv-conf", "join_timeout=1", JOBS / "train.py", "nowhere"),
        )

        assert agent.exit_status() == 1

        (event,) = agent.events("rendezvous.timeout")
        check(event)
        assert (event["run_id"], event["backend"]) == ("job-7", "c10d")
        assert (event["joined_count"], event["min_nodes"]) == (1, 2)
        assert "1 of 2 nodes joined" in agent.errors()


class TestWithoutTorchrun:
    """A job that starts its ranks itself."""

    @pytest.mark.exclusive
    @pytest.mark.parametrize("method", ["spawn", "fork"])
    def test_children(self, start_command: StartCommand, method: str) -> None:
        """The events of each child have its rank, which is not in its environment."""
        script = JOBS / "start_ranks.py"
        job = start_command(
            *("tracedstore-run", sys.executable, script, method, free_port())
        )

        status = job.exit_status()

        assert status == 0, job.errors()
        by_process: dict[int, set[tuple[int, int]]] = {}
        for event in job.events():
            identity = event["rank"], event["world_size"]
            by_process.setdefault(event["pid"], set()).add(identity)
        assert sorted(map(sorted, by_process.values())) == [[(0, 2)], [(1, 2)]]
        assert "Traceback" not in job.errors()


def test_checkpoint_helper(start_command: StartCommand, tmp_path: Path) -> None:
    """The helper processes of a checkpoint have a store of their own, traced too."""
    job = start_command(
        *("tracedstore-run", "torchrun", "--nproc-per-node", 2),
        *(JOBS / "async_checkpoint.py", tmp_path / "checkpoint"),
        TRACEDSTORE_STALL_AFTER="2",
        **one_node(),
    )

    def stalls() -> list[dict[str, Any]]:
        # On a busy machine a rank may be late for the training's own group.
        found = job.events("job.stalled")
        return [one for one in found if one["phase"] == "connecting to the store"]

    (stall, *_) = wait_until(stalls)

    assert stall["awaited_ranks"] == [1]
    # Its process may have been started by now.
    assert stall["cause"] in ("late", "not_started")
    assert "1 of 2 clients joined" in stall["evidence"][0]
