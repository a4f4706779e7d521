"""No process of the demo outlives it, whatever ends it: SIGKILL cannot be handled."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Found before anything is forked; where the system has no such call, ranks still end
# with their channel.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; it stays so over exec.

    For a child that was just forked, by the thread that will live longest.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It ended before the kernel knew.
        os._exit(1)
