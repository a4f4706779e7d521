"""What this process does: its Store calls, and the stacks of its threads."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import tracedstore
from tracedstore.common.identity import process_identity
from tracedstore.common.keys import shown
from tracedstore.coordination import rank_registry
from tracedstore.coordination.missing_report import StalledBarrier
from tracedstore.local.facts import (
    MAX_CALLS,
    MAX_FAMILIES,
    MAX_FRAMES,
    MAX_NAME,
    MAX_STACK_FRAMES,
    MAX_THREADS,
    Frame,
    ProcessFacts,
)
from tracedstore.local.key_writers import KEY_WRITERS
from tracedstore.local.last_call import LAST_CALL
from tracedstore.recording.counters import thread_names
from tracedstore.recording.recorder import RECORDER
from tracedstore.signals.inflight import in_flight

ITSELF = "itself"
_PACKAGE = f"{Path(tracedstore.__file__).parent}/"
# The demo is a job, not a part of the wrapper.
_DEMO = f"{_PACKAGE}tools/demo/"


def own_facts(
    rank: int | None, families: Iterable[str] = (), *, with_stacks: bool = False
) -> ProcessFacts:
    """Return the facts about this process.

    Args:
        rank: Its rank, None for a process without one.
        families: The key families of which it reports what it wrote.
        with_stacks: Add the stacks of all threads.
    """
    identity = process_identity()
    calls = in_flight(RECORDER)
    known = [KEY_WRITERS.wrote(family) for family in list(families)[:MAX_FAMILIES]]
    return ProcessFacts(
        rank=rank,
        host=identity.host,
        pid=identity.fields()["pid"],
        state="running",
        registered=bool(rank_registry.registered_stores()),
        idle_seconds=LAST_CALL.idle_seconds(),
        operation=_operation(),
        recording=RECORDER.on,
        in_flight=tuple(calls[:MAX_CALLS]),
        more_in_flight=max(0, len(calls) - MAX_CALLS),
        barriers=tuple(RECORDER.cold.states(StalledBarrier)),
        frames=_main_frames(),
        wrote=tuple(written for written in known if written is not None),
        stacks=all_stacks() if with_stacks else {},
        source=ITSELF,
    )


def all_stacks() -> dict[str, tuple[Frame, ...]]:
    """Return the innermost frames of every thread, by thread name, main thread first.

    At most 64 threads have at most 64 frames each. Threads of torch's C++ have frames
    only while they are in Python code.
    """
    names = thread_names()
    main = threading.main_thread().ident
    stacks: dict[str, tuple[Frame, ...]] = {}
    current = sys._current_frames()  # noqa: SLF001 - the only way; public by its documentation
    try:
        for ident in sorted(current, key=lambda ident: ident != main)[:MAX_THREADS]:
            name = names.get(ident, f"native-{ident}")[:MAX_NAME]
            # Threads may share a name.
            key = name if name not in stacks else f"{name} ({ident})"
            stacks[key] = _frames(current[ident], MAX_STACK_FRAMES)
    finally:
        # It contains the frame of this function, and so itself. Until the next garbage
        # collection it would keep the variables of all threads, process groups too.
        current.clear()
    return stacks


def _main_frames() -> tuple[Frame, ...]:
    main = threading.main_thread().ident or 0
    # Not in a variable, which would make a cycle; see above.
    return _frames(sys._current_frames().get(main), MAX_FRAMES)  # noqa: SLF001


def _frames(innermost: FrameType | None, limit: int) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    frame = innermost
    while frame is not None and len(frames) < limit:
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_DEMO):
            # The wrapper's own frames are between those of the job.
            frame = frame.f_back
            continue
        frames.append(
            Frame(
                file="/".join(file.split("/")[-2:])[-MAX_NAME:],
                # None between two lines of some instructions
                line=frame.f_lineno or 0,
                function=code.co_qualname[:MAX_NAME],
            )
        )
        frame = frame.f_back
    return tuple(frames)


def _operation() -> str:
    """Return the oldest Store call in flight, preferring one of the main thread."""
    main = threading.main_thread().ident
    calls = sorted(
        RECORDER.counters.calls(), key=lambda active: active.thread_id != main
    )
    if not calls:
        return ""
    keys, count = calls[0].method.keys_of(calls[0].args)
    first = shown(keys)[:1]
    more = f" and {count - 1} more" if count > 1 else ""
    return " ".join([calls[0].method.name, *first]) + more
