"""The batch scripts of examples/slurm, run with a fake of Slurm on this machine.

What the fake sets for a task is compared with recordings of a real Slurm. The names of
the hosts in each distribution are in unit/test_decoders.py.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from integration.harness import wait_until
from support.processes import running
from support.slurm import fake
from support.tools import ROOT

FOLDER = ROOT / "examples/slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
RECORDED: dict[str, Any] = json.loads(
    (ROOT / "tests/support/slurm/recorded.json").read_text("utf-8")
)
BIN = Path(sys.executable).parent
_TIMEOUT = 240

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)

# Records its environment, and ends with an exit code that the batch script must keep.
RECORDER = """\
#!/bin/sh
env > "$RECORDED/$SLURM_PROCID"
echo "$0 $@"
exit 3
"""
# A job that hangs: the last rank stays away until the test lets it go.
HANGING = """\
import os, time
import torch.distributed as dist

if os.environ["RANK"] == "3":
    while not os.path.exists("go"):
        time.sleep(0.1)
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), "is done", flush=True)
dist.destroy_process_group()
"""


class Job:
    """A batch job on some nodes.

    Attributes:
        id: Its job id.
        folder: The folder it was submitted from, with copies of the examples.
    """

    def __init__(self, folder: Path, script: Path, nodes: str) -> None:
        # The ports of a job follow from its id: another worker runs another test.
        self.id = os.getpid()
        self.folder = folder
        self._script = folder / script.name
        for file in FOLDER.iterdir():
            text = file.read_text("utf-8")
            # As few nodes and tasks as show something.
            text = re.sub("--nodes=[2-9]", "--nodes=2", text)
            text = text.replace("--ntasks-per-node=8", "--ntasks-per-node=2")
            text = re.sub("--cpus-per-task=[0-9]+", "--cpus-per-task=4", text)
            (folder / file.name).write_text(text)
            (folder / file.name).chmod(0o755)
        fake.install(folder / "bin")
        self.environ = {
            **os.environ,
            **fake.sbatch_environment(self._script, self.id, nodes, processors=8),
            "PATH": f"{folder}/bin:{BIN}:{os.environ['PATH']}",
            "SLURM_CLUSTER_NAME": "hpc",
            "SLURM_GPUS_ON_NODE": "2",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TRACEDSTORE_STALL_AFTER": "3",
            # Seconds between two readings of the store.
            "INTERVAL": "1",
            "TMPDIR": str(folder),
        }

    @property
    def targets(self) -> Path:
        """The file for Prometheus."""
        return self.folder / f"targets/{self.id}.json"

    def logs(self) -> str:
        """Return the text of all logs."""
        files = sorted((self.folder / f"logs/{self.id}").glob("*.log"))
        return "".join(file.read_text("utf-8") for file in files)

    def running(self) -> "AbstractContextManager[subprocess.Popen[str]]":
        """Run the batch script, and end its processes afterwards."""
        command = ["bash", self._script]
        return running(command, self.folder, self.environ, errors=subprocess.STDOUT)


@pytest.mark.parametrize("step", RECORDED)
def test_fake_is_like_slurm(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake sets what a real Slurm has set for the same options."""
    monkeypatch.chdir(tmp_path)
    hosts = ["node02", "node01", "node03", "node01", "node02", "node02"]
    (tmp_path / "hosts.txt").write_text("\n".join(hosts))
    recorded = RECORDED[step]
    set_by_job = {"SLURM_NTASKS": "10"} | {
        name: value
        for name, value in recorded["job"].items()
        if name.startswith(("SLURM_JOB", "SLURM_HOSTFILE"))
    }
    tasks = fake.task_environments(shlex.split(recorded["options"]), set_by_job)

    assert len(tasks) == len(recorded["tasks"])
    for task, real in zip(tasks, recorded["tasks"], strict=True):
        assert task.items() <= (recorded["job"] | real).items()


