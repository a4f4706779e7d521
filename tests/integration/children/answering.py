"""A process that listens for questions and then does what its test asks for.

It does not import torch, so it starts fast. ``LOCAL_SOCKET`` is started as a rank of
`tracedstore-run` starts it.
"""

import ctypes
import os
import re
import sys
import time

from integration.harness import report
from tracedstore.auto import patches
from tracedstore.common import procfs


def hold_gil() -> None:
    """Hold the GIL for a minute: sleep in C without releasing it."""
    ctypes.PyDLL(None).sleep(60)


def vfork() -> None:
    """Be in a system call that no signal interrupts, for a minute.

    Until its child ends, which has its memory and keeps its GIL.
    """
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.sleep(60)
        libc._exit(0)


def backtrack() -> None:
    """Hold the GIL in a regular expression that backtracks without end."""
    re.match(r"(a|a)*$", "a" * 64 + "b")


def compute() -> None:
    """Execute Python code without end."""
    while True:
        sum(range(1000))


def load_dataset() -> None:
    """Wait for the end of the test."""
    sys.stdin.read()


def fork() -> None:
    """Fork a child that does not register, and wait for the end of the test."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    report(child=pid)
    sys.stdin.read()


if __name__ == "__main__":
    patches.answer_before_registration()
    report(
        pid=os.getpid(),
        start_ticks=procfs.own_start_ticks(),
        namespace=procfs.own_namespace(),
    )
    globals()[sys.argv[1]]()
