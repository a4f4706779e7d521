"""One decoder per launcher, created from the variables that the launcher sets.

A decoder names only what is certain. The factory raises a DecoderError if another
launcher numbered the ranks, or if a roster puts this process on the wrong host: without
a name, an operator looks the host up; a wrong name sends the operator to the wrong
machine.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from tracedstore.coordination.environment import (
    OWN_DECODER,
    DecoderError,
    number,
    parse,
    quoted,
    refuse_if_set,
    require,
    require_equal,
)
from tracedstore.coordination.rosters import (
    assign_tasks,
    parse_host_file,
    parse_node_list,
    parse_task_counts,
)

Decoder = Callable[[int], str]
"""Returns the name of a rank; raises LookupError for an unknown rank."""


def slurm(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Name the hosts of a Slurm step: node list, tasks per node, and distribution.

    Two distributions are not known. ``arbitrary`` is refused. With ``cyclic``, nodes of
    unequal size and more tasks than processors, Slurm begins a second deal at a point
    that the counts do not show.
    """
    refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    refuse_if_set(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    # The step's variables belong together: a step may use fewer nodes than its job.
    nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    if not (environ.get(nodes) and environ.get(tasks)):
        nodes = require(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST", nodes)
        tasks = require(environ, tasks, "SLURM_TASKS_PER_NODE")
    hosts = parse(environ, nodes, parse_node_list)
    counts = parse(environ, tasks, parse_task_counts)
    if len(hosts) != len(counts):
        raise DecoderError(
            f"{tasks} is {quoted(environ[tasks])}, which counts {len(counts)} nodes,"
            f" but {nodes} names {len(hosts)}; run under srun, or {OWN_DECODER}"
        )
    assigned = assign_tasks(counts, _slurm_plane_size(environ) or max(counts))
    require_equal(environ, "WORLD_SIZE", len(assigned), tasks)
    if environ.get("SLURM_PROCID"):
        own = number(environ, "SLURM_PROCID")
        require_equal(environ, "RANK", own, "SLURM_PROCID")
        node = environ.get("SLURMD_NODENAME")
        if node and (own >= len(assigned) or hosts[assigned[own]] != node):
            raise DecoderError(
                f"SLURMD_NODENAME is {quoted(node)}, but {nodes} and {tasks} put task"
                f" {own} elsewhere; {OWN_DECODER}"
            )
    return _table_decoder(hosts, assigned)


def _slurm_plane_size(environ: Mapping[str, str]) -> int:
    """Return how many tasks a node takes in turn; 0 for all of them."""
    name = "SLURM_DISTRIBUTION"
    # What follows ":" is about sockets and cores; "Pack" and "NoPack" about counts.
    across_nodes = environ.get(name, "").partition(",")[0].partition(":")[0]
    kind, _, size = across_nodes.strip().lower().partition("=")
    if kind in {"", "*", "block"}:
        return 0
    if kind == "cyclic":
        return 1
    if kind == "plane":
        # srun sets "plane" and the size in another variable; users write "plane=4".
        if size:
            return number({f"{name} plane": size}, f"{name} plane", minimum=1)
        return number(environ, "SLURM_DIST_PLANESIZE", minimum=1)
    if kind == "arbitrary":
        raise DecoderError(
            f"{name} is 'arbitrary', and the order of the nodes is only in the file"
            f" that SLURM_HOSTFILE named at launch; use hostfile:PATH, or {OWN_DECODER}"
        )
    raise DecoderError(
        f"{name} is {quoted(environ[name])}, not block, cyclic or plane=N;"
        f" {OWN_DECODER}"
    )


def torchrun(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name this host, and number the other nodes by their group rank.

    torchrun assigns group ranks at each rendezvous, and passes a worker no host but its
    own. If nodes have different numbers of workers, the other nodes' ranks are unknown.
    """
    rank = number(environ, "RANK")
    local_size = number(environ, "LOCAL_WORLD_SIZE", minimum=1)
    group = number(environ, "GROUP_RANK")
    groups = number(environ, "GROUP_WORLD_SIZE", minimum=1)
    size = number(environ, "WORLD_SIZE", minimum=1)
    homogeneous = local_size * groups == size
    first = group * local_size
    if not homogeneous:
        first = rank - number(environ, "LOCAL_RANK")
    own = range(first, first + local_size)
    if rank not in own or first < 0 or own.stop > size or group >= groups:
        raise DecoderError(
            f"RANK is {rank}, which is impossible for GROUP_RANK={group} of {groups}"
            f" groups with LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size}; start"
            f" with torchrun, or {OWN_DECODER}"
        )
    return _block_decoder(own, size, host or socket.gethostname(), numbered=homogeneous)


def kubernetes(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Name the pods of an Indexed Job, ``<job>-<index>``.

    Ranks are assigned to pods in the order of their index, LOCAL_WORLD_SIZE to each (1
    if not set). torchrun's agents keep that order only with a fixed node rank.
    """
    refuse_if_set(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    index = number(environ, "JOB_COMPLETION_INDEX")
    per_pod = 1
    if environ.get("LOCAL_WORLD_SIZE"):
        per_pod = number(environ, "LOCAL_WORLD_SIZE", minimum=1)
    # The elastic rendezvous sorts by address, where job-10 is before job-2.
    # PET_NODE_RANK is torchrun's --node-rank, as Kubeflow and others set it.
    fixed = (
        environ.get("PET_NODE_RANK") == environ.get("GROUP_RANK") == str(index)
        and environ.get("PET_RDZV_BACKEND", "static") == "static"
    )
    if not fixed:
        refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    if environ.get("RANK"):
        own = number(environ, "RANK") // per_pod
        if own != index:
            raise DecoderError(
                f"RANK is {quoted(environ['RANK'])}, which is not a rank of pod"
                f" JOB_COMPLETION_INDEX={index} with {per_pod} per pod; {OWN_DECODER}"
            )
    size = number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else None
    name = environ[require(environ, "HOSTNAME")].partition(".")[0]
    job = name.removesuffix(f"-{index}")
    if job in {name, ""}:
        raise DecoderError(
            f"HOSTNAME is {quoted(name)}, which does not end in the"
            f" JOB_COMPLETION_INDEX -{index}; leave the pod's hostname unset, or"
            f" {OWN_DECODER}"
        )

    def pod(rank: int) -> str:
        if rank < 0 or (size is not None and rank >= size):
            raise LookupError(rank)
        return f"{job}-{rank // per_pod}"

    return pod


def openmpi(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name this host, and number the others if all have the same number of ranks.

    mpirun passes a process no host but its own. The decoder assumes mpirun's default,
    that ranks fill one host after the other. If this process's ranks contradict that,
    only its own rank is named.
    """
    refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    rank = number(environ, "OMPI_COMM_WORLD_RANK")
    size = number(environ, "OMPI_COMM_WORLD_SIZE", minimum=1)
    local_rank = number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", minimum=1)
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise DecoderError(
            f"OMPI_COMM_WORLD_RANK is {rank} of {size} and OMPI_COMM_WORLD_LOCAL_RANK"
            f" is {local_rank} of {local_size}, which is impossible; start with"
            f" mpirun, or {OWN_DECODER}"
        )
    require_equal(environ, "RANK", rank, "OMPI_COMM_WORLD_RANK")
    require_equal(environ, "WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")
    first = rank - local_rank
    own = range(first, first + local_size)
    homogeneous = size % local_size == 0
    if own.stop > size or (homogeneous and first % local_size):
        own, homogeneous = range(rank, rank + 1), False
    return _block_decoder(own, size, host or socket.gethostname(), numbered=homogeneous)


def hostfile(path: str | os.PathLike[str]) -> Decoder:
    """Assign ranks to the slots of a launcher's host file, in the order of the file."""
    shown = os.fspath(path)
    try:
        with open(shown, encoding="utf-8") as lines:  # noqa: PTH123 - needs no Path
            entries = parse_host_file(lines)
    except OSError as error:
        raise DecoderError(
            f"host file {shown!r} cannot be read ({error.strerror}); correct the path,"
            f" or {OWN_DECODER}"
        ) from None
    except UnicodeDecodeError:
        raise DecoderError(
            f"host file {shown!r} is not UTF-8 text; correct the path, or {OWN_DECODER}"
        ) from None
    except ValueError as error:
        raise DecoderError(f"{shown}:{error}; correct it, or {OWN_DECODER}") from None
    counts = [slots for _, slots in entries]
    if not any(counts):
        raise DecoderError(
            f"host file {shown!r} has no slots; add lines such as 'node1 slots=8', or"
            f" {OWN_DECODER}"
        )
    hosts = [host for host, _ in entries]
    return _table_decoder(hosts, assign_tasks(counts, max(counts)))


def _table_decoder(hosts: Sequence[str], assigned: Sequence[int]) -> Decoder:
    """Return a decoder for ranks that are assigned to hosts by index."""

    def host(rank: int) -> str:
        if not 0 <= rank < len(assigned):
            raise LookupError(rank)
        return hosts[assigned[rank]]

    return host


def _block_decoder(own: range, size: int, host: str, *, numbered: bool) -> Decoder:
    """Return a decoder that knows one block of ranks.

    Args:
        own: The ranks on this host.
        size: The world size.
        host: The name of this host.
        numbered: Number the other hosts, whose blocks have the same length.
    """

    def node(rank: int) -> str:
        if rank in own:
            return host
        if not numbered or not 0 <= rank < size:
            raise LookupError(rank)
        return f"node {rank // len(own)}"

    return node
