"""Barriers, names and diagnosis over EtcdV3Store."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import Store

import tracedstore
from integration.harness import in_background, in_threads, results, wait_until
from support.etcd import EtcdServer
from tracedstore import BarrierTimeout
from tracedstore.etcd import EtcdV3Store
from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.store_snapshot import connect

pytestmark = pytest.mark.etcd


@pytest.fixture
def store(etcd_v3_store: Callable[[Path], Store], tmp_path: Path) -> Any:
    """A store in a namespace of its own."""
    return etcd_v3_store(tmp_path)


class TestBarrier:
    """tracedstore.barrier on EtcdV3Store."""

    def test_completes(self, store: Any) -> None:
        """All ranks pass, each with a client of its own."""

        def rank(number: int) -> None:
            clone = tracedstore.wrap(store.clone())
            tracedstore.barrier(clone, 6, "step/1", 40, rank=number)

        assert results(in_threads(6, rank)) == [None] * 6

    def test_names_missing_ranks(self, store: Any) -> None:
        """The ledger, which is made of chunks, has the ranks that arrived."""

        def rank(number: int) -> BarrierTimeout:
            clone = tracedstore.wrap(store.clone())
            with pytest.raises(BarrierTimeout) as caught:
                tracedstore.barrier(clone, 5, "step/1", 3, rank=number)
            return caught.value

        errors = results(in_threads(3, rank))

        assert {error.missing_ranks for error in errors} == {(3, 4)}
        assert {error.arrived_ranks for error in errors} == {(0, 1, 2)}


class TestAddress:
    """etcd:// addresses of running jobs."""

    def test_blocked_barrier_is_read(
        self, etcd_server: EtcdServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """`status` shows a barrier, who arrived and who is missing."""
        from tracedstore.tools.cli.main import main

        namespace = f"status/{os.urandom(4).hex()}"
        make = partial(EtcdV3Store, etcd_server.address, namespace)
        arriving = [
            in_background(
                partial(tracedstore.barrier, make(), 3, "step/1", 40, rank=number)
            )
            for number in range(2)
        ]
        reader = make()
        wait_until(
            lambda: (
                reader.check(["step/1/num_members"])
                and reader.get("step/1/num_members") == b"2"
            )
        )

        main(["status", "--store", f"etcd://{etcd_server.address}/{namespace}"])
        shown = capsys.readouterr().out
        tracedstore.barrier(make(), 3, "step/1", 40, rank=2)
        for call in arriving:
            call.result(60)

        assert "step/1" in shown
        assert "2 of 3" in shown

    def test_writes_reach_the_job(self, etcd_server: EtcdServer) -> None:
        """A command that asks the ranks writes into the store of the job."""
        store = EtcdV3Store(etcd_server.address, "asked")
        store.set("k", "v")

        with connect(
            Address(f"etcd://{etcd_server.address}/asked"), for_writing=True
        ) as connection:
            connection.append("question", "?")

        assert store.get("question") == b"?"
