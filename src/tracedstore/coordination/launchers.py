"""One decoder for each launcher, made from what it leaves in the environment.

They say only what is really known. Where another launcher numbered the ranks, or where
a roster puts this very process on the wrong host, the factory refuses: a missing
name costs a look into a table, a wrong one sends somebody to the wrong machine.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence

from tracedstore.coordination.environment import (
    OWN,
    DecoderError,
    agree,
    number,
    parsed,
    refuse_ranks_of,
    required,
    shown,
)
from tracedstore.coordination.rosters import counts_in, hosts_in, place, slots_in

Decoder = Callable[[int], str]
"""From a rank to a name; LookupError for a rank it knows nothing of."""


def slurm(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Read the node list, the tasks on each node, and how tasks were dealt out.

    Two things cannot be known: an ``arbitrary`` distribution, which is refused; and
    ``cyclic`` over nodes of unequal size with more tasks than processors, where Slurm
    begins a second deal at a point that the counts do not show.
    """
    refuse_ranks_of(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    refuse_ranks_of(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    # The step's two belong together: a step may use fewer nodes than its job.
    nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    if not (environ.get(nodes) and environ.get(tasks)):
        nodes = required(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST", nodes)
        tasks = required(environ, tasks, "SLURM_TASKS_PER_NODE")
    hosts = parsed(environ, nodes, hosts_in)
    counts = parsed(environ, tasks, counts_in)
    if len(hosts) != len(counts):
        raise DecoderError(
            f"{tasks} is {shown(environ[tasks])}, which counts {len(counts)} nodes,"
            f" but {nodes} names {len(hosts)}; run under srun, or {OWN}"
        )
    placed = place(counts, _slurm_turn(environ) or max(counts))
    agree(environ, "WORLD_SIZE", len(placed), tasks)
    if environ.get("SLURM_PROCID"):
        own = number(environ, "SLURM_PROCID")
        agree(environ, "RANK", own, "SLURM_PROCID")
        node = environ.get("SLURMD_NODENAME")
        if node and (own >= len(placed) or hosts[placed[own]] != node):
            raise DecoderError(
                f"SLURMD_NODENAME is {shown(node)}, which is not where {nodes} and"
                f" {tasks} put task {own}; {OWN}"
            )
    return _by_table(hosts, placed)


def _slurm_turn(environ: Mapping[str, str]) -> int:
    """Give how many tasks a node takes in turn, or 0 for all it gets."""
    name = "SLURM_DISTRIBUTION"
    # What follows ":" is about sockets and cores; "Pack" and "NoPack" about counts.
    across_nodes = environ.get(name, "").partition(",")[0].partition(":")[0]
    kind, _, size = across_nodes.strip().lower().partition("=")
    if kind in {"", "*", "block"}:
        return 0
    if kind == "cyclic":
        return 1
    if kind == "plane":
        # srun writes "plane", and the size apart; a user writes "plane=4".
        if size:
            return number({f"{name} plane": size}, f"{name} plane", least=1)
        return number(environ, "SLURM_DIST_PLANESIZE", least=1)
    if kind == "arbitrary":
        raise DecoderError(
            f"{name} is 'arbitrary', and the order of the nodes is in the file"
            f" SLURM_HOSTFILE named at launch only; use hostfile:PATH, or {OWN}"
        )
    raise DecoderError(
        f"{name} is {shown(environ[name])}; known are block, cyclic and plane=N, else"
        f" {OWN}"
    )


def torchrun(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name the own host; of other nodes only their number in this rendezvous.

    torchrun deals group ranks out anew at each rendezvous and tells its workers
    nobody else's host. Where nodes have different numbers of workers, not even the
    bounds of the other groups are known.
    """
    rank = number(environ, "RANK")
    local_size = number(environ, "LOCAL_WORLD_SIZE", least=1)
    group = number(environ, "GROUP_RANK")
    groups = number(environ, "GROUP_WORLD_SIZE", least=1)
    size = number(environ, "WORLD_SIZE", least=1)
    homogeneous = local_size * groups == size
    first = group * local_size
    if not homogeneous:
        first = rank - number(environ, "LOCAL_RANK")
    own = range(first, first + local_size)
    if rank not in own or first < 0 or own.stop > size or group >= groups:
        raise DecoderError(
            f"RANK is {rank}, which GROUP_RANK={group} of {groups} groups of"
            f" LOCAL_WORLD_SIZE={local_size} cannot have of WORLD_SIZE={size}; start"
            f" with torchrun, or {OWN}"
        )
    return _by_block(own, size, host or socket.gethostname(), numbered=homogeneous)


def kubernetes(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Name the pods of an Indexed Job, ``<job>-<index>``.

    Ranks go to pods in order of their index, LOCAL_WORLD_SIZE to each (1 unless
    set). torchrun's agents keep to that order only with a fixed node rank.
    """
    refuse_ranks_of(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    index = number(environ, "JOB_COMPLETION_INDEX")
    per_pod = 1
    if environ.get("LOCAL_WORLD_SIZE"):
        per_pod = number(environ, "LOCAL_WORLD_SIZE", least=1)
    # The elastic rendezvous sorts by address, where job-10 is before job-2.
    # PET_NODE_RANK is torchrun's --node-rank as Kubeflow and others set it.
    fixed = (
        environ.get("PET_NODE_RANK") == environ.get("GROUP_RANK") == str(index)
        and environ.get("PET_RDZV_BACKEND", "static") == "static"
    )
    if not fixed:
        refuse_ranks_of(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    if environ.get("RANK"):
        own = number(environ, "RANK") // per_pod
        if own != index:
            raise DecoderError(
                f"RANK is {shown(environ['RANK'])}, which is not a rank of pod"
                f" JOB_COMPLETION_INDEX={index} at {per_pod} in each; {OWN}"
            )
    size = number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else None
    name = environ[required(environ, "HOSTNAME")].partition(".")[0]
    job = name.removesuffix(f"-{index}")
    if job in {name, ""}:
        raise DecoderError(
            f"HOSTNAME is {shown(name)}, which does not end in the"
            f" JOB_COMPLETION_INDEX -{index}; leave the pod's hostname unset, or {OWN}"
        )

    def pod(rank: int) -> str:
        if rank < 0 or (size is not None and rank >= size):
            raise LookupError(rank)
        return f"{job}-{rank // per_pod}"

    return pod


def openmpi(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name the own host; number the others if each has as many ranks.

    mpirun tells a process no other host. Ranks are taken to fill one host after the
    other, which is its default; where this process shows that they do not, only
    its own rank is known.
    """
    refuse_ranks_of(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    rank = number(environ, "OMPI_COMM_WORLD_RANK")
    size = number(environ, "OMPI_COMM_WORLD_SIZE", least=1)
    local_rank = number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise DecoderError(
            f"OMPI_COMM_WORLD_RANK is {rank} of {size} and OMPI_COMM_WORLD_LOCAL_RANK"
            f" {local_rank} of {local_size}, which cannot be; start with mpirun, or"
            f" {OWN}"
        )
    agree(environ, "RANK", rank, "OMPI_COMM_WORLD_RANK")
    agree(environ, "WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")
    first = rank - local_rank
    own = range(first, first + local_size)
    homogeneous = size % local_size == 0
    if own.stop > size or (homogeneous and first % local_size):
        own, homogeneous = range(rank, rank + 1), False
    return _by_block(own, size, host or socket.gethostname(), numbered=homogeneous)


def hostfile(path: str | os.PathLike[str]) -> Decoder:
    """Give ranks to the slots of a launcher's host file, in the file's order."""
    where = os.fspath(path)
    try:
        with open(where, encoding="utf-8") as lines:  # noqa: PTH123
            entries = slots_in(lines)
    except OSError as error:
        raise DecoderError(
            f"host file {where!r} cannot be read ({error.strerror}); correct the path,"
            f" or {OWN}"
        ) from None
    except UnicodeDecodeError:
        raise DecoderError(
            f"host file {where!r} is not text in UTF-8; correct the path, or {OWN}"
        ) from None
    except ValueError as error:
        raise DecoderError(f"{where}:{error}; correct it, or {OWN}") from None
    counts = [slots for _, slots in entries]
    if not any(counts):
        raise DecoderError(
            f"host file {where!r} has no slots; add lines such as 'node1 slots=8', or"
            f" {OWN}"
        )
    return _by_table([host for host, _ in entries], place(counts, max(counts)))


def _by_table(hosts: Sequence[str], placed: Sequence[int]) -> Decoder:
    def host(rank: int) -> str:
        if not 0 <= rank < len(placed):
            raise LookupError(rank)
        return hosts[placed[rank]]

    return host


def _by_block(own: range, size: int, host: str, *, numbered: bool) -> Decoder:
    """Know the own block of ranks, and perhaps that the others are as long."""

    def node(rank: int) -> str:
        if rank in own:
            return host
        if not numbered or not 0 <= rank < size:
            raise LookupError(rank)
        return f"node {rank // len(own)}"

    return node
