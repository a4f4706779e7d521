"""Jobs that a launcher starts: torchrun, torch.multiprocessing.spawn, or two nodes.

The two nodes are on one machine, in network namespaces with a link between them. They
have host names, process ids and addresses of their own, and an agent of torchrun each.
The second node is lost, or a rank on it is late, and the first one serves the store.
This needs root and a kernel with namespaces.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from hangs.cases import Case
from tracedstore.tools.attach.child_process import die_with_parent

NODES: Final = ("nodea", "nodeb")
RANKS_PER_NODE: Final = 2
# torchrun counts a node as dead after so many heartbeats of so many seconds.
_HEARTBEATS: Final = "keep_alive_interval=2,keep_alive_max_attempt=3"
_ADDRESSES: Final = ("10.99.0.1", "10.99.0.2")
_PORT: Final = 29400
_NAMESPACES: Final = ("--net", "--uts", "--pid", "--mount-proc", "--fork")
# Seconds for agents and workers to start on a busy machine, or a healthy job to end;
# and for reports, which are repeated when a wait has doubled: those of a node that is
# lost, which torchrun notices late, and of a rank.
_START, _NODE_REPORTED, _RANK_REPORTED = 240.0, 30.0, 15.0


def missing() -> str:
    """Return why there can be no nodes here; "" if there can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare and ip (util-linux, iproute2) are not installed"
    command = ("unshare", *_NAMESPACES, "ip", "link", "add", "type", "veth")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def run_launched(case: Case, directory: Path) -> float:
    """Run a job of a launcher; return when its victims were lost."""
    # All ranks of a job that loses a node reach this point, and the victims of others.
    reached = case.world_size if case.scenario.nodes else len(case.victims)
    with _start_programs(case, directory) as programs:
        _wait_until(lambda: len(list(directory.glob("reached.*"))) == reached)
        lost_at = time.time()
        if case.scenario.nodes:
            _lose(case, programs[1])
        end = _NODE_REPORTED if case.scenario.nodes else _RANK_REPORTED
        end = _START if case.scenario.harmless else end
        # After a rank has died, the agent of the other node waits at its exit barrier.
        ending = programs[-1:] if case.kind == "gone" else programs
        _wait_for(lambda: all(one.poll() is not None for one in ending), end)
        return lost_at


@contextmanager
def _start_programs(
    case: Case, directory: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    programs: list[subprocess.Popen[bytes]] = []
    nodes = case.start == "two nodes"
    try:
        for number, command in enumerate(_commands(case, directory)):
            with (directory / f"log.{number}").open("wb") as log:
                programs.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        env={
                            **os.environ,
                            **({"GLOO_SOCKET_IFNAME": "eth0"} if nodes else {}),
                        },
                        stdout=log,
                        stderr=log,
                        preexec_fn=partial(  # noqa: PLW1509 - there are no threads yet
                            die_with_parent, os.getpid()
                        ),
                    )
                )
        if nodes:
            _connect([node.pid for node in programs])
        yield programs
    finally:
        for program in programs:
            _signal(program.pid, signal.SIGKILL)
            program.kill()
            program.wait()


def _commands(case: Case, directory: Path) -> list[list[str]]:
    """Return the programs that start the ranks of a case."""
    module = (sys.executable, "-W", "ignore", "-m", "hangs.node_process")
    work = (case.scenario.name, case.kind, str(directory))
    if case.start == "spawn":
        return [[*module, "spawn", str(case.world_size), *work]]
    agent = [*module, "agent"]
    worker = ("-m", "hangs.node_process", "worker", *work)
    if case.start == "torchrun":
        ranks = ("--nproc-per-node", str(case.world_size))
        return [[*agent, "--standalone", *ranks, *worker]]
    return [
        _node_command(name, [*agent, *_node_options(case, number), *worker])
        for number, name in enumerate(NODES)
    ]


def _node_command(name: str, agent: Sequence[str]) -> list[str]:
    # The agent starts when the node has its address.
    script = f'hostname {name}; until ip route | grep -q 10.99; do sleep .1; done; "$@"'
    return ["unshare", *_NAMESPACES, "--kill-child", "sh", "-c", script, "sh", *agent]


def _node_options(case: Case, number: int) -> list[str]:
    # torch itself removes a healthy node that is late on a busy machine.
    lost = case.scenario.nodes and not case.scenario.harmless
    heartbeats = f",{_HEARTBEATS}" if lost else ""
    return [
        *("--nnodes", "2", "--nproc-per-node", str(RANKS_PER_NODE)),
        *("--node-rank", str(number), "--local-addr", _ADDRESSES[number]),
        *("--rdzv-backend", "traced-c10d", "--rdzv-id", f"hang-{case.number}"),
        *("--rdzv-endpoint", f"{_ADDRESSES[0]}:{_PORT}"),
        *("--rdzv-conf", f"is_host={1 - number}{heartbeats}"),
    ]


def _connect(pids: Sequence[int]) -> None:
    """Connect the namespaces of two processes."""
    first, second = map(str, pids)
    link = ("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer")
    _wait_until(lambda: all(map(_has_own_network, pids)))
    subprocess.run((*link, "name", "eth0", "netns", second), check=True)
    for pid, address in zip(pids, _ADDRESSES, strict=True):
        inside = ("nsenter", "-t", str(pid), "-n", "ip")
        subprocess.run((*inside, "link", "set", "lo", "up"), check=True)
        subprocess.run((*inside, "link", "set", "eth0", "up"), check=True)
        added = ("addr", "add", f"{address}/24", "dev", "eth0")
        subprocess.run((*inside, *added), check=True)


def _has_own_network(pid: int) -> bool:
    own, other = Path("/proc/self/ns/net"), Path(f"/proc/{pid}/ns/net")
    return own.readlink() != other.readlink()


def _lose(case: Case, node: "subprocess.Popen[bytes]") -> None:
    """Do to the second node what the case says."""
    if case.kind in ("node_dead", "node_cut_off"):
        # A host that dies says no goodbye.
        down = ("ip", "link", "set", "eth0", "down")
        subprocess.run(("nsenter", "-t", str(node.pid), "-n", *down), check=True)
    if case.kind == "node_dead":
        _signal(node.pid, signal.SIGKILL)
    elif case.kind == "node_frozen":
        _signal(node.pid, signal.SIGSTOP)


def _signal(pid: int, number: int) -> None:
    """Send a signal to all processes of a node, but not to that which started it."""
    for child in _children(pid):
        # Before its children, so that it starts no further ones.
        os.kill(child, number)
        _signal(child, number)


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return list(map(int, text.split()))


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: It does not; there was no hang.
    """
    _wait_for(condition, _START)
    if not condition():
        raise TimeoutError(f"the nodes have not started within {_START:.0f} s")


def _wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
