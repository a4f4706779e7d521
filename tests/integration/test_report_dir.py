"""What TRACEDSTORE_REPORT_DIR keeps of a job whose processes are ended."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integration.harness import wait_until
from support.fork_server import run_python, start_python
from support.processes import descendants, kill_tree, running

BIN = Path(sys.executable).parent
_TIMEOUT = 240
# Rank 1 stays away from the barrier.
TRAIN = """\
import time
import torch.distributed as dist

def load_data():
    while dist.get_rank() == 1:
        time.sleep(0.1)

dist.init_process_group("gloo")
load_data()
dist.barrier()
"""

pytestmark = pytest.mark.processes


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of one name in all files."""
    lines = [
        line
        for path in folder.glob("*.log")
        for line in path.read_text("utf-8").splitlines()
        if f'"event": "{name}"' in line
    ]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_job(number: signal.Signals, tmp_path: Path) -> None:
    """The report has the verdict of a job that was killed; at SIGTERM, stacks too.

    The kubelet sends SIGTERM to torchrun only, which ends its workers.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    folder = tmp_path / "reports"
    environ = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TMPDIR": str(tmp_path),
        "TRACEDSTORE_REPORT_DIR": str(folder),
        "TRACEDSTORE_STALL_AFTER": "3",
        "TRACEDSTORE_RUN_ID": "team-a/train/1",
    }
    command = ["tracedstore-run", "torchrun", "--nproc-per-node=3", "train.py"]
    with (
        (tmp_path / "log").open("w") as log,
        running(command, tmp_path, environ, errors=log.fileno()) as agent,
    ):
        (stalled,) = wait_until(lambda: events(folder, "job.stalled"), _TIMEOUT)
        workers = descendants(agent.pid)
        if number == signal.SIGKILL:
            kill_tree(agent.pid)
        else:
            agent.send_signal(number)
        agent.communicate(timeout=_TIMEOUT)

    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert (stalled["awaited_ranks"], stalled["attempt"]) == ([1], 0)
    assert stalled["run_id"] == "team-a/train/1"
    report = subprocess.run(
        [BIN / "tracedstore", "report", folder, "--output", tmp_path / "page.html"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=True,
    )
    named = r"The job was waiting in .* for rank 1 on .*train\.py:6 load_data"
    assert re.match(named, report.stdout), report.stdout
    page = (tmp_path / "page.html").read_text("utf-8")
    assert ("the innermost frame is the first one" in page) == (
        number == signal.SIGTERM
    )
    (awaited,) = folder.glob("rank1.*.log")
    stacks = awaited.read_text("utf-8")
    assert bool(re.search(r"Current thread[^T]*train\.py\", line 6", stacks)) == (
        number == signal.SIGTERM
    )


# Prints what it gets, and ends with an exit code of its own.
HANDLES = """\
import os, signal, sys
import tracedstore

def handle(*_):
    print("handled", flush=True)
    sys.exit(7)

def configure():
    tracedstore.configure(report_dir="reports")
    from tracedstore.export.report_files import REPORT_FILE
    REPORT_FILE.writer.flush(60)

before = sys.argv[1] == "before"
if before:
    signal.signal(signal.SIGTERM, handle)
configure()
if not before:
    signal.signal(signal.SIGTERM, handle)
tracedstore.shutdown()
configure()
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_own_handler(when: str, tmp_path: Path) -> None:
    """A program that handles SIGTERM is left alone, and leaves no empty file."""
    done = run_python("-c", HANDLES, when, cwd=tmp_path, timeout=_TIMEOUT)

    assert (done.returncode, done.stdout) == (7, "handled\n"), done.stderr
    assert not list((tmp_path / "reports").iterdir())


BOUNDED = """\
import os, signal
import tracedstore
from tracedstore.export.report_files import REPORT_FILE

tracedstore.configure(report_dir="reports")
for number in range(2 << 10):
    REPORT_FILE.write(f"{number} " + "x" * 8000)
    REPORT_FILE.writer.flush(60)
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


def test_bounded(tmp_path: Path) -> None:
    """A process has two files of 4 MiB at most: the last lines, and the stacks."""
    done = run_python("-c", BOUNDED, cwd=tmp_path, timeout=_TIMEOUT)

    assert done.returncode == -signal.SIGTERM, done.stderr
    earlier, last = sorted((tmp_path / "reports").iterdir())
    assert earlier.name == last.name.replace(".log", ".earlier.log")
    numbers = re.findall(
        r"^(\d+) x", earlier.read_text() + last.read_text(), re.MULTILINE
    )
    assert list(map(int, numbers)) == list(range(2 << 10))[-len(numbers) :]
    assert len(numbers) > 512
    for path in (earlier, last):
        assert path.stat().st_size <= 4 << 20
    assert "(most recent call first)" in last.read_text().rpartition(" x")[2]


CHILD = """\
import os, signal
import tracedstore
from tracedstore.export.report_files import REPORT_FILE

tracedstore.configure(report_dir="reports")
REPORT_FILE.writer.flush(60)
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()
_, status = os.waitpid(child, 0)
(path,) = os.scandir("reports")
print(os.waitstatus_to_exitcode(status), path.stat().st_size, flush=True)
"""


def test_child(tmp_path: Path) -> None:
    """A forked child, such as one of a data loader, writes nothing to the file."""
    done = run_python("-c", CHILD, cwd=tmp_path, timeout=_TIMEOUT)

    assert done.stdout == f"{-signal.SIGTERM} 0\n", done.stderr


# A pipe that nobody reads: opening it does not return.
HANGING = """\
import os, socket, sys
import tracedstore
from torch.distributed import HashStore
from tracedstore.common.identity import process_identity

os.mkdir("reports")
os.mkfifo(f"reports/{process_identity().host}.{os.getpid()}.log")
tracedstore.configure(report_dir="reports", exit_timeout=0.5)
store = tracedstore.wrap(HashStore())
store.set("k", "v")
print(store.get("k"), flush=True)
"""


def test_hanging_volume(tmp_path: Path) -> None:
    """A folder that hangs delays neither the job nor, beyond the bound, its end."""
    with start_python("-c", HANGING, cwd=tmp_path) as child:
        out, errors = child.communicate(timeout=_TIMEOUT)

    assert (child.returncode, out) == (0, "b'v'\n"), errors
