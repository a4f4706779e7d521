"""Injects faults into an etcd cluster and checks what EtcdV3Store answered meanwhile.

Clients use a register, a counter and a queue at the same time, with new keys in each
round. The leader of three members is killed, stopped, or cut off from the others but
not from its clients. Each history must be linearizable (`etcd_history`). Exits with 1
if one is not.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

from etcd_history import Call, Model, counter, is_linearizable, queue, register
from torch.distributed import DistStoreError, QueueEmptyError

from support.etcd import EtcdCluster
from tracedstore.etcd import EtcdOutcomeUnknownError, EtcdV3Store

_CLIENTS, _CALLS = 4, 4
_MODELS: dict[str, Model] = {"register": register, "counter": counter, "queue": queue}
# A fault lasts this long, and so does the time between two faults.
_FAULT_SECONDS = 2.0


class Round:
    """The calls of all clients in one round, by object."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.calls: dict[str, list[Call]] = {name: [] for name in _MODELS}
        self.unknown = self.refused = 0

    def run(self, stores: list[Any]) -> None:
        """Let all clients make their calls."""
        threads = [
            threading.Thread(target=self._client, args=(n, store))
            for n, store in enumerate(stores)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, client: int, store: Any) -> None:
        for turn in range(_CALLS):
            value = f"{client}.{turn}".encode()
            for kind, calls in self._choices(store, value).items():
                name, args, call = random.choice(calls)
                self._record(kind, name, args, call)

    def _choices(
        self, store: Any, value: bytes
    ) -> dict[str, list[tuple[str, tuple[Any, ...], Callable[[], Any]]]]:
        key = f"round/{self._number}"
        seen = self.calls["register"]
        expected = next((c.args[0] for c in reversed(seen) if c.name == "set"), b"")

        def get() -> Any:
            return store.get(key) if store.check([key]) else None

        def pop() -> Any:
            try:
                return store.queue_pop(key, False)
            except QueueEmptyError:
                return None

        return {
            "register": [
                ("set", (value,), lambda: store.set(key, value)),
                ("get", (), get),
                (
                    "compare_set",
                    (expected, value),
                    lambda: store.compare_set(key, expected, value),
                ),
            ],
            "counter": [
                ("add", (1,), lambda: store.add(f"{key}/n", 1)),
                ("add", (3,), lambda: store.add(f"{key}/n", 3)),
            ],
            "queue": [
                ("push", (value,), lambda: store.queue_push(key, value)),
                ("pop", (), pop),
            ],
        }

    def _record(
        self, kind: str, name: str, args: tuple[Any, ...], call: Callable[[], Any]
    ) -> None:
        started = time.monotonic()
        try:
            result = call()
        except EtcdOutcomeUnknownError:
            self.unknown += 1
            self.calls[kind].append(Call(started, inf, name, args))
            return
        except DistStoreError:  # it was not applied
            self.refused += 1
            return
        ended = time.monotonic()
        self.calls[kind].append(Call(started, ended, name, args, result))


def inject(cluster: EtcdCluster, stop: threading.Event, done: "Counter[str]") -> None:
    """Kill, stop and cut off the leader in turns, until the end."""
    for fault in itertools.cycle(("killed", "stopped", "cut off")):
        if stop.wait(_FAULT_SECONDS):
            return
        leader = cluster.leader()
        done[f"leader {fault}"] += 1
        if fault == "killed":
            leader.kill()
            end = leader.restart
        elif fault == "stopped":
            leader.pause()
            end = leader.resume
        else:
            end = cluster.cut_off(leader)
        stop.wait(_FAULT_SECONDS)
        end()


def main() -> int:
    """Run the rounds, and check their histories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    options = parser.parse_args()
    # The members of the cluster end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        cluster = EtcdCluster(Path(folder))
        cluster.start()
        try:
            stores = [EtcdV3Store(cluster.addresses, "faults") for _ in range(_CLIENTS)]
            stores[0].check(["k"])
            injector = threading.Thread(target=inject, args=(cluster, stop, faults))
            injector.start()
            for number in range(options.rounds):
                made = Round(number)
                made.run(stores)
                totals["unknown"] += made.unknown
                totals["refused"] += made.refused
                for kind, calls in made.calls.items():
                    totals["calls"] += len(calls)
                    if not is_linearizable(calls, _MODELS[kind]):
                        totals["not linearizable"] += 1
                        print(f"round {number}, {kind}:", *calls, sep="\n  ")
            stop.set()
            injector.join()
        finally:
            stop.set()
            cluster.stop()
    print(
        f"{options.rounds} rounds, {totals['calls']} calls, {dict(faults)},"
        f" {totals['unknown']} with an unknown outcome, {totals['refused']} refused:"
        f" {totals['not linearizable']} histories are not linearizable"
    )
    return 1 if totals["not linearizable"] else 0


if __name__ == "__main__":
    sys.exit(main())
