"""A torch without a name that the package uses: one report, and the rest works."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,  # noqa: F401 - has patch targets
    dynamic_rendezvous,
    rendezvous_handler_registry,
    static_tcp_rendezvous,  # noqa: F401 - has a patch target
)
from torch.distributed.elastic.rendezvous import utils as rendezvous_utils
from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore
from torch.distributed.elastic.utils import store as torch_store

import tracedstore
from integration.harness import in_background
from support.rendezvous import handler, new_run_id
from support.stores import tcp
from tracedstore.auto import patches
from tracedstore.common.errors import TracedStoreError
from tracedstore.coordination.store_access import etcd_contents, side_connection
from tracedstore.recording.operation import METHODS
from tracedstore.recording.recorder import RECORDER

Events = Callable[[], list[dict[str, Any]]]


def reports(events: Events) -> list[str]:
    """Return the errors of the telemetry.disabled events so far."""
    found = [one for one in events() if one["event"] == "telemetry.disabled"]
    return [str(one["error"]) for one in found]


def missing(name: str) -> str:
    """Return the beginning of the report of a missing name."""
    return f"torch {torch.__version__} has no {name}: "


def run_without(names: str, script: str) -> str:
    """Run a script in a process where Store has no such attributes; return stdout."""
    removal = (
        "import sys\n"
        "from torch.distributed import *\n"
        "from torch.distributed import Store, PrefixStore, HashStore, TCPStore\n"
        f"for name in {names.split()}:\n"
        "    if name in vars(Store):\n"
        "        delattr(Store, name)\n"
        "import tracedstore\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", removal + script],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class TestStore:
    """Methods and properties of torch's stores."""

    @pytest.mark.parametrize("name", [*(method.name for method in METHODS), "timeout"])
    def test_same_attributes(self, name: str) -> None:
        """A traced store has an attribute if the bare class has it."""
        assert hasattr(tracedstore.TracedStore, name) == hasattr(dist.Store, name)

    def test_old_store(self) -> None:
        """Without newer methods a traced store lacks them too, and works."""
        gone = (
            "clone list_keys barrier queue_push queue_pop queue_len multi_get multi_set"
            " append delete_key num_keys"
        )
        script = (
            "store = tracedstore.wrap(HashStore())\n"
            "store.set('k', 'v')\n"
            "above = PrefixStore('p', store)\n"
            "above.set('k', 'w')\n"
            "print(store.get('k'), above.get('k'), store.get('p/k'))\n"
            f"names = {gone.split()}\n"
            "print([n for n in names if hasattr(tracedstore.TracedStore, n)])\n"
            "print([n for n in names if hasattr(store, n)])\n"
        )

        out = run_without(gone, script)

        assert out.splitlines() == ["b'v' b'w' b'w'", "[]", "[]"]

    @pytest.mark.parametrize("core", ["python"], indirect=True)
    def test_timeout(self, core: str) -> None:
        """Without Store.timeout, the timeout set on the wrapper is the inner one's."""
        script = (
            "from datetime import timedelta\n"
            "stores = [tracedstore.wrap(HashStore()) for _ in range(2)]\n"
            "stores[0].set_timeout(timedelta(milliseconds=50))\n"
            "print(hasattr(tracedstore.TracedStore, 'timeout'))\n"
            "try:\n"
            "    stores[0].get('never')\n"
            "except DistStoreError as error:\n"
            "    print(str(error).splitlines()[0])\n"
        )

        out = run_without("timeout", script)

        assert "False\n" in out
        assert "Wait timeout" in out
        assert out.count(missing("Store.timeout")) == 1

    def test_underlying_store(
        self, monkeypatch: pytest.MonkeyPatch, events: Events, tmp_path: Path
    ) -> None:
        """Without PrefixStore.underlying_store, a PrefixStore is wrapped as it is."""
        monkeypatch.delattr(dist.PrefixStore, "underlying_store")
        tracedstore.configure()
        server = tcp(tmp_path)

        stores = [tracedstore.wrap(dist.PrefixStore("p", server)) for _ in range(2)]
        stores[0].set("k", "v")

        assert server.get("p/k") == b"v"
        (error,) = reports(events)
        assert error.startswith(missing("PrefixStore.underlying_store"))
        waiting = in_background(lambda: stores[0].wait(["go"], timedelta(seconds=30)))
        with side_connection(stores[0]) as connection:
            assert connection.check(["k"])
            connection.set("go", "")
        waiting.result(60)


class TestClone:
    """Connections beside the one that waits, in a torch without Store.clone."""

    @pytest.fixture(autouse=True)
    def without_clone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Remove the method from torch's stores and from the traced ones."""
        for each in (dist.Store, tracedstore.TracedStore, *METHOD_OWNERS):
            monkeypatch.delattr(each, "clone", raising=False)

    @pytest.mark.parametrize("wrapped", [True, False])
    def test_new_connection(self, tmp_path: Path, wrapped: bool) -> None:
        """A store is read through a new connection while another thread waits."""
        store: Any = tcp(tmp_path)
        if wrapped:
            store = tracedstore.wrap(store)
        waiting = in_background(lambda: store.wait(["go"], timedelta(seconds=30)))

        with side_connection(store) as connection:
            assert connection is not store
            connection.set("go", "")

        waiting.result(60)

    def test_early_warning(self, tmp_path: Path, events: Events) -> None:
        """A barrier warns while it waits."""
        tracedstore.configure()
        store = tracedstore.wrap(tcp(tmp_path))

        with pytest.raises(tracedstore.BarrierTimeout):
            tracedstore.barrier(store, 2, "b", 3, rank=0, warn_after=0.1)

        warnings = [one for one in events() if one["event"] == "barrier.waiting"]
        assert warnings[0]["missing_ranks"] == [1]

    @pytest.mark.parametrize("outside", [True, False])
    def test_below_a_prefix(self, tmp_path: Path, outside: bool) -> None:
        """A PrefixStore, whose prefix is unknown, is reported."""
        store = tcp(tmp_path)
        chain = (
            tracedstore.wrap(dist.PrefixStore("p", store))
            if outside
            else dist.PrefixStore("p", tracedstore.wrap(store))
        )

        with (
            pytest.raises(TracedStoreError, match=r"has no Store\.clone: "),
            side_connection(chain),
        ):
            pass


