"""Records what a real Slurm sets for the tasks of steps, in each distribution.

    python scripts/record_slurm.py tests/support/slurm/recorded.json

Unpacks Debian's packages of Slurm into .tools/slurm, without installing them, and
starts a controller and three nodes of 4, 4 and 2 processors on this machine. It needs
root, takes a minute, and is not part of the tests.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("slurm-client", "slurmd", "slurmctld", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15"),
)
NODES = {"node01": 4, "node02": 4, "node03": 2}
HOSTS = ["node02", "node01", "node03", "node01", "node02", "node02"]
# The options of srun by the name of the step. "@" sets SLURM_HOSTFILE.
STEPS = {
    "block": "-n 6 -m block",
    "default": "-n 6",
    "default_few": "-n 3",
    "cyclic": "-n 6 -m cyclic",
    "cyclic_full": "-n 10 -m cyclic",
    "cyclic_c2": "-n 5 -c 2 -m cyclic",
    "plane": "-n 8 -m plane=2",
    "plane_full": "-n 10 -m plane=3",
    "over_block": "-O -n 16 -m block",
    "over_cyclic": "-O -n 16 -m cyclic",
    "over_plane": "-O -n 16 -m plane=2",
    "hostfile": "@-n 6",
    "hostfile_m": "@-n 6 -m cyclic",
    "hostfile_w": "@-n 4 -w node01,node02",
    "w_file_arb": "-n 6 -w ./hosts.txt -m arbitrary",
    "subset": "-N2 -n 4 -w node02,node03",
    "subset_cyclic": "-N2 -n 6 -w node03,node02 -m cyclic",
    "pernode2": "--ntasks-per-node=2 -n 6 -m cyclic",
}
# About the machine and the user, or different in every run.
IGNORED = re.compile(
    "CONF|ADDR|_COMM_|PORT|TASK_PID|UID|_GID$|USER|SUBMIT|UMASK|PRIO|RLIMIT|CPU_BIND"
    "|TOPOLOGY|CLUSTER|ALIASES|PACK_GROUP|SCRIPT|TIME"
)
TASK = """
import json, os, sys
found = {name: value for name, value in os.environ.items() if name.startswith("SLURM")}
open(f"{sys.argv[1]}.{os.environ['SLURM_PROCID']}", "w").write(json.dumps(found))
"""


def unpack(folder: Path) -> None:
    """Download the packages and unpack them."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, folder / "root"], check=True)


def configuration(work: Path, plugins: Path) -> str:
    """Return slurm.conf for a controller and the nodes on this machine."""
    here = socket.gethostname()
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={17901 + number}"
        f" CPUs={processors}"
        for number, (name, processors) in enumerate(NODES.items())
    )
    return f"""\
ClusterName=record
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort=17817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={work}/munge.socket
CredType=cred/munge
PluginDir={plugins}
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool/%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def running(*command: str | Path) -> Iterator[None]:
    """Run a daemon in the foreground until the block ends."""
    process = subprocess.Popen(
        [*command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def record(work: Path, tools: Path) -> None:
    """Run the steps in one job; each task writes its variables into the folder."""
    lines = ["#!/bin/bash", "#SBATCH -N3 -n10 --exclusive", f"cd {work}"]
    for name, options in STEPS.items():
        host_file = "SLURM_HOSTFILE=hosts.txt " if options[0] == "@" else ""
        step = f"srun {options.removeprefix('@')}"
        lines.append(f"{host_file}{step} {sys.executable} task.py steps/{name}")
    for folder in ("state", "steps", *(f"spool/{node}" for node in NODES)):
        (work / folder).mkdir(parents=True)
    (work / "task.py").write_text(TASK)
    (work / "hosts.txt").write_text("\n".join(HOSTS) + "\n")
    (work / "job.sbatch").write_text("\n".join(lines) + "\n")
    sbin, daemons = tools / "usr/sbin", ExitStack()
    key = work / "munge.key"
    subprocess.run([sbin / "mungekey", "-c", "-k", key], check=True)
    files = {"key-file": key} | {
        f"{name}-file": work / f"munge.{name}" for name in ("pid", "log", "seed")
    }
    with daemons:
        daemons.enter_context(
            running(
                *(sbin / "munged", "-F", "--force", "-S", work / "munge.socket"),
                *(f"--{name}={path}" for name, path in files.items()),
            )
        )
        time.sleep(1)
        daemons.enter_context(running(sbin / "slurmctld-wlm", "-D"))
        time.sleep(2)
        stepd = sbin / "slurmstepd-wlm"
        for node in NODES:
            daemons.enter_context(
                running(sbin / "slurmd-wlm", "-N", node, "-D", "-d", stepd)
            )
        time.sleep(5)
        sbatch = tools / "usr/bin/sbatch"
        log = work / "job.log"
        subprocess.run(
            [sbatch, "--wait", f"--output={log}", work / "job.sbatch"], check=False
        )


def compact(work: Path) -> str:
    """Return the recordings as JSON: what all tasks of a step share, and the rest."""
    steps = []
    for name, options in STEPS.items():
        files = sorted(
            (work / "steps").glob(f"{name}.*"), key=lambda file: int(file.suffix[1:])
        )
        tasks = [
            {key: value for key, value in found.items() if not IGNORED.search(key)}
            for found in (json.loads(file.read_text()) for file in files)
        ]
        first = tasks[0]
        job = {
            key: first[key]
            for key in sorted(first)
            if all(task.get(key) == first[key] for task in tasks)
        }
        own = [
            json.dumps({key: task[key] for key in sorted(task) if key not in job})
            for task in tasks
        ]
        shown = json.dumps(shlex.join(shlex.split(options.removeprefix("@"))))
        joined = ",\n   ".join(own)
        steps.append(
            f' {json.dumps(name)}: {{"options": {shown},\n  "job": {json.dumps(job)},\n'
            f'  "tasks": [\n   {joined}\n  ]}}'
        )
    return "{\n" + ",\n".join(steps) + "\n}\n"


def main() -> None:
    """Record all steps."""
    folder = ROOT / ".tools/slurm"
    unpack(folder)
    tools = folder / "root"
    libraries = tools / "usr/lib/x86_64-linux-gnu"
    work = folder / f"work-{os.getpid()}"
    work.mkdir()
    conf = work / "slurm.conf"
    conf.write_text(configuration(work, libraries / "slurm-wlm"))
    os.environ["SLURM_CONF"] = str(conf)
    os.environ["LD_LIBRARY_PATH"] = f"{libraries}:{libraries / 'slurm-wlm'}"
    os.environ["PATH"] = f"{tools / 'usr/bin'}:{os.environ['PATH']}"
    record(work, tools)
    Path(sys.argv[1]).write_text(compact(work))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
