"""What /proc tells about the processes, ports and addresses of this host.

Linux only, and as far as permissions allow. Where there is no /proc, nothing is known.
A pid alone does not identify a process: pids are used again, and every pid namespace
has its own. A process is certain by its pid, its start time and its namespace.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tracedstore.common.text import printable
from tracedstore.common.threads import pause

IPAddress = IPv4Address | IPv6Address
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
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21
# Seconds between two looks at a process.
_BETWEEN_LOOKS: Final = 0.2
_MAX_ENVIRON_BYTES = 1 << 20
# The state of a socket in /proc/net/tcp.
_LISTEN: Final = "0A"
_MAX_SOCKETS = 200_000
_MAX_WORDS = 4
_MAX_ANCESTORS = 32
_MAX_COMMAND, _MAX_COMMAND_READ = 120, 4096


class Stat(NamedTuple):
    """What /proc/<pid>/stat has about a process.

    Attributes:
        letter: Its state, such as ``R``, ``S``, ``D``, ``T`` or ``Z``.
        parent: The pid of its parent.
        start_ticks: When it started, in clock ticks since the boot.
        exit_status: The wait status of a zombie; 0 where it cannot be read.
        cpu_ticks: The CPU time that it has used, in clock ticks.
        memory_bytes: The memory of it that is resident.
    """

    letter: str
    parent: int
    start_ticks: int
    exit_status: int
    cpu_ticks: int
    memory_bytes: int = 0


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
            int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]),
            int(fields[_RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE"),
        )
    except (OSError, ValueError, IndexError):
        return None


def start_ticks(pid: int | str) -> int | None:
    """Return when a process started; None if there is none, or no /proc."""
    stat = read_stat(pid)
    return None if stat is None else stat.start_ticks


def thread_cpu_seconds(thread: int | None) -> float | None:
    """Return the CPU time of a thread of this process; None if it is unknown.

    Args:
        thread: Its id as the kernel has it.
    """
    try:
        text = (_PROC / f"self/task/{thread}/stat").read_text("utf-8", "replace")
        fields = text.rpartition(")")[2].split()
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


def own_start_ticks() -> int | None:
    """Return when this process started; None without /proc."""
    return start_ticks("self")


def start_time(pid: int | str) -> float | None:
    """Return when a process started, in seconds since the epoch; None if unknown."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    try:
        uptime = float((_PROC / "uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


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
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


IN_KERNEL: Final = "blocked in the kernel (D)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process did between two looks at it.

    Attributes:
        letter: Its state at the second look.
        halt: Why it executes nothing, for people; "" if it may execute something. One
            look does not tell: a debugger halts a process for moments, and a process
            that reads from a disk is in state D most of the time.
        cpu_seconds: The CPU time that it used.
        seconds: The time between the looks.
    """

    letter: str
    halt: str
    cpu_seconds: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"state {self.letter}, {self.cpu_seconds:.2f} s of CPU time in"
            f" {self.seconds:.1f} s"
        )


def watch(pids: Iterable[int]) -> dict[int, Activity]:
    """Look at processes twice, 0.2 s apart; those that cannot be read are omitted."""
    first = {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}
    if not first:
        return {}
    started = time.monotonic()
    pause(_BETWEEN_LOOKS)
    found = {}
    for pid, before in first.items():
        now = read_stat(pid)
        if now is not None and now.start_ticks == before.start_ticks:
            ticks = now.cpu_ticks - before.cpu_ticks
            found[pid] = Activity(
                letter=now.letter,
                halt=_halt(before.letter, now.letter, ticks),
                cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
                seconds=time.monotonic() - started,
            )
    return found


def _halt(before: str, now: str, ticks: int) -> str:
    if is_halted(before) and is_halted(now):
        return f"stopped by a {'debugger' if now == 't' else 'signal'} (T)"
    # One tick may be of the moment before it was blocked.
    return IN_KERNEL if before == now == "D" and ticks <= 1 else ""


def is_halted(letter: str) -> bool:
    """Return whether a state is that of a process that a signal or debugger stopped."""
    return _STATES.get(letter) == "stopped"


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


def ancestors(pid: int) -> list[int]:
    """Return the pids of a process's parents, nearest first."""
    found: list[int] = []
    while len(found) < _MAX_ANCESTORS and (stat := read_stat(pid)) is not None:
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


def read_command(pid: int) -> str:
    """Read the first words of a process's command line; "" if it is not readable."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[:_MAX_WORDS]
    except OSError:
        return ""
    text = b" ".join(word for word in words if word).decode("utf-8", "replace")
    # A word may be a program of many lines: python -c "...".
    return printable(" ".join(text[:_MAX_COMMAND_READ].split()))[:_MAX_COMMAND]


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHolder:
    """A process that listens at a port.

    Attributes:
        pid: Its process id, None if it cannot be read.
        uid: The user that owns the socket.
        command: The first words of its command line.
        started: When it started, in seconds since the epoch; None if unknown.
        stopped: It is stopped by a signal.
        environ: The variables that it was started with, as far as they are readable.
    """

    pid: int | None
    uid: int
    command: str = ""
    started: float | None = None
    stopped: bool = False
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def describe(self) -> str:
        """Return ``pid 812 (python train.py, started at 09:12:00)``."""
        if self.pid is None:
            return f"a process of uid {self.uid}, whose pid is not readable here"
        words = [self.command] if self.command else []
        if self.started is not None:
            local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started))
            words.append(f"started at {local}")
        if self.uid != os.getuid():
            words.append(f"uid {self.uid}")
        if self.stopped:
            words.append("stopped by a signal")
        return f"pid {self.pid}" + (f" ({', '.join(words)})" if words else "")

    def is_rank(self, rank: int, port: int) -> bool:
        """Return whether it was started as this rank, with this MASTER_PORT."""
        started_as = self.environ.get("RANK"), self.environ.get("MASTER_PORT")
        return started_as == (str(rank), str(port))


def port_holder(port: int) -> PortHolder | None:
    """Return the process that listens at a TCP port; None if there is none.

    The sockets of other users' processes are visible, but not the process.
    """
    owners = dict(_listening(port))
    if not owners:
        return None
    uid = next(iter(owners.values()))
    pid = _process_with({f"socket:[{inode}]" for inode in owners})
    if pid is None:
        return PortHolder(pid=None, uid=uid)
    stat = read_stat(pid)
    return PortHolder(
        pid=pid,
        uid=uid,
        command=read_command(pid),
        started=start_time(pid),
        stopped=stat is not None and _STATES.get(stat.letter) == "stopped",
        environ=read_environ(pid),
    )


def _listening(port: int) -> Iterator[tuple[str, int]]:
    """Yield inode and uid of the sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), (_PROC / "net" / table).open() as lines:
            for number, line in enumerate(lines):
                if number > _MAX_SOCKETS:
                    break
                fields = line.split()
                with suppress(ValueError, IndexError):
                    local = int(fields[1].rpartition(":")[2], 16)
                    # 0 for a socket that is being closed.
                    if local == port and fields[3] == _LISTEN and fields[9] != "0":
                        yield fields[9], int(fields[7])


def _process_with(links: set[str]) -> int | None:
    """Return the process that has an open file of these; the latest, if several do."""
    pids: list[int] = []
    with suppress(OSError):
        names = (entry.name for entry in _PROC.iterdir())
        pids = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
    for pid in pids:
        with suppress(OSError):
            folder = f"{_PROC}/{pid}/fd"
            for descriptor in os.listdir(folder):  # noqa: PTH208 - thousands of them
                with suppress(OSError):
                    if os.readlink(f"{folder}/{descriptor}") in links:  # noqa: PTH115
                        return pid
    return None


def interface_addresses() -> list[IPAddress]:
    """Return the IP addresses of this machine."""
    found: list[IPAddress] = []
    with suppress(OSError, ValueError):
        lines = (_PROC / "net/fib_trie").read_text().splitlines()
        for before, line in pairwise(lines):
            if "/32 host LOCAL" in line:
                found.append(ip_address(before.rpartition("-- ")[2].strip()))
    with suppress(OSError, ValueError):
        lines = (_PROC / "net/if_inet6").read_text().splitlines()
        found += [IPv6Address(bytes.fromhex(line.partition(" ")[0])) for line in lines]
    return list(dict.fromkeys(found))


def max_backlog() -> str:
    """Return net.core.somaxconn of this host."""
    try:
        return (_PROC / "sys/net/core/somaxconn").read_text().strip()
    except OSError:
        return "unknown"
