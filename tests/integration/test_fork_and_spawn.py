"""A process with traced stores starts others, by fork and by spawn."""

from typing import Any

import pytest

from integration.conftest import StartChild
from integration.harness import Child

pytestmark = pytest.mark.processes


@pytest.fixture
def port(tcp_server: Child) -> int:
    """Where a TCPStore's server is."""
    number: int = tcp_server.next_report()["port"]
    return number


def run(start_child: StartChild, script: str, *args: object) -> dict[str, Any]:
    """Run a script to its end, and give what it reported."""
    child = start_child(script, *args)
    reported = child.next_report()
    assert child.exit_status() == 0, child.errors()
    return reported


class TestFork:
    """A forked child has the parent's stores, and none of its calls or threads."""

    def test_with_a_running_watch(self, start_child: StartChild, port: int) -> None:
        """Parent and child each count their own calls and watch their own stalls."""
        reported = run(start_child, "forking", "with_a_running_watch", port)

        child, parent = reported["child"], reported["parent"]
        assert child["at_first"] == {}
        assert child["threads"] == ["MainThread"]
        assert child["inherited"] == child["read"] == "parent's"
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
        """What other threads of the parent are in is not in flight in the child."""
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
        """A thread stuck in an event in the parent does not block the child's calls."""
        reported = run(start_child, "forking", "while_another_thread_logs")

        assert reported == {"was_stuck": True, "child": True, "parent": True}


class TestSpawn:
    """A spawned child starts from nothing."""

    def test_own_store(self, start_child: StartChild, port: int) -> None:
        """It wraps its own store; a traced store cannot be handed to it."""
        reported = run(start_child, "spawning", port)

        assert reported["child"]["read"] == "parent's"
        assert reported["child"]["counted"] == {"tcp_store.get": 1, "tcp_store.set": 1}
        assert reported["exit_status"] == 0
        assert reported["read"] == "child's"
        assert reported["counted"] == {"tcp_store.get": 1, "tcp_store.set": 1}
        assert reported["refusal"] == (
            "cannot pickle a TracedStore: a store is a live connection; create and"
            " wrap one in each process instead"
        )
