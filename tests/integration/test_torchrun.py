"""torchrun with the traced backends: events and metrics of its agents."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import etcd
import pytest

from integration.harness import Child, wait_until
from support.etcd import EtcdServer, free_port
from support.events import check
from support.rendezvous import new_run_id
from support.torchrun import TRAIN, Agent

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.timeout(120)]

StartAgent = Callable[..., Agent]

# How often agents check their workers; torchrun's default is five seconds.
MONITOR = ("--monitor-interval", "0.1")


# By default torch 2.13 keeps the workers' store and its keys over all rounds. Workers
# of a second round then read the addresses of the first (gloo: "Connection refused"),
# and a node that joins later waits for a MASTER_ADDR that no node writes.
NEW_STORE_EVERY_ROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[StartAgent]:
    """Start torchrun; it is killed at the end of the test."""
    started: list[Agent] = []

    def start(
        backend: str, endpoint: str, run_id: str, *args: str, **env: str
    ) -> Agent:
        folder = tmp_path / f"agent-{len(started)}"
        rendezvous = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
        agent = Agent(
            folder, *rendezvous, "--rdzv-id", run_id, *MONITOR, *args, env=env
        )
        started.append(agent)
        return agent

    yield start
    for agent in started:
        agent.kill()


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
        workers = wait_until(lambda: training(agents, 4), 60)

        # One worker of each agent: an agent that restarts only because another one does
        # does not count that as a restart.
        for worker in (workers[0], workers[3]):
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: training(agents, 4, restart=1), 60)
        stop.touch()

        assert [agent.exit_status() for agent in agents] == [0, 0]
        text = "".join(agent.out() for agent in agents)
        assert len(re.findall(r"rank \d of 4: done after", text)) == 4
        writes = "tracedstore_rendezvous_state_writes_total"
        for agent in agents:
            rounds = "tracedstore_rendezvous_duration_seconds_count"
            assert agent.metric(rounds, backend="c10d", result="completed") == 2
            assert agent.metric(rounds, result="failed") == 0
            assert agent.metric("tracedstore_rendezvous_participants") == 2
            assert agent.metric("tracedstore_rendezvous_complete") == 1
            assert agent.metric("tracedstore_rendezvous_round") == 1
            assert agent.metric(writes, backend="c10d", result="accepted") >= 2
            assert agent.metric(writes, result="failed") == 0
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

    def test_etcd(self, start_agent: StartAgent, etcd_server: EtcdServer) -> None:
        """The rendezvous and the agents' store are in etcd."""
        endpoint, run_id = f"127.0.0.1:{etcd_server.port}", new_run_id()
        options = ["--nnodes", "2", "--nproc-per-node", "2", str(TRAIN)]
        agents = [
            start_agent("traced-etcd-v2", endpoint, run_id, *options) for _ in range(2)
        ]

        assert [agent.exit_status() for agent in agents] == [0, 0]
        text = "".join(agent.out() for agent in agents)
        assert len(re.findall(r"rank \d of 4: done after 10 steps", text)) == 4
        calls = "tracedstore_operation_duration_seconds_count"
        for agent in agents:
            assert agent.metric("tracedstore_rendezvous_participants") == 2
            assert agent.metric(calls, store="etcd_store", operation="get") > 0
            assert agent.metric(calls, store="rendezvous_etcd_v2") > 0
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
        wait_until(lambda: training([first], 1), 60)

        second = start_agent(
            "c10d", endpoint, run_id, *options, **NEW_STORE_EVERY_ROUND
        )
        wait_until(lambda: training([first, second], 2), 60)
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
        options += ["--rdzv-conf", "join_timeout=6,is_host=0,warn_after=2"]
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
            assert all(0 <= seconds < 30 for seconds in silent)
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
        wait_until(lambda: "started" in other.out(), 60)

        assert waiting.exit_status() == 0
        (event,) = waiting.events("barrier.timeout")
        check(event)
        assert (event["rank"], event["world_size"]) == (0, 2)
        assert event["missing_ranks"] == [1]
        assert event["missing_names"] == [f"127.0.0.2 (pid {other.pid})"]
        assert "Error waiting on exit barrier" in waiting.errors()


