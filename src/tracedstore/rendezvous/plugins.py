"""The entry points of the group ``torchrun.handlers``.

torch loads them while it imports elastic's rendezvous, possibly during the import of
tracedstore's. So this module imports nothing before a handler is created.
"""

from typing import Any


def traced_c10d() -> Any:
    """Return the factory for ``--rdzv-backend traced-c10d``."""
    return _create_c10d


def traced_etcd_v2() -> Any:
    """Return the factory for ``--rdzv-backend traced-etcd-v2``."""
    return _create_etcd_v2


def _create_c10d(params: Any) -> Any:
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        c10d_rendezvous_backend as c10d,
    )

    from tracedstore.rendezvous.handlers import create  # noqa: PLC0415

    return create(params, c10d.create_backend, c10d.DEFAULT_PORT)


def _create_etcd_v2(params: Any) -> Any:
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        etcd_rendezvous_backend as etcd_v2,
    )

    from tracedstore.rendezvous.handlers import create  # noqa: PLC0415

    return create(params, etcd_v2.create_backend, 2379)


# By the name of torch's backend that each one replaces.
CREATORS = {"c10d": _create_c10d, "etcd-v2": _create_etcd_v2}
