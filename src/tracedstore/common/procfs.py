"""The state of processes of this host, from /proc.

A pid alone does not identify a process: pids are used again, and every pid namespace
has its own. A process is certain by its pid, its start time and its namespace.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

ProcState = Literal["running", "stopped", "disk_wait", "gone"]

_PROC = Path("/proc")
_STATES: Final[dict[str, ProcState]] = {
    "T": "stopped",
    "t": "stopped",
    "D": "disk_wait",
    "Z": "gone",
    "X": "gone",
    "x": "gone",
}
# Fields of /proc/<pid>/stat after the command, which is in parentheses.
_STATE, _PARENT, _START_TICKS, _EXIT_STATUS = 0, 1, 19, 49
_MAX_ENVIRON_BYTES = 1 << 20


class Stat(NamedTuple):
    """What /proc/<pid>/stat has about a process.

    Attributes:
        letter: Its state, such as ``R``, ``S``, ``D``, ``T`` or ``Z``.
        parent: The pid of its parent.
        start_ticks: When it started, in clock ticks since the boot.
        exit_status: The wait status of a zombie; 0 where it cannot be read.
    """

    letter: str
    parent: int
    start_ticks: int
    exit_status: int


def read_stat(pid: int | str) -> Stat | None:
    """Read the state of a process; None if there is none, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("utf-8", "replace")
        fields = text.rpartition(")")[2].split()
        return Stat(
            fields[_STATE],
            int(fields[_PARENT]),
            int(fields[_START_TICKS]),
            int(fields[_EXIT_STATUS]) if len(fields) > _EXIT_STATUS else 0,
        )
    except (OSError, ValueError, IndexError):
        return None


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started; None if there is none, or no /proc."""
    stat = read_stat(pid)
    return None if stat is None else stat.start_ticks


def own_start_ticks() -> int | None:
    """Return when this process started; None without /proc."""
    return start_ticks("self")


def own_namespace() -> str | None:
    """Return what identifies the pid namespace of this process among all hosts.

    It is the boot id of the kernel and the namespace's link. None without a /proc that
    shows the pids of this process's namespace.
    """
    try:
        # In a new pid namespace with the /proc of another one, pids do not agree.
        if str((_PROC / "self").readlink()) != str(os.getpid()):
            return None
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return None


def process_state(
    pid: int, started_ticks: int | None, namespace: str | None
) -> ProcState | None:
    """Return the state of a process; None where it cannot be known.

    Args:
        pid: Its process id.
        started_ticks: When it started. Another start time is another process.
        namespace: Its pid namespace, as `own_namespace` returned it there.
    """
    if pid <= 0 or started_ticks is None:
        return None
    if namespace is None or namespace != own_namespace():
        return None
    stat = read_stat(pid)
    if stat is None:
        return "gone" if is_absent(pid) else None
    if stat.start_ticks != started_ticks:
        return "gone"
    return _STATES.get(stat.letter, "running")


def is_absent(pid: int) -> bool:
    """Return whether no process has this pid; /proc may hide those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def describe_state(pid: int) -> str:
    """Describe the state of a process for people; "" for one that runs or is gone."""
    stat = read_stat(pid)
    state = "running" if stat is None else _STATES.get(stat.letter, "running")
    if stat is None or state in ("running", "gone"):
        return ""
    if state == "disk_wait":
        return "in disk wait (D)"
    return f"stopped by a {'debugger' if stat.letter == 't' else 'signal'} (T)"


def describe_exit(returncode: int) -> str:
    """Describe an exit code as `subprocess` returns it: negative for a signal."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = str(-returncode)
    with suppress(ValueError):
        name = signal.Signals(-returncode).name
    return f"killed by {name}"


EXITED_WELL: Final = describe_exit(0)


def zombie_exit(pid: int) -> int | None:
    """Return the exit code of a process that its parent has not waited for yet."""
    stat = read_stat(pid)
    if stat is None or stat.letter != "Z":
        return None
    return os.waitstatus_to_exitcode(stat.exit_status)


def ancestors(pid: int, limit: int = 32) -> list[int]:
    """Return the pids of a process's parents, nearest first."""
    found: list[int] = []
    while len(found) < limit and (stat := read_stat(pid)) is not None:
        if stat.parent <= 0:
            break
        pid = stat.parent
        found.append(pid)
    return found


def read_environ(pid: int) -> dict[str, str]:
    """Read the variables that a process was started with; {} if they are not readable.

    Variables that it set later are not there.
    """
    try:
        with (_PROC / str(pid) / "environ").open("rb") as file:
            text = file.read(_MAX_ENVIRON_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, separator, value in pairs if separator}
