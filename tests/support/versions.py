"""The version of the installed torch, and marks for what some versions lack."""

import os
from collections.abc import Mapping
from importlib.util import find_spec

import pytest
import torch

# Major and minor version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

LIST_KEYS = (2, 10)
# A TCPStore connects again if another program answers. 2.8 fails at once; 2.9 was not
# tried.
RETRIES_FOREIGN = (2, 10)
# Gloo gives up a connection before a late rank arrives. That of 2.8 tries for so long
# that the group may come about; 2.9 was not tried.
GLOO_GIVES_UP = (2, 10)
STORE_BARRIER = (2, 12)
# An agent that becomes rank 0 in a later round starts a server for the workers.
# Before, torch asserts that it has one.
SERVES_LATER_ROUNDS = (2, 13)
WITHOUT_COLLECTIVES = (2, 14)
# A rank counts every group that it creates, also those with hashed names.
COUNTS_ALL_GROUPS = (2, 14)
# Torch 2.8 has no barrier of its checkpoints.
HAS_CHECKPOINT_BARRIER = (
    find_spec("torch.distributed.checkpoint._experimental") is not None
)


def has_split_group(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether groups of gloo have split_group.

    2.8 lacks it, and 2.10 in the debug mode that wraps groups.
    """
    in_detail = environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    first = (2, 11) if in_detail else (2, 9)
    return first <= TORCH


needs_list_keys = pytest.mark.skipif(
    TORCH < LIST_KEYS, reason="stores list their keys from torch 2.10 on"
)
needs_store_barrier = pytest.mark.skipif(
    TORCH < STORE_BARRIER, reason="Store.barrier exists from torch 2.12 on"
)
needs_collectives = pytest.mark.skipif(
    TORCH >= WITHOUT_COLLECTIVES, reason="torch 2.14 removed _StoreCollectives"
)
