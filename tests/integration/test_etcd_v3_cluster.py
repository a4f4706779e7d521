"""EtcdV3Store on a cluster of three, whose leader fails under load."""

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import DistStoreError, QueueEmptyError

from integration.harness import in_background, wait_until
from support.etcd import EtcdCluster
from tracedstore.etcd import EtcdOutcomeUnknownError, EtcdV3Store

pytestmark = [pytest.mark.etcd, pytest.mark.processes]

WORKERS = 3
LONG = timedelta(seconds=90)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A cluster whose members all run when a test ends."""
    cluster = EtcdCluster(tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.stop()


def _note(entries: list[str], entry: str, _result: None) -> None:
    entries.append(entry)


class Load:
    """Clients that write without a pause, and note what the store answered."""

    def __init__(self, cluster: EtcdCluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._stop = threading.Event()
        self.sums: list[int] = []
        self.appended: list[str] = []
        self.pushed: list[str] = []
        self.popped: list[bytes] = []
        self.swapped = 0
        self.unknown: dict[str, int] = dict.fromkeys(
            ("add", "append", "push", "pop", "swap"), 0
        )
        self.failed: list[str] = []
        self.progress = 0
        self._workers = [
            in_background(partial(self._work, number)) for number in range(WORKERS)
        ]

    def store(self) -> Any:
        """Return a new client."""
        return EtcdV3Store(self._cluster.addresses, self._namespace, timeout=LONG)

    def stop(self) -> None:
        """Let all clients finish what they do."""
        self._stop.set()
        for worker in self._workers:
            worker.result(60)

    def _try(
        self,
        kind: str,
        note: Callable[[Any], Any],
        call: Callable[..., Any],
        *args: Any,
    ) -> None:
        try:
            note(call(*args))
        except EtcdOutcomeUnknownError:
            self.unknown[kind] += 1
        except QueueEmptyError:
            pass
        except DistStoreError as error:
            self.failed.append(str(error))

    def _swap(self, store: Any) -> bool:
        """Add one to a number with compare_set; return whether that succeeded."""
        old = store.compare_set("cas", "0", "0")
        new = b"%d.%d" % (int(old.partition(b".")[0]) + 1, threading.get_ident())
        return bool(store.compare_set("cas", old, new) == new)

    def _work(self, number: int) -> None:
        store, turn = self.store(), 0
        while not self._stop.is_set():
            turn += 1
            entry = f"{number}:{turn}"
            append, push = partial(_note, self.appended), partial(_note, self.pushed)
            self._try("add", self.sums.append, store.add, "n", 1)
            self._try(
                "append", partial(append, entry), store.append, "log", f"{entry},"
            )
            self._try("push", partial(push, entry), store.queue_push, "q", entry)
            self._try("pop", self.popped.append, store.queue_pop, "q", False)
            self._try("swap", self._count_swap, self._swap, store)
            self.progress += 1

    def _count_swap(self, won: bool) -> None:
        self.swapped += won


def kill(cluster: EtcdCluster) -> Callable[[], None]:
    """Kill the leader; return what ends the fault."""
    leader = cluster.leader()
    leader.kill()
    return leader.restart


def stop(cluster: EtcdCluster) -> Callable[[], None]:
    """Stop the leader, as a host does that hangs; return what ends the fault."""
    leader = cluster.leader()
    leader.pause()
    return leader.resume


def cut_off(cluster: EtcdCluster) -> Callable[[], None]:
    """Cut the leader off from the other members, but not from its clients."""
    leader = cluster.leader()
    client: Any = EtcdV3Store(leader.address, "alone")
    client.check(["k"])
    heal = cluster.cut_off(leader)
    wait_until(lambda: "leader" not in leader.call("maintenance/status", {}))

    # It does not answer from what it knows, nor leave its clients waiting.
    client.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(DistStoreError, match="has no leader"):
        client.get("k")
    return heal


class TestLeaderFails:
    """The leader fails while clients write."""

    @pytest.mark.parametrize(
        "fault", [kill, stop, cut_off], ids=lambda fault: fault.__name__
    )
    def test_nothing_is_lost_or_applied_twice(
        self, cluster: EtcdCluster, fault: Callable[[EtcdCluster], Callable[[], None]]
    ) -> None:
        """What succeeded is there once; only what is unknown may be there or not."""
        namespace = fault.__name__
        watcher: Any = EtcdV3Store(cluster.addresses, namespace, timeout=LONG)
        watcher.set("cas", "0.0")
        waiting = in_background(lambda: watcher.clone().get("woken"))
        load = Load(cluster, namespace)
        wait_until(lambda: load.progress > 2 * WORKERS)

        end = fault(cluster)
        before = load.progress
        wait_until(lambda: load.progress > before + 3 * WORKERS)
        end()
        load.stop()
        load.store().set("woken", "v")

        assert waiting.result(60) == b"v"
        assert load.failed == []
        store = load.store()
        unknown = load.unknown
        # The sums are unique, and the counter has all of them.
        assert len(set(load.sums)) == len(load.sums)
        total = store.add("n", 0)
        assert len(load.sums) <= total <= len(load.sums) + unknown["add"]
        entries = store.get("log").decode().split(",")[:-1]
        assert len(set(entries)) == len(entries)
        assert set(load.appended) <= set(entries)
        assert len(entries) <= len(load.appended) + unknown["append"]
        popped = [entry.decode() for entry in load.popped]
        assert len(set(popped)) == len(popped)
        left = [store.queue_pop("q").decode() for _ in range(store.queue_len("q"))]
        seen = set(popped) | set(left)
        assert len(seen) == len(popped) + len(left)
        assert len(set(load.pushed) - seen) <= unknown["pop"]
        assert len(seen - set(load.pushed)) <= unknown["push"]
        swaps = int(store.get("cas").partition(b".")[0])
        assert load.swapped <= swaps <= load.swapped + unknown["swap"]

    def test_no_quorum(self, cluster: EtcdCluster) -> None:
        """Without a quorum a call ends with an error, and works again with one."""
        store: Any = EtcdV3Store(cluster.addresses, "quorum")
        store.set("k", "v")
        for member in cluster.members[1:]:
            member.kill()
        store.set_timeout(timedelta(seconds=1))

        with pytest.raises(DistStoreError, match=r"Wait timeout after 1000ms, keys: k"):
            store.get("k")

        for member in cluster.members[1:]:
            member.launch()
        store.set_timeout(LONG)
        assert store.get("k") == b"v"
