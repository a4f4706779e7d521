"""Counts the lines of a log: by event, by rank and by minute."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(slots=True)
class LogLines:
    """The events in the logs of a job.

    Attributes:
        lines: Seconds since the epoch, event, rank and bytes of each line.
    """

    lines: list[tuple[float, str, int, int]] = field(default_factory=list)

    def add(self, line: str, at: float | None = None) -> None:
        """Count a line, if it is an event.

        Args:
            line: The line.
            at: When it was written, in seconds since the epoch; by default what it has
                as its timestamp.
        """
        if not line.startswith("{"):
            return
        event = json.loads(line)
        at = (
            datetime.fromisoformat(event["timestamp"]).timestamp() if at is None else at
        )
        self.lines.append((at, event["event"], event["rank"], len(line.encode())))

    def summary(self, began: float, ended: float) -> dict[str, Any]:
        """Return the counts of an interval in seconds since the epoch, for JSON."""
        lines = [line for line in self.lines if began <= line[0] < ended]
        numbers: Counter[int] = Counter()
        sizes: Counter[int] = Counter()
        for at, _, _, size in lines:
            minute = int(at - began) // 60
            numbers[minute] += 1
            sizes[minute] += size
        minutes = range(-(-int(ended - began) // 60))
        return {
            "seconds": ended - began,
            "lines": len(lines),
            "bytes": sum(sizes.values()),
            "lines_a_minute": [numbers[minute] for minute in minutes],
            "bytes_a_minute": [sizes[minute] for minute in minutes],
            "events": dict(Counter(event for _, event, _, _ in lines)),
            "ranks": len({rank for _, _, rank, _ in lines}),
            "longest_line": max((size for _, _, _, size in lines), default=0),
        }
