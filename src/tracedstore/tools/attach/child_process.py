"""Runs a function in a forked child, which can be killed whatever it blocks in.

A thread cannot be killed: torch lists the keys of a store with the GIL held. While it
waits there for a stopped server, no other thread runs, and Ctrl-C has no effect. A
dead name server and a hung file system block in the same way.
"""

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar, cast

from tracedstore.common.errors import CommandError

T = TypeVar("T")

# Called by the child whenever it has made progress.
Heartbeat = Callable[[], None]
# Seconds after its timeout that a child ends itself, in case its parent is dead.
_ORPHAN_DELAY = 1.0
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Loaded before any fork. On a system without prctl, nothing ends with its parent.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


class ChildTimeoutError(TimeoutError):
    """The child took too long and was killed.

    Attributes:
        made_progress: It had sent a heartbeat.
    """

    def __init__(self, *, made_progress: bool) -> None:
        super().__init__("the child process timed out")
        self.made_progress = made_progress


def run_in_child(
    timeout: float, work: Callable[[Heartbeat], T], heartbeat_timeout: float = 0.0
) -> T:
    """Run a function in a forked child and return its result, which is pickled.

    Args:
        timeout: Seconds that it may take.
        work: The function. It may call the heartbeat that it is passed.
        heartbeat_timeout: Seconds that it may take after a heartbeat, at least.

    Raises:
        ChildTimeoutError: It took too long.
        ChildProcessError: The child ended without a result.
        CommandError: The function raised one, or another exception, whose type and
            first line are the text.
    """
    receiver, sender = Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        receiver.close()
        _run_child(timeout, work, heartbeat_timeout, sender)
    try:
        sender.close()
        failed, result = _receive(receiver, timeout, heartbeat_timeout)
    except EOFError:
        _, status = os.waitpid(child, 0)
        reason = _describe_exit(os.waitstatus_to_exitcode(status))
        raise ChildProcessError(reason) from None
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    finally:
        receiver.close()
    os.waitpid(child, 0)
    if failed:
        raise CommandError(result)
    return cast("T", result)


def _receive(
    receiver: Connection, timeout: float, heartbeat_timeout: float
) -> tuple[bool, Any]:
    deadline = time.monotonic() + timeout
    made_progress = False
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            message = receiver.recv()
        except OSError:  # it ended in the middle of a message
            raise EOFError from None
        if message is not None:
            failed, result = message
            return failed, result
        made_progress = True
        deadline = max(deadline, time.monotonic() + heartbeat_timeout)
    raise ChildTimeoutError(made_progress=made_progress)


def _run_child(
    timeout: float,
    work: Callable[[Heartbeat], T],
    heartbeat_timeout: float,
    sender: Connection,
) -> NoReturn:
    def heartbeat() -> None:
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        signal.setitimer(
            signal.ITIMER_REAL, max(left, heartbeat_timeout + _ORPHAN_DELAY)
        )
        sender.send(None)

    try:
        # The parent's garbage is not collected here: the destructor of a store's server
        # joins a thread that the child does not have, and hangs or crashes.
        gc.freeze()
        # Default actions, because Python's handlers wait for the GIL. A parent that
        # ignores SIGINT, as a shell's background job does, has children that do.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # Ends the child if its parent is dead.
        signal.setitimer(signal.ITIMER_REAL, timeout + _ORPHAN_DELAY)
        message: tuple[bool, Any]
        try:
            message = False, work(heartbeat)
        except CommandError as error:
            message = True, str(error)
        except Exception as error:
            message = True, f"{type(error).__name__}: {error}".partition("\n")[0]
        sender.send(message)
    finally:
        # Skips the parent's exit handlers and unflushed buffers.
        os._exit(0)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; survives exec.

    Call it in a child immediately after the fork. The kernel watches the thread that
    forked, so fork from the one that lives longest.

    Args:
        parent: The parent's process id.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent ended before the call.
        os._exit(1)