class TestReplacedNode:
    """The agent of rank 0 is killed, and the others go on without it."""

    def test_address_of_an_earlier_round(
        self, start_agent: StartAgent, tcp_server: Child, tmp_path: Path
    ) -> None:
        """An agent that keeps the MASTER_ADDR of the dead node reports both."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        script, end = tmp_path / "fail_once.py", tmp_path / "end"
        script.write_text(
            "import os, pathlib, sys, time\n"
            "names = 'TORCHELASTIC_RESTART_COUNT', 'MASTER_ADDR', 'MASTER_PORT'\n"
            "print('started', *map(os.environ.get, names), flush=True)\n"
            "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
            "sys.exit(os.environ[names[0]] == '0')\n"
        )
        options = ["--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "1"]
        # A node counts as dead after two seconds without a heartbeat.
        conf = "is_host=0,last_call_timeout=5,keep_alive_interval=1"
        options += ["--rdzv-conf", f"{conf},keep_alive_max_attempt=2"]
        run_id = new_run_id()
        agents = [
            start_agent(
                *("traced-c10d", endpoint, run_id, *options),
                *("--local-addr", addr, str(script), str(end)),
            )
            for addr in ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        ]
        wait_until(lambda: all("started 0" in agent.out() for agent in agents), 90)

        # Agents have ranks in the order of their addresses.
        agents[0].kill()
        end.touch()

        _, _, last = agents
        found = wait_until(lambda: last.events("store.stale_keys"), 60)
        check(found[0])
        (before,) = re.findall(r"started 0 (\S+ \d+)", last.out())
        (after,) = wait_until(
            lambda: re.findall(r"started 1 (\S+ \d+)", agents[1].out()), 60
        )
        assert before.startswith("127.0.0.1 ")
        assert after.startswith("127.0.0.2 ")
        assert (
            f"MASTER_ADDR of an earlier round: {before.replace(' ', ':')}; that of"
            f" round 1 is {after.replace(' ', ':')}" in found[0]["message"]
        )
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found[0]["remedy"]
        assert not agents[1].events("store.stale_keys")


class TestTwoJobs:
    """Two torchruns with one endpoint: the second one uses the server of the first."""

    def test_one_endpoint(self, start_agent: StartAgent, tmp_path: Path) -> None:
        """Another job is reported at once, and when the server ends with it."""
        endpoint, first_id, other_id = (
            f"127.0.0.1:{free_port()}",
            new_run_id(),
            new_run_id(),
        )
        script, end = tmp_path / "until_told.py", tmp_path / "end"
        script.write_text(
            "import pathlib, sys, time\n"
            "print('started', flush=True)\n"
            "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.05)\n"
        )
        options = ["--nnodes", "1", "--nproc-per-node", "1", str(script)]
        first = start_agent("traced-c10d", endpoint, first_id, *options, str(end))
        wait_until(lambda: "started" in first.out(), 60)
        other = start_agent("traced-c10d", endpoint, other_id, *options, "never")
        same = start_agent(
            *("traced-c10d", endpoint, first_id, "--rdzv-conf", "warn_after=1"),
            *(*options, "never"),
        )

        (shared,) = wait_until(lambda: other.events("store.stale_keys"), 60)
        waiting = wait_until(lambda: same.events("rendezvous.waiting"), 60)
        end.touch()

        check(shared)
        agent = f"(pid {first.pid})"
        assert shared["previous_run_id"] == first_id
        assert shared["previous_pid"] == first.pid
        assert (
            f"two jobs share the server {endpoint}: run '{first_id}' (agent"
            in (shared["message"])
        )
        check(waiting[0])
        assert "is complete without this node" in waiting[0]["message"]
        assert agent in waiting[0]["message"]
        assert "start that with another --rdzv-id" in waiting[0]["message"]
        assert first.exit_status() == 0
        assert not first.events("store.stale_keys")
        assert other.exit_status() == 1
        (failed,) = other.events("rendezvous.failed")
        assert f"run '{first_id}' (agent " in failed["message"]
        assert f"{agent}) used this server too" in failed["message"]


class TestKilledAgent:
    """An agent is killed while the workers run."""

    def test_silent(self, start_agent: StartAgent, tcp_server: Child) -> None:
        """The other agent names it, once; nothing fails."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        run_id = new_run_id()
        conf = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=12"
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-conf", conf]
        survivor, killed = (
            start_agent(
                *("traced-c10d", endpoint, run_id, *options, "--local-addr", addr),
                # torchrun replaces $$ by $.
                *("--no-python", "sh", "-c", "echo started $$$$; exec sleep 100"),
            )
            for addr in ("127.0.0.1", "127.0.0.2")
        )
        wait_until(lambda: "started" in survivor.out(), 60)
        started = wait_until(lambda: re.search(r"started (\d+)", killed.out()), 60)
        assert survivor.events("rendezvous.waiting") == []
        os.kill(killed.pid, signal.SIGKILL)  # and not its worker

        try:
            (event,) = wait_until(lambda: survivor.events("rendezvous.waiting"), 60)
        finally:
            os.kill(int(started[1]), signal.SIGKILL)

        check(event)
        assert (
            f"silent: 127.0.0.2 (pid {killed.pid}), last heartbeat"
            in (event["message"])
        )
        assert "their workers may still run" in event["message"]
        assert event["complete"] is True


