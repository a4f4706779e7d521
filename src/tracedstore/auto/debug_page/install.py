"""Adds the page to torch's debug server, whose modules are private and may change.

If that fails, one `telemetry.disabled` event has the reason and the job continues
without the page.

torch's worker server accepts handlers in Python, but ranks do not serve their status
through it. It counts references to the handlers without the GIL (measured on 2.13: four
clients crash the process within seconds). Its shutdown waits for the handlers with the
GIL held. A request during interpreter shutdown aborts the process. A Python thread has
none of these problems.
"""

import importlib
import inspect
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tracedstore import names
from tracedstore.common.errors import TracedStoreError
from tracedstore.coordination import rank_registry
from tracedstore.coordination.connections import close_connection
from tracedstore.export import http_server as server
from tracedstore.export import process_status
from tracedstore.export.setup import ensure_configured
from tracedstore.recording.recorder import RECORDER

if TYPE_CHECKING:
    from torch.distributed.debug._frontend import DebugHandler

_HANDLERS = "handlers"
_status_server: server.Server | None = None


def add(handlers: "Sequence[DebugHandler] | None" = None) -> dict[str, Any]:
    """Serve this rank's status, and return arguments for ``start_debug_server``.

    Call it on every rank, with the environment that ``start_debug_server`` needs:

        start_debug_server(**debug_page.add())

    A rank that does not call it is shown as a rank without this page.

    Args:
        handlers: The other pages; torch's by default.

    Returns:
        The keyword arguments for ``start_debug_server``. If the page cannot be added,
        they do not have it, and a `telemetry.disabled` event has the reason.
    """
    without_page = {} if handlers is None else {_HANDLERS: list(handlers)}
    ensure_configured()
    try:
        _register()
        if os.environ["RANK"] != "0":
            return without_page
        others = _other_handlers(handlers)
        # Second, after Home: torch's menu is wider than a screen.
        return {_HANDLERS: [*others[:1], _page(), *others[1:]]}
    except Exception as error:
        RECORDER.failures.add(names.DEBUG_PAGE, _explain(error))
        return without_page


def _register() -> None:
    """Start to serve this rank's status, and register its address."""
    global _status_server  # noqa: PLW0603 - one per process
    torch_store = _import_from_torch("_store")
    store, rank = torch_store.tcpstore_client(), torch_store.get_rank()
    if _status_server is None:
        _status_server = _start_status_server()
    address = f"{socket.gethostname()}:{_status_server.port}"
    try:
        rank_registry.register(
            store, rank, torch_store.get_world_size(), answers=address
        )
    finally:
        close_connection(store)


def _start_status_server() -> server.Server:
    """Serve the status on all interfaces, as torch's worker server does."""
    page = {"/": process_status.page}
    try:
        started = server.Server(page, "::", 0)  # accepts IPv4 too
    except OSError:
        started = server.Server(page, "0.0.0.0", 0)  # noqa: S104 - queried by rank 0

    def after_fork() -> None:
        """Drop the parent's server: a child that serves a status has its own.

        The child inherits the socket without the thread. It would accept connections
        and never answer, even after the parent has ended.
        """
        global _status_server  # noqa: PLW0603 - one per process
        started.reset()
        if _status_server is started:
            _status_server = None

    os.register_at_fork(after_in_child=after_fork)
    return started


def _other_handlers(
    handlers: "Sequence[DebugHandler] | None",
) -> "Sequence[DebugHandler]":
    if handlers is not None:
        return handlers
    default: list[DebugHandler] = _import_from_torch(
        "_debug_handlers"
    ).default_handlers()
    return default


def _page() -> "DebugHandler":
    from torch.distributed.debug import start_debug_server  # noqa: PLC0415

    if _HANDLERS not in inspect.signature(start_debug_server).parameters:
        raise TracedStoreError("start_debug_server takes no handlers")
    # Imported here, because it needs packages that only torch's frontend needs.
    from tracedstore.auto.debug_page.handler import StoreHandler  # noqa: PLC0415

    return StoreHandler()


def _import_from_torch(module: str) -> Any:
    return importlib.import_module(f"torch.distributed.debug.{module}")


def _explain(error: Exception) -> TracedStoreError:
    """Return an error with one sentence: why there is no page, and the remedy."""
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
        reason = f"torch {torch.__version__} differs from torch 2.13 ({reason})"
    return TracedStoreError(f"no page in torch's debug server: {reason}")
