"""Threads that ask again and again whether the same keys exist.

``while not store.check(keys): sleep(1)`` may go on for ever, and no call of it blocks.
Nothing is added to the path of a call. The recorder shows the calls within the span
budget to its observers, at most one in 50 ms: a call right after another one may be
missed. So it also counts where the thread is when the diagnosis looks, about once a
second. A thread that polls is in the same function each time, and uses little CPU time;
one that asks once in each step of its work is not.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

from tracedstore import names
from tracedstore.common import procfs
from tracedstore.common.identity import StoreIdentity
from tracedstore.local.facts import is_own_code
from tracedstore.recording import store_proxy
from tracedstore.recording.operation import Operation

# Seconds from one request to the next after which it is a new poll.
_LONGEST_GAP = 10.0
# Threads, and sets of keys of one thread, that are remembered.
_MAX_THREADS, _MAX_POLLS = 64, 8
_MAX_DEPTH = 64
# Functions between the one that asks and the one that pauses.
_MAX_CALLERS = 2
# Looks until a poll counts, and samples of each look: what works is seen to do so.
_MIN_LOOKS = 4
_SAMPLES, _SAMPLE_INTERVAL = 10, 0.005
# A thread that polls uses this share of one CPU at most, and so many seconds more.
_MAX_CPU_SHARE, _CPU_SECONDS = 0.1, 0.2

_THREADING: Final = threading.Event.wait.__code__.co_filename
Stack = tuple[tuple[str, str], ...]


@dataclass(slots=True, kw_only=True)
class Poll:
    """A thread that asks for the same keys.

    Attributes:
        thread_id: The thread.
        store: The store.
        keys: The first keys.
        since: When it began, by ``time.monotonic``.
        seen_at: When it asked last, by the same clock.
        stack: The functions that the thread was in when it asked, the outermost last.
        cpu: The CPU time that it had used at the first look, in seconds.
        looks: The number of looks.
    """

    thread_id: int
    store: StoreIdentity
    keys: tuple[str, ...]
    since: float
    seen_at: float
    stack: Stack
    cpu: float = 0.0
    looks: int = 0

    @property
    def key(self) -> Hashable:
        """Its identity."""
        return _key_of(self.thread_id, self.store, self.keys)

    def is_still(self, stacks: set[Stack], cpu: float, now: float) -> bool:
        """Return whether the thread is where it asks, and has done nothing else.

        It may pause in a function that calls the one which asks.
        """
        places = {self.stack[level:] for level in range(_MAX_CALLERS + 1)}
        allowed = _CPU_SECONDS + _MAX_CPU_SHARE * (now - self.since)
        return stacks <= places and (not self.looks or cpu - self.cpu <= allowed)


class Polls:
    """Observes requests for keys, and the threads that make them."""

    name = names.DIAGNOSIS

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.reset()

    def reset(self) -> None:
        """Start from zero, as a forked child must."""
        self._by_thread: dict[int, dict[Hashable, Poll]] = {}

    def observe(self, operation: Operation) -> None:
        """Note a request for keys; any other call of the thread ends its polls."""
        thread_id = operation.thread_id
        if operation.method.name != "check" or operation.error is not None:
            self._by_thread.pop(thread_id, None)
            return
        if thread_id not in self._by_thread and len(self._by_thread) >= _MAX_THREADS:
            return
        now = self._monotonic()
        polls = self._by_thread.setdefault(thread_id, {})
        key = _key_of(thread_id, operation.store, operation.keys)
        known = polls.get(key)
        if known is not None and now - known.seen_at <= _LONGEST_GAP:
            known.seen_at = now
        elif known is not None or len(polls) < _MAX_POLLS:
            polls[key] = Poll(
                thread_id=thread_id,
                store=operation.store,
                keys=operation.keys,
                since=now,
                seen_at=now,
                stack=_stack_of(thread_id),
            )

    def look(self) -> list[Poll]:
        """Look at the threads; return the polls that go on, with several looks each."""
        found: list[Poll] = []
        by_thread = list(self._by_thread.items())
        if not by_thread:
            return found
        sampled = _sample([thread_id for thread_id, _ in by_thread])
        now = self._monotonic()
        for thread_id, polls in by_thread:
            stacks, cpu = sampled[thread_id], _cpu_seconds(thread_id)
            for key, poll in list(polls.items()):
                if now - poll.seen_at > _LONGEST_GAP or cpu is None:
                    polls.pop(key, None)
                elif not poll.is_still(stacks, cpu, now):
                    # It works, and asks from time to time.
                    poll.since, poll.looks = now, 0
                else:
                    poll.cpu = poll.cpu if poll.looks else cpu
                    poll.looks += 1
                    if poll.looks >= _MIN_LOOKS:
                        found.append(poll)
            if not polls:
                self._by_thread.pop(thread_id, None)
        return found


# One a process, like the recorder whose calls it observes.
POLLS: Final = Polls()


def _key_of(
    thread_id: int, store: StoreIdentity, keys: tuple[str, ...]
) -> tuple[Hashable, ...]:
    return (thread_id, "check", store, *keys)


def _sample(thread_ids: Sequence[int]) -> dict[int, set[Stack]]:
    """Return where threads are, in some samples of one moment for all of them."""
    stacks: dict[int, set[Stack]] = {one: {_stack_of(one)} for one in thread_ids}
    for _ in range(_SAMPLES):
        time.sleep(_SAMPLE_INTERVAL)
        for thread_id in thread_ids:
            stacks[thread_id].add(_stack_of(thread_id))
    return stacks


def _stack_of(thread_id: int) -> Stack:
    """Return the functions of the job that a thread is in, the outermost last."""
    frame: FrameType | None = sys._current_frames().get(thread_id)  # noqa: SLF001 - see `facts`
    functions: list[tuple[str, str]] = []
    while frame is not None and len(functions) < _MAX_DEPTH:
        code = frame.f_code
        if code.co_filename == store_proxy.__file__:
            # It was the request, which a store in Python makes in code of its own.
            functions.clear()
        # Nor the pause between two.
        is_inner = is_own_code(code.co_filename) or code.co_filename == _THREADING
        if functions or not is_inner:
            functions.append((code.co_filename, code.co_qualname))
        frame = frame.f_back
    return tuple(functions)


def _cpu_seconds(thread_id: int) -> float | None:
    """Return the CPU time of a thread that Python knows; None if it has ended."""
    if thread_id == threading.main_thread().ident:
        # Python does not update `native_id` in a forked child.
        return procfs.thread_cpu_seconds(os.getpid())
    native = (one.native_id for one in threading.enumerate() if one.ident == thread_id)
    return procfs.thread_cpu_seconds(next(native, None))
