"""What outlives a process: its events, and its stacks at SIGTERM, in a file of its own.

A pod is deleted with its logs. With ``TRACEDSTORE_REPORT_DIR`` on a volume, each
process has a file there, which ``tracedstore report`` reads:

- Events are written when they are emitted, so that they are there however the process
  ends. Nothing is left to do at its end.
- At SIGTERM, `faulthandler` writes the stacks of all threads: in C, in the thread that
  gets the signal, also where the main thread is in C++ or holds the GIL. Then the
  signal does what it did before. A program that handles SIGTERM itself is left alone.
"""

import faulthandler
import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import IO, Final

from tracedstore import names
from tracedstore.common.identity import process_identity
from tracedstore.recording.queue_worker import QueueWorker
from tracedstore.recording.recorder import RECORDER

# Bytes of a file. The one before it is kept, so that a process has twice as many.
MAX_BYTES: Final = 4 << 20
_MAX_HOST = 150
# Others may be able to write to the folder, and know the name: no symbolic links.
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_STATUS: Final = Path("/proc/self/status")
# The signals that a process catches and ignores; bit 0 is signal 1.
_HANDLED: Final = re.compile(r"^Sig(?:Cgt|Ign):\s*([0-9a-f]+)$", re.MULTILINE)


class ReportFile:
    """The file of this process.

    A thread of its own writes it, because a volume may hang.

    Args:
        max_bytes: Bytes after which another file is begun.

    Attributes:
        writer: The thread, with its queue.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.writer = QueueWorker(
            "tracedstore-report-writer",
            names.REPORT,
            RECORDER.failures,
            stuck_after=10.0,
        )
        self._directory: Path | None = None
        # The handler of SIGTERM is set.
        self._handles = False
        self._forget()

    def _forget(self) -> None:
        self._file: IO[bytes] | None = None
        self._path = Path()
        self._started = False

    def enable(self, directory: str | None) -> None:
        """Write to a folder from now on; None for nowhere."""
        wanted = None if directory is None else Path(directory).absolute()
        if wanted != self._directory:
            self._directory = wanted
            self._forget()

    def start(self) -> None:
        """Create the file, unless that is so."""
        if self._directory is not None and not self._started:
            self._started = True
            self.writer.submit(self._open)

    def write(self, line: str) -> None:
        """Add a line, in the thread."""
        self.writer.submit(partial(self._append, line))

    def stop(self, timeout: float) -> None:
        """Write what is queued, within the timeout, and remove an empty file."""
        self._started = False
        if self.writer.is_running:
            self.writer.submit(self._remove_empty)
            self.writer.stop(timeout)

    def reset(self) -> None:
        """Leave the file to the parent, as a forked child must."""
        self.writer.reset()
        self._forget()
        if self._handles:
            # The handler is inherited. The worker of a data loader is no rank.
            _write_stacks_to(os.open(os.devnull, os.O_WRONLY))

    def _append(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        file = self._open()
        if file.tell() + len(data) > self._max_bytes:
            self._path.replace(self._path.with_suffix(".earlier.log"))
            # The handler has the new file before the old one is closed.
            self._file, full = None, file
            file = self._open()
            full.close()
        file.write(data)

    def _open(self) -> IO[bytes]:
        if self._file is None:
            directory = self._directory or Path()
            directory.mkdir(parents=True, exist_ok=True)
            identity = process_identity()
            host = re.sub(r"[^\w.@-]", "_", identity.host)[:_MAX_HOST]
            rank = "" if identity.rank is None else f"rank{identity.rank}."
            self._path = directory / f"{rank}{host}.{os.getpid()}.log"
            self._file = os.fdopen(os.open(self._path, _FLAGS, 0o666), "ab", 0)
            if self._handles or not _handles_sigterm():
                _write_stacks_to(self._file)
                self._handles = True
        return self._file

    def _remove_empty(self) -> None:
        if self._file is not None and not os.fstat(self._file.fileno()).st_size:
            self._file = None
            self._path.unlink(missing_ok=True)


def _write_stacks_to(file: IO[bytes] | int) -> None:
    # Again for another file: a handler that the program has set since then stays.
    faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)


def _handles_sigterm() -> bool:
    """Return whether the program handles or ignores SIGTERM, in Python or in C."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return True
    try:
        masks = _HANDLED.findall(_STATUS.read_text("ascii", "replace"))
    except OSError:
        return False
    return any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


# One a process, like the recorder whose events it keeps.
REPORT_FILE: Final = ReportFile()
