"""Makes the picture of ``tracedstore top`` from a real job of torchrun that hangs."""

import asyncio
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from tracedstore.tools.attach.address import Address
from tracedstore.tools.attach.token_policy import TokenPolicy
from tracedstore.tools.top.live import LiveApp
from tracedstore.tools.top.reader_process import JobReader
from tracedstore.tools.top.saving import screen_svg

_JOB = """\
import time

import torch.distributed as dist

import tracedstore


def load_dataset() -> None:
    time.sleep(600)


dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
for step in range(6):
    time.sleep(0.4 * (rank == 3))
    tracedstore.barrier(store, 8, f"step/{step}", 60, rank=rank)
if rank == 5:
    load_dataset()
dist.new_group()
"""
_SIZE = (80, 24)
_TIMEOUT = 120.0


def make_picture(folder: Path, picture: Path) -> None:
    """Run the job in a folder, and write the screen as SVG."""
    job_folder = folder / "job"
    job_folder.mkdir()
    (job_folder / "train.py").write_text(_JOB)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    python = Path(sys.executable).parent
    torchrun = f"{python}/tracedstore-run {python}/torchrun --nproc-per-node 8"
    torchrun += " --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-id job-7 "
    torchrun += f"--rdzv-endpoint {endpoint} train.py"
    job = subprocess.Popen(  # noqa: S603 - our own job
        shlex.split(torchrun),
        cwd=job_folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRACEDSTORE_STALL_AFTER": "5"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        picture.write_text(asyncio.run(_draw(f"tcp://{endpoint}")), "utf-8")
    finally:
        job.terminate()
        job.wait()


async def _draw(url: str) -> str:
    app = LiveApp(JobReader(Address(url), TokenPolicy(), after=5.0), 0.5, Path())
    async with asyncio.timeout(_TIMEOUT), app.run_test(size=_SIZE) as pilot:
        while "load_dataset" not in app.shown_job().headline:
            await pilot.pause(0.1)
        await pilot.pause()
        svg = screen_svg(app, f"tracedstore top --store {url}")
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())
