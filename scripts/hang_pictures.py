"""Makes the pictures of docs/my-job-hangs.md: four hangs, as the README has them found.

Each is a real job of three ranks on a terminal of 80x24. Its log, and then ``top`` in a
second terminal and in a browser, are pictures of what is there after half a minute.
"""

import time
from collections.abc import Callable
from pathlib import Path

from support.browser import Browser
from support.tmux import Tmux

_JOB = """\
import os
import time

import torch
import torch.distributed as dist

HANG, RANK = os.environ["HANG"], int(os.environ["RANK"])


def load_dataset():
    time.sleep(600)


def evaluate():
    time.sleep(600)


if HANG == "asleep" and RANK == 2:
    load_dataset()
dist.init_process_group("gloo")
if HANG == "crash" and RANK == 2:
    raise ValueError("a sample has no label")
if HANG == "loader" and RANK == 2:
    load_dataset()
dist.new_group()
for step in range(5):
    if HANG == "skipped" and RANK == 2 and step == 3:
        evaluate()
    dist.all_reduce(torch.ones(1))
"""
_TORCHRUN = "tracedstore-run torchrun --nproc-per-node 3 train.py"
# torchrun ends the others when a rank crashes. Without it they wait.
_RANKS = "for r in 0 1 2; do RANK=$r tracedstore-run python train.py & done; wait"
_ENVIRONMENT = "OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3"
_HANGS = {
    "asleep": _TORCHRUN,
    "crash": _RANKS,
    "loader": _TORCHRUN,
    "skipped": _TORCHRUN,
}
_WEB = "http://127.0.0.1:8080"
# Seconds for a job to end.
_TIMEOUT = 240.0
_WINDOW = "--window-size=1000,560"


def make_pictures(
    folder: Path, output: Path, draw: Callable[[list[str], str], str]
) -> None:
    """Make three pictures of each hang: its log, ``top``, and ``top`` in a browser."""
    folder.mkdir()
    (folder / "train.py").write_text(_JOB)
    for hang, command in _HANGS.items():
        name = output / f"hang-{hang}"
        with Tmux(folder) as job, Tmux(folder) as tool:
            _type(job, f"export HANG={hang} {_ENVIRONMENT}; PS1='$ '; clear")
            job.press(command, "Enter")
            job.wait_for(": stalled ")
            _save(job, name.with_name(f"{name.name}-log.svg"), draw, "the job")
            _type(tool, "PS1='$ '; clear")
            tool.press("tracedstore top", "Enter")
            tool.wait_for("waiting for")
            _save(tool, name.with_name(f"{name.name}-top.svg"), draw, "tracedstore top")
            tool.press("q")
            tool.wait_for("reading ")
            _type(tool, "clear")
            tool.press("tracedstore top --web 8080", "Enter")
            tool.wait_for("serving on")
            with Browser(_WINDOW) as browser:
                browser.open(_WEB)
                browser.wait_for("waiting for")
                browser.screenshot(name.with_name(f"{name.name}-web.png"))
            tool.press("C-c")
            job.press("C-c")
            # Of ranks in the background, the next hang would be a second job.
            job.press("kill %1 %2; wait", "Enter")
            _type(job, "clear")


def _type(terminal: Tmux, command: str) -> None:
    """Type a command that clears the screen, and wait until it has."""
    terminal.press(command, "Enter")
    deadline = time.monotonic() + _TIMEOUT
    while (screen := terminal.screen().strip()) != "$":
        if time.monotonic() > deadline:
            raise TimeoutError(screen)
        time.sleep(0.05)


def _save(
    terminal: Tmux, path: Path, draw: Callable[[list[str], str], str], title: str
) -> None:
    lines = terminal.screen("-e").rstrip().splitlines()
    path.write_text(draw(lines, title), "utf-8")
