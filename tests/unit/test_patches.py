"""Patching torch and restoring it, in this process."""

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


def patched_names() -> dict[str, Any]:
    """Return the current objects at all patch targets."""
    handler = dynamic_rendezvous.DynamicRendezvousHandler
    return {
        "env": handlers["env"],
        "tcp": handlers["tcp"],
        "file": handlers["file"],
        "groups": distributed_c10d._new_process_group_helper,
        "init barrier": distributed_c10d._store_based_barrier,
        "server": vars(handler)["_create_tcp_store_server"],
        "static": static_tcp_rendezvous.TCPStore,
        "c10d tcp": c10d_rendezvous_backend._create_tcp_store,
        "c10d file": c10d_rendezvous_backend._create_file_store,
        "c10d": rendezvous_handler_registry._registry["c10d"],
        "etcd-v2": rendezvous_handler_registry._registry["etcd-v2"],
        "barrier": store.barrier,
        "barrier copy": distributed.barrier,
    }


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the targets with the same object in both."""
    return [name for name in before if before[name] is after[name]]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of the parameters."""
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


class TestTorch:
    """Thirteen functions of torch are replaced, and restored."""

    def test_instrument_and_uninstrument(self) -> None:
        """All targets are replaced, and the same objects are restored."""
        before, public = patched_names(), dict(vars(dist))

        tracedstore.instrument()
        during = patched_names()
        public_during = dict(vars(dist))
        tracedstore.uninstrument()

        assert unchanged(before, during) == []
        assert unchanged(before, patched_names()) == list(before)
        # The names that jobs import are not changed.
        assert public_during == public

    def test_second_call(self) -> None:
        """A second call has no effect, and one uninstrument() restores all."""
        before = patched_names()
        tracedstore.instrument()
        once = patched_names()
        meta_path = list(sys.meta_path)

        tracedstore.instrument()
        again = patched_names()
        same_finders = sys.meta_path == meta_path
        tracedstore.uninstrument()
        tracedstore.uninstrument()

        assert unchanged(once, again) == list(once)
        assert same_finders
        assert unchanged(before, patched_names()) == list(before)

    def test_signatures(self) -> None:
        """The shims have the signatures of torch's functions."""
        before = {
            name: parameters(function)
            for name, function in patched_names().items()
            if name != "static"
        }

        tracedstore.instrument()
        shims = patched_names()

        assert {name: parameters(shims[name]) for name in before} == before

    def test_patch_of_another_library(self) -> None:
        """uninstrument() keeps a patch that was installed after instrument()."""
        original = handlers["file"]
        tracedstore.instrument()

        def other_handler(url: str, **_kwargs: Any) -> Iterator[Any]:
            yield url

        handlers["file"] = other_handler
        tracedstore.uninstrument()
        handler, handlers["file"] = handlers["file"], original

        assert handler is other_handler

    def test_shim_after_uninstrument(self, tmp_path: Path) -> None:
        """A shim that was referenced before calls torch's original."""
        tracedstore.instrument()
        kept = handlers["file"]
        tracedstore.uninstrument()

        url = f"file://{tmp_path / 'store'}?rank=0&world_size=1"
        created, rank, world_size = next(kept(url))

        assert type(created) is dist.FileStore
        assert (rank, world_size) == (0, 1)

    def test_package_cannot_be_loaded(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """If the package cannot be loaded, that is logged and torch is restored."""
        before = patched_names()
        monkeypatch.delattr("tracedstore.auto.replacements", raising=False)
        monkeypatch.setitem(sys.modules, "tracedstore.auto.replacements", None)
        tracedstore.instrument()

        url = f"file://{tmp_path / 'store'}"
        stores = [next(dist.rendezvous(url, 0, 1))[0] for _ in range(2)]

        assert [type(store) for store in stores] == [dist.FileStore] * 2
        assert unchanged(before, patched_names()) == list(before)
        (record,) = caplog.records
        assert "telemetry.disabled: torch is not instrumented: " in record.getMessage()

    def test_errors(self, tmp_path: Path) -> None:
        """A bad URL and a second rendezvous raise torch's errors."""
        tracedstore.instrument()
        with pytest.raises(ValueError, match="tcp:// rendezvous: port number missing"):
            next(dist.rendezvous("tcp://127.0.0.1", 0, 1))

        results = dist.rendezvous(f"file://{tmp_path / 'store'}", 0, 1)
        next(results)
        with pytest.raises(RuntimeError, match="rerendezvous using file://"):
            next(results)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that has not been imported."""
    name = "module_of_a_test"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


class TestWhenImported:
    """Actions run after the import of a module."""

    def test_after_the_import(self, package: str) -> None:
        """The action runs once, with the complete module."""
        seen: list[tuple[ModuleType, int]] = []
        patches.when_imported(
            package, lambda module: seen.append((module, module.value))
        )
        assert seen == []

        module = importlib.import_module(package)
        importlib.reload(module)

        assert seen == [(module, 1)]
        assert patches._import_hook not in sys.meta_path

    def test_imported_before(self, package: str) -> None:
        """The action runs at once, without an import hook."""
        module = importlib.import_module(package)
        seen: list[ModuleType] = []

        patches.when_imported(package, seen.append)

        assert seen == [module]
        assert patches._import_hook not in sys.meta_path

    def test_find_spec_only(self, package: str) -> None:
        """Checking whether a module exists does not run the action."""
        seen: list[ModuleType] = []
        patches.when_imported(package, seen.append)

        assert importlib.util.find_spec(package) is not None
        assert seen == []

        module = importlib.import_module(package)
        assert seen == [module]

    def test_loader(self, package: str) -> None:
        """The imported module has its own loader."""
        plain = importlib.util.find_spec(package)
        patches.when_imported(package, lambda _module: None)

        module = importlib.import_module(package)

        assert plain is not None
        assert module.__spec__ is not None
        assert type(module.__spec__.loader) is type(plain.loader)
        assert module.__loader__ is module.__spec__.loader
        assert "value = 1" in inspect.getsource(module)

    def test_import_fails(self, package: str, tmp_path: Path) -> None:
        """The error is raised, and the action runs after a later import."""
        source = tmp_path / f"{package}.py"
        source.write_text("raise RuntimeError('first import')\n")
        seen: list[ModuleType] = []
        patches.when_imported(package, seen.append)

        with pytest.raises(RuntimeError, match="first import"):
            importlib.import_module(package)
        source.write_text("value = 'second import'\n")
        importlib.invalidate_caches()
        module = importlib.import_module(package)

        assert seen == [module]

    def test_no_such_module(self) -> None:
        """Python's ModuleNotFoundError is raised."""
        patches.when_imported("no_such_module_at_all", lambda _module: None)

        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            importlib.import_module("no_such_module_at_all")
