"""Rendezvous that fail, on real servers: what is told, and what is raised."""

import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as torchs_store

import tracedstore
from integration.harness import (
    Child,
    in_background,
    in_threads,
    results,
    wait_until,
)
from support.certificates import Authority, Pair
from support.etcd import EtcdServer, free_port
from support.events import Events, check
from support.rendezvous import handler, new_run_id
from tracedstore import TracedStore, names
from tracedstore.core.recorder import RECORDER

pytestmark = [pytest.mark.processes, pytest.mark.etcd]


@pytest.fixture(autouse=True)
def telemetry(registry: CollectorRegistry) -> None:
    """Count into the test's own registry."""
    tracedstore.configure(registry=registry, slow_after=5)


@pytest.fixture
def endpoints(etcd_server: EtcdServer) -> dict[str, str]:
    """Where the nodes meet, by backend."""
    return {
        "c10d": f"127.0.0.1:{free_port()}",
        "etcd-v2": f"127.0.0.1:{etcd_server.port}",
    }


# Rank 0 opens a server at its address, so it has to be one; in the order of ranks.
AGENTS = ("127.0.0.1", "127.0.0.2")
BOTH = pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])


def meet(handlers: list[RendezvousHandler]) -> list[Any]:
    """Let all of them join, each in a thread of its own, as they are processes."""
    return results(
        in_threads(len(handlers), lambda number: handlers[number].next_rendezvous())
    )


def only(events: Events, *wanted: str) -> dict[str, Any]:
    """The one event of these, which is as the schema says."""
    (event,) = [event for event in events() if event["event"] in wanted]
    check(event)
    return event


class TestTogether:
    """Traced and plain nodes in one rendezvous."""

    @BOTH
    def test_settings_that_are_wrong(
        self, backend: str, endpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are told of, and the rendezvous is torch's own."""
        tracedstore.shutdown(timeout=1)
        monkeypatch.setenv("TRACEDSTORE_SLOW_AFTER", "10ms")
        node = handler(
            f"traced-{backend}", endpoints[backend], new_run_id(), nodes=(1, 1)
        )

        info = node.next_rendezvous()

        assert (info.rank, info.world_size) == (0, 1)
        assert type(info.store) is not TracedStore
        assert node.shutdown()
        assert RECORDER.failures.counts()[names.RENDEZVOUS] == 1

    @pytest.mark.parametrize("kind", ["c10d", "c10d-file", "etcd-v2"])
    def test_meet(self, kind: str, endpoints: dict[str, str], tmp_path: Path) -> None:
        """They get different ranks in one world, and one store."""
        run_id, backend = new_run_id(), kind.removesuffix("-file")
        endpoints["c10d-file"] = str(tmp_path / "rendezvous")
        config = {"store_type": "file"} if kind == "c10d-file" else {}
        names_ = [backend, f"traced-{backend}", f"traced-{backend}"]
        nodes = [
            handler(name, endpoints[kind], run_id, nodes=(3, 3), **config)
            for name in names_
        ]

        infos = meet(nodes)

        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}
        masters = {vars(info.bootstrap_store_info)["master_port"] for info in infos}
        assert len(masters) == 1
        assert [type(info.store) is TracedStore for info in infos] == [
            False,
            True,
            True,
        ]
        infos[0].store.set("word", "plain")
        assert infos[1].store.get("word") == b"plain"
        for node in nodes:
            assert node.num_nodes_waiting() == 0
            assert node.is_closed() is False
        assert all(node.shutdown() for node in nodes)
        assert all(node.is_closed() for node in nodes)

    def test_queues(self, endpoints: dict[str, str]) -> None:
        """The store has all that torch's has: it is traced around its prefix."""
        node = handler("traced-c10d", endpoints["c10d"], new_run_id(), nodes=(1, 1))
        store: Any = node.next_rendezvous().store
        store.queue_push("queue", "item")

        assert store.queue_pop("queue") == b"item"
        assert "MASTER_ADDR" in "".join(store.list_keys())
        node.shutdown()

    def test_rounds_leave_nothing(self, endpoints: dict[str, str]) -> None:
        """The store of the last round is let go of."""
        from tracedstore import store as store_module

        node = handler("traced-c10d", endpoints["c10d"], new_run_id(), nodes=(1, 1))
        for _ in range(3):
            node.next_rendezvous()

        assert len(store_module._kept_alive) == 1
        node.shutdown()


