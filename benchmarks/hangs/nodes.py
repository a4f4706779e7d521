"""Two nodes on one machine: network namespaces with a link between them.

They have host names, process ids and addresses of their own, and an agent of torchrun
each. The second node is lost, and the first one serves the store. This needs root and a
kernel with namespaces.
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
# and for reports, which are repeated when a wait has doubled.
_START, _REPORTED = 240.0, 30.0


def missing() -> str:
    """Return why there can be no nodes here; "" if there can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare and ip (util-linux, iproute2) are not installed"
    command = ("unshare", *_NAMESPACES, "ip", "link", "add", "type", "veth")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def run_nodes(case: Case, directory: Path) -> float:
    """Run a job on two nodes; return when the second one was lost."""
    with _start_nodes(case, directory) as nodes:
        _wait_until(lambda: len(list(directory.glob("reached.*"))) == case.world_size)
        lost_at = time.time()
        _lose(case, nodes[1])
        end = _START if case.scenario.harmless else _REPORTED
        _wait_for(lambda: all(node.poll() is not None for node in nodes), end)
        return lost_at


@contextmanager
def _start_nodes(
    case: Case, directory: Path
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, name in enumerate(NODES):
            with (directory / f"log.{number}").open("wb") as log:
                nodes.append(
                    subprocess.Popen(
                        _node_command(name, _agent(case, number, directory)),
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                        stdout=log,
                        stderr=log,
                        preexec_fn=partial(  # noqa: PLW1509 - there are no threads yet
                            die_with_parent, os.getpid()
                        ),
                    )
                )
        _connect([node.pid for node in nodes])
        yield nodes
    finally:
        for node in nodes:
            _signal(node.pid, signal.SIGKILL)
            node.kill()
            node.wait()


def _node_command(name: str, agent: Sequence[str]) -> list[str]:
    # The agent starts when the node has its address.
    script = f'hostname {name}; until ip route | grep -q 10.99; do sleep .1; done; "$@"'
    return ["unshare", *_NAMESPACES, "--kill-child", "sh", "-c", script, "sh", *agent]


def _agent(case: Case, number: int, directory: Path) -> list[str]:
    # torch itself removes a healthy node that is late on a busy machine.
    heartbeats = "" if case.scenario.harmless else f",{_HEARTBEATS}"
    return [
        *(sys.executable, "-W", "ignore", "-m", "hangs.node_process", "agent"),
        *("--nnodes", "2", "--nproc-per-node", str(RANKS_PER_NODE)),
        *("--node-rank", str(number), "--local-addr", _ADDRESSES[number]),
        *("--rdzv-backend", "traced-c10d", "--rdzv-id", f"hang-{case.number}"),
        *("--rdzv-endpoint", f"{_ADDRESSES[0]}:{_PORT}"),
        *("--rdzv-conf", f"is_host={1 - number}{heartbeats}"),
        *("-m", "hangs.node_process", case.scenario.name, str(directory)),
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
