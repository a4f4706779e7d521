"""The processes of the demo: started, told what to do, killed, and always ended."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Self

from tracedstore.coordination.ranges import fold
from tracedstore.core.errors import CommandError
from tracedstore.demo.parent_death import end_with
from tracedstore.demo.rank import Folder, live


class Fleet:
    """Ranks as forked processes; at the end of a ``with`` block none is left.

    Forked, because torch takes seconds to load: from a process that has loaded it and
    has made no store yet, so that there is no thread of one to lose.

    Attributes:
        living: The ranks that were not killed, in order.
    """

    def __init__(self, count: int, seed: int, folder: Folder) -> None:
        self.living = list(range(count))
        self._folder = folder
        self._pids: dict[int, int] = {}
        self._channels: dict[int, socket.socket] = {}
        try:
            for rank in self.living:
                self._start(rank, count, seed)
        except OSError as error:
            self.end()
            raise CommandError(
                f"{count} processes cannot be started here: {error.strerror}; try fewer"
                " with --ranks"
            ) from None
        except BaseException:
            self.end()
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
            end_with(parent)
            # A rank ends when nobody holds the other end of its channel any more.
            for channel in (ours, *self._channels.values()):
                channel.close()
            live(rank, count, seed, self._folder, theirs)
        theirs.close()
        ours.setblocking(False)
        self._pids[rank], self._channels[rank] = pid, ours

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def tell(self, act: str, **given: Any) -> None:
        """Have all that live do something."""
        for rank in self.living:
            # Who has died meanwhile is found out by whoever waits for it.
            with suppress(OSError):
                self._channels[rank].sendall(json.dumps([act, given]).encode() + b"\n")

    def wait(self, what: str, seconds: float, meanwhile: Callable[[], None]) -> None:
        """Wait until all that live have done what they were told last.

        Raises:
            CommandError: One of them ended, or takes too long.
        """
        deadline = time.monotonic() + seconds
        busy = set(self.living)
        while busy:
            meanwhile()
            busy = {rank for rank in busy if not self._is_done(rank, what)}
            if busy and time.monotonic() > deadline:
                raise CommandError(
                    f"ranks {fold(busy)} are not through with {what} after"
                    f" {seconds:g} s: is this machine very busy? Their logs are in"
                    f" {self._folder.path / 'logs'}"
                )

    def _is_done(self, rank: int, what: str) -> bool:
        try:
            heard = self._channels[rank].recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            heard = b""
        if not heard:
            raise CommandError(
                f"rank {rank} ended by itself during {what}; {self._folder.log(rank)}"
                " has its last words"
            )
        return heard.endswith(b"\n")

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill ranks, without warning."""
        for rank in ranks:
            self.living.remove(rank)
            self._end(rank)

    def end(self) -> None:
        """Leave none."""
        for rank in [*self._pids]:
            self._end(rank)

    def _end(self, rank: int) -> None:
        pid = self._pids[rank]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        # At last, so that whoever is interrupted here can do it again.
        self._channels.pop(rank).close()
        del self._pids[rank]
