"""Hangs of torchrun's agents: what a traced rendezvous reports, with real agents."""

import base64
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import etcd
import pytest
from torch.distributed import TCPStore

from integration.conftest import StartAgent
from integration.harness import Child, wait_until
from support.etcd import EtcdServer, free_port
from support.events import check
from support.processes import descendants
from support.rendezvous import new_run_id
from support.torchrun import Agent
from support.versions import SERVES_LATER_ROUNDS, TORCH
from tracedstore.rendezvous.state import parse_state

pytestmark = [pytest.mark.processes, pytest.mark.etcd]


class TestReplacedNode:
    """The agent of rank 0 is killed, and the others begin a round without it."""

    @pytest.fixture
    def agents(
        self, start_agent: StartAgent, tcp_server: Child, tmp_path: Path
    ) -> Iterator[list[Agent]]:
        """Start three agents and kill that of rank 0.

        The workers of the first round fail then. Those of the second one run until the
        end of the test, because an agent that ends does not report any more.
        """
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        script, end = tmp_path / "fail_once.py", tmp_path / "end"
        script.write_text(
            "import os, pathlib, sys, time\n"
            "names = 'TORCHELASTIC_RESTART_COUNT', 'MASTER_ADDR', 'MASTER_PORT'\n"
            "print('started', *map(os.environ.get, names), flush=True)\n"
            "end = pathlib.Path(sys.argv[1] + os.environ[names[0]])\n"
            "while not end.exists(): time.sleep(0.05)\n"
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
        wait_until(lambda: all("started 0" in agent.out() for agent in agents))

        # Agents have ranks in the order of their addresses.
        agents[0].kill()
        end.with_name("end0").touch()
        yield agents
        end.with_name("end1").touch()

    @pytest.mark.skipif(
        TORCH < SERVES_LATER_ROUNDS,
        reason="an agent that becomes rank 0 goes on from torch 2.13 on",
    )
    def test_address_of_an_earlier_round(self, agents: list[Agent]) -> None:
        """An agent that keeps the MASTER_ADDR of the dead node reports both."""
        last = agents[2]
        found = wait_until(lambda: last.events("store.stale_keys"))
        check(found[0])
        (before,) = re.findall(r"started 0 (\S+ \d+)", last.out())
        (after,) = wait_until(
            lambda: re.findall(r"started 1 (\S+ \d+)", agents[1].out())
        )
        assert before.startswith("127.0.0.1 ")
        assert after.startswith("127.0.0.2 ")
        assert (
            f"MASTER_ADDR of an earlier round: {before.replace(' ', ':')}; that of"
            f" round 1 is {after.replace(' ', ':')}" in found[0]["message"]
        )
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found[0]["remedy"]
        assert not agents[1].events("store.stale_keys")

    @pytest.mark.skipif(
        TORCH >= SERVES_LATER_ROUNDS,
        reason="an agent that becomes rank 0 fails before torch 2.13",
    )
    def test_no_server(self, agents: list[Agent]) -> None:
        """The agent that becomes rank 0 fails, and reports why and what helps."""
        (failed,) = wait_until(lambda: agents[1].events("rendezvous.failed"))

        check(failed)
        assert failed["cause"] == "rank_0_replaced"
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in failed["message"]
        assert agents[1].exit_status() == 1


# Nodes of one machine: another host name, and processes that /proc of the machine's
# other processes identifies, but not as theirs.
_NODE = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "sh", "-c")


def has_namespaces() -> bool:
    """Return whether this user may have namespaces of its own."""
    return subprocess.run([*_NODE, "exit 0"], check=False).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="namespaces need root")
