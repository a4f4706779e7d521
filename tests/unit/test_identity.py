"""The identity of a store and of a process in telemetry."""

import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store

from support.stores import KINDS, tcp
from tracedstore.common.identity import ProcessIdentity, bottom_of, host_name, identify
from tracedstore.coordination import rank_registry


class TestStoreIdentity:
    """The identity has the store's kind, from its class, and its server."""

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
        """The kind is the class in snake case; the system has a `pytorch.` prefix."""
        identity = identify(KINDS[kind](tmp_path))

        assert identity.kind == expected
        assert identity.system == f"pytorch.{expected}"
        assert identity.in_process == (kind == "hash")

    def test_below_prefix_stores(self, tmp_path: Path) -> None:
        """bottom_of() returns the store below all PrefixStores."""
        store = tcp(tmp_path)

        assert bottom_of(PrefixStore("a", PrefixStore("b", store))) is store

    def test_server(self, tmp_path: Path) -> None:
        """The server is host:port, a path or empty."""
        store = tcp(tmp_path)
        file: Any = KINDS["file"](tmp_path)

        assert identify(store).server == f"127.0.0.1:{store.port}"
        assert identify(file).server == file.path
        assert identify(KINDS["hash"](tmp_path)).server == ""

    def test_etcd(self, etcd_store: Callable[[Path], Store], tmp_path: Path) -> None:
        """The system of an EtcdStore is `etcd` and its namespace the prefix."""
        store: Any = etcd_store(tmp_path)
        identity = identify(store)

        assert (identity.kind, identity.system) == ("etcd_store", "etcd")
        assert identity.namespace == store.prefix
        assert identity.server == f"127.0.0.1:{store.client.port}"

    def test_attributes_of_other_types(self) -> None:
        """A user's store whose host and port have other types has no server."""

        class MyHTTPStore(Store):
            host = 3
            port = "http"

        identity = identify(MyHTTPStore())

        assert (identity.kind, identity.server) == ("my_http_store", "")


class TestProcessIdentity:
    """The identity of the process, from the environment."""

    def test_torchrun(self) -> None:
        """The identity has the variables that torchrun sets."""
        identity = ProcessIdentity.from_environment(
            {
                "TORCHELASTIC_RUN_ID": "job",
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
                "TORCHELASTIC_RESTART_COUNT": "2",
            }
        )

        assert identity == ProcessIdentity("job", 5, 1, 8, 2)
        assert identity.fields()["host"] == socket.gethostname()

    def test_unknown(self) -> None:
        """Missing and malformed variables are omitted."""
        identity = ProcessIdentity.from_environment({"RANK": "x", "WORLD_SIZE": ""})

        assert identity == ProcessIdentity()
        assert set(identity.fields()) == {"host", "pid"}


class TestHostName:
    """The name of the host, in a pod and elsewhere."""

    def test_machine(self) -> None:
        """Outside of a pod it is the host name."""
        assert host_name({}) == socket.gethostname()

    def test_pod(self) -> None:
        """A pod is named with its node, as far as its manifest passes the names."""
        pod = {"TRACEDSTORE_POD_NAME": "train-2-x7f9k"}
        node = {"TRACEDSTORE_NODE_NAME": "gpu-17"}

        assert host_name(pod | node) == "train-2-x7f9k@gpu-17"
        assert host_name(pod) == "train-2-x7f9k"
        assert host_name(node) == f"{socket.gethostname()}@gpu-17"

    def test_registered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The registry entry of a rank in a pod is valid, and has both names."""
        monkeypatch.setenv("TRACEDSTORE_POD_NAME", "train-2-x7f9k")
        monkeypatch.setenv("TRACEDSTORE_NODE_NAME", "gpu-17.example")
        written = json.dumps(asdict(rank_registry.own_entry(2, 4)))
        entry = rank_registry.parse_entry(written.encode())

        assert entry is not None
        assert entry.host == "train-2-x7f9k@gpu-17.example"

    def test_long_names(self) -> None:
        """A name is bounded, because every event and entry carries it."""
        assert len(host_name({"TRACEDSTORE_POD_NAME": "p" * 5000})) == 256
