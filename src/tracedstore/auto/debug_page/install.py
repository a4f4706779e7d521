"""Put the page into torch's debug server, which is private and may change.

Where it cannot be, one sentence says why, and the job goes on without it.

torch's own worker server takes handlers in Python too, and is not used for what ranks
answer: it counts references to them without the GIL (measured on 2.13: four clients
crash the process within seconds), its shutdown waits for them with the GIL held, and
one that is asked while the interpreter ends aborts the process. A thread of Python's
has none of that.
"""

import importlib
import inspect
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tracedstore import names
from tracedstore.coordination import rank_registry
from tracedstore.coordination.arrivals import close_connection
from tracedstore.core.errors import TracedStoreError
from tracedstore.core.recorder import RECORDER
from tracedstore.export import process_status, server
from tracedstore.export.setup import ensure_configured

if TYPE_CHECKING:
    from torch.distributed.debug._frontend import DebugHandler

_HANDLERS = "handlers"
_answering: server.Server | None = None


def add(handlers: "Sequence[DebugHandler] | None" = None) -> dict[str, Any]:
    """Make this rank answer, and give ``start_debug_server`` the page.

    To be called on every rank, with torch's rank and store in the environment as
    ``start_debug_server`` needs them itself:

        start_debug_server(**debug_page.add())

    A rank that does not call it is shown as one without this page.

    Args:
        handlers: The other pages, instead of torch's own.

    Returns:
        The arguments for ``start_debug_server``. Where the page cannot be had, they
        are without it, and `telemetry.disabled` says why.
    """
    given = {} if handlers is None else {_HANDLERS: list(handlers)}
    ensure_configured()
    try:
        _register()
        if os.environ["RANK"] != "0":
            return given
        others = _others(handlers)
        # After Home: torch's menu is wider than a screen.
        return {_HANDLERS: [*others[:1], _page(), *others[1:]]}
    except Exception as error:
        RECORDER.failures.add(names.DEBUG_PAGE, _explained(error))
        return given


def _register() -> None:
    """Answer from now on, and say where."""
    global _answering  # noqa: PLW0603 - one a process
    found = _torchs("_store")
    store, rank = found.tcpstore_client(), found.get_rank()
    if _answering is None:
        _answering = _answer()
    address = f"{socket.gethostname()}:{_answering.port}"
    try:
        rank_registry.register(store, rank, found.get_world_size(), answers=address)
    finally:
        close_connection(store)


def _answer() -> server.Server:
    """Answer whoever asks; as open as torch's worker server is."""
    page = {"/": process_status.page}
    try:
        answering = server.Server(page, "::", 0)  # takes IPv4 as well
    except OSError:
        answering = server.Server(page, "0.0.0.0", 0)  # noqa: S104 - asked from afar
    # A child has the socket and not the thread: it would take questions and never
    # answer them, also when this process is long gone.
    os.register_at_fork(after_in_child=answering.reset)
    return answering


def _others(handlers: "Sequence[DebugHandler] | None") -> "Sequence[DebugHandler]":
    if handlers is not None:
        return handlers
    found: list[DebugHandler] = _torchs("_debug_handlers").default_handlers()
    return found


def _page() -> "DebugHandler":
    from torch.distributed.debug import start_debug_server  # noqa: PLC0415

    if _HANDLERS not in inspect.signature(start_debug_server).parameters:
        raise TracedStoreError("start_debug_server takes no handlers")
    # Not before: it needs packages that only torch's frontend does.
    from tracedstore.auto.debug_page.handler import StoreHandler  # noqa: PLC0415

    return StoreHandler()


def _torchs(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.debug.{module}")


def _explained(error: Exception) -> TracedStoreError:
    """Say in one sentence why there is no page, and what to do."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if package != "torch":
            return TracedStoreError(
                f"torch's debug server needs the package {package}, which is not"
                f" installed: pip install {package}"
            )
    if isinstance(error, KeyError):
        return TracedStoreError(
            f"torch's debug server needs the variable {error.args[0]}, which is not"
            " set: start the job with torchrun, or set it"
        )
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, (ImportError, AttributeError, TypeError, TracedStoreError)):
        reason = f"that of torch {torch.__version__} is not as in 2.13 ({reason})"
    return TracedStoreError(f"no page in torch's debug server: {reason}")
