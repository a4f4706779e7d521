"""A Slurm for tests on one machine: sbatch, srun and ``scontrol show hostnames``.

srun starts the tasks of all nodes here, with the variables that Slurm documents. What
it sets is compared with recordings of a real Slurm (recorded.json). Tasks get no
resources, and share the host name of this machine.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

# Options of the batch script, and the variables that sbatch makes of them.
_OF_SBATCH = {
    "nodes": "SLURM_NNODES",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
}


def expand(nodes: str) -> list[str]:
    """Expand a node list with at most one bracket for each name."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^]]*\])?", nodes):
        prefix, _, numbers = part.rstrip("]").partition("[")
        for item in numbers.split(",") if numbers else []:
            first, _, last = item.partition("-")
            names += (
                f"{prefix}{number:0{len(first)}}"
                for number in range(int(first), int(last or first) + 1)
            )
        names += [] if numbers else [prefix]
    return names


def shorten(counts: Sequence[int]) -> str:
    """Write counts as Slurm does: ``4(x2),2``."""
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    return ",".join(f"{n}(x{times})" if times > 1 else str(n) for n, times in groups)


def sbatch_environment(
    script: Path, job_id: int, nodes: str, processors: int
) -> dict[str, str]:
    """Return the variables that sbatch sets for a batch script with options in it."""
    options = dict(
        re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script.read_text(), re.MULTILINE)
    )
    hosts = expand(nodes)
    assert int(options.get("nodes", 1)) == len(hosts)
    per_node = int(options.get("ntasks-per-node", 1))
    variables = {
        variable: options[name]
        for name, variable in _OF_SBATCH.items()
        if name in options
    }
    return variables | {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOBID": str(job_id),
        "SLURM_JOB_NAME": options.get("job-name", script.name),
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(len(hosts)),
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_NTASKS": str(per_node * len(hosts)),
        "SLURM_NPROCS": str(per_node * len(hosts)),
        "SLURM_TASKS_PER_NODE": shorten([per_node] * len(hosts)),
        "SLURM_JOB_CPUS_PER_NODE": shorten([processors] * len(hosts)),
        # The batch script itself is a task on the first node.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": hosts[0],
    }


def task_environments(
    options: Sequence[str], environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables that srun sets for each task of a step."""
    given = _srun_options(options)[0]
    hosts = expand(environ["SLURM_JOB_NODELIST"])
    processors = dict(
        zip(hosts, _counts(environ["SLURM_JOB_CPUS_PER_NODE"]), strict=True)
    )
    tasks = given.ntasks or int(environ["SLURM_NTASKS"])
    kind, _, plane = (given.distribution or "").partition("=")
    file = None if given.nodelist else environ.get("SLURM_HOSTFILE")
    if given.nodelist and "/" in given.nodelist:
        file = given.nodelist if kind == "arbitrary" else None
    elif given.nodelist and given.nodes:
        hosts = [host for host in hosts if host in expand(given.nodelist)]
    if file:
        kind = "arbitrary"
        lines = Path(file).read_text().split()[:tasks]
        order = [hosts.index(line) for line in lines]
    else:
        # By default, cyclic for one task a node and block for more.
        kind = kind or ("block" if tasks > len(hosts) else "cyclic")
        slots = [processors[host] // given.cpus_per_task for host in hosts]
        counts = _deal(tasks, slots, int(plane or 1))
        order = _order(counts, int(plane or 1) if kind != "block" else tasks)
    counts = [order.count(node) for node in range(len(hosts))]
    step = {
        "SLURM_DISTRIBUTION": kind,
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_NNODES": str(len(hosts)),
        "SLURM_STEP_NODELIST": _node_list(hosts, environ["SLURM_JOB_NODELIST"]),
        "SLURM_STEP_NUM_NODES": str(len(hosts)),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": shorten(counts),
        "SLURM_TASKS_PER_NODE": shorten(counts),
    }
    if plane:
        step["SLURM_DIST_PLANESIZE"] = plane
    if given.overcommit:
        step["SLURM_OVERCOMMIT"] = "1"
    # As 22.05 to 23.02, srun does not take it from the options of sbatch.
    if given.cpus_per_task > 1:
        step["SLURM_CPUS_PER_TASK"] = str(given.cpus_per_task)
    return [
        step
        | {
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(order[:task].count(node)),
            "SLURM_NODEID": str(node),
            "SLURM_GTIDS": ",".join(str(n) for n, at in enumerate(order) if at == node),
            "SLURMD_NODENAME": hosts[node],
        }
        for task, node in enumerate(order)
    ]


def _node_list(hosts: list[str], of_job: str) -> str:
    if hosts == expand(of_job):
        return of_job
    prefix = hosts[0].rstrip("0123456789")
    numbers = [host.removeprefix(prefix) for host in hosts]
    return f"{prefix}[{numbers[0]}-{numbers[-1]}]"


def _counts(text: str) -> list[int]:
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _deal(tasks: int, slots: list[int], plane: int) -> list[int]:
    """Return the tasks of each node: in turn, while there are free processors."""
    counts = [0] * len(slots)
    free = list(slots)
    while sum(counts) < tasks:
        if not any(free):  # --overcommit
            free = [tasks] * len(slots)
            plane = 1
        for node, left in enumerate(free):
            taken = min(plane, left, tasks - sum(counts))
            counts[node] += taken
            free[node] -= taken
    return counts


def _order(counts: list[int], plane: int) -> list[int]:
    order: list[int] = []
    left = list(counts)
    while any(left):
        for node, remaining in enumerate(left):
            taken = min(plane, remaining)
            order += [node] * taken
            left[node] -= taken
    return order


def _srun_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-N", "--nodes", type=int)
    parser.add_argument("-n", "--ntasks", type=int)
    parser.add_argument("-c", "--cpus-per-task", type=int, default=1)
    parser.add_argument("-m", "--distribution")
    parser.add_argument("-w", "--nodelist")
    parser.add_argument("-O", "--overcommit", action="store_true")
    parser.add_argument("-o", "--output")
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    return given, given.command


def srun(arguments: Sequence[str]) -> int:
    """Run the tasks of a step, and return the highest exit code."""
    given, command = _srun_options(arguments)
    tasks: list[subprocess.Popen[bytes]] = []

    def end(number: int, _frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    for variables in task_environments(arguments, os.environ):
        pattern = given.output.replace("%t", variables["SLURM_PROCID"])
        with Path(pattern).open("wb") as output:
            tasks.append(
                subprocess.Popen(
                    command,
                    # Not Slurm's: how many processors the task really gets.
                    env=os.environ
                    | variables
                    | {"TASK_CPUS": str(given.cpus_per_task)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return max(task.wait() for task in tasks)


def scontrol(arguments: Sequence[str]) -> int:
    """Print the names of a node list, as ``scontrol show hostnames`` does."""
    assert list(arguments[:2]) == ["show", "hostnames"]
    sys.stdout.write("".join(f"{name}\n" for name in expand(arguments[2])))
    return 0


def install(folder: Path) -> None:
    """Write the programs ``srun`` and ``scontrol`` into a folder for the PATH."""
    folder.mkdir()
    for name in ("srun", "scontrol"):
        program = folder / name
        called = shlex.join([sys.executable, "-S", __file__, name])
        program.write_text(f'#!/bin/sh\nexec {called} "$@"\n')
        program.chmod(0o755)


if __name__ == "__main__":
    # srun tasks must not inherit what only this program needs.
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
