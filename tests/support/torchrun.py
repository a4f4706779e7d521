"""Runs real torchrun agents and reads what they write."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.fork_server import ForkedProcess, python_path, start_python
from support.processes import kill_tree
from support.versions import TORCH

_ROOT = Path(__file__).parents[2]
TRAIN = _ROOT / "examples/train_ddp.py"


def one_node() -> dict[str, str]:
    """Return variables that let a torchrun without options run beside another one.

    torch 2.13 chooses c10d and a free port. An older one may use port 29500.
    """
    if TORCH >= (2, 13):
        return {}
    return {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}


class Agent:
    """One torchrun process. It and its workers are forked from one that has torch.

    Args:
        folder: Where it writes its output.
        args: The options of torchrun.
        env: Further variables.
        command: A command that it is an argument of.

    Attributes:
        pid: The process id of the agent.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: dict[str, str],
        command: Sequence[str] = (),
    ) -> None:
        folder.mkdir()
        self._out, self._errors = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._errors.open("wb") as errors:
            environ = {
                **os.environ,
                "PYTHONPATH": python_path(),
                "OMP_NUM_THREADS": "1",
                **env,
            }
            module = ("-m", "integration.children.torchrun_agent", *args)
            self._process: subprocess.Popen[str] | ForkedProcess
            if command:
                self._process = subprocess.Popen(
                    [*command, sys.executable, "-W", "ignore", *module],
                    env=environ,
                    stdout=out,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            else:
                self._process = start_python(
                    *module, env=environ, stdout=out, stderr=errors
                )
        self.pid = self._process.pid

    def exit_status(self, timeout: float = 240.0) -> int:
        """Wait until the agent exits and return its exit status."""
        try:
            return self._process.wait(timeout)
        except (TimeoutError, subprocess.TimeoutExpired):
            raise AssertionError(
                f"torchrun is still running: {self.out()}\n{self.errors()}"
            ) from None

    def out(self) -> str:
        """Return what the agent and its workers have written to standard output."""
        return self._out.read_text(errors="replace")

    def errors(self) -> str:
        """Return what the agent and its workers have written to standard error."""
        return self._errors.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name from the agent and its workers."""
        lines = [line for line in self.errors().splitlines() if line[:1] == "{"]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the agent's samples of a metric, as of its exit."""
        (text,) = [
            json.loads(line)["metrics"]
            for line in self.out().splitlines()
            if line.startswith('{"metrics":')
        ]
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and sample.labels.items() >= labels.items()
        ]
        assert values, f"no {name} with {labels} in {text}"
        return sum(values)

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans that the console exporter has written."""
        spans, text, decoder = [], self.out(), json.JSONDecoder()
        start = 0
        while (start := text.find("{\n", start)) >= 0:
            span, start = decoder.raw_decode(text, start)
            spans.append(span)
        return spans

    def kill(self) -> None:
        """Send SIGKILL to the agent and its workers."""
        if self._process.poll() is None:
            kill_tree(self.pid)
            self._process.wait(240)
