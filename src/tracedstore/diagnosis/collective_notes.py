"""Adds the verdict to the exception with which a collective fails.

torch logs each exception of a function of ``torch.distributed`` while it handles it, on
a logger of its own. A handler there sees the exception, and no function of torch is
replaced. The exceptions of an asynchronous ``Work.wait``, and what ends a process for
NCCL, do not pass it.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tracedstore import names
from tracedstore.recording.recorder import RECORDER

_MODULE: Final = "torch.distributed.c10d_logger"
_NAME: Final = "_c10d_logger"


class CollectiveNotes(logging.Handler):
    """Gives each exception that torch logs to a function.

    Args:
        explain: Adds a note to the exception, if something is known about it. It runs
            in the thread of the exception, or in one for which that waits.
    """

    def __init__(self, explain: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._explain = explain

    def createLock(self) -> None:  # noqa: N802 - the name is logging's
        """Have no lock, as a NullHandler: the main thread takes none of this package.

        logging makes the locks new of all handlers that it has created one for, in each
        forked child.
        """
        self.lock = None

    def install(self) -> None:
        """Listen from now on, if torch.distributed is imported and not heard yet."""
        module = sys.modules.get(_MODULE)
        if module is None:
            return
        logger = getattr(module, _NAME, None)
        if not isinstance(logger, logging.Logger):
            RECORDER.failures.add_missing(
                names.DIAGNOSIS,
                f"c10d_logger.{_NAME}",
                "exceptions of collectives have no note",
            )
            return
        # Not by `addHandler`: the main thread may hold logging's lock, and wait for the
        # thread that this runs in.
        if self not in logger.handlers:
            logger.handlers.append(self)

    def remove(self) -> None:
        """Listen no more."""
        logger = getattr(sys.modules.get(_MODULE), _NAME, None)
        if isinstance(logger, logging.Logger):
            with suppress(ValueError):
                logger.handlers.remove(self)

    def emit(self, _record: logging.LogRecord) -> None:
        """Explain the exception that is being handled, if there is one."""
        error = sys.exc_info()[1]
        if error is not None:
            RECORDER.failures.guarded(names.DIAGNOSIS, self._explain, error)
