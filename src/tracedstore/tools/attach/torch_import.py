"""Importing torch, which takes seconds, so that Ctrl-C ends it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Let SIGINT end the process while torch is imported in the ``with`` block.

    torch's modules may catch a KeyboardInterrupt. Another SIGINT handler than
    Python's default is left as it is.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
