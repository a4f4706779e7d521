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


def traced_etcd() -> Any:
    """Return the factory for ``--rdzv-backend traced-etcd``, over etcd's v3 API."""
    return _create_etcd


def _create_c10d(params: Any) -> Any:
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        c10d_rendezvous_backend as c10d,
    )

    return _create(params, c10d.create_backend, getattr(c10d, "DEFAULT_PORT", 29400))


def _create_etcd_v2(params: Any) -> Any:
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        etcd_rendezvous_backend as etcd_v2,
    )

    return _create(params, etcd_v2.create_backend, 2379)


def _create_etcd(params: Any) -> Any:
    from tracedstore.rendezvous.etcd_v3 import create_backend  # noqa: PLC0415

    return _create(params, create_backend, 2379)


def _create(params: Any, create_backend: Any, default_port: int) -> Any:
    try:
        from tracedstore.rendezvous.handlers import create  # noqa: PLC0415
    except (
        ImportError
    ) as error:  # torch has moved a name: the job must start all the same
        from tracedstore import names  # noqa: PLC0415
        from tracedstore.recording.recorder import RECORDER  # noqa: PLC0415

        RECORDER.failures.add(names.RENDEZVOUS, error)
        return create_untraced(params, create_backend)
    return create(params, create_backend, default_port)


def create_untraced(params: Any, create_backend: Any) -> Any:
    """Return torch's own handler, under the name that was given to torchrun."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (  # noqa: PLC0415
        create_handler,
    )

    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    # torch requires the name that it looked up.
    vars(handler)["get_backend"] = lambda: params.backend
    return handler


# By the name of torch's backend that each one replaces.
CREATORS = {"c10d": _create_c10d, "etcd-v2": _create_etcd_v2}
