"""Failing rendezvous on real servers: events and exceptions."""

import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils import store as torch_store

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
from support.native import on_both_bases
from support.rendezvous import handler, new_run_id
from tracedstore import TracedStore, names
from tracedstore.recording.recorder import RECORDER

pytestmark = [pytest.mark.processes, pytest.mark.etcd]


@pytest.fixture(autouse=True)
def telemetry(registry: CollectorRegistry) -> None:
    """Count into the test's registry."""
    tracedstore.configure(registry=registry, slow_after=5)


@pytest.fixture
def endpoints(etcd_server: EtcdServer) -> dict[str, str]:
    """The endpoint of each backend."""
    return {
        "c10d": f"127.0.0.1:{free_port()}",
        "etcd-v2": f"127.0.0.1:{etcd_server.port}",
        "etcd-v3": f"127.0.0.1:{etcd_server.port}",
    }


# In the order of ranks. Rank 0 opens a server at its address, so it must be valid.
AGENTS = ("127.0.0.1", "127.0.0.2")
BOTH = pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])


def join_all(handlers: list[RendezvousHandler]) -> list[Any]:
    """Let all handlers join, each in a thread."""
    return results(
        in_threads(len(handlers), lambda number: handlers[number].next_rendezvous())
    )


def only(events: Events, *wanted: str) -> dict[str, Any]:
    """Return the one event with one of these names, checked against the schema."""
    (event,) = [event for event in events() if event["event"] in wanted]
    check(event)
    return event


