"""The table of torch's keys against the keys that the installed torch uses."""

from pathlib import Path
from typing import Any

import pytest

from integration.conftest import StartChild
from integration.harness import Child
from support.etcd import free_port
from support.versions import (
    STORE_BARRIER,
    TORCH,
    WITHOUT_COLLECTIVES,
    has_split_group,
)
from tracedstore.diagnosis.observe.torch_keys import KeyMeaning, meaning

pytestmark = pytest.mark.processes

# The name of the split group of children/store_keys.py.
SPLIT = "5" * 40
WAITING = ("wait", "get", "multi_get")
WRITING = ("set", "multi_set", "add", "compare_set")


class Job:
    """The Store calls of all ranks of a job.

    Attributes:
        reports: The report of each rank.
        waited: The keys that a rank waited for, with the ranks that did.
        written: The keys that a rank wrote, with the ranks that did.
    """

    def __init__(self, ranks: list[Child]) -> None:
        self.reports = [rank.next_report() for rank in ranks]
        self.waited: dict[str, set[int]] = {}
        self.written: dict[str, set[int]] = {}
        for rank, report in enumerate(self.reports):
            for method, keys in report["calls"]:
                for key in keys:
                    if key.startswith("tracedstore/"):
                        continue
                    if method in WAITING:
                        self.waited.setdefault(key, set()).add(rank)
                    if method in WRITING:
                        self.written.setdefault(key, set()).add(rank)
        for child in ranks:
            assert child.exit_status() == 0

    def members(self, name: str) -> list[int]:
        """Return the members of a group; all ranks that recorded it agree."""
        (members,) = {
            tuple(report["groups"][name])
            for report in self.reports
            if name in report["groups"]
        }
        return list(members)

    def meanings(self, *unknown: str) -> dict[str, KeyMeaning]:
        """Return the meaning of every key that was waited for.

        Only the unknown keys have none. The keys that a meaning refers to exist.
        """
        found = {key: meaning(key) for key in self.waited}
        known = {key: one for key, one in found.items() if one is not None}
        assert {*found} - {*known} == {*unknown}
        for key, one in known.items():
            assert one.observed, key
            if one.last_arrival:
                assert one.counter is not None, key
                # Every rank of the exchange counts itself, also the last one.
                assert self.written[one.counter] >= self.waited[key], key
                assert self.written[one.counter] >= self.written.get(key, set()), key
            if one.sibling is not None and one.writers is not None:
                assert one.sibling.format(rank=one.writers[0]) == key
        return known


def start_ranks(
    start_child: StartChild,
    how: str,
    address: object,
    world_size: int,
    *args: object,
    **env: str,
) -> list[Child]:
    """Start all ranks of a job."""
    return [
        start_child("store_keys", how, address, rank, world_size, *args, env=env)
        for rank in range(world_size)
    ]