class TestDisabled:
    """Where nothing is to be recorded, everything is torch's own."""

    def test_exception_and_barrier(
        self, registry: CollectorRegistry, endpoints: dict[str, str], events: Events
    ) -> None:
        """The exception is as empty as ever, and the barrier is torch's."""
        tracedstore.configure(registry=registry, disabled=True)
        before = torchs_store.barrier
        node = handler("traced-c10d", endpoints["c10d"], "run", join_timeout="1")

        with pytest.raises(RendezvousTimeoutError) as raised:
            node.next_rendezvous()

        assert str(raised.value) == ""
        assert torchs_store.barrier is before
        assert events() == []


class TestTimeout:
    """Too few come."""

    @BOTH
    def test_who_came(
        self, backend: str, endpoints: dict[str, str], events: Events
    ) -> None:
        """The exception says it, and one event, with the one that left before."""
        run_id, endpoint = new_run_id(), endpoints[backend]
        plain = handler(
            backend, endpoint, run_id, nodes=(3, 4), addr="early", join_timeout="2"
        )
        traced: Any = handler(
            f"traced-{backend}",
            endpoint,
            run_id,
            nodes=(3, 4),
            addr="late",
            join_timeout="4",
        )
        left = in_background(plain.next_rendezvous)
        # A node looks once a second, and has to look while the other one is there.
        wait_until(lambda: b"early" in (traced._traced_backend.get_state() or [b""])[0])

        with pytest.raises(RendezvousTimeoutError) as raised:
            traced.next_rendezvous()

        assert isinstance(left.exception(15), RendezvousTimeoutError)
        assert str(left.exception()) == ""
        event = only(events, names.RENDEZVOUS_TIMEOUT, names.RENDEZVOUS_FAILED)
        assert event["event"] == names.RENDEZVOUS_TIMEOUT
        assert (event["joined"], event["left"]) == (["late"], ["early"])
        assert (event["joined_count"], event["waiting"]) == (1, [])
        assert event["left_silent_seconds"][0] > 1
        assert (event["backend"], event["endpoint"]) == (backend, endpoint)
        assert (event["run_id"], event["during"]) == (run_id, "next_rendezvous")
        assert (event["min_nodes"], event["max_nodes"]) == (3, 4)
        assert (event["round"], event["complete"], event["closed"]) == (0, False, False)
        assert event["cause"] == "too_few_nodes"
        assert str(raised.value) == event["message"]
        assert "1 of 3 to 4 nodes joined: late (pid" in event["message"]
        assert "were there and left: early (pid" in event["message"]

    def test_no_room(self, endpoints: dict[str, str], events: Events) -> None:
        """One that comes when the job runs waits, and is told for what."""
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        config = {"nodes": (1, 2), "last_call_timeout": "1"}
        running = handler("c10d", endpoint, run_id, addr="127.0.0.1", **config)
        running.next_rendezvous()
        late = handler(
            "traced-c10d", endpoint, run_id, addr="late", join_timeout="1", **config
        )

        with pytest.raises(RendezvousTimeoutError, match="on the wait list: late"):
            late.next_rendezvous()

        event = only(events, names.RENDEZVOUS_TIMEOUT)
        assert (event["joined"], event["waiting"]) == (["127.0.0.1"], ["late"])
        assert (event["complete"], event["cause"]) == (True, "no_room")
        running.shutdown()

    def test_closed(self, endpoints: dict[str, str], events: Events) -> None:
        """One that comes when it is over."""
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        first = handler("c10d", endpoint, run_id, nodes=(1, 1))
        first.next_rendezvous()
        first.shutdown()

        with pytest.raises(RendezvousClosedError, match="its run id is used up"):
            handler("traced-c10d", endpoint, run_id, nodes=(1, 1)).next_rendezvous()

        event = only(events, names.RENDEZVOUS_FAILED)
        assert (event["cause"], event["closed"]) == ("closed", True)

    def test_corrupt(self, endpoints: dict[str, str], events: Events) -> None:
        """Somebody else has written there."""
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        node: Any = handler("traced-c10d", endpoint, run_id, nodes=(1, 1))
        node._traced_backend._store.set(f"torch.rendezvous.{run_id}", "x")

        with pytest.raises(RendezvousStateError):
            node.next_rendezvous()

        assert only(events, names.RENDEZVOUS_FAILED)["cause"] == "corrupt_state"