class TestMixedNodes:
    """Traced and plain nodes join one rendezvous."""

    @BOTH
    def test_invalid_settings(
        self, backend: str, endpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are reported, and the rendezvous is torch's."""
        tracedstore.shutdown(timeout=1)
        monkeypatch.setenv("TRACEDSTORE_SLOW_AFTER", "10ms")
        node = handler(
            f"traced-{backend}", endpoints[backend], new_run_id(), nodes=(1, 1)
        )

        info = node.next_rendezvous()

        assert (info.rank, info.world_size) == (0, 1)
        assert not isinstance(info.store, TracedStore)
        assert node.shutdown()
        assert RECORDER.failures.counts()[names.RENDEZVOUS] == 1

    @pytest.mark.parametrize("kind", ["c10d", "c10d-file", "etcd-v2"])
    def test_join(self, kind: str, endpoints: dict[str, str], tmp_path: Path) -> None:
        """The nodes get different ranks, one world size and one store."""
        run_id, backend = new_run_id(), kind.removesuffix("-file")
        endpoints["c10d-file"] = str(tmp_path / "rendezvous")
        config = {"store_type": "file"} if kind == "c10d-file" else {}
        names_ = [backend, f"traced-{backend}", f"traced-{backend}"]
        nodes = [
            handler(name, endpoints[kind], run_id, nodes=(3, 3), **config)
            for name in names_
        ]

        infos = join_all(nodes)

        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}
        masters = {vars(info.bootstrap_store_info)["master_port"] for info in infos}
        assert len(masters) == 1
        assert [isinstance(info.store, TracedStore) for info in infos] == [
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

    def test_join_etcd_v3(self, endpoints: dict[str, str]) -> None:
        """Nodes meet over the v3 API, and their store has every operation."""
        run_id = "a run/with % and ä"
        nodes = [
            handler("traced-etcd", endpoints["etcd-v3"], run_id, nodes=(3, 3))
            for _ in range(3)
        ]

        infos = join_all(nodes)

        assert sorted(info.rank for info in infos) == [0, 1, 2]
        masters = {vars(info.bootstrap_store_info)["master_port"] for info in infos}
        assert len(masters) == 1
        assert {type(info.store) for info in infos} == {TracedStore}
        infos[0].store.append("word", "v3")
        assert infos[1].store.get("word") == b"v3"
        for node in nodes:
            assert node.get_backend() == "traced-etcd"
            assert node.num_nodes_waiting() == 0
        assert all(node.shutdown() for node in nodes)
        assert all(node.is_closed() for node in nodes)

    def test_queues(self, endpoints: dict[str, str]) -> None:
        """The traced store has queues above its prefix."""
        node = handler("traced-c10d", endpoints["c10d"], new_run_id(), nodes=(1, 1))
        store: Any = node.next_rendezvous().store
        store.queue_push("queue", "item")

        assert store.queue_pop("queue") == b"item"
        node.shutdown()

    def test_listing(self, endpoints: dict[str, str]) -> None:
        """The traced store lists the keys under its prefix."""
        node = handler("traced-c10d", endpoints["c10d"], new_run_id(), nodes=(1, 1))
        store: Any = node.next_rendezvous().store

        assert "MASTER_ADDR" in "".join(store.list_keys())
        node.shutdown()

    @on_both_bases
    def test_store_of_an_earlier_round(
        self, endpoints: dict[str, str], core: str
    ) -> None:
        """It is closed in the next round; a native one is not kept at all."""
        from tracedstore import store as store_module

        # The fixture of this module has configured it before the base was selected.
        tracedstore.configure(core=core)
        node = handler("traced-c10d", endpoints["c10d"], new_run_id(), nodes=(1, 1))
        for _ in range(3):
            node.next_rendezvous()

        assert len(store_module._kept_alive) == (1 if core == "python" else 0)
        node.shutdown()


class TestDisabled:
    """With disabled telemetry, torch's behaviour is unchanged."""

    def test_exception_and_barrier(
        self, registry: CollectorRegistry, endpoints: dict[str, str], events: Events
    ) -> None:
        """The exception has no text, and the barrier is torch's."""
        tracedstore.configure(registry=registry, disabled=True)
        before = torch_store.barrier
        node = handler("traced-c10d", endpoints["c10d"], "run", join_timeout="1")

        with pytest.raises(RendezvousTimeoutError) as raised:
            node.next_rendezvous()

        assert str(raised.value) == ""
        assert torch_store.barrier is before
        assert events() == []


class TestTimeout:
    """Too few nodes join."""

    @BOTH
    def test_joined_and_left_nodes(
        self, backend: str, endpoints: dict[str, str], events: Events
    ) -> None:
        """The exception and one event name the nodes that joined and left."""
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
        # A node reads the state once a second; the other node must be in it then.
        wait_until(lambda: b"early" in (traced._traced_backend.get_state() or [b""])[0])

        with pytest.raises(RendezvousTimeoutError) as raised:
            traced.next_rendezvous()

        assert isinstance(left.exception(60), RendezvousTimeoutError)
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
        assert "joined and left: early (pid" in event["message"]
        assert (event["missing_count"], event["missing_names"]) == (2, ["early", None])
        assert event["missing_causes"] == ["gone", "not_started"]

    def test_no_room(self, endpoints: dict[str, str], events: Events) -> None:
        """A node that joins a running job times out on the wait list.

        On a busy machine the timeout may pass before the node is on the list, so
        further nodes try it with longer ones.
        """
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        config = {"nodes": (1, 2), "last_call_timeout": "1"}
        running = handler("c10d", endpoint, run_id, addr="127.0.0.1", **config)
        running.next_rendezvous()

        for join_timeout in ("1", "8", "64"):
            late = handler(
                "traced-c10d",
                endpoint,
                run_id,
                addr="late",
                join_timeout=join_timeout,
                **config,
            )
            with pytest.raises(RendezvousTimeoutError) as raised:
                late.next_rendezvous()
            if "on the wait list" in str(raised.value):
                break

        assert "on the wait list: late" in str(raised.value)
        event = events()[-1]
        assert event["event"] == names.RENDEZVOUS_TIMEOUT
        check(event)
        assert (event["joined"], event["waiting"]) == (["127.0.0.1"], ["late"])
        assert (event["complete"], event["cause"]) == (True, "no_room")
        running.shutdown()

    @BOTH
    def test_closed_before(
        self, backend: str, endpoints: dict[str, str], events: Events
    ) -> None:
        """A node that comes to a closed rendezvous reports since when it is closed."""
        run_id, endpoint = new_run_id(), endpoints[backend]
        first = handler(backend, endpoint, run_id, nodes=(1, 1), addr="127.0.0.1")
        first.next_rendezvous()
        first.shutdown()
        second = handler(f"traced-{backend}", endpoint, run_id, nodes=(1, 1))

        with pytest.raises(RendezvousClosedError, match="use a new --rdzv-id"):
            second.next_rendezvous()

        event = only(events, names.RENDEZVOUS_FAILED)
        assert (event["cause"], event["closed"]) == ("closed", True)
        assert 0 <= event["closed_seconds"] < 60
        assert f"run id '{run_id}' has a rendezvous that was closed" in event["message"]

    def test_closed_meanwhile(self, endpoints: dict[str, str], events: Events) -> None:
        """A node that gave up in this run is not taken for an earlier run."""
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        other = handler("c10d", endpoint, run_id, nodes=(3, 3), addr="other")
        node: Any = handler("traced-c10d", endpoint, run_id, nodes=(3, 3), addr="own")
        joining = in_background(node.next_rendezvous)
        wait_until(lambda: b"own" in (node._traced_backend.get_state() or [b""])[0])

        other.shutdown()

        assert isinstance(joining.exception(60), RendezvousClosedError)
        event = only(events, names.RENDEZVOUS_FAILED)
        assert (event["cause"], event["closed_seconds"]) == ("closed", None)
        assert "another node gave up" in event["message"]

    def test_corrupt(self, endpoints: dict[str, str], events: Events) -> None:
        """Another program has written to the key of the state."""
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        node: Any = handler("traced-c10d", endpoint, run_id, nodes=(1, 1))
        node._traced_backend._store.set(f"torch.rendezvous.{run_id}", "x")

        with pytest.raises(RendezvousStateError):
            node.next_rendezvous()

        assert only(events, names.RENDEZVOUS_FAILED)["cause"] == "corrupt_state"


class TestUnreachable:
    """The backend cannot be created."""

    @pytest.mark.parametrize(
        ("backend", "address", "cause"),
        [
            ("c10d", "no.such.host.invalid:4711", "name_resolution"),
            ("c10d", "refused", "refused"),
            # A TCPStore never times out on a server that sends nothing.
            ("etcd-v2", "no.such.host.invalid:4711", "name_resolution"),
            ("etcd-v2", "refused", "refused"),
            ("etcd-v2", "silent", "no_answer"),
        ],
    )
    def test_causes(
        self, backend: str, address: str, cause: str, events: Events
    ) -> None:
        """One event has the cause; the exception is torch's, with a note."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ports = {"refused": free_port(), "silent": silent.getsockname()[1]}
            endpoint = f"127.0.0.1:{ports[address]}" if address in ports else address
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

    @pytest.mark.parametrize(
        ("address", "cause"),
        [
            ("no.such.host.invalid:4711", "name_resolution"),
            ("refused", "refused"),
            ("silent", "no_answer"),
        ],
    )
    def test_causes_etcd_v3(self, address: str, cause: str, events: Events) -> None:
        """The exception has torch's class and text, and one event has the cause."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            ports = {"refused": free_port(), "silent": silent.getsockname()[1]}
            endpoint = f"127.0.0.1:{ports[address]}" if address in ports else address
            with pytest.raises(RendezvousConnectionError, match="to etcd has failed"):
                handler("traced-etcd", endpoint, "run", read_timeout="1")

        event = only(events, names.RENDEZVOUS_FAILED)
        assert (event["cause"], event["backend"]) == (cause, "etcd")
        assert "EtcdUnreachableError" in event["causes"][1]

    def test_port_in_use(self, events: Events) -> None:
        """The port of the node that hosts the c10d store is in use."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(RendezvousConnectionError):
                handler("traced-c10d", endpoint, "run", is_host="1")

        assert only(events, names.RENDEZVOUS_FAILED)["cause"] == "address_in_use"

    def test_ended_on_purpose(
        self, events: Events, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A signal that ends the agent is no failure of the rendezvous."""
        node = handler("traced-c10d", f"127.0.0.1:{free_port()}", "run", is_host="1")

        def is_ended() -> int:
            raise SignalException("SIGTERM", signal.SIGTERM)

        monkeypatch.setattr(node._inner, "num_nodes_waiting", is_ended)  # type: ignore[attr-defined]

        with pytest.raises(SignalException) as raised:
            node.num_nodes_waiting()

        assert [e for e in events() if e["event"] == names.RENDEZVOUS_FAILED] == []
        assert not hasattr(raised.value, "__notes__")

    def test_etcd_without_v2(self, tmp_path: Path, events: Events) -> None:
        """The message has the option with which to start etcd."""
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


class TestConnectionLost:
    """The server ends while it is needed."""

    def test_tcp_server_dies(self, tcp_server: Child, events: Events) -> None:
        """The first failing call emits an event, later calls do not."""
        endpoint = f"127.0.0.1:{tcp_server.next_report()['port']}"
        node = handler("traced-c10d", endpoint, "run", nodes=(1, 1), is_host="0")
        node.next_rendezvous()
        tcp_server.kill()

        # torch caches the state for a second.
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
        """After a restart of etcd during a rendezvous, nodes that retry join."""
        server = EtcdServer(tmp_path)
        server.start()
        endpoint, run_id = f"127.0.0.1:{server.port}", new_run_id()
        try:
            waits = handler("traced-etcd-v2", endpoint, run_id, addr="127.0.0.1")
            joining = in_background(waits.next_rendezvous)

            def joined() -> bool:
                name = names.RENDEZVOUS_PARTICIPANTS.name
                labels = {"backend": "etcd-v2"}
                return registry.get_sample_value(name, labels) == 1

            def accepted() -> float:
                name = names.RENDEZVOUS_WRITES.name
                labels = {"backend": "etcd-v2", "result": "accepted"}
                return registry.get_sample_value(name, labels) or 0

            wait_until(joined)
            server.kill()
            error = joining.exception(60)
            server.restart()

            assert isinstance(error, RendezvousConnectionError)
            event = only(events, names.RENDEZVOUS_FAILED)
            assert (event["cause"], event["joined"]) == ("refused", ["127.0.0.1"])
            assert any("EtcdConnectionFailed" in cause for cause in event["causes"])
            # The node is still in the state that etcd has stored: it removes itself
            # and joins again.
            before = accepted()
            rejoining = in_background(waits.next_rendezvous)
            wait_until(lambda: accepted() >= before + 2 and joined())
            other = handler("traced-etcd-v2", endpoint, run_id, addr="127.0.0.2")
            assert other.next_rendezvous().world_size == 2
            assert rejoining.result(60).world_size == 2
            assert len([e for e in events() if e["event"] == event["event"]]) == 1
            for node in (waits, other):
                node.shutdown()
        finally:
            server.stop()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The certificate authority of server and clients."""
    return Authority(tmp_path_factory.mktemp("tls"), "authority")


@pytest.fixture(scope="module")
def tls_server(
    authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    """An etcd that requires client certificates."""
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
    """etcd over TLS, with client certificates."""

    @staticmethod
    def config(authority: Authority, pair: Pair | None = None) -> dict[str, str]:
        """Return the options of --rdzv-conf."""
        config = {"protocol": "https", "ca_cert": str(authority.certificate)}
        if pair is not None:
            config |= {"ssl_cert": str(pair.certificate), "ssl_cert_key": str(pair.key)}
        return config | {"read_timeout": "5"}

    def test_valid_certificate(
        self, authority: Authority, tls_server: EtcdServer, events: Events
    ) -> None:
        """Traced and plain nodes join."""
        config = self.config(authority, authority.sign("client"))
        run_id, endpoint = new_run_id(), f"127.0.0.1:{tls_server.port}"
        nodes = [
            handler(name, endpoint, run_id, **config)
            for name in ("etcd-v2", "traced-etcd-v2")
        ]
        v3 = [handler("traced-etcd", endpoint, run_id, **config) for _ in range(2)]

        assert sorted(info.rank for info in join_all(nodes)) == [0, 1]
        assert sorted(info.rank for info in join_all(v3)) == [0, 1]
        for node in nodes + v3:
            node.shutdown()
        assert [e for e in events() if e["event"] == names.RENDEZVOUS_FAILED] == []

    @pytest.mark.parametrize(
        ("case", "cause"),
        [
            ("expired", "tls"),
            ("stranger", "tls"),
            ("none", "tls"),
            ("wrong authority", "tls"),
            # etcd closes a connection without TLS, without a message.
            ("no TLS", "connection_lost"),
        ],
    )
    def test_invalid_certificate(
        self,
        case: str,
        cause: str,
        authority: Authority,
        tls_server: EtcdServer,
        events: Events,
        tmp_path: Path,
    ) -> None:
        """The exception is torch's, and the event has the cause."""
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
                handler(name, f"127.0.0.1:{tls_server.port}", "run", **configs[case])
            raised.append(error.value)

        assert str(raised[0]) == str(raised[1])
        event = only(events, names.RENDEZVOUS_FAILED)
        assert event["cause"] == cause, event["causes"]
        assert ("ca_cert" if cause == "tls" else "protocol=https") in event["message"]


class TestAgents:
    """Agents wait for keys after the rendezvous; events name who writes them."""

    @pytest.fixture(params=["c10d", "etcd-v2"])
    def pair(
        self, request: pytest.FixtureRequest, endpoints: dict[str, str]
    ) -> Iterator[list[Any]]:
        """The stores of two agents of one rendezvous, by rank."""
        run_id = new_run_id()
        nodes = [
            handler(f"traced-{request.param}", endpoints[request.param], run_id, addr=a)
            for a in AGENTS
        ]
        infos = sorted(join_all(nodes), key=lambda info: info.rank)
        yield [info.store for info in infos]
        for node in nodes:
            node.shutdown()

    def test_missing_role(self, pair: list[Any], events: Events) -> None:
        """Rank 0 waits for the roles; the event names the agent without one."""
        rank_0, _ = pair
        rank_0.set("torchelastic/role_info/0", "role")
        rank_0.set_timeout(timedelta(seconds=3))

        with pytest.raises((RuntimeError, LookupError)) as raised:
            rank_0.multi_get([f"torchelastic/role_info/{n}" for n in range(2)])

        event = only(events, names.OPERATION_FAILED)
        assert event["awaited_ranks"] == [1]
        assert event["awaited"].startswith(f"agent 1 on {AGENTS[1]} (pid ")
        assert event["phase"] == "rank assignment of torchrun's agents"
        assert event["awaited"] in raised.value.__notes__[0]

    def test_missing_assignment(self, pair: list[Any], events: Events) -> None:
        """The other agents wait for rank 0."""
        for rank in range(2):
            pair[0].set(f"torchelastic/role_info/{rank}", "role")
        pair[1].set_timeout(timedelta(seconds=3))

        with pytest.raises((RuntimeError, LookupError)):
            pair[1].get("torchelastic/assigned_ranks/1")

        event = only(events, names.OPERATION_FAILED)
        assert event["awaited_ranks"] == [0]
        assert event["awaited"].startswith(f"agent 0 on {AGENTS[0]} (pid ")

    def test_stalled_call(
        self, endpoints: dict[str, str], registry: CollectorRegistry, events: Events
    ) -> None:
        """The event is emitted while the agent waits, and the wait continues."""
        tracedstore.configure(registry=registry, stall_after=0.5)
        run_id, endpoint = new_run_id(), endpoints["c10d"]
        nodes = [handler("traced-c10d", endpoint, run_id, addr=a) for a in AGENTS]
        first, second = sorted(join_all(nodes), key=lambda info: info.rank)
        keys = [f"torchelastic/role_info/{n}" for n in range(2)]
        first.store.set(keys[0], "role")
        waiting = in_background(lambda: first.store.multi_get(keys))

        def stalled() -> list[dict[str, Any]]:
            return [
                event
                for event in events()
                if event["event"] == names.JOB_STALLED and event["key"] == keys[1]
            ]

        event = wait_until(stalled)[0]
        check(event)
        assert event["awaited"].startswith(f"agent 1 on {AGENTS[1]} (pid ")
        second.store.set(keys[1], "role")
        assert waiting.result(60) == [b"role", b"role"]
        for node in nodes:
            node.shutdown()

    def test_exit_barrier(self, pair: list[Any], events: Events) -> None:
        """The barrier that torch calls without a rank names the missing agents."""
        with pytest.raises(tracedstore.BarrierTimeout) as raised:
            torch_store.barrier(
                store=pair[0],
                world_size=2,
                key_prefix="torchelastic/agent/terminal_state",
                barrier_timeout=0.3,
            )

        (name,) = raised.value.missing_names
        assert name.startswith(f"{AGENTS[1]} (pid ")
        assert only(events, names.BARRIER_TIMEOUT)["missing_ranks"] == [1]