class TestNoServer:
    """No agent serves the c10d store."""

    @pytest.mark.parametrize("conf", ["is_host=0,", ""])
    def test_waiting_and_failed(self, start_agent: StartAgent, conf: str) -> None:
        """Both events say why this agent does not serve it, and what to change."""
        # Of a network for documentation: no machine has this address.
        host = "127.0.0.1" if conf else "203.0.113.1"
        endpoint, run_id = f"{host}:{free_port()}", new_run_id()
        options = ["--nnodes", "2", "--nproc-per-node", "1"]
        options += ["--rdzv-conf", f"{conf}read_timeout=4"]

        agent = start_agent(
            *("traced-c10d", endpoint, run_id, *options), "--no-python", "true"
        )

        assert agent.exit_status() == 1
        (failed,) = agent.events("rendezvous.failed")
        waiting = agent.events("rendezvous.waiting")[0]
        reason = (
            "is_host is false" if conf else f"no name or address of it matches '{host}'"
        )
        for event in (waiting, failed):
            check(event)
            assert (
                f"this agent does not serve the endpoint, because {reason}"
                in (event["message"])
            )
            assert f"{socket.gethostname()}" in event["message"]
            assert "pass --rdzv-conf is_host=1" in event["message"]
        assert (
            f"'{run_id}' at {endpoint} through c10d is not connected after"
            in (waiting["message"])
        )
        assert failed["during"] == "create_backend"
        # What an address without a machine does depends on the network.
        lost = ("refused", "unreachable", "no_answer", "connection_lost")
        assert failed["cause"] in lost
        # The note of torch's exception.
        assert agent.errors().count(failed["message"]) == 2