class TestProcessGroups:
    """Groups of three ranks: all, two of them by name and by hash, and a split."""

    @pytest.mark.parametrize(
        ("how", "env"),
        [
            ("env", {}),
            ("tcp", {"TORCH_DIST_INIT_BARRIER": "1"}),
            ("file", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
            ("store", {}),
        ],
    )
    def test_gloo(
        self,
        start_child: StartChild,
        tcp_server: Child,
        tmp_path: Path,
        how: str,
        env: dict[str, str],
    ) -> None:
        """Each key has its phase, its group and the rank that writes it."""
        addresses: dict[str, Any] = {
            "file": tmp_path / "store",
            "store": tcp_server.next_report()["port"],
        }
        address = addresses.get(how) or free_port()

        job = Job(start_ranks(start_child, how, address, 3, **env))
        meanings = job.meanings()

        (hashed,) = {
            name for one in job.reports for name in one["groups"] if len(name) > 1
        }
        creations = {
            "0": "init_process_group",
            "1": "new_group 1",
            "2": "new_group 2",
            hashed: f"new_group {hashed}",
        }
        assert {name: job.members(name) for name in creations} == {
            "0": [0, 1, 2],
            "1": [0, 1, 2],
            "2": [1, 2],
            hashed: [0, 1],
        }
        gloo = {key: one for key, one in meanings.items() if one.protocol == "gloo"}
        names = {one.group_name for one in gloo.values()}
        assert names == {*creations, *([SPLIT] if has_split_group(env) else [])}
        for key, one in gloo.items():
            members = [0, 1, 2]
            if one.group_name == SPLIT:
                assert one.phase == f"split_group {SPLIT}"
            else:
                members = job.members(one.group_name)
                assert one.phase.startswith(creations[one.group_name])
            assert one.writers is not None
            assert {members[rank] for rank in one.writers} == job.written[key]
            assert job.waited[key] == set(members)
            assert one.group == key.rpartition("/")[0]
        wrapped = {one.phase for one in gloo.values() if "DETAIL" in one.phase}
        assert len(wrapped) == (4 if "TORCH_DISTRIBUTED_DEBUG" in env else 0)
        barriers = {
            one.phase: one
            for one in meanings.values()
            if one.protocol == "store_based_barrier"
        }
        assert set(meanings) - set(gloo) == {
            f"{one.group}:last_worker" for one in barriers.values()
        }
        if "TORCH_DIST_INIT_BARRIER" not in env:
            assert not barriers
            return
        assert {phase: one.group_name for phase, one in barriers.items()} == {
            "store-based barrier of group 0": "0",
            # All ranks call it, not only the members of the new group.
            "store-based barrier of group 1": "0",
            "store-based barrier of group 2": "0",
            f"store-based barrier of group {hashed}": hashed,
        }
        for one in barriers.values():
            assert one.counter is not None
            assert job.written[one.counter] == set(job.members(one.group_name))

    def test_rpc(self, start_child: StartChild) -> None:
        """The keys of init_rpc and of its shutdown."""
        job = Job(start_ranks(start_child, "rpc", free_port(), 2))

        meanings = job.meanings()

        assert {one.protocol for one in meanings.values()} == {"rpc"}
        phases = {one.phase for one in meanings.values()}
        assert phases == {"init_rpc", "rpc.shutdown"}
        for key, one in meanings.items():
            if one.writers is not None:
                assert set(one.writers) == job.written[key]
        without_writers = {key for key, one in meanings.items() if one.writers is None}
        ends = {key.rpartition("/")[2] for key in without_writers}
        assert {end for end in ends if not end.startswith(("READY", "ACTIVE"))} == {
            "worker0",
            "worker1",
        }


class TestBarriers:
    """Barriers with a key that the caller chooses."""

    def test_all(self, start_child: StartChild, tcp_server: Child) -> None:
        """Those of Store, elastic, _StoreCollectives and torch's checkpoints."""
        port = tcp_server.next_report()["port"]

        job = Job(start_ranks(start_child, "barriers", port, 2, free_port()))
        # An application may have keys of the form of those of `synchronize`.
        exchanged = [
            f"{name}/{rank}" for name in ("exchange", "end") for rank in (0, 1)
        ]
        meanings = job.meanings(*exchanged)

        expected = {
            "elastic/7/last_member": ("store_barrier", "barrier elastic/7"),
            "exchange//finished/last_member": (
                "store_barrier",
                "barrier exchange//finished",
            ),
            "end//finished/last_member": ("store_barrier", "barrier end//finished"),
            "missing//last_member": ("store_barrier", "barrier missing/"),
            "missing//TRACING_GATE": (
                "elastic_barrier",
                "missing ranks of barrier missing/",
            ),
            "missing/1/TRACE": ("elastic_barrier", "missing ranks of a barrier"),
            "missing/2/TRACE": ("elastic_barrier", "missing ranks of a barrier"),
        }
        expected["checkpoint0/last_member"] = (
            "store_barrier",
            "barrier checkpoint0",
        )
        if TORCH >= STORE_BARRIER:
            expected["prefix/sync/last_member"] = (
                "store_barrier",
                "barrier prefix/sync",
            )
        if TORCH < WITHOUT_COLLECTIVES:
            expected["collective/last_members"] = (
                "store_collectives",
                "barrier collective",
            )
        assert expected == {
            key: (one.protocol, one.phase) for key, one in meanings.items()
        }
        assert meanings["missing//TRACING_GATE"].writers == (0,)
        assert job.written["missing//TRACING_GATE"] == {0}
        if TORCH >= WITHOUT_COLLECTIVES:
            return
        sibling = meanings["collective/last_members"].sibling
        assert sibling is not None
        for rank in (0, 1):
            assert job.written[sibling.format(rank=rank)] == {rank}


class TestAgents:
    """Two agents of torchrun."""

    @pytest.mark.parametrize("backend", ["c10d", "static"])
    def test_keys(self, start_child: StartChild, backend: str) -> None:
        """The ranks are those of the agents."""
        address = f"127.0.0.1:{free_port()}"
        options = ["--nnodes", 2, "--monitor-interval", "0.1", "--rdzv-id", "a.7"]
        options += ["--rdzv-backend", backend, "--rdzv-endpoint", address]
        command = ["--no-python", "true"]
        agents = [
            start_child("store_keys_agent", *options, "--node-rank", rank, *command)
            for rank in range(2)
        ]

        job = Job(agents)
        meanings = job.meanings()

        assert all(one.agents for one in meanings.values())
        protocols = {"role_info", "assigned_ranks", "elastic_barrier"}
        if backend == "c10d":
            protocols |= {"master_address", "rendezvous_state"}
        assert {one.protocol for one in meanings.values()} == protocols
        # The rendezvous assigns the ranks of the agents in its own order.
        (first,) = job.written[role_key(meanings, 0)]
        ranks = {0: {first}, 1: {1 - first}}
        for key, one in meanings.items():
            if one.writers is not None:
                assert job.written[key] == ranks[one.writers[0]], key
            if one.protocol == "elastic_barrier":
                assert one.phase == "agents' exit barrier"


def role_key(meanings: dict[str, KeyMeaning], rank: int) -> str:
    """Return the key with the role of an agent."""
    siblings = {one.sibling for one in meanings.values() if one.protocol == "role_info"}
    (sibling,) = siblings
    assert sibling is not None
    return sibling.format(rank=rank)
