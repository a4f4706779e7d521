"""etcd: a Store over the v3 API, and the requests inside torch's own EtcdStore (v2)."""

from tracedstore.etcd.endpoints import Tls
from tracedstore.etcd.errors import (
    EtcdDeniedError,
    EtcdError,
    EtcdLeaseError,
    EtcdOutcomeUnknownError,
    EtcdUnreachableError,
)
from tracedstore.etcd.store import EtcdV3Store

__all__ = [
    "EtcdDeniedError",
    "EtcdError",
    "EtcdLeaseError",
    "EtcdOutcomeUnknownError",
    "EtcdUnreachableError",
    "EtcdV3Store",
    "Tls",
]