# Where `clone` may be defined.
METHOD_OWNERS = tracedstore.TracedStore.__mro__[1:]


class TestEtcdStore:
    """The attribute through which an EtcdStore makes its requests."""

    def test_client(self, events: Events) -> None:
        """Without it, requests are not counted and keys are not listed."""

        class Renamed(EtcdStore):
            def __init__(self) -> None:
                dist.Store.__init__(self)

        Renamed.__name__ = "EtcdStore"
        tracedstore.configure()

        stores = [tracedstore.wrap(Renamed()) for _ in range(2)]

        (error,) = reports(events)
        assert error.startswith(missing("EtcdStore.client"))
        assert etcd_contents(stores[0]) is None


class TestPatchTargets:
    """The functions that instrument() replaces."""

    @pytest.fixture(autouse=True)
    def nothing_logged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Forget the names that another test logged."""
        monkeypatch.setattr(patches, "_missing", set())

    @pytest.mark.parametrize(
        "target", patches.PATCH_TARGETS, ids=lambda one: f"{one.owner}.{one.name}"
    )
    def test_one_is_missing(
        self,
        target: patches.PatchTarget,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """It is logged once, and the others are replaced."""
        owner: Any = importlib.import_module(target.module)
        for name in target.owner.split(".") if target.owner else ():
            owner = getattr(owner, name)
        if isinstance(owner, dict):
            monkeypatch.delitem(owner, target.name)
        else:
            monkeypatch.delattr(owner, target.name)

        for _ in range(2):
            tracedstore.instrument()
            installed = len(patches._installed)
            tracedstore.uninstrument()

        assert installed == len(patches.PATCH_TARGETS) - 1
        (record,) = caplog.records
        parts = (target.module, target.owner, target.name)
        name = ".".join(filter(None, parts))
        assert record.getMessage() == (
            f"telemetry.disabled: {missing(name)}its stores are not traced"
        )

    def test_handlers(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        tmp_path: Path,
    ) -> None:
        """Without the table of handlers, a store stays bare."""
        torch_rendezvous = sys.modules["torch.distributed.rendezvous"]
        handlers = torch_rendezvous._rendezvous_handlers
        monkeypatch.delattr(torch_rendezvous, "_rendezvous_handlers")
        tracedstore.instrument()
        patches.register_init_methods()
        monkeypatch.setattr(
            torch_rendezvous, "_rendezvous_handlers", handlers, raising=False
        )

        store, *_ = next(dist.rendezvous(f"file://{tmp_path / 'store'}", 0, 1))

        assert type(store) is dist.FileStore
        (record,) = caplog.records
        assert "has no torch.distributed.rendezvous._rendezvous_handlers: " in (
            record.getMessage()
        )

    def test_barrier(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without torch's barrier, that is logged and the rest is instrumented."""
        monkeypatch.delattr(torch_store, "barrier")

        tracedstore.instrument()

        assert patches._installed
        assert missing(f"{torch_store.__name__}.barrier") in caplog.text
        assert "barriers of torch do not name missing ranks" in caplog.text


class TestRendezvousHandler:
    """The private parts of torch's dynamic rendezvous handler."""

    @pytest.mark.parametrize("name", ["_get_store", "settings"])
    def test_name(
        self,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
        events: Events,
        tmp_path: Path,
    ) -> None:
        """It is reported once; the rendezvous times out as it does in torch."""
        monkeypatch.delattr(dynamic_rendezvous.DynamicRendezvousHandler, name)
        tracedstore.configure()
        endpoint = str(tmp_path / "store")

        for _ in range(2):
            joining = handler(
                "traced-c10d",
                endpoint,
                new_run_id(),
                store_type="file",
                join_timeout=1,
            )
            with pytest.raises(dynamic_rendezvous.RendezvousTimeoutError):
                joining.next_rendezvous()

        found = [one for one in reports(events) if "DynamicRendezvousHandler" in one]
        assert len(found) == 1
        assert found[0].startswith(missing(f"DynamicRendezvousHandler.{name}"))

    def test_import(
        self, monkeypatch: pytest.MonkeyPatch, events: Events, tmp_path: Path
    ) -> None:
        """If a name cannot be imported, the handler is torch's own."""
        monkeypatch.delattr(rendezvous_utils, "parse_rendezvous_endpoint")
        for module in ("handlers", "endpoint"):
            name = f"tracedstore.rendezvous.{module}"
            monkeypatch.delitem(sys.modules, name, raising=False)
            monkeypatch.delattr(name, raising=False)
        tracedstore.configure()

        created = handler(
            "traced-c10d", str(tmp_path / "store"), new_run_id(), store_type="file"
        )

        assert type(created) is dynamic_rendezvous.DynamicRendezvousHandler
        assert created.get_backend() == "traced-c10d"
        assert "parse_rendezvous_endpoint" in "".join(reports(events))
        assert RECORDER.failures.counts() == {"rendezvous": 1}
        assert "traced-c10d" in rendezvous_handler_registry._registry
