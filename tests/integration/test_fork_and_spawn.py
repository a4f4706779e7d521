"""Processes with traced stores that start others by fork and by spawn."""

from typing import Any

import pytest

from integration.conftest import StartChild
from integration.harness import Child
from support.native import on_both_bases

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("core"),
    on_both_bases,
]


@pytest.fixture
def port(tcp_server: Child) -> int:
    """Return the port of a TCPStore's server."""
    number: int = tcp_server.next_report()["port"]
    return number


def run(start_child: StartChild, script: str, *args: object) -> dict[str, Any]:
    """Run a script to its end, and return its report."""
    child = start_child(script, *args)
    reported = child.next_report()
    assert child.exit_status() == 0, child.errors()
    return reported


class TestFork:
    """A forked child has the stores of its parent, but not its calls or threads."""

    def test_with_running_watcher(self, start_child: StartChild, port: int) -> None:
        """Parent and child each count their own calls and report their own stalls."""
        reported = run(start_child, "forking", "with_running_watcher", port)

        child, parent = reported["child"], reported["parent"]
        assert child["counted_before"] == {}
        assert child["threads"] == ["MainThread"]
        assert child["inherited"] == child["read"] == "parent"
        assert child["in_flight"] == parent["in_flight"] == 1
        assert child["counted"] == {
            "hash_store.get": 1,
            "hash_store.set": 1,
            "tcp_store.get": 2,
        }
        assert parent["counted"] == {
            "hash_store.get": 1,
            "hash_store.set": 1,
            "tcp_store.get": 2,
            "tcp_store.set": 1,
        }

    def test_while_another_thread_waits(
        self, start_child: StartChild, port: int
    ) -> None:
        """Calls of other threads of the parent are not in flight in the child."""
        reported = run(start_child, "forking", "while_another_thread_waits", port)

        child, parent = reported["child"], reported["parent"]
        assert child["in_flight"] == 0
        assert child["gauges"] == {"tcp_store": 0, "hash_store": 0}
        assert child["counted"] == {"tcp_store.add": 1}
        assert parent["in_flight"] == 2
        assert parent["values"] == ["v", "v"]
        assert parent["counted"] == {
            "hash_store.get": 1,
            "hash_store.set": 1,
            "tcp_store.get": 1,
        }

    def test_while_another_thread_logs(self, start_child: StartChild) -> None:
        """A parent's thread that blocks in logging does not block the child."""
        reported = run(start_child, "forking", "while_another_thread_logs")

        assert reported == {"was_blocked": True, "child": True, "parent": True}


class TestSpawn:
    """A spawned child inherits nothing."""

    def test_new_store(self, start_child: StartChild, port: int) -> None:
        """The child wraps a new store; a traced store cannot be passed to it."""
        reported = run(start_child, "spawning", port)

        assert reported["child"]["read"] == "parent"
        assert reported["child"]["counted"] == {"tcp_store.get": 1, "tcp_store.set": 1}
        assert reported["exit_status"] == 0
        assert reported["read"] == "child"
        assert reported["counted"] == {"tcp_store.get": 1, "tcp_store.set": 1}
        assert reported["pickle_error"] == (
            "cannot pickle a TracedStore: a store is a live connection; create and"
            " wrap one in each process instead"
        )
