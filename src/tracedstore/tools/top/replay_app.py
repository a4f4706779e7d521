"""The screen of a finished job: it plays the logs back."""

import time
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType

from tracedstore.common.text import duration
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.top.app import TopApp
from tracedstore.tools.top.model import Model
from tracedstore.tools.top.replay import Replay
from tracedstore.tools.top.rows import Row, Span, pad, row, shorten
from tracedstore.tools.top.saving import page_files

# Times as fast as the job ran.
_SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1000.0, 3600.0)
# Seconds that a whole job should take at first.
_WHOLE = 60.0
_STEPS_A_SECOND = 5


class ReplayApp(TopApp):
    """The screen of a finished job.

    Args:
        replay: The job.
        stats: What was read of its logs.
        folder: Where `e` and `r` write.
    """

    HAS_REPLAY_KEYS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "pause"),
        Binding("comma", "step(-1)"),
        Binding("full_stop", "step(1)"),
        Binding("less_than_sign", "speed(-1)"),
        Binding("greater_than_sign", "speed(1)"),
        Binding("n", "incident(1)"),
        Binding("p", "incident(-1)"),
        Binding("0", "restart"),
    ]

    def __init__(self, replay: Replay, stats: ReadStats, folder: Path) -> None:
        super().__init__(folder)
        self._replay = replay
        self._stats = stats
        self._time = replay.start
        self._playing = True
        wanted = (replay.end - replay.start) / _WHOLE
        self._speed = min(bisect_left(_SPEEDS, max(1.0, wanted)), len(_SPEEDS) - 1)
        self._drawn = time.monotonic()

    def on_mount(self) -> None:
        """Start to play."""
        self.set_interval(1 / _STEPS_A_SECOND, self._play)

    def _play(self) -> None:
        now = time.monotonic()
        passed, self._drawn = now - self._drawn, now
        if self._playing:
            self._go_to(self._time + passed * _SPEEDS[self._speed])

    def _go_to(self, moment: float) -> None:
        replay = self._replay
        self._time = min(replay.end, max(replay.start, moment))
        if self._time >= replay.end:
            self._playing = False
        self.draw()

    def shown_model(self) -> Model:
        """Return the job at the current time."""
        return self._replay.model(self._time)

    def footer(self, width: int) -> Row:
        """Return the time bar: ``!`` where something went wrong."""
        message = super().footer(width)
        if message.text and message.spans[0].style == "notable":
            return message
        replay = self._replay
        whole = max(replay.end - replay.start, 1e-9)
        state = "playing" if self._playing else "paused"
        left = f"{state} x{_SPEEDS[self._speed]:g}  "
        right = f" {duration(self._time - replay.start)} of {duration(whole)}"
        right += "  Space , . n p ?"
        room = max(10, width - len(left) - len(right) - 2)
        cells = [" "] * room

        def cell(moment: float) -> int:
            return min(room - 1, int((moment - replay.start) / whole * (room - 1)))

        here = cell(self._time)
        cells[: here + 1] = ["="] * (here + 1)
        for moment in replay.incidents:
            cells[cell(moment)] = "!"
        cells[here] = ">" if self._playing else "|"
        bar = f"[{''.join(cells)}]"
        return row(
            Span(left, "heading"), Span(bar, "chart"), Span(shorten(pad(right, 0), 60))
        )

    def action_pause(self) -> None:
        """Pause, or go on; from the start at the end."""
        if self._time >= self._replay.end:
            self._time = self._replay.start
        self._playing = not self._playing
        self.draw()

    def action_step(self, steps: int) -> None:
        """Go a step back or on, and pause."""
        self._playing = False
        self._go_to(self._time + steps * max(0.1, _SPEEDS[self._speed]))

    def action_speed(self, steps: int) -> None:
        """Play slower or faster."""
        self._speed = min(len(_SPEEDS) - 1, max(0, self._speed + steps))
        self.draw()

    def action_incident(self, step: int) -> None:
        """Go to the next time at which something went wrong, or the one before."""
        moments = self._replay.incidents
        if step > 0:
            found = moments[bisect_right(moments, self._time) :][:1]
        else:
            found = moments[: bisect_left(moments, self._time)][-1:]
        self._playing = False
        if found:
            self._go_to(found[0])
        else:
            self.say("no further time at which something went wrong")

    def action_restart(self) -> None:
        """Play from the start."""
        self._time, self._playing = self._replay.start, True
        self.draw()

    def action_report(self) -> None:
        """Write the report of the logs."""
        self.save_later(lambda: page_files(self._replay.analysis, self._stats))
