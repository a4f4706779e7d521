"""Fixtures of the contract suite: every kind of store, including etcd."""

from pathlib import Path

import pytest
from torch.distributed import HashStore, Store

from contract.harness import Make
from support.stores import KINDS, SHORT
from tracedstore.testing import FlakyStore


def _python(_folder: Path) -> Store:
    inner = HashStore()
    inner.set_timeout(SHORT)
    return FlakyStore(inner)


@pytest.fixture(params=[*KINDS, pytest.param("etcd", marks=pytest.mark.etcd)])
def kind(request: pytest.FixtureRequest) -> str:
    """The name of a kind of store; tests run once for each kind."""
    name: str = request.param
    return name


@pytest.fixture
def make(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Make:
    """Return a function that creates a new store of that kind."""
    if kind == "etcd":
        make = request.getfixturevalue("etcd_store")
    else:
        make = {**KINDS, "python": _python}[kind]
    # torch's C++ does not keep a Python store alive; this list does.
    made: list[Store] = []

    def make_and_keep() -> Store:
        made.append(make(tmp_path))
        return made[-1]

    return make_and_keep
