"""Second connections to the servers of real stores."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

import tracedstore
from support.stores import tcp
from tracedstore import store as store_module
from tracedstore.coordination.store_access import side_connection


class TestSideConnection:
    """A side connection does not block while another thread waits on the store."""

    @pytest.mark.parametrize(
        "shape",
        [
            lambda store: store,
            tracedstore.wrap,
            lambda store: PrefixStore("p", tracedstore.wrap(store)),
            lambda store: tracedstore.wrap(PrefixStore("p", store)),
        ],
        ids=["bare", "wrapped", "under-prefix", "over-prefix"],
    )
    def test_tcp_store(self, shape: Callable[[Any], Any], tmp_path: Path) -> None:
        """During a wait on a TCPStore, the side connection reads and writes."""
        tracedstore.configure(log_format="off")
        server = tcp(tmp_path)
        store = shape(server)
        store.set("existing", "x")
        kept = len(store_module._kept_alive)
        waiter = threading.Thread(
            target=store.wait, args=(["later"], timedelta(seconds=20))
        )
        waiter.start()
        with side_connection(store) as connection:
            assert connection is not store
            assert connection.check(["existing"])
            connection.set("later", "x")
        waiter.join(60)

        assert not waiter.is_alive()
        assert len(store_module._kept_alive) == kept

    def test_other_stores(self) -> None:
        """A store without a connection lock is used itself."""
        store = HashStore()

        with side_connection(store) as connection:
            assert connection is store
