"""Lets a rank answer questions from the import of torch on, before it has a store.

A rank that is late, because it reads data before it creates its store, is what the
others wait for. It has not registered, so only its own host can find it.
"""

import sys

from tracedstore import names
from tracedstore.common.errors import ConfigurationError
from tracedstore.export.settings import Settings
from tracedstore.local.socket_server import LOCAL_SOCKET
from tracedstore.recording.recorder import RECORDER


def start() -> None:
    """Listen for questions, unless a setting disables that."""
    try:
        settings = Settings.load({})
    except ConfigurationError:
        return  # reported when the telemetry is set up
    LOCAL_SOCKET.enable(on=settings.answers and not settings.disabled)
    if not _is_helper():
        RECORDER.failures.guarded(names.DIAGNOSIS, LOCAL_SOCKET.start)


def _is_helper() -> bool:
    """Return whether a process of the job started this one, with its variables.

    A data loader's worker has the RANK of its parent. Where ``multiprocessing`` starts
    the ranks themselves, they listen when they register.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None
