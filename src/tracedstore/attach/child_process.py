"""Do something in a process of its own, which can be ended whatever it hangs in.

A thread cannot be: torch lists the keys of a store with the GIL held, and while it
waits there for a server that was stopped nothing else runs, not even Ctrl-C. A name
server that is gone and a file system that hangs are no better.
"""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar, cast

from tracedstore.core.errors import CommandError

T = TypeVar("T")

# Says that something goes on as it should.
Mark = Callable[[], None]
# Seconds after its time was up that a child ends itself, if nobody has.
_ORPHANED = 1.0


class ChildTimeoutError(TimeoutError):
    """It took too long, and was ended.

    Attributes:
        marked: It had made a mark by then.
    """

    def __init__(self, *, marked: bool) -> None:
        super().__init__("no end in time")
        self.marked = marked


def run_in_child(seconds: float, work: Callable[[Mark], T], then: float = 0.0) -> T:
    """Do something in a forked child; give what it returned, which is pickled.

    Args:
        seconds: How long it may take.
        work: What to do. It may make a mark whenever it has come a step further.
        then: How many seconds it has from a mark on, at least.

    Raises:
        ChildTimeoutError: It took too long.
        ChildProcessError: It ended without a word.
        CommandError: It raised that; or something else, which it then says.
    """
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        reading.close()
        _be_the_child(seconds, work, then, writing)
    try:
        writing.close()
        failed, result = _outcome(reading, seconds, then)
    except EOFError:
        _, status = os.waitpid(child, 0)
        raise ChildProcessError(_how(os.waitstatus_to_exitcode(status))) from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        reading.close()
    os.waitpid(child, 0)
    if failed:
        raise CommandError(result)
    return cast("T", result)


def _outcome(reading: Connection, seconds: float, then: float) -> tuple[bool, Any]:
    deadline = time.monotonic() + seconds
    marked = False
    while reading.poll(max(0.0, deadline - time.monotonic())):
        try:
            said = reading.recv()
        except OSError:  # it ended in the midst of it
            raise EOFError from None
        if said is not None:
            failed, result = said
            return failed, result
        marked = True
        deadline = max(deadline, time.monotonic() + then)
    raise ChildTimeoutError(marked=marked)


def _be_the_child(
    seconds: float, work: Callable[[Mark], T], then: float, writing: Connection
) -> NoReturn:
    def mark() -> None:
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        signal.setitimer(signal.ITIMER_REAL, max(left, then + _ORPHANED))
        writing.send(None)

    try:
        # Not Python's handlers, which wait for the GIL: these end it wherever it is.
        # Who ignores Ctrl-C, as what runs in a shell's background does, goes on to.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # For when nobody is there any more to end it.
        signal.setitimer(signal.ITIMER_REAL, seconds + _ORPHANED)
        said: tuple[bool, Any]
        try:
            said = False, work(mark)
        except CommandError as error:
            said = True, str(error)
        except Exception as error:
            said = True, f"{type(error).__name__}: {error}".partition("\n")[0]
        writing.send(said)
    finally:
        # Nothing of what the parent has to do at its end is to be done twice.
        os._exit(0)


def _how(code: int) -> str:
    return (
        f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    )
