"""The rank processes of the demo: starts, commands, kills and always ends them."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

from tracedstore.common.errors import CommandError
from tracedstore.common.parent_death import die_with_parent
from tracedstore.common.ranges import fold
from tracedstore.tools.demo.output_folder import OutputFolder
from tracedstore.tools.demo.rank import run_rank


class Fleet:
    """Ranks as forked processes; at the end of a ``with`` block none is left.

    They are forked because importing torch takes seconds. The parent has imported it
    and has no store yet, so no thread of a store is lost in the fork.

    Attributes:
        living: The ranks that were not killed, in order.
    """

    def __init__(self, count: int, seed: int, folder: OutputFolder) -> None:
        self.living = list(range(count))
        self._folder = folder
        self._pids: dict[int, int] = {}
        self._channels: dict[int, socket.socket] = {}
        try:
            for rank in self.living:
                self._start(rank, count, seed)
        except OSError as error:
            self.close()
            raise CommandError(
                f"{count} processes cannot be started here: {error.strerror}; try fewer"
                " with --ranks"
            ) from None
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, count: int, seed: int) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            die_with_parent(parent)
            # A rank ends when no process has the other end of its channel open.
            for channel in (ours, *self._channels.values()):
                channel.close()
            run_rank(rank, count, seed, self._folder, theirs)
        theirs.close()
        ours.setblocking(False)
        self._pids[rank], self._channels[rank] = pid, ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command to all living ranks."""
        message = json.dumps([command, arguments]).encode() + b"\n"
        for rank in self.living:
            # A rank that has died is reported by wait().
            with suppress(OSError):
                self._channels[rank].sendall(message)

    def end_load(self, rank: int) -> None:
        """End `load_dataset` of a rank; otherwise a rank ignores it."""
        with suppress(OSError):
            self._channels[rank].sendall(b"\n")

    def wait(
        self, scenario: str, timeout: float, meanwhile: Callable[[], None]
    ) -> None:
        """Wait until all living ranks have finished the last command.

        Args:
            scenario: Its name, for errors.
            timeout: Seconds that it may take.
            meanwhile: Is called again and again.

        Raises:
            CommandError: A rank has ended, or the timeout has passed.
        """
        deadline = time.monotonic() + timeout
        busy = set(self.living)
        while busy:
            meanwhile()
            busy = {rank for rank in busy if not self._is_done(rank, scenario)}
            if busy and time.monotonic() > deadline:
                raise CommandError(
                    f"ranks {fold(busy)} have not finished {scenario} after"
                    f" {timeout:g} s: this machine may be too busy; their logs are in"
                    f" {self._folder.path / 'logs'}"
                )

    def _is_done(self, rank: int, scenario: str) -> bool:
        try:
            received = self._channels[rank].recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        if not received:
            raise CommandError(
                f"rank {rank} ended unexpectedly during {scenario}; see"
                f" {self._folder.log(rank)}"
            )
        return received.endswith(b"\n")

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks with SIGKILL."""
        for rank in ranks:
            self.living.remove(rank)
            self._end(rank)

    def close(self) -> None:
        """Kill all ranks that are left."""
        for rank in [*self._pids]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        pid = self._pids[rank]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        # Removed last, so that close() can repeat this after an interrupt.
        self._channels.pop(rank).close()
        del self._pids[rank]
