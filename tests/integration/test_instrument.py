"""instrument() in real processes: every path is traced, and torch notices nothing."""

from pathlib import Path

import pytest

from integration.conftest import StartChild
from support.etcd import free_port

pytestmark = pytest.mark.processes


def calls(store: str, *, sets: int = 1, **more: int) -> dict[str, float]:
    """What gloo does for a group of one: it writes its address and reads it."""
    counted = {"set": sets, "wait": 1, "get": 1, **more}
    return {f"{store}_store.{name}": count for name, count in counted.items()}


class TestPaths:
    """Each way in which torch comes to a store by itself."""

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_each_is_traced(
        self, start_child: StartChild, tmp_path: Path, order: str
    ) -> None:
        """Whether torch was imported before or after, and used by name."""
        child = start_child("traced_paths", tmp_path, order)

        answer = child.next_report()

        found = answer["found"]
        # Besides what gloo does, the script writes a key, and the rank itself.
        for path, store in (
            ("env", "tcp"),
            ("tcp", "tcp"),
            ("store", "hash"),
            ("file", "file"),
        ):
            assert found[path] == calls(store, sets=1 + 2)
        # Two keys of the rendezvous, the script's, and one in the workers' store.
        assert found["c10d"]["tcp_store.set"] == 4
        assert found["c10d"]["tcp_store.compare_set"] >= 1
        assert found["static"] == {"tcp_store.set": 1}
        assert answer["barriers"] == {"by/module": 1, "_tcp_store/num_members": 1}
        # The job's own variable is the store it always was.
        assert answer["given"] == ["HashStore", "value"]
        assert child.exit_status() == 0
        assert "Traceback" not in child.errors()

    @pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
    def test_explicit_init_method(
        self, start_child: StartChild, tmp_path: Path, scheme: str
    ) -> None:
        """traced+env:// needs no instrument()."""
        port = str(free_port())
        where = {"env": "", "tcp": f"127.0.0.1:{port}", "file": f"{tmp_path}/store"}
        child = start_child(
            *("one_group", f"traced+{scheme}://{where[scheme]}"),
            env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )

        answer = child.next_report()

        assert (answer["store"], answer["value"]) == ("TracedStore", 3)
        assert answer["registered"] == [[0, 1, child.pid]]


class TestTransparency:
    """The job cannot tell, and wins where telemetry fails."""

    def test_groups_come_and_go_as_bare(
        self, start_child: StartChild, tmp_path: Path
    ) -> None:
        """Ports, files and keys are left as the bare stores leave them."""
        children = {}
        for how in ("bare", "instrument", "explicit"):
            (tmp_path / how).mkdir()
            children[how] = start_child("group_lifetime", how, tmp_path / how)

        found = {how: child.next_report() for how, child in children.items()}

        assert found["bare"]["second: left over"] is False
        assert found["bare"]["second: after"] is False
        assert found["bare"]["kept group"] is True
        assert found["bare"]["nothing kept"] is False
        assert found["instrument"] == found["bare"]
        assert found["explicit"] == found["bare"]
        assert {child.exit_status() for child in children.values()} == {0}

    def test_identity_from_the_group(self, start_child: StartChild) -> None:
        """Rank and world size are those given, though the environment has others."""
        child = start_child(
            *("one_group", f"tcp://127.0.0.1:{free_port()}", "instrument"),
            env={
                "TRACEDSTORE_SLOW_AFTER": "0",
                "TRACEDSTORE_RUN_ID": "job-7",
                "LOCAL_RANK": "5",
                "RANK": "99",
            },
        )
        answer = child.next_report()

        events = child.events()

        assert answer["registered"] == [[0, 1, child.pid]]
        assert [event["operation"] for event in events[:2]] == ["set", "set"]
        for event in events:
            assert (event["rank"], event["world_size"]) == (0, 1)
            assert (event["run_id"], event["local_rank"]) == ("job-7", 5)

    @pytest.mark.parametrize(
        ("variable", "value", "says"),
        [
            (
                "TRACEDSTORE_SLOW_AFTER",
                "10ms",
                "TRACEDSTORE_SLOW_AFTER is '10ms'; accepted is",
            ),
            ("TRACEDSTORE_DISABLED", "1", ""),
        ],
    )
    def test_without_telemetry_stores_are_bare(
        self, start_child: StartChild, variable: str, value: str, says: str
    ) -> None:
        """A setting that cannot be used is told of once, and stops nobody."""
        child = start_child(
            *("one_group", f"tcp://127.0.0.1:{free_port()}", "instrument"),
            env={variable: value},
        )

        answer = child.next_report()
        child.write("\n")

        assert (answer["store"], answer["value"]) == ("TCPStore", 3)
        assert (answer["counted"], answer["registered"]) == ({}, [])
        assert child.exit_status() == 0
        assert child.errors().count("telemetry.disabled") == bool(says)
        assert says in child.errors()

    def test_twice_is_once(self, start_child: StartChild) -> None:
        """A call is counted once, and the rank registers once."""
        where = f"tcp://127.0.0.1:{free_port()}"
        child = start_child("one_group", where, "instrument", "instrument")

        answer = child.next_report()

        assert answer["counted"] == calls("tcp", sets=1 + 1)
