"""Which threads of this process a rank itself waits in.

A rank waits if its main thread does. A helper thread may wait as well, for a key such
as ``shutdown``, while the rank works: that says nothing about the rank. It does only if
the main thread waits for that helper thread.

The main thread waits for another one in ``Thread.join``, for a result of
``concurrent.futures``, or while the interpreter waits for its threads to end. Which
thread it waits for in a queue, an event or a condition is unknown, as in an event loop.
"""

import concurrent.futures
import concurrent.futures.thread
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final

from tracedstore.coordination import rank_registry

# How a thread belongs to a rank. The call of the first one is the rank's wait.
MAIN, REGISTERED, AWAITED = range(3)

_futures: Any = concurrent.futures._base  # noqa: SLF001 - its functions are compared
_THREAD: Final = threading.Thread  # noqa: TID251 - it is not started here
_JOIN: Final = _THREAD.join.__code__
_SHUTDOWN: Final = threading._shutdown.__code__  # type: ignore[attr-defined] # noqa: SLF001 - see the docstring
_OF_ONE: Final = (_futures.Future.result.__code__, _futures.Future.exception.__code__)
_OF_SEVERAL: Final = (_futures.wait.__code__, _futures.as_completed.__code__)
_WORK: Final = concurrent.futures.thread._WorkItem.run.__code__  # noqa: SLF001 - see above
_THREADING: Final = _JOIN.co_filename
_FUTURES: Final = _futures.wait.__code__.co_filename
# Functions of the standard library in which a thread waits for another one.
_WAITS: Final = {
    _THREADING: ("join", "_wait_for_tstate_lock", "_shutdown", "wait", "wait_for"),
    _FUTURES: ("result", "exception", "wait", "as_completed"),
}
# Threads that wait for each other, at most.
_MAX_CHAIN: Final = 64

Frames = Mapping[int, FrameType]


def rank_threads() -> dict[int, int]:
    """Return how each thread belongs to a rank of this process; others do not."""
    found = dict.fromkeys(_awaited_by_main(), AWAITED)
    found |= dict.fromkeys(rank_registry.registered_threads(), REGISTERED)
    found[threading.main_thread().ident or 0] = MAIN
    return found


def _awaited_by_main() -> set[int]:
    """Return the threads that the main thread waits for.

    It waits for a thread that one of these waits for, too.
    """
    frames = sys._current_frames()  # noqa: SLF001 - public by its documentation
    try:
        found: set[int] = set()
        pending = {threading.main_thread().ident or 0}
        while pending and len(found) < _MAX_CHAIN:
            new = _awaited_by(pending.pop(), frames) - found
            pending |= new
            found |= new
        return found
    finally:
        # It contains the frame of this function, and so itself.
        frames.clear()


def _awaited_by(thread_id: int, frames: Frames) -> set[int]:
    # A frame keeps what was read of it, so only functions of the standard library are
    # read, and no variable of the job.
    waiting = list(_waiting_frames(frames.get(thread_id)))
    for frame in waiting:
        code, own = frame.f_code, frame.f_locals
        if code is _JOIN:
            return {own["self"].ident or 0}
        if code is _SHUTDOWN:
            alive = threading.enumerate()
            return {one.ident or 0 for one in alive if not one.daemon} - {thread_id}
        if code in _OF_ONE:
            return _working_for([own["self"]], frames)
        if code in _OF_SEVERAL:
            return _working_for(own.get("pending") or own["fs"], frames)
    return set()


def _waiting_frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """Yield the innermost frames of a thread, as long as they wait for another one."""
    frame = innermost
    while frame is not None:
        code = frame.f_code
        if code.co_name not in _WAITS.get(code.co_filename, ()):
            return
        yield frame
        frame = frame.f_back


def _working_for(futures: Iterable[Any], frames: Frames) -> set[int]:
    """Return the threads of executors that work for one of these futures."""
    wanted = {id(future) for future in list(futures)}
    return {
        thread_id
        for thread_id, item in _work_items(frames)
        if id(item.future) in wanted
    }


def _work_items(frames: Frames) -> Iterator[tuple[int, Any]]:
    """Yield the threads of executors, and what they work on."""
    for thread_id, innermost in list(frames.items()):
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code is not _WORK:
            frame = frame.f_back
        if frame is not None:
            yield thread_id, frame.f_locals["self"]
