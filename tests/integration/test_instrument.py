"""instrument() in real processes: all stores are traced, and torch works as before."""

from pathlib import Path

import pytest

from integration.conftest import StartChild
from support.etcd import free_port

pytestmark = pytest.mark.processes


def calls(store: str, *, sets: int = 1, **more: int) -> dict[str, float]:
    """Return the calls of gloo for a group of one: write and read its address."""
    counted = {"set": sets, "wait": 1, "get": 1, **more}
    return {f"{store}_store.{name}": count for name, count in counted.items()}


class TestPaths:
    """Each way in which torch creates or receives a store."""

    @pytest.mark.parametrize("order", ["before", "after"])
    def test_all_traced(
        self, start_child: StartChild, tmp_path: Path, order: str
    ) -> None:
        """Names of torch may be imported before or after instrument()."""
        child = start_child("traced_paths", tmp_path, order, forked=False)

        report = child.next_report()

        calls_by_path = report["found"]
        # Besides gloo's calls, the script sets a key, and the rank registers.
        for path, store in (
            ("env", "tcp"),
            ("tcp", "tcp"),
            ("store", "hash"),
            ("file", "file"),
        ):
            assert calls_by_path[path] == calls(store, sets=1 + 2)
        # Two keys of the rendezvous, the script's key, and one key for the workers.
        assert calls_by_path["c10d"]["tcp_store.set"] == 4
        assert calls_by_path["c10d"]["tcp_store.compare_set"] >= 1
        assert calls_by_path["static"] == {"tcp_store.set": 1}
        assert report["barriers"] == {"by/module": 1, "_tcp_store/num_members": 1}
        # The job's variable still has the bare store.
        assert report["given"] == ["HashStore", "value"]
        assert child.exit_status() == 0
        assert "Traceback" not in child.errors()

    @pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
    def test_explicit_init_method(
        self, start_child: StartChild, tmp_path: Path, scheme: str
    ) -> None:
        """traced+env:// works without instrument()."""
        port = str(free_port())
        addresses = {"env": "", "tcp": f"127.0.0.1:{port}", "file": f"{tmp_path}/store"}
        child = start_child(
            *("one_group", f"traced+{scheme}://{addresses[scheme]}"),
            env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )

        report = child.next_report()

        assert (report["store"], report["value"]) == ("TracedStore", 3)
        assert report["registered"] == [[0, 1, child.pid]]

    def test_store_that_the_program_wrapped(self, start_child: StartChild) -> None:
        """Its rank is registered, which the environment does not have."""
        child = start_child("one_group", "wrapped", "instrument")

        report = child.next_report()

        assert (report["store"], report["value"]) == ("TracedStore", 3)
        assert report["registered"] == [[0, 1, child.pid]]


class TestTransparency:
    """The job runs as without tracedstore, also if the telemetry fails."""

    def test_lifetime_of_groups(self, start_child: StartChild, tmp_path: Path) -> None:
        """Ports, files and keys are released as with bare stores."""
        children = {}
        for mode in ("bare", "instrument", "explicit"):
            (tmp_path / mode).mkdir()
            children[mode] = start_child("group_lifetime", mode, tmp_path / mode)

        reports = {mode: child.next_report() for mode, child in children.items()}

        assert reports["bare"]["second: left over"] is False
        assert reports["bare"]["second: after"] is False
        assert reports["bare"]["kept group"] is True
        assert reports["bare"]["nothing kept"] is False
        assert reports["instrument"] == reports["bare"]
        assert reports["explicit"] == reports["bare"]
        assert {child.exit_status() for child in children.values()} == {0}

    def test_identity_from_the_group(self, start_child: StartChild) -> None:
        """Rank and world size are the group's, not the environment's."""
        child = start_child(
            *("one_group", f"tcp://127.0.0.1:{free_port()}", "instrument"),
            env={
                "TRACEDSTORE_SLOW_AFTER": "0",
                "TRACEDSTORE_RUN_ID": "job-7",
                "LOCAL_RANK": "5",
                "RANK": "99",
            },
        )
        report = child.next_report()

        events = child.events()

        assert report["registered"] == [[0, 1, child.pid]]
        # Those of this package are not reported.
        assert events
        assert {event["operation"] for event in events} == {"set"}
        for event in events:
            assert (event["rank"], event["world_size"]) == (0, 1)
            assert (event["run_id"], event["local_rank"]) == ("job-7", 5)

    @pytest.mark.parametrize(
        ("variable", "value", "message"),
        [
            (
                "TRACEDSTORE_SLOW_AFTER",
                "10ms",
                "TRACEDSTORE_SLOW_AFTER is '10ms'; accepted is",
            ),
            ("TRACEDSTORE_DISABLED", "1", ""),
        ],
    )
    def test_stores_are_bare_without_telemetry(
        self, start_child: StartChild, variable: str, value: str, message: str
    ) -> None:
        """An invalid setting is logged once, and the job continues."""
        child = start_child(
            *("one_group", f"tcp://127.0.0.1:{free_port()}", "instrument"),
            env={variable: value},
        )

        report = child.next_report()
        child.write("\n")

        assert (report["store"], report["value"]) == ("TCPStore", 3)
        assert (report["counted"], report["registered"]) == ({}, [])
        assert child.exit_status() == 0
        assert child.errors().count("telemetry.disabled") == bool(message)
        assert message in child.errors()

    def test_second_call(self, start_child: StartChild) -> None:
        """After two calls, each store call is counted once."""
        url = f"tcp://127.0.0.1:{free_port()}"
        child = start_child("one_group", url, "instrument", "instrument")

        report = child.next_report()

        assert report["counted"] == calls("tcp", sets=1 + 1)
