"""Finds the process of this host that listens at a port.

Linux only, and as far as permissions allow: the sockets of other users' processes are
visible, but not the process.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tracedstore.common.keys import key_text

_LISTEN: Final = "0A"
_MAX_SOCKETS = 200_000
_MAX_WORDS = 4
_MAX_COMMAND = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class PortHolder:
    """A process that listens at a port.

    Attributes:
        pid: Its process id, None if it cannot be read.
        uid: The user that owns the socket.
        command: The first words of its command line.
        started: When it started, in seconds since the epoch; None if unknown.
        stopped: It is stopped by a signal.
        environ: Its RANK, MASTER_PORT and run id, as far as they are set and readable.
    """

    pid: int | None
    uid: int
    command: str = ""
    started: float | None = None
    stopped: bool = False
    environ: tuple[tuple[str, str], ...] = ()

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
        environ = dict(self.environ)
        return (environ.get("RANK"), environ.get("MASTER_PORT")) == (
            str(rank),
            str(port),
        )


def port_holder(port: int, proc: Path = Path("/proc")) -> PortHolder | None:
    """Return the process that listens at a TCP port; None if there is none.

    Args:
        port: The port.
        proc: The proc file system; for tests.
    """
    owners = dict(_listening(port, proc))
    if not owners:
        return None
    links = {f"socket:[{inode}]" for inode in owners}
    for pid in _pids(proc):
        with suppress(OSError):
            folder = f"{proc}/{pid}/fd"
            for descriptor in os.listdir(folder):  # noqa: PTH208 - thousands of them
                with suppress(OSError):
                    if os.readlink(f"{folder}/{descriptor}") in links:  # noqa: PTH115
                        return _describe(pid, next(iter(owners.values())), proc)
    return PortHolder(pid=None, uid=next(iter(owners.values())))


def _listening(port: int, proc: Path) -> Iterator[tuple[str, int]]:
    """Yield inode and uid of the sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), (proc / "net" / table).open() as lines:
            for number, line in enumerate(lines):
                if number > _MAX_SOCKETS:
                    break
                fields = line.split()
                with suppress(ValueError, IndexError):
                    local = int(fields[1].rpartition(":")[2], 16)
                    # 0 for a socket that is being closed.
                    if local == port and fields[3] == _LISTEN and fields[9] != "0":
                        yield fields[9], int(fields[7])


def _pids(proc: Path) -> list[int]:
    with suppress(OSError):
        names = (entry.name for entry in proc.iterdir())
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)
    return []


def _describe(pid: int, uid: int, proc: Path) -> PortHolder:
    folder = proc / str(pid)
    command, state, started = "", "", None
    variables: list[tuple[str, str]] = []
    with suppress(OSError):
        words = (folder / "cmdline").read_bytes().split(b"\0")[:_MAX_WORDS]
        text = b" ".join(word for word in words if word).decode("utf-8", "replace")
        command = key_text(text)[:_MAX_COMMAND]
    with suppress(OSError, ValueError, IndexError):
        # After the command in parentheses, which may have blanks.
        fields = (
            (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        )
        state = fields[0]
        ticks = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        started = _boot_time(proc) + ticks
    with suppress(OSError):
        for entry in (folder / "environ").read_bytes().split(b"\0"):
            name, _, value = entry.decode("utf-8", "replace").partition("=")
            if name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
                variables.append((name, key_text(value)))
    return PortHolder(
        pid=pid,
        uid=uid,
        command=command,
        started=started,
        stopped=state in ("T", "t"),
        environ=tuple(variables),
    )


def _boot_time(proc: Path) -> float:
    for line in (proc / "stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    raise ValueError("no boot time")
