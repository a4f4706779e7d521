"""Ranks that are real processes and meet at barriers, for the tests that watch them."""

import itertools
import json
from typing import Any

from integration.harness import Child, wait_until
from tracedstore.coordination.arrivals import read_ledger, read_traceparent
from tracedstore.coordination.protocol import BarrierKeys

# A FileStore rounds up to whole seconds.
TIMEOUT = 1.0


class Fleet:
    """Processes that become ranks, and a client of the store they meet through."""

    def __init__(self, child: Child, store: Any) -> None:
        self.child = child
        self.store = store
        self._reports: list[dict[str, Any]] = []
        assert child.next_report() == {"ready": True}

    def tell(self, command: dict[str, Any]) -> None:
        """Start a rank, or kill one."""
        self.child.write(json.dumps(command) + "\n")

    def report(self, kind: str, prefix: str) -> dict[str, Any]:
        """Wait for the next report of a kind from one barrier."""
        for index, one in enumerate(self._reports):
            if kind in one and one["prefix"] == prefix:
                return self._reports.pop(index)
        while True:
            one = self.child.next_report()
            if kind in one and one["prefix"] == prefix:
                return one
            self._reports.append(one)


class Meeting:
    """One barrier that ranks of a fleet come to."""

    _numbers = itertools.count()

    def __init__(self, fleet: Fleet, kind: str) -> None:
        self.kind = kind
        self.prefix = f"barrier/{next(self._numbers)}"
        self._fleet = fleet
        self._pids: dict[int, int] = {}

    def start(self, *ranks: int, world_size: int = 4, **options: Any) -> None:
        """Let ranks come to the barrier."""
        for rank in ranks:
            self._fleet.tell(
                {
                    "rank": rank,
                    "world_size": world_size,
                    "prefix": self.prefix,
                    "timeout": TIMEOUT,
                    "flavour": "traced",
                    "trace_timeout": 10,
                    "warn_after": 0,
                    "decode": False,
                }
                | options
            )
            self._pids[rank] = self._fleet.report("started", self.prefix)["pid"]

    def kill(self, rank: int) -> None:
        """Kill a rank that came, with SIGKILL."""
        self._fleet.tell({"kill": self._pids[rank]})

    def arrived(self, count: int) -> None:
        """Wait until so many have been counted."""
        key = f"{self.prefix}/num_members"
        wait_until(lambda: self._fleet.store.add(key, 0) >= count)

    def led(self) -> None:
        """Wait until the first one has left its trace for the others."""
        store, keys = self._fleet.store, BarrierKeys(self.prefix)
        wait_until(lambda: read_traceparent(store, keys, read_ledger(store, keys)))

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events that were told of this barrier."""
        found = self._fleet.child.events(name)
        return [event for event in found if event["barrier"] == self.prefix]

    def results(self, *ranks: int) -> list[dict[str, Any]]:
        """Wait until these ranks are through; give what each of them says."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(ranks):
            ended = self._fleet.report("result", self.prefix)
            found[ended["rank"]] = ended
        assert sorted(found) == sorted(ranks)
        assert all(one["timeout_kept"] for one in found.values())
        return [found[rank] for rank in ranks]

    def completed(self, *ranks: int) -> None:
        """All of these came through."""
        results = [one["result"] for one in self.results(*ranks)]
        assert results == ["completed"] * len(ranks)

    def missed(self, missing: list[int], *ranks: int) -> list[dict[str, Any]]:
        """All of these name exactly the missing ones."""
        results = self.results(*ranks)
        for one in results:
            assert (one["result"], one["missing"]) == ("timeout", missing), one
            assert one["unidentified"] == 0
        return results
