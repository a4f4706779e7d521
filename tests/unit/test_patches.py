"""Taking torch's places and giving them back, in this very process."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    dynamic_rendezvous,
    rendezvous_handler_registry,
    static_tcp_rendezvous,
)
from torch.distributed.elastic.utils import distributed, store
from torch.distributed.rendezvous import _rendezvous_handlers as handlers

import tracedstore
from tracedstore.auto import patches


def in_torch() -> dict[str, Any]:
    """What stands in the places now."""
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    return {
        "env": handlers["env"],
        "tcp": handlers["tcp"],
        "file": handlers["file"],
        "groups": distributed_c10d._new_process_group_helper,
        "server": vars(handler)["_create_tcp_store_server"],
        "static": static_tcp_rendezvous.TCPStore,
        "c10d tcp": c10d_rendezvous_backend._create_tcp_store,
        "c10d file": c10d_rendezvous_backend._create_file_store,
        "c10d": rendezvous_handler_registry._registry["c10d"],
        "etcd-v2": rendezvous_handler_registry._registry["etcd-v2"],
        "barrier": store.barrier,
        "barrier's copy": distributed.barrier,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The places where both are the very same object."""
    return [name for name in one if one[name] is other[name]]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """What can be passed to it, and how."""
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


class TestTorch:
    """torch is changed in twelve places and nowhere else, and back."""

    def test_there_and_back(self) -> None:
        """All are taken, and the very same objects return."""
        before, public = in_torch(), dict(vars(dist))

        tracedstore.instrument()
        during = in_torch()
        public_during = dict(vars(dist))
        tracedstore.uninstrument()

        assert same(before, during) == []
        assert same(before, in_torch()) == list(before)
        # What jobs import by name is never touched.
        assert public_during == public

    def test_twice_is_once(self) -> None:
        """A second call changes nothing, and one uninstrument() takes it all back."""
        before = in_torch()
        tracedstore.instrument()
        once = in_torch()
        meta_path = list(sys.meta_path)

        tracedstore.instrument()
        again = in_torch()
        same_finders = sys.meta_path == meta_path
        tracedstore.uninstrument()
        tracedstore.uninstrument()

        assert same(once, again) == list(once)
        assert same_finders
        assert same(before, in_torch()) == list(before)

    def test_signatures_stay(self) -> None:
        """Whoever inspects them finds torch's."""
        before = {
            name: parameters(found)
            for name, found in in_torch().items()
            if name != "static"
        }

        tracedstore.instrument()
        found = in_torch()

        assert {name: parameters(found[name]) for name in before} == before

    def test_what_another_put_there_stays(self) -> None:
        """uninstrument() does not undo what came after instrument()."""
        original = handlers["file"]
        tracedstore.instrument()

        def somebody_elses(url: str, **_kwargs: Any) -> Iterator[Any]:
            yield url

        handlers["file"] = somebody_elses
        tracedstore.uninstrument()
        found, handlers["file"] = handlers["file"], original

        assert found is somebody_elses

    def test_a_kept_shim_does_nothing(self, tmp_path: Path) -> None:
        """What was taken from a place meanwhile works on, untraced."""
        tracedstore.instrument()
        kept = handlers["file"]
        tracedstore.uninstrument()

        url = f"file://{tmp_path / 'store'}?rank=0&world_size=1"
        found, rank, world_size = next(kept(url))

        assert type(found) is dist.FileStore
        assert (rank, world_size) == (0, 1)

    def test_a_package_that_is_broken(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Where the rest cannot be loaded, torch is left alone, and that is told."""
        before = in_torch()
        monkeypatch.delattr("tracedstore.auto.replacements", raising=False)
        monkeypatch.setitem(sys.modules, "tracedstore.auto.replacements", None)
        tracedstore.instrument()

        url = f"file://{tmp_path / 'store'}"
        stores = [next(dist.rendezvous(url, 0, 1))[0] for _ in range(2)]

        assert [type(found) for found in stores] == [dist.FileStore] * 2
        assert same(before, in_torch()) == list(before)
        (record,) = caplog.records
        assert "telemetry.disabled: torch is left as it is" in record.getMessage()

    def test_errors_are_torchs(self, tmp_path: Path) -> None:
        """A bad URL fails with torch's words, and the second turn does too."""
        tracedstore.instrument()
        with pytest.raises(ValueError, match="tcp:// rendezvous: port number missing"):
            next(dist.rendezvous("tcp://127.0.0.1", 0, 1))

        found = dist.rendezvous(f"file://{tmp_path / 'store'}", 0, 1)
        next(found)
        with pytest.raises(RuntimeError, match="rerendezvous using file://"):
            next(found)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported and has not been."""
    name = "waited_for_by_a_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


class TestWaiting:
    """Something is done when a module has been imported, and nothing before."""

    def test_after_it_is_complete(self, package: str) -> None:
        """It is called once, with the module as its importer gets it."""
        seen: list[tuple[ModuleType, int]] = []
        patches.when_imported(
            package, lambda module: seen.append((module, module.value))
        )
        assert seen == []

        module = importlib.import_module(package)
        importlib.reload(module)

        assert seen == [(module, 1)]
        assert patches._finder not in sys.meta_path

    def test_at_once_if_it_is_there(self, package: str) -> None:
        """A module that was imported before is not waited for."""
        module = importlib.import_module(package)
        seen: list[ModuleType] = []

        patches.when_imported(package, seen.append)

        assert seen == [module]
        assert patches._finder not in sys.meta_path

    def test_only_looking_for_it_is_not_importing_it(self, package: str) -> None:
        """Many programs ask whether a module exists before they import it."""
        seen: list[ModuleType] = []
        patches.when_imported(package, seen.append)

        assert importlib.util.find_spec(package) is not None
        assert seen == []

        module = importlib.import_module(package)
        assert seen == [module]

    def test_leaves_no_trace(self, package: str) -> None:
        """The module's loader is as it always was."""
        plain = importlib.util.find_spec(package)
        patches.when_imported(package, lambda _module: None)

        module = importlib.import_module(package)

        assert plain is not None
        assert module.__spec__ is not None
        assert type(module.__spec__.loader) is type(plain.loader)
        assert module.__loader__ is module.__spec__.loader
        assert "value = 1" in inspect.getsource(module)

    def test_a_module_that_fails(self, package: str, tmp_path: Path) -> None:
        """Its error is its importer's, and it is waited for still."""
        source = tmp_path / f"{package}.py"
        source.write_text("raise RuntimeError('not today')\n")
        seen: list[ModuleType] = []
        patches.when_imported(package, seen.append)

        with pytest.raises(RuntimeError, match="not today"):
            importlib.import_module(package)
        source.write_text("value = 'another day'\n")
        importlib.invalidate_caches()
        module = importlib.import_module(package)

        assert seen == [module]

    def test_a_module_that_does_not_exist(self) -> None:
        """Python says so, as always."""
        patches.when_imported("no_such_module_at_all", lambda _module: None)

        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            importlib.import_module("no_such_module_at_all")
