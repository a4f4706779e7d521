"""Bounds in time for work that has none."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Run work in a thread and abandon it after a timeout.

    For Store calls that nothing else bounds: a TCPStore retries a connection to a
    server that is gone for as long as its own timeout, and waits without end for one
    that hangs.

    Raises:
        TimeoutError: The work took too long, and may still go on; or no thread can be
            started, and the work was not run.
        Exception: What the work raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tracedstore-bounded", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the limit is reached, or the interpreter finalizes
        raise TimeoutError(f"not run: {error}") from error
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"not finished after {seconds:g} s")
    return results[0]