class TestUnreachable:
    """There is no backend to be had."""

    @pytest.mark.parametrize(
        ("backend", "where", "cause"),
        [
            ("c10d", "no.such.host.invalid:4711", "name_resolution"),
            ("c10d", "refused", "refused"),
            # A TCPStore never gives up on one that listens and says nothing.
            ("etcd-v2", "no.such.host.invalid:4711", "name_resolution"),
            ("etcd-v2", "refused", "refused"),
            ("etcd-v2", "silent", "no_answer"),
        ],
    )
    def test_causes(self, backend: str, where: str, cause: str, events: Events) -> None:
        """One event with the cause; the exception is torch's, with a note."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ports = {"refused": free_port(), "silent": silent.getsockname()[1]}
            endpoint = f"127.0.0.1:{ports[where]}" if where in ports else where
            config = {"is_host": "0"} if backend == "c10d" else {}

            def fail(number: int) -> RendezvousConnectionError:
                name = [backend, f"traced-{backend}"][number]
                with pytest.raises(RendezvousConnectionError) as error:
                    handler(name, endpoint, "run", read_timeout="1", **config)
                return error.value

            raised = results(in_threads(2, fail))

        assert str(raised[0]) == str(raised[1])
        assert type(raised[0].__cause__) is type(raised[1].__cause__)
        event = only(events, names.RENDEZVOUS_FAILED)
        assert event["cause"] == cause
        assert event["during"] == "create_backend"
        assert (event["endpoint"], event["backend"]) == (endpoint, backend)
        assert event["causes"][0] == f"RendezvousConnectionError: {raised[0]}"
        assert len(event["causes"]) >= 2
        assert raised[1].__notes__ == [event["message"]]

    def test_port_taken(self, events: Events) -> None:
        """The host of a c10d store finds its port taken."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(RendezvousConnectionError):
                handler("traced-c10d", endpoint, "run", is_host="1")

        assert only(events, names.RENDEZVOUS_FAILED)["cause"] == "address_in_use"

    def test_etcd_without_v2(self, tmp_path: Path, events: Events) -> None:
        """It says how to start etcd."""
        server = EtcdServer(tmp_path, "--enable-v2=false")
        server.start()
        try:
            with pytest.raises(RendezvousConnectionError) as raised:
                handler("traced-etcd-v2", f"127.0.0.1:{server.port}", "run")
        finally:
            server.stop()

        event = only(events, names.RENDEZVOUS_FAILED)
        assert event["cause"] == "v2_api_off"
        assert "--enable-v2" in event["message"]
        assert "--enable-v2" in "".join(raised.value.__notes__)


