"""One agent of torchrun that reports every Store call that torch makes.

Arguments: those of torchrun.
"""

import sys
from typing import Any

from torch.distributed.elastic.rendezvous import (
    c10d_rendezvous_backend,
    static_tcp_rendezvous,
)
from torch.distributed.run import main

import tracedstore
from integration.harness import report
from tracedstore.testing import OperationLog


def trace_results(module: Any, name: str) -> None:
    """Wrap the stores that a function of torch returns."""
    original = getattr(module, name)
    setattr(
        module,
        name,
        lambda *args, **kwargs: tracedstore.wrap(original(*args, **kwargs)),
    )


if __name__ == "__main__":
    log = OperationLog()
    # Every call is slow, and so reaches the observer. torch's own barrier stays.
    tracedstore.configure(observers=[log], slow_after=0, log_format="off")
    trace_results(c10d_rendezvous_backend, "_create_tcp_store")
    trace_results(static_tcp_rendezvous, "TCPStore")
    main(sys.argv[1:])
    report(calls=[(call.method.name, call.keys) for call in log.operations])
