"""Lines of JSON over pipes, between the director of a case and its processes."""

import json
import os
import time
from typing import Any

# Kept, because a fault replaces the functions of `time` in a rank.
_monotonic = time.monotonic


class Channel:
    """The end of a rank or server: it sends lines and waits for the answer."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    def send(self, kind: str, **fields: Any) -> None:
        """Send a line with the time; it survives the death of this process."""
        line = json.dumps({"kind": kind, "at": _monotonic(), **fields}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(self._writing, data) :]

    def wait(self) -> bytes:
        """Wait for one byte from the director; b"" if it has ended."""
        return os.read(self._reading, 1)


class Lines:
    """The lines of one pipe, as they arrive."""

    def __init__(self, reading: int) -> None:
        self.reading = reading
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Return the lines that have arrived; None at the end of the pipe."""
        data = os.read(self.reading, 65536)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
