"""torchrun with the traced backends: events and metrics of its agents."""

import os
import re
import signal
from pathlib import Path

import pytest

from integration.conftest import StartAgent
from integration.harness import Child, wait_until
from support.etcd import EtcdServer, free_port
from support.events import check
from support.rendezvous import new_run_id
from support.torchrun import TRAIN, Agent

pytestmark = [pytest.mark.processes, pytest.mark.etcd]

# By default torch 2.13 keeps the workers' store and its keys over all rounds. Workers
# of a second round then read the addresses of the first (gloo: "Connection refused"),
# and a node that joins later waits for a MASTER_ADDR that no node writes.
NEW_STORE_EVERY_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def training(
    agents: list[Agent], world_size: int, restart: int = 0
) -> list[int] | None:
    """Return the process ids of all workers by rank; None until all train."""
    pattern = rf"rank (\d+) of {world_size}: training, pid (\d+), restart {restart}"
    text = "\n".join(agent.out() for agent in agents)
    pids = dict(re.findall(pattern, text))
    if len(pids) < world_size:
        return None
    return [int(pids[str(rank)]) for rank in range(world_size)]


class TestTwoAgents:
    """Two agents train together."""

    def test_c10d_with_killed_workers(
        self, start_agent: StartAgent, tmp_path: Path
    ) -> None:
        """All workers are restarted and join a second round."""
        endpoint, run_id = f"127.0.0.1:{free_port()}", new_run_id()
        stop = tmp_path / "stop"
        options = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1"]
        options += [str(TRAIN), "--steps", "100000", "--pause", "0.05"]
        options += ["--stop-file", str(stop)]
        agents = [
            start_agent(
                "traced-c10d",
                endpoint,
                run_id,
                *options,
                **NEW_STORE_EVERY_ROUND,
                TRACEDSTORE_TRACING="1",
                OTEL_TRACES_EXPORTER="console",
            )
            for _ in range(2)
        ]
        workers = wait_until(lambda: training(agents, 4))

        # One worker of each agent: an agent that restarts only because another one does
        # does not count that as a restart.
        for worker in (workers[0], workers[3]):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: training(agents, 4, restart=1))
        stop.touch()

        assert [agent.exit_status() for agent in agents] == [0, 0]
        text = "".join(agent.out() for agent in agents)
        assert len(re.findall(r"rank \d of 4: done after", text)) == 4
        writes = "tracedstore_rendezvous_state_writes_total"
        for agent in agents:
            rounds = "tracedstore_rendezvous_duration_seconds_count"
            assert agent.metric(rounds, backend="c10d", result="completed") == 2
            assert agent.metric(rounds) == 2, "no round failed or timed out"
            assert agent.metric("tracedstore_rendezvous_participants") == 2
            assert agent.metric("tracedstore_rendezvous_complete") == 1
            assert agent.metric("tracedstore_rendezvous_round") == 1
            assert agent.metric(writes, backend="c10d", result="accepted") >= 2
            # The last write closes the rendezvous. torch's agents do that after their
            # exit barrier, and the one that serves the store may have ended by then.
            assert agent.metric(writes, result="failed") <= 1
            assert (
                agent.metric(
                    "tracedstore_barrier_duration_seconds_count", result="completed"
                )
                == 1
            )
            for name in ("rendezvous.timeout", "rendezvous.failed"):
                assert agent.events(name) == []
            set_states = [
                span["attributes"]
                for span in agent.spans()
                if span["attributes"].get("db.operation.name") == "set_state"
            ]
            joined = "tracedstore.rendezvous.participants"
            assert {attributes.get(joined) for attributes in set_states} >= {2}

    @pytest.mark.parametrize(
        ("backend", "store", "rendezvous"),
        [
            ("traced-etcd-v2", "etcd_store", "rendezvous_etcd_v2"),
            ("traced-etcd", "etcd_v3_store", "rendezvous_etcd"),
        ],
    )
    def test_etcd(
        self,
        start_agent: StartAgent,
        etcd_server: EtcdServer,
        backend: str,
        store: str,
        rendezvous: str,
    ) -> None:
        """The rendezvous and the agents' store are in etcd."""
        endpoint, run_id = f"127.0.0.1:{etcd_server.port}", new_run_id()
        options = ["--nnodes", "2", "--nproc-per-node", "2", str(TRAIN)]
        agents = [start_agent(backend, endpoint, run_id, *options) for _ in range(2)]

        assert [agent.exit_status() for agent in agents] == [0, 0]
        text = "".join(agent.out() for agent in agents)
        assert len(re.findall(r"rank \d of 4: done after 10 steps", text)) == 4
        waits = "tracedstore_wait_duration_seconds_count"
        calls = "tracedstore_operation_duration_seconds_count"
        for agent in agents:
            assert agent.metric("tracedstore_rendezvous_participants") == 2
            assert agent.metric(waits, store=store, operation="get") > 0
            assert agent.metric(calls, store=rendezvous) > 0
            assert agent.events("rendezvous.failed") == []

    def test_scale_up(self, start_agent: StartAgent, tmp_path: Path) -> None:
        """A plain agent joins a traced one that runs already."""
        endpoint, run_id = f"127.0.0.1:{free_port()}", new_run_id()
        stop = tmp_path / "stop"
        options = ["--nnodes", "1:2", "--nproc-per-node", "1"]
        options += ["--rdzv-conf", "last_call_timeout=1"]
        options += [str(TRAIN), "--steps", "100000", "--pause", "0.05"]
        options += ["--stop-file", str(stop)]
        first = start_agent(
            "traced-c10d", endpoint, run_id, *options, **NEW_STORE_EVERY_ROUND
        )
        wait_until(lambda: training([first], 1))

        second = start_agent(
            "c10d", endpoint, run_id, *options, **NEW_STORE_EVERY_ROUND
        )
        wait_until(lambda: training([first, second], 2))
        stop.touch()

        assert [agent.exit_status() for agent in (first, second)] == [0, 0]
        assert first.metric("tracedstore_rendezvous_participants") == 2
        assert first.metric("tracedstore_rendezvous_round") == 1
        rounds = "tracedstore_rendezvous_duration_seconds_count"
        assert first.metric(rounds, result="completed") == 2


