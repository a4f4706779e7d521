"""What a store and a process are called."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store

from support.stores import KINDS, tcp
from tracedstore.core.identity import ProcessIdentity, bottom_of, identify


class TestStoreIdentity:
    """A store is named by its class, and placed by what it says of itself."""

    @pytest.mark.parametrize(
        ("kind", "expected"),
        [
            ("tcp", "tcp_store"),
            ("tcp-legacy", "tcp_store"),
            ("file", "file_store"),
            ("hash", "hash_store"),
            ("python", "flaky_store"),
        ],
    )
    def test_kinds(self, kind: str, expected: str, tmp_path: Path) -> None:
        """Snake case, and OpenTelemetry's name has its owner in front."""
        identity = identify(KINDS[kind](tmp_path))

        assert identity.kind == expected
        assert identity.system == f"pytorch.{expected}"
        assert identity.in_process == (kind == "hash")

    def test_below_prefix_stores(self, tmp_path: Path) -> None:
        """A PrefixStore is not a kind: what is below it is."""
        store = tcp(tmp_path)

        assert bottom_of(PrefixStore("a", PrefixStore("b", store))) is store

    def test_server(self, tmp_path: Path) -> None:
        """host:port, a path, or nothing."""
        store = tcp(tmp_path)
        file: Any = KINDS["file"](tmp_path)

        assert identify(store).server == f"127.0.0.1:{store.port}"
        assert identify(file).server == file.path
        assert identify(KINDS["hash"](tmp_path)).server == ""

    def test_etcd(self, etcd_store: Callable[[Path], Store], tmp_path: Path) -> None:
        """Etcd is a product of its own name; the prefix is the namespace."""
        store: Any = etcd_store(tmp_path)
        identity = identify(store)

        assert (identity.kind, identity.system) == ("etcd_store", "etcd")
        assert identity.namespace == store.prefix
        assert identity.server == f"127.0.0.1:{store.client.port}"

    def test_a_store_that_says_strange_things(self) -> None:
        """Attributes of another type are a user's own business."""

        class MyHTTPStore(Store):
            host = 3
            port = "http"

        identity = identify(MyHTTPStore())

        assert (identity.kind, identity.server) == ("my_http_store", "")


class TestProcessIdentity:
    """What the environment says of the process."""

    def test_torchrun(self) -> None:
        """The variables torchrun sets."""
        identity = ProcessIdentity.from_environment(
            {
                "TORCHELASTIC_RUN_ID": "job",
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
            }
        )

        assert identity == ProcessIdentity("job", 5, 1, 8)
        assert identity.fields()["host"] == socket.gethostname()

    def test_nothing_known(self) -> None:
        """What is not known is left out; what is malformed is not ours to judge."""
        identity = ProcessIdentity.from_environment({"RANK": "x", "WORLD_SIZE": ""})

        assert identity == ProcessIdentity()
        assert set(identity.fields()) == {"host", "pid"}