class TestClockSkew:
    """The clock of one agent's machine is wrong."""

    @pytest.mark.parametrize("skew", [-60, 60, -2])
    def test_waiting(
        self, start_agent: StartAgent, tcp_server: Child, skew: int
    ) -> None:
        """The other agent reports it; two seconds are not reported."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        run_id = new_run_id()
        options = ["--nnodes", "3", "--nproc-per-node", "1", "--rdzv-conf"]
        options += ["is_host=0,keep_alive_interval=1,warn_after=2"]
        agents = [
            start_agent(
                *("traced-c10d", endpoint, run_id, *options),
                *("--local-addr", addr, "--no-python", "true"),
                **env,
            )
            for addr, env in (("right", {}), ("wrong", {"CLOCK_SKEW": str(skew)}))
        ]

        def warned() -> list[dict[str, Any]]:
            events = agents[0].events("rendezvous.waiting")
            both = [e for e in events if {*e["joined"], *e["left"]} >= {"wrong"}]
            # After the first one, several heartbeats have come.
            return both[1:] if abs(skew) < 5 else [e for e in both if e["skewed"]]

        event = wait_until(warned, 60)[0]
        check(event)
        if abs(skew) < 5:
            assert (event["skewed"], event["left_over"]) == ([], [])
            return
        assert event["skewed"] == ["wrong"]
        assert event["left_over"] == []
        (seconds,) = event["skewed_seconds"]
        assert (seconds > 0) == (skew > 0)
        assert 5 <= abs(seconds) <= 60
        assert f"the clock of wrong (pid {agents[1].pid}) is at" in event["message"]
        # The node with a wrong clock is removed by the others, and is not gone.
        assert "gone" not in event["missing_causes"]


class TestEarlierRun:
    """A run id was used before, and etcd still has the state of that run."""

    # Heartbeats of torch are five seconds apart by default.
    FAST = "warn_after=4,keep_alive_interval=1,keep_alive_max_attempt=60"

    def test_closed(self, start_agent: StartAgent, etcd_server: EtcdServer) -> None:
        """The second run fails, and reports when the first one ended."""
        endpoint, run_id = f"127.0.0.1:{etcd_server.port}", new_run_id()
        options = ("--nnodes", "1", "--nproc-per-node", "1", "--no-python", "true")
        first = start_agent("traced-etcd-v2", endpoint, run_id, *options)
        assert first.exit_status() == 0
        ended = time.time()

        second = start_agent("traced-etcd-v2", endpoint, run_id, *options)

        assert second.exit_status() == 1
        (event,) = second.events("rendezvous.failed")
        check(event)
        assert (event["cause"], event["closed"]) == ("closed", True)
        # etcd counts in whole seconds.
        assert 0 <= event["closed_seconds"] <= time.time() - ended + 10
        assert "closed before this node came" in event["message"]
        assert f"(pid {first.pid}), last heartbeat" in event["message"]
        assert f"RendezvousClosedError: {event['message']}" in second.errors()

    def test_left_over_agent(
        self, start_agent: StartAgent, etcd_server: EtcdServer
    ) -> None:
        """A round that is completed with an agent of a killed run names that agent."""
        endpoint, run_id = f"127.0.0.1:{etcd_server.port}", new_run_id()
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-conf", self.FAST]
        options += ["--no-python", "true"]
        killed = start_agent(
            "etcd-v2", endpoint, run_id, "--local-addr", "127.0.0.1", *options
        )
        key = f"/torch/elastic/rendezvous/{run_id}"
        wait_until(lambda: key in etcd_keys(etcd_server), 60)
        killed.kill()

        agent = start_agent(
            *("traced-etcd-v2", endpoint, run_id, "--local-addr", "127.0.0.2"),
            *options,
            TRACEDSTORE_STALL_AFTER="3",
        )

        def reported() -> list[dict[str, Any]]:
            events = agent.events("rendezvous.waiting")
            return [event for event in events if event["left_over"]]

        event = wait_until(reported, 60)[0]
        check(event)
        assert event["left_over"] == ["127.0.0.1"]
        left_over = f"127.0.0.1 (pid {killed.pid}) was there before this node and sent"
        assert left_over in event["message"]
        assert f"earlier run with run id '{run_id}'" in event["message"]
        assert (event["complete"], event["skewed"]) == (True, [])
        stalled = wait_until(lambda: agent.events("job.stalled"), 60)[0]
        assert stalled["awaited"].startswith(
            f"agent 0 on 127.0.0.1 (pid {killed.pid}): "
        )


def etcd_keys(server: EtcdServer) -> set[str]:
    """Return the keys of the rendezvous in etcd."""
    try:
        found = server.client().read("/torch/elastic/rendezvous")
    except etcd.EtcdKeyNotFound:
        return set()
    return {child.key for child in found.children}