class TestMissingAgent:
    """Events of torchrun's agents when one is missing."""

    def test_too_few_agents(self, start_agent: StartAgent, tcp_server: Child) -> None:
        """The event and the exception name the agents that joined."""
        # A separate server: an agent's would end with the first agent to give up.
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        run_id = new_run_id()
        options = ["--nnodes", "3", "--nproc-per-node", "1"]
        options += ["--rdzv-conf", "join_timeout=20,is_host=0,warn_after=4"]
        agents = [
            start_agent(
                *("traced-c10d", endpoint, run_id, *options),
                *("--local-addr", addr, str(TRAIN)),
            )
            for addr in ("node-a", "node-b")
        ]

        emitted = []
        for agent in agents:
            assert agent.exit_status() == 1
            # The first to give up closes the rendezvous for the other one.
            (event,) = agent.events("rendezvous.timeout") or agent.events(
                "rendezvous.failed"
            )
            check(event)
            emitted.append(event["event"])
            assert {*event["joined"], *event["left"]} == {"node-a", "node-b"}
            assert (event["min_nodes"], event["max_nodes"]) == (3, 3)
            assert (event["run_id"], event["endpoint"]) == (run_id, endpoint)
            silent = event["joined_silent_seconds"] + event["left_silent_seconds"]
            assert len(silent) == 2
            assert all(seconds >= 0 for seconds in silent)
            if event["event"] == "rendezvous.timeout":
                assert event["cause"] == "too_few_nodes"
            else:
                assert (event["cause"], event["closed"]) == ("closed", True)
            # The exceptions of torch have no text.
            _, _, text = agent.errors().partition(f"Error: rendezvous '{run_id}' ")
            assert "node-a (pid" in text
            assert "node-b (pid" in text
            rounds = "tracedstore_rendezvous_duration_seconds_count"
            assert agent.metric(rounds, result=event["event"].split(".")[1]) == 1

        assert "rendezvous.timeout" in emitted
        # Before that, while the agents waited.
        warnings = [
            event for agent in agents for event in agent.events("rendezvous.waiting")
        ]
        for event in warnings:
            check(event)
            assert (event["min_nodes"], event["run_id"]) == (3, run_id)
            assert event["message"].startswith(f"rendezvous '{run_id}' at {endpoint} ")
            assert event["missing_causes"].count("not_started") >= 1
        assert ["node-a", "node-b"] in [sorted(event["joined"]) for event in warnings]

    def test_exit_barrier(self, start_agent: StartAgent, tmp_path: Path) -> None:
        """An agent that waits in the exit barrier names the missing one."""
        endpoint, run_id = f"127.0.0.1:{free_port()}", new_run_id()
        script = tmp_path / "one_continues.py"
        script.write_text(
            "import os, time\n"
            "print('started', flush=True)\n"
            "time.sleep(100 if os.environ['GROUP_RANK'] == '1' else 0)\n"
        )
        options = ["--nnodes", "2", "--nproc-per-node", "1"]
        agents = {
            addr: start_agent(
                *("traced-c10d", endpoint, run_id, *options),
                *("--local-addr", addr, str(script)),
                EXIT_BARRIER_TIMEOUT="3",
            )
            for addr in ("127.0.0.1", "127.0.0.2")
        }
        # Agents have ranks in the order of their addresses.
        waiting, other = agents["127.0.0.1"], agents["127.0.0.2"]
        wait_until(lambda: "started" in other.out())

        assert waiting.exit_status() == 0
        (event,) = waiting.events("barrier.timeout")
        check(event)
        assert (event["rank"], event["world_size"]) == (0, 2)
        assert event["missing_ranks"] == [1]
        assert event["missing_names"] == [f"127.0.0.2 (pid {other.pid})"]
        assert "Error waiting on exit barrier" in waiting.errors()
