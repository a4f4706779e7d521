"""Wait for something that may never end, for so long and no longer."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Do something in a thread, and leave it behind if it takes too long.

    For calls that nothing else can bound: a TCPStore tries to connect to a server that
    is gone for as long as its timeout, and waits without end for one that hangs.

    Raises:
        TimeoutError: It took too long. It may still go on.
        Exception: What the work raised.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="tracedstore-bounded", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # too many of them, or the interpreter is on its way out
        return work()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no end after {seconds:g} s")
    return done[0]
