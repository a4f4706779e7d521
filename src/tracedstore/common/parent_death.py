"""Ends a process with its parent, even after SIGKILL."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
# Loaded before any fork. On a system without prctl, nothing ends with its parent.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


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