class TestSilentHost:
    """A host on which nothing runs any more, as after a crash or a broken link."""

    def test_frozen_host(
        self, start_agent: StartAgent, tcp_server: Child, tmp_path: Path
    ) -> None:
        """Its ranks are named with one sentence on the host, and no other cause."""
        script = tmp_path / "wait.py"
        script.write_text(
            "import os, time\n"
            "from datetime import timedelta\n"
            "import tracedstore\n"
            "tracedstore.instrument()\n"
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "print('started', flush=True)\n"
            "store = dist.distributed_c10d._get_default_store()\n"
            "if os.environ['RANK'] == '0': store.wait(['go'], timedelta(hours=1))\n"
            "time.sleep(3600)\n"
        )
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        run_id = new_run_id()
        # A node counts as silent after four seconds without a heartbeat.
        conf = "is_host=0,keep_alive_interval=2,keep_alive_max_attempt=3"
        first, second = (
            start_agent(
                *("traced-c10d", endpoint, run_id, "--nnodes", "2"),
                *("--nproc-per-node", str(size), "--rdzv-conf", conf),
                *("--local-addr", address, str(script)),
                command=(*_NODE, f'hostname {host}; exec "$@"', "sh"),
                GLOO_SOCKET_IFNAME="lo",
                TRACEDSTORE_STALL_AFTER="2",
            )
            for host, address, size in (
                ("nodea", "127.0.0.1", 1),
                ("nodeb", "127.0.0.2", 2),
            )
        )
        wait_until(lambda: (first.out() + second.out()).count("started") == len("abb"))
        for pid in descendants(second.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

        def silent() -> list[dict[str, Any]]:
            stalls = first.events("job.stalled")
            return [one for one in stalls if one["cause"] == "host_silent"]

        (stall, *_) = wait_until(silent)

        check(stall)
        assert stall["awaited_ranks"] == [1, 2]
        assert stall["awaited_causes"] == ["host_silent"] * 2
        assert re.fullmatch(
            r"ranks 1-2 on nodeb: no process of nodeb answers, its agent has been"
            r" silent for \d+ s: the host is down, frozen or cut off",
            stall["awaited"],
        )
        assert "check the host of each awaited rank" in stall["remedy"]


class TestNodesThatEndAtDifferentTimes:
    """The agent of a node that has finished waits for the others: all are healthy."""

    def test_nobody_is_accused(
        self, start_agent: StartAgent, tcp_server: Child, tmp_path: Path
    ) -> None:
        """Neither the node that runs on, nor the one that sends no heartbeats."""
        script, end = tmp_path / "until_told.py", tmp_path / "end"
        script.write_text(
            "import os, pathlib, sys, time\n"
            "print('started', flush=True)\n"
            "end = pathlib.Path(sys.argv[1])\n"
            "while os.environ['RANK'] == '0' and not end.exists(): time.sleep(0.05)\n"
        )
        port, run_id = tcp_server.next_report()["port"], new_run_id()
        endpoint = f"127.0.0.1:{port}"
        # A node counts as silent after four seconds without a heartbeat.
        conf = "is_host=0,keep_alive_interval=1,keep_alive_max_attempt=5"
        running, finished = (
            start_agent(
                *("traced-c10d", endpoint, run_id, "--nnodes", "2"),
                *("--nproc-per-node", "1", "--rdzv-conf", conf),
                *("--local-addr", address, str(script), str(end)),
                TRACEDSTORE_STALL_AFTER="2",
            )
            for address in ("127.0.0.1", "127.0.0.2")
        )
        wait_until(
            lambda: (running.out() + finished.out()).count("started") == len("ab")
        )
        store = TCPStore("127.0.0.1", port, wait_for_workers=False)

        def removed() -> bool:
            value = store.get(f"torch.rendezvous.{run_id}")
            state = parse_state(base64.b64decode(value))
            return state is not None and len(state.participants) == 1

        # torch removes it from the round, a second after it counts as silent.
        wait_until(removed)
        end.touch()

        for agent in (running, finished):
            assert agent.exit_status() == 0
            names = ("job.stalled", "rendezvous.waiting", "store.operation.stalled")
            assert [event for name in names for event in agent.events(name)] == []


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
        wait_until(lambda: "started" in first.out())
        other = start_agent("traced-c10d", endpoint, other_id, *options, "never")
        same = start_agent(
            *("traced-c10d", endpoint, first_id, "--rdzv-conf", "warn_after=1"),
            *(*options, "never"),
        )

        (shared,) = wait_until(lambda: other.events("store.stale_keys"))
        waiting = wait_until(lambda: same.events("rendezvous.waiting"))
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
        wait_until(lambda: "started" in survivor.out())
        started = wait_until(lambda: re.search(r"started (\d+)", killed.out()))
        assert survivor.events("rendezvous.waiting") == []
        os.kill(killed.pid, signal.SIGKILL)  # and not its worker

        try:
            (event,) = wait_until(lambda: survivor.events("rendezvous.waiting"))
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

    def test_stall_after(self, start_agent: StartAgent, tcp_server: Child) -> None:
        """It is the time after which an agent reports that it waits for others."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        agent = start_agent(
            *("traced-c10d", endpoint, new_run_id(), "--nnodes", "2"),
            *("--nproc-per-node", "1", "--rdzv-conf", "is_host=0"),
            *("--no-python", "true"),
            TRACEDSTORE_STALL_AFTER="1",
        )

        (first, *_) = wait_until(lambda: agent.events("rendezvous.waiting"))

        # The default of both is 30 s.
        assert 1 <= first["waited_seconds"] < 25

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
        waiting = agent.events("rendezvous.waiting")
        assert waiting
        reason = (
            "is_host is false"
            if conf
            else f"torch compares '{host}' with the name {socket.gethostname()} and"
        )
        for event in (*waiting, failed):
            check(event)
            assert (
                f"this agent does not serve the endpoint, because {reason}"
                in (event["message"])
            )
            assert f"{socket.gethostname()}" in event["message"]
            assert "pass --rdzv-conf is_host=1" in event["message"]
            connecting = f"'{run_id}' at {endpoint} through c10d"
            connecting += " failed after" if event is failed else " is not connected"
            assert connecting in event["message"]
        assert failed["during"] == "create_backend"
        lost = ("refused", "unreachable", "no_answer", "connection_lost", "foreign")
        assert failed["cause"] in lost
        # The note of torch's exception.
        assert agent.errors().count(failed["message"]) == 2


class TestClockSkew:
    """The clock of one agent's machine is wrong."""

    @pytest.mark.parametrize(("skew", "nodes"), [(-60, 2), (60, 3), (-2, 3)])
    def test_waiting(
        self, start_agent: StartAgent, tcp_server: Child, skew: int, nodes: int
    ) -> None:
        """The other agent reports it; two seconds are not reported.

        A round of two nodes completes, and each of them waits for the other one.
        """
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        run_id = new_run_id()
        options = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-conf"]
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

        event = wait_until(warned)[0]
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
        wait_until(lambda: key in etcd_keys(etcd_server))
        killed.kill()

        agent = start_agent(
            *("traced-etcd-v2", endpoint, run_id, "--local-addr", "127.0.0.2"),
            *options,
            TRACEDSTORE_STALL_AFTER="3",
        )

        def reported() -> list[dict[str, Any]]:
            events = agent.events("rendezvous.waiting")
            return [event for event in events if event["left_over"]]

        event = wait_until(reported)[0]
        check(event)
        assert event["left_over"] == ["127.0.0.1"]
        left_over = f"127.0.0.1 (pid {killed.pid}) was there before this node and sent"
        assert left_over in event["message"]
        assert f"earlier run with run id '{run_id}'" in event["message"]
        assert (event["complete"], event["skewed"]) == (True, [])
        stalled = wait_until(lambda: agent.events("job.stalled"))[0]
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
