"""etcd: a Store over the v3 API, and the requests inside torch's own EtcdStore (v2)."""

from tracedstore.etcd.etcd_errors import (
    EtcdDeniedError,
    EtcdError,
    EtcdLeaseError,
    EtcdOutcomeUnknownError,
    EtcdUnreachableError,
)
from tracedstore.etcd.etcd_v3_store import EtcdV3Store
from tracedstore.etcd.http_pool import Tls

__all__ = [
    "EtcdDeniedError",
    "EtcdError",
    "EtcdLeaseError",
    "EtcdOutcomeUnknownError",
    "EtcdUnreachableError",
    "EtcdV3Store",
    "Tls",
]
