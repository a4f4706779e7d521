"""The screen of a running job, which another process reads."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from textual import on
from textual.message import Message

from tracedstore.common.text import duration
from tracedstore.common.threads import DaemonThread
from tracedstore.tools.job_view import JobView, RankName
from tracedstore.tools.top.app import TopApp
from tracedstore.tools.top.reader_process import (
    ReaderAnswer,
    ReaderLostError,
    ReaderRequest,
)

# Seconds between two readings, at least.
_MIN_PAUSE = 0.05


class Source(Protocol):
    """Reads a running job.

    Attributes:
        source: The URL of its store.
        asks: It writes to the store, because the user has asked for it.
    """

    source: str
    asks: bool

    def read(self, request: ReaderRequest) -> ReaderAnswer:
        """Return the job now; may block.

        Raises:
            ReaderLostError: It cannot read any more.
        """

    def close(self) -> None:
        """End a `read` that blocks."""


class LiveApp(TopApp):
    """The screen of a running job.

    Args:
        source: Reads the job.
        interval: Seconds between the starts of two readings.
        folder: Where `e` and `r` write.
    """

    class Arrived(Message):
        """The source has answered."""

        def __init__(self, request: ReaderRequest, response: ReaderAnswer) -> None:
            super().__init__()
            self.request = request
            self.response = response

    def __init__(self, source: Source, interval: float, folder: Path) -> None:
        super().__init__(folder)
        self._source = source
        self._interval = interval
        self._job: JobView | None = None
        self._error = ""
        self._asked: RankName | None = None
        self._confirmed = source.asks
        self._wake = threading.Event()
        self._ended = False
        self._started = time.monotonic()

    def on_mount(self) -> None:
        """Start reading."""
        DaemonThread(self._read, name="tracedstore-top").start()

    def on_unmount(self) -> None:
        """Stop reading."""
        self._ended = True
        self._wake.set()
        self._source.close()

    def _read(self) -> None:
        """Read the job again and again, in a thread: a store may be slow."""
        while not self._ended:
            started = time.monotonic()
            self._wake.clear()
            request = ReaderRequest(
                rates=self.selection.view == "store", stacks_of=self._asked
            )
            try:
                response = self._source.read(request)
            except ReaderLostError:
                text = "the process that reads the job has ended; start top again"
                self.post_message(self.Arrived(request, ReaderAnswer(error=text)))
                return
            if request.stacks_of is not None:
                self._asked = None
            self.post_message(self.Arrived(request, response))
            left = self._interval - (time.monotonic() - started)
            self._wake.wait(max(_MIN_PAUSE, left))

    @on(Arrived)
    def _show(self, message: Arrived) -> None:
        rank, response = message.request.stacks_of, message.response
        if rank is not None:
            asked = time.strftime("asked at %H:%M:%S:")
            self.stacks[rank] = (asked, *(response.stacks or (response.error,)))
            self.say("")
        elif response.job is not None:
            self._job, self._error = response.job, ""
            self.seen.add(response.job)
        else:
            self._error = response.error
        self.draw()

    @property
    def has_read(self) -> bool:
        """Whether the store was read, or could not be read."""
        return self._job is not None or bool(self._error)

    def shown_job(self) -> JobView:
        """Return the job as it was read last, or why it cannot be read."""
        if self._job is None:
            text = self._error and f"{self._error}; trying again"
            age = duration(time.monotonic() - self._started)
            return JobView(
                source=self._source.source,
                time=time.time(),
                level="bad" if text else "notable",
                headline=text or f"loading for {age}: importing torch takes seconds",
                loading=True,
            )
        if not self._error:
            return self._job
        age = duration(time.time() - self._job.time)
        text = f"store lost, last read {age} ago, trying again: {self._error}"
        return replace(self._job, level="bad", headline=text, details=())

    def action_view(self, view: str) -> None:
        """Show another view; rates are read only for their own."""
        super().action_view(view)
        self._wake.set()

    def action_stacks(self) -> None:
        """Ask for the stacks of the selected rank."""
        job = self.shown_job()
        rank = self.selection.rank(job)
        if rank is None:
            self.say("select a rank first")
        elif self._asked is not None:
            self.say(f"rank {self._asked[1]} is being asked")
        elif not self._confirmed:
            self._confirmed = True
            self.say("s writes a question to the store, and deletes it: press s again")
        else:
            self._asked = rank.name
            self._wake.set()
            self.say(f"asking rank {rank.rank} for its stacks, up to 5 s ...")
            self.zoom(None)