class TestLost:
    """The server goes while it is needed."""

    def test_tcp_server_dies(self, tcp_server: Child, events: Events) -> None:
        """The one call that meets it says so, those after it do not again."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        node = handler("traced-c10d", endpoint, "run", nodes=(1, 1), is_host="0")
        node.next_rendezvous()
        tcp_server.kill()

        # The state is remembered for a second.
        def fails() -> bool:
            try:
                node.num_nodes_waiting()
            except RendezvousConnectionError:
                return True
            return False

        wait_until(fails)
        with pytest.raises(RendezvousConnectionError):
            node.is_closed()
        assert node.shutdown() is False

        event = only(events, names.RENDEZVOUS_FAILED)
        assert event["during"] == "num_nodes_waiting"
        assert event["cause"] == "refused"
        assert event["joined_count"] == 1

    def test_etcd_restarts(
        self, tmp_path: Path, registry: CollectorRegistry, events: Events
    ) -> None:
        """Killed and restarted in the middle: those who kept on trying meet."""
        server = EtcdServer(tmp_path)
        server.start()
        endpoint, run_id = f"127.0.0.1:{server.port}", new_run_id()
        try:
            waits = handler("traced-etcd-v2", endpoint, run_id, addr="127.0.0.1")
            joining = in_background(waits.next_rendezvous)
            book = names.RENDEZVOUS_PARTICIPANTS.name

            def joined() -> bool:
                labels = {"backend": "etcd-v2"}
                return registry.get_sample_value(book, labels) == 1

            def accepted() -> float:
                name = names.RENDEZVOUS_WRITES.name
                labels = {"backend": "etcd-v2", "result": "accepted"}
                return registry.get_sample_value(name, labels) or 0

            wait_until(joined)
            server.kill()
            error = joining.exception(15)
            server.restart()

            assert isinstance(error, RendezvousConnectionError)
            event = only(events, names.RENDEZVOUS_FAILED)
            assert (event["cause"], event["joined"]) == ("refused", ["127.0.0.1"])
            assert any("EtcdConnectionFailed" in cause for cause in event["causes"])
            # The node stands in the state that etcd has kept: it takes itself off
            # that, and joins once more.
            before = accepted()
            rejoining = in_background(waits.next_rendezvous)
            wait_until(lambda: accepted() >= before + 2 and joined())
            other = handler("traced-etcd-v2", endpoint, run_id, addr="127.0.0.2")
            assert other.next_rendezvous().world_size == 2
            assert rejoining.result(15).world_size == 2
            assert len([e for e in events() if e["event"] == event["event"]]) == 1
            for node in (waits, other):
                node.shutdown()
        finally:
            server.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom both sides trust."""
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="module")
def tls_server(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """An etcd that wants a certificate."""
    own = authority.sign("server")
    server = EtcdServer(
        tmp_path_factory.mktemp("etcd-tls"),
        "--enable-v2",
        "--client-cert-auth",
        f"--trusted-ca-file={authority.certificate}",
        f"--cert-file={own.certificate}",
        f"--key-file={own.key}",
        scheme="https",
    )
    server.start()
    yield server
    server.stop()


class TestTLS:
    """etcd over TLS, with certificates of clients."""

    @staticmethod
    def config(authority: Authority, pair: Pair | None = None) -> dict[str, str]:
        """What --rdzv-conf would say."""
        config = {"protocol": "https", "ca_cert": str(authority.certificate)}
        if pair is not None:
            config |= {"ssl_cert": str(pair.certificate), "ssl_cert_key": str(pair.key)}
        return config | {"read_timeout": "5"}

    def test_right(
        self, authority: Authority, tls_server: EtcdServer, events: Events
    ) -> None:
        """They meet, traced and plain."""
        config = self.config(authority, authority.sign("client"))
        run_id, endpoint = new_run_id(), f"127.0.0.1:{tls_server.port}"
        nodes = [
            handler(name, endpoint, run_id, **config)
            for name in ("etcd-v2", "traced-etcd-v2")
        ]

        assert sorted(info.rank for info in meet(nodes)) == [0, 1]
        for node in nodes:
            node.shutdown()
        assert [e for e in events() if e["event"] == names.RENDEZVOUS_FAILED] == []

    @pytest.mark.parametrize(
        ("which", "cause"),
        [
            ("expired", "tls"),
            ("stranger", "tls"),
            ("none", "tls"),
            ("wrong authority", "tls"),
            # To one that speaks no TLS, etcd says nothing at all.
            ("no TLS", "connection_lost"),
        ],
    )
    def test_wrong(
        self,
        which: str,
        cause: str,
        authority: Authority,
        tls_server: EtcdServer,
        events: Events,
        tmp_path: Path,
    ) -> None:
        """As with torch's own, and told as what it is."""
        strangers = Authority(tmp_path, "strangers")
        configs = {
            "expired": self.config(authority, authority.sign("old", expired=True)),
            "stranger": self.config(authority, strangers.sign("stranger")),
            "none": self.config(authority),
            "wrong authority": self.config(strangers, authority.sign("client-2")),
            "no TLS": {"protocol": "http"},
        }
        raised = []
        for name in ("etcd-v2", "traced-etcd-v2"):
            with pytest.raises(RendezvousConnectionError) as error:
                handler(name, f"127.0.0.1:{tls_server.port}", "run", **configs[which])
            raised.append(error.value)

        assert str(raised[0]) == str(raised[1])
        event = only(events, names.RENDEZVOUS_FAILED)
        assert event["cause"] == cause, event["causes"]
        assert ("ca_cert" if cause == "tls" else "protocol=https") in event["message"]


class TestAgents:
    """What the agents wait for after they have met, and for whom."""

    @pytest.fixture(params=["c10d", "etcd-v2"])
    def pair(
        self, request: pytest.FixtureRequest, endpoints: dict[str, str]
    ) -> Iterator[list[Any]]:
        """The stores of two agents that have met, by rank."""
        run_id = new_run_id()
        nodes = [
            handler(f"traced-{request.param}", endpoints[request.param], run_id, addr=a)
            for a in AGENTS
        ]
        infos = sorted(meet(nodes), key=lambda info: info.rank)
        yield [info.store for info in infos]
        for node in nodes:
            node.shutdown()

    def test_role_that_is_missing(self, pair: list[Any], events: Events) -> None:
        """Rank 0 waits for the roles of all agents: who did not write its own?"""
        leader, _ = pair
        leader.set("torchelastic/role_info/0", "role")
        leader.set_timeout(timedelta(seconds=0.3))

        with pytest.raises((RuntimeError, LookupError)):
            leader.multi_get([f"torchelastic/role_info/{n}" for n in range(2)])

        event = only(events, names.OPERATION_FAILED)
        assert event["missing_keys"] == ["torchelastic/role_info/1"]
        assert event["missing_key_count"] == event["missing_agent_count"] == 1
        assert event["missing_agents"][0].startswith(f"{AGENTS[1]} (pid ")

    @pytest.mark.parametrize(("written", "culprit"), [([0, 1], 0), ([0], 1)])
    def test_ranks_that_are_missing(
        self, pair: list[Any], events: Events, written: list[int], culprit: int
    ) -> None:
        """The others wait for rank 0, or for whom rank 0 waits for."""
        for rank in written:
            pair[0].set(f"torchelastic/role_info/{rank}", "role")
        pair[1].set_timeout(timedelta(seconds=0.3))

        with pytest.raises((RuntimeError, LookupError)):
            pair[1].get("torchelastic/assigned_ranks/1")

        event = only(events, names.OPERATION_FAILED)
        assert event["missing_keys"] == ["torchelastic/assigned_ranks/1"]
        assert [name.split(" ")[0] for name in event["missing_agents"]] == [
            AGENTS[culprit]
        ]

    def test_while_it_stalls(
        self, endpoints: dict[str, str], registry: CollectorRegistry, events: Events
    ) -> None:
        """It is told while the agent still waits, and the wait goes on."""
        tracedstore.configure(registry=registry, stall_after=0.5)
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        nodes = [handler("traced-c10d", endpoint, run_id, addr=a) for a in AGENTS]
        first, second = sorted(meet(nodes), key=lambda info: info.rank)
        keys = [f"torchelastic/role_info/{n}" for n in range(2)]
        first.store.set(keys[0], "role")
        waiting = in_background(lambda: first.store.multi_get(keys))

        def told() -> list[dict[str, Any]]:
            return [
                event
                for event in events()
                if event["event"] == names.OPERATION_STALLED
                and event["operation"] == "multi_get"
            ]

        event = wait_until(told)[0]
        check(event)
        assert event["missing_keys"] == [keys[1]]
        assert event["missing_agents"][0].startswith(f"{AGENTS[1]} (pid ")
        second.store.set(keys[1], "role")
        assert waiting.result(15) == [b"role", b"role"]
        for node in nodes:
            node.shutdown()

    def test_exit_barrier(self, pair: list[Any], events: Events) -> None:
        """Torch's barrier is called without a rank, and names agents all the same."""
        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torchs_store.barrier(
                store=pair[0],
                world_size=2,
                key_prefix="torchelastic/agent/terminal_state",
                barrier_timeout=0.3,
            )

        (name,) = raised.value.missing_names
        assert name.startswith(f"{AGENTS[1]} (pid ")
        assert only(events, names.BARRIER_TIMEOUT)["missing_ranks"] == [1]
