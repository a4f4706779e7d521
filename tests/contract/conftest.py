"""Fixtures of the contract suite: every kind of store, on both recording bases."""

from pathlib import Path

import pytest
from torch.distributed import HashStore, Store

from contract.harness import Make
from support.native import use_core
from support.stores import KINDS, SHORT
from tracedstore.testing import FlakyStore

# Stores written in Python: the Python base records them, whatever is set.
_PYTHON_KINDS = {"python", "etcd", "etcd-v3"}


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Deselect the native base for kinds of stores that it does not record."""

    def is_for_native(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        return params.get("core") == "native" and params.get("kind") in _PYTHON_KINDS

    config.hook.pytest_deselected(items=[item for item in items if is_for_native(item)])
    items[:] = [item for item in items if not is_for_native(item)]


@pytest.fixture(params=["python", "native"], autouse=True)
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recording base; tests run once for each base."""
    return use_core(request.param, monkeypatch)


def _python(_folder: Path) -> Store:
    inner = HashStore()
    inner.set_timeout(SHORT)
    return FlakyStore(inner)


_IN_ETCD = {"etcd": "etcd_store", "etcd-v3": "etcd_v3_store"}


@pytest.fixture(
    params=[
        *KINDS,
        *(pytest.param(name, marks=pytest.mark.etcd) for name in _IN_ETCD),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a kind of store; tests run once for each kind."""
    name: str = request.param
    return name


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Make:
    """Return a function that creates a new store of that kind."""
    if kind in _IN_ETCD:
        make = request.getfixturevalue(_IN_ETCD[kind])
    else:
        make = {**KINDS, "python": _python}[kind]
    # torch's C++ does not keep a Python store alive; this list does.
    made: list[Store] = []

    def make_and_keep() -> Store:
        made.append(make(tmp_path))
        return made[-1]

    return make_and_keep
