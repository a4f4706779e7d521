"""Real torchrun agents on this machine, and what they wrote."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_ROOT = Path(__file__).parents[2]
TRAIN = _ROOT / "examples/train_ddp.py"


class Agent:
    """One torchrun process, in a group of its own with its workers.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, folder: Path, *args: str, env: dict[str, str]) -> None:
        folder.mkdir()
        self._out, self._errors = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", "-m"),
                    *("integration.children.torchrun_agent", *args),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": str(_ROOT / "tests"),
                    "OMP_NUM_THREADS": "1",
                    **env,
                },
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def exit_status(self, timeout: float = 50.0) -> int:
        """Wait until it ends by itself."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it goes on: {self.out()}\n{self.errors()}") from None

    def out(self) -> str:
        """What it and its workers wrote to standard output so far."""
        return self._out.read_text(errors="replace")

    def errors(self) -> str:
        """What they wrote to standard error so far."""
        return self._errors.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name, with those of its workers."""
        lines = [line for line in self.errors().splitlines() if line[:1] == "{"]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def metric(self, name: str, **labels: str) -> float:
        """What a metric of the agent's said when it ended."""
        (text,) = [
            json.loads(line)["metrics"]
            for line in self.out().splitlines()
            if line.startswith('{"metrics":')
        ]
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.items() >= labels.items()
        ]
        assert found, f"no {name} with {labels} in {text}"
        return sum(found)

    def spans(self) -> list[dict[str, Any]]:
        """The spans that the console exporter wrote."""
        found, text, decoder = [], self.out(), json.JSONDecoder()
        start = 0
        while (start := text.find("{\n", start)) >= 0:
            span, start = decoder.raw_decode(text, start)
            found.append(span)
        return found

    def kill(self) -> None:
        """End it and its workers, without warning."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(10)