@pytest.mark.processes
class TestScripts:
    """What the batch scripts start."""

    @every_script
    def test_tasks(self, script: Path, tmp_path: Path) -> None:
        """Each task gets command, variables and a log; the exit code is kept."""
        nodes = "localhost" if script.stem == "one-node" else "localhost,node2"
        job = Job(tmp_path, script, nodes)
        (tmp_path / "recorded").mkdir()
        program = tmp_path / "bin/tracedstore-run"
        program.write_text(RECORDER)
        program.chmod(0o755)
        job.environ["RECORDED"] = str(tmp_path / "recorded")
        with job.running() as batch:
            batch.communicate(timeout=240)

        assert batch.returncode == 3
        assert not job.targets.exists()
        ranks = script.stem == "ranks"
        count = len(nodes.split(",")) * (2 if ranks else 1)
        port = 29000 + job.id % 1000
        for task in range(count):
            lines = (tmp_path / f"recorded/{task}").read_text("utf-8").splitlines()
            environ = dict(line.partition("=")[::2] for line in lines if "=" in line)
            log = (tmp_path / f"logs/{job.id}/{task}.log").read_text("utf-8")
            assert environ["TRACEDSTORE_RUN_ID"] == f"hpc-{job.id}-0"
            assert environ["SLURM_PROCID"] == str(task)
            assert environ["TASK_CPUS"] == "4"
            if ranks:
                assert log.endswith("tracedstore-run python train.py\n")
                named = (
                    "RANK",
                    "LOCAL_RANK",
                    "WORLD_SIZE",
                    "MASTER_ADDR",
                    "MASTER_PORT",
                )
                assert [environ[name] for name in named] == [
                    *(str(task), str(task % 2), "4"),
                    *("localhost", str(port)),
                ]
            else:
                assert log.endswith(
                    f"torchrun --nnodes={count} --nproc-per-node=2 --rdzv-backend=c10d"
                    f" --rdzv-endpoint=localhost:{port} --rdzv-id=hpc-{job.id}-0"
                    " train.py\n"
                )

    @every_script
    def test_requeued(self, script: Path, tmp_path: Path) -> None:
        """A job that starts again with its id is another run, and keeps the logs."""
        job = Job(tmp_path, script, "localhost" if script.stem == "one-node" else "a,b")
        program = tmp_path / "bin/tracedstore-run"
        program.write_text("#!/bin/sh\necho start $TRACEDSTORE_RUN_ID\n")
        program.chmod(0o755)
        for restarts in ("", "1", "2"):
            if restarts:
                job.environ["SLURM_RESTART_COUNT"] = restarts
            with job.running() as batch:
                batch.communicate(timeout=240)

        for folder, restarts in (("", "0"), ("-1", "1"), ("-2", "2")):
            log = tmp_path / f"logs/{job.id}{folder}/0.log"
            text = f"start hpc-{job.id}-{restarts}"
            assert log.read_text("utf-8").strip() == text

    def test_job(self, tmp_path: Path) -> None:
        """Two agents and four ranks: the log names whom the job waits for.

        The targets of both nodes are in the file while the job runs. The report finds
        the logs. At the end, the file and all processes are gone.
        """
        job = Job(tmp_path, FOLDER / "many-nodes.sbatch", "localhost,node2")
        (tmp_path / "train.py").write_text(HANGING)

        def stalled() -> str | None:
            found = re.search(r'.*"event": "job.stalled".*', job.logs())
            return found[0] if found else None

        def listed() -> list[dict[str, Any]]:
            try:
                found: list[dict[str, Any]] = json.loads(job.targets.read_text("utf-8"))
            except (OSError, ValueError):
                return []
            return found if len(found) == 2 else []

        with job.running() as batch:
            line = wait_until(stalled, _TIMEOUT)
            targets = wait_until(listed, _TIMEOUT)
            (tmp_path / "go").touch()
            out, _ = batch.communicate(timeout=_TIMEOUT)

        assert batch.returncode == 0, out
        event = json.loads(line[line.index("{") :])
        assert event["awaited_ranks"] == [3]
        assert (event["run_id"], event["attempt"]) == (f"hpc-{job.id}-0", 0)
        # The first agent has ranks 0 and 1, the second one rank 2.
        for target in targets:
            assert set(target["labels"]) == {"__scheme__", "run_id", "host"}
            assert target["labels"]["run_id"] == f"hpc-{job.id}-0"
        assert targets[0]["targets"] != targets[1]["targets"]
        assert job.logs().count("is done") == 4
        assert not job.targets.exists()
        report = subprocess.run(
            [BIN / "tracedstore", "report", f"logs/{job.id}", "--output", "page.html"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        assert report.stderr == ""
        page = (tmp_path / "page.html").read_text("utf-8")
        # On a busy machine the report may come while rank 0 waits for its clients.
        assert re.search(r"The job waited in [^<]* for rank(s [-0-9,]*)? ?[^<]*3", page)
