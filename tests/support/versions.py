"""The version of the installed torch, and marks for what some versions lack."""

import pytest
import torch

# Major and minor version.
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# The method of ProcessGroup; 2.8 lacks it.
SPLIT_GROUP = (2, 9)
LIST_KEYS = (2, 10)
DEBUG_SERVER = (2, 11)
STORE_BARRIER = (2, 12)
WITHOUT_COLLECTIVES = (2, 14)

needs_list_keys = pytest.mark.skipif(
    TORCH < LIST_KEYS, reason="stores list their keys from torch 2.10 on"
)
needs_debug_server = pytest.mark.skipif(
    TORCH < DEBUG_SERVER, reason="torch's debug server takes pages from torch 2.11 on"
)
needs_store_barrier = pytest.mark.skipif(
    TORCH < STORE_BARRIER, reason="Store.barrier exists from torch 2.12 on"
)
needs_collectives = pytest.mark.skipif(
    TORCH >= WITHOUT_COLLECTIVES, reason="torch 2.14 removed _StoreCollectives"
)
