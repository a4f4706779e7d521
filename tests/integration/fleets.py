"""Ranks as real processes that call barriers, controlled by tests."""

import itertools
import json
from typing import Any

from integration.harness import Child, wait_until

# Seconds. A FileStore rounds a timeout up to whole seconds.
TIMEOUT = 1.0


class Fleet:
    """Processes that run ranks, and a client of their store."""

    def __init__(self, child: Child, store: Any) -> None:
        self.child = child
        self.store = store
        self._reports: list[dict[str, Any]] = []
        assert child.next_report() == {"ready": True}

    def send(self, command: dict[str, Any]) -> None:
        """Send a command that starts or kills a rank."""
        self.child.write(json.dumps(command) + "\n")

    def report(self, kind: str, prefix: str) -> dict[str, Any]:
        """Wait for the next report of a kind from one barrier."""
        for index, report in enumerate(self._reports):
            if kind in report and report["prefix"] == prefix:
                return self._reports.pop(index)
        while True:
            report = self.child.next_report()
            if kind in report and report["prefix"] == prefix:
                return report
            self._reports.append(report)


class FleetBarrier:
    """One barrier that ranks of a fleet call."""

    _numbers = itertools.count()

    def __init__(self, fleet: Fleet, kind: str) -> None:
        self.kind = kind
        self.prefix = f"barrier/{next(self._numbers)}"
        self._fleet = fleet
        self._pids: dict[int, int] = {}

    def start(self, *ranks: int, world_size: int = 4, **options: Any) -> None:
        """Start ranks that call the barrier."""
        for rank in ranks:
            self._fleet.send(
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
        """Kill a started rank with SIGKILL."""
        self._fleet.send({"kill": self._pids[rank]})

    def wait_for_arrivals(self, count: int) -> None:
        """Wait until this number of ranks has arrived."""
        key = f"{self.prefix}/num_members"
        wait_until(lambda: self._fleet.store.add(key, 0) >= count)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of this barrier by name."""
        events = self._fleet.child.events(name)
        return [event for event in events if event["barrier"] == self.prefix]

    def results(self, *ranks: int) -> list[dict[str, Any]]:
        """Wait until the calls of these ranks end, and return their reports."""
        by_rank: dict[int, dict[str, Any]] = {}
        while len(by_rank) < len(ranks):
            report = self._fleet.report("result", self.prefix)
            by_rank[report["rank"]] = report
        assert sorted(by_rank) == sorted(ranks)
        assert all(report["timeout_kept"] for report in by_rank.values())
        return [by_rank[rank] for rank in ranks]

    def assert_completed(self, *ranks: int) -> None:
        """Assert that the barrier completes for all of these ranks."""
        results = [report["result"] for report in self.results(*ranks)]
        assert results == ["completed"] * len(ranks)

    def assert_timed_out(self, missing: list[int], *ranks: int) -> list[dict[str, Any]]:
        """Assert that all of these ranks time out and report exactly the missing."""
        reports = self.results(*ranks)
        for report in reports:
            assert (report["result"], report["missing"]) == ("timeout", missing), report
            assert report["unidentified"] == 0
        return reports
