"""The version of the installed torch, and marks for what some versions lack."""

import os
from collections.abc import Mapping

import pytest
import torch

# Major and minor version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

STORE_BARRIER = (2, 12)
# An agent that becomes rank 0 in a later round starts a server for the workers.
# Before, torch asserts that it has one.
SERVES_LATER_ROUNDS = (2, 13)
WITHOUT_COLLECTIVES = (2, 14)
# A rank counts every group that it creates, also those with hashed names.
COUNTS_ALL_GROUPS = (2, 14)


def has_split_group(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether groups of gloo have split_group.

    2.10 lacks it in the debug mode that wraps groups.
    """
    return environ.get("TORCH_DISTRIBUTED_DEBUG") != "DETAIL" or TORCH >= (2, 11)


needs_store_barrier = pytest.mark.skipif(
    TORCH < STORE_BARRIER, reason="Store.barrier exists from torch 2.12 on"
)
needs_collectives = pytest.mark.skipif(
    TORCH >= WITHOUT_COLLECTIVES, reason="torch 2.14 removed _StoreCollectives"
)
