"""Starts processes, finds their descendants, and ends them together."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def running(
    command: Sequence[object], folder: Path, env: dict[str, str], *, errors: int
) -> Iterator["subprocess.Popen[str]"]:
    """Run a command, and end its processes afterwards.

    Args:
        command: The command.
        folder: Where it runs.
        env: Its environment.
        errors: Where its standard error goes, as for ``Popen``.
    """
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # torchrun's workers are in other sessions; torchrun ends them.
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.communicate()


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process that leads a group, the group and its descendants.

    torchrun's workers lead groups of their own. A process whose parent has ended is no
    descendant.
    """
    below = descendants(pid)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for one in below:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    children: list[str] = []
    # torch starts workers in threads of the agent, too.
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += task.read_text().split()
    return [
        descendant
        for child in map(int, children)
        for descendant in (child, *descendants(child))
    ]
