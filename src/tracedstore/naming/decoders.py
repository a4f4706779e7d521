"""Decoders: functions from a rank to a name, mostly the name of its host.

A decoder is any callable, so a user's function or a dictionary's ``__getitem__`` is
one too. There is one for each launcher, created from the variables that it sets.

A decoder names only what is certain. The factory raises a DecoderError if another
launcher numbered the ranks, or if a roster puts this process on the wrong host: without
a name, an operator looks the host up; a wrong name sends the operator to the wrong
machine. A variable that is missing, malformed or inconsistent with another one is a
DecoderError: one sentence with the variable, its value and the remedy.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from tracedstore.common.errors import TracedStoreError
from tracedstore.common.identity import host_name
from tracedstore.common.keys import key_text
from tracedstore.common.ranges import ranks_text
from tracedstore.common.text import plural
from tracedstore.naming.rosters import (
    assign_tasks,
    parse_host_file,
    parse_node_list,
    parse_slurm_host_file,
    parse_task_counts,
)

# The remedy in every message of a DecoderError.
OWN_DECODER = "pass your own decoder"
_MAX_VALUE_LENGTH = 80
# Stricter than int(), which accepts "+1", "1_000" and the digits of other scripts.
_NUMBER = re.compile(r"[0-9]{1,18}")

T = TypeVar("T")


class DecoderError(TracedStoreError):
    """A decoder cannot be created; the message has the reason and the remedy."""


def _require(environ: Mapping[str, str], *names: str) -> str:
    """Return the first of these variables that is set and not empty.

    Raises:
        DecoderError: None of them is.
    """
    for name in names:
        if environ.get(name):
            return name
    raise DecoderError(
        f"{' or '.join(names)} is not set; start under its launcher, or {OWN_DECODER}"
    )


def _number(environ: Mapping[str, str], name: str, minimum: int = 0) -> int:
    """Read a whole number.

    Raises:
        DecoderError: The variable is missing, not a number, or below the minimum.
    """
    value = environ[_require(environ, name)]
    if not _NUMBER.fullmatch(value) or int(value) < minimum:
        raise DecoderError(
            f"{name} is {quoted(value)}, not a whole number of at least {minimum};"
            f" correct it, or {OWN_DECODER}"
        )
    return int(value)


def _parse(environ: Mapping[str, str], name: str, parser: Callable[[str], T]) -> T:
    """Parse a variable; the parser's ValueError becomes a DecoderError."""
    try:
        return parser(environ[name])
    except ValueError as error:
        raise DecoderError(
            f"{name} is {quoted(environ[name])}: {error}; correct it, or {OWN_DECODER}"
        ) from None


def _require_equal(
    environ: Mapping[str, str], name: str, expected: int, source: str
) -> None:
    """Raise a DecoderError if a variable is set to another number than expected.

    Args:
        environ: The environment.
        name: The variable, which need not be set.
        expected: The number that it should have.
        source: The variable that the expected number is derived from.
    """
    if environ.get(name) and _number(environ, name) != expected:
        raise DecoderError(
            f"{name} is {quoted(environ[name])}, but {expected} according to {source},"
            f" so another launcher assigned the ranks; {OWN_DECODER}"
        )


def _refuse_if_set(environ: Mapping[str, str], name: str, launcher: str) -> None:
    """Raise a DecoderError if a variable shows that a launcher assigned the ranks.

    Args:
        environ: The environment.
        name: A variable that this launcher sets.
        launcher: The launcher, and the decoder to use instead.
    """
    if environ.get(name):
        raise DecoderError(
            f"{name} is {quoted(environ[name])}, so another launcher assigned the"
            f" ranks; use the {launcher} decoder, or {OWN_DECODER}"
        )


def quoted(value: str) -> str:
    """Quote a value for a message, cut to 80 characters."""
    if len(value) > _MAX_VALUE_LENGTH:
        value = value[:_MAX_VALUE_LENGTH] + "…"
    return repr(value)


Decoder = Callable[[int], str]
"""Returns the name of a rank; raises LookupError for an unknown rank."""


# How many Jobs a JobSet has of the kind that this pod belongs to. A manifest sets it
# from a label of the pod: Kubernetes passes a container no variable with it.
JOBSET_REPLICAS = "TRACEDSTORE_JOBSET_REPLICAS"


def slurm(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Name the hosts of a Slurm step: node list, tasks per node, and distribution.

    Under ``arbitrary``, the order is in the file that SLURM_HOSTFILE names. Without a
    file that agrees with the step, the distribution is refused.
    """
    _refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    _refuse_if_set(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    # The step's variables belong together: a step may use fewer nodes than its job.
    nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    if not (environ.get(nodes) and environ.get(tasks)):
        nodes = _require(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST", nodes)
        tasks = _require(environ, tasks, "SLURM_TASKS_PER_NODE")
    hosts = _parse(environ, nodes, parse_node_list)
    counts = _parse(environ, tasks, parse_task_counts)
    if len(hosts) != len(counts):
        raise DecoderError(
            f"{tasks} is {quoted(environ[tasks])}, which counts {len(counts)} nodes,"
            f" but {nodes} names {len(hosts)}; run under srun, or {OWN_DECODER}"
        )
    source = f"{nodes} and {tasks} put"
    plane_size = _slurm_plane_size(environ)
    if plane_size is None:
        source = f"{_SLURM_HOST_FILE} puts"
        assigned = _slurm_hosts_in_file(environ, hosts, counts, tasks)
    else:
        assigned = assign_tasks(counts, plane_size or max(counts))
    _require_equal(environ, "WORLD_SIZE", len(assigned), tasks)
    if environ.get("SLURM_PROCID"):
        own = _number(environ, "SLURM_PROCID")
        _require_equal(environ, "RANK", own, "SLURM_PROCID")
        node = environ.get("SLURMD_NODENAME")
        if node and (own >= len(assigned) or hosts[assigned[own]] != node):
            raise DecoderError(
                f"SLURMD_NODENAME is {quoted(node)}, but {source} task {own}"
                f" elsewhere; {OWN_DECODER}"
            )
        if own < len(assigned):
            _check_tasks_of_node(environ, assigned, assigned[own], source)
    return _table_decoder(hosts, assigned)


_SLURM_HOST_FILE = "SLURM_HOSTFILE"


def _check_tasks_of_node(
    environ: Mapping[str, str], assigned: Sequence[int], node: int, source: str
) -> None:
    """Raise a DecoderError if Slurm lists other tasks for this node."""
    listed = environ.get("SLURM_GTIDS")
    expected = ",".join(str(task) for task, at in enumerate(assigned) if at == node)
    if listed and listed != expected:
        raise DecoderError(
            f"SLURM_GTIDS is {quoted(listed)}, but {source} other tasks on this node;"
            f" {OWN_DECODER}"
        )


def _slurm_plane_size(environ: Mapping[str, str]) -> int | None:
    """Return how many tasks a node takes in turn; 0 for all of them.

    None for ``arbitrary``, which has no such number.
    """
    name = "SLURM_DISTRIBUTION"
    # What follows ":" is about sockets and cores; "Pack" and "NoPack" about counts.
    across_nodes = environ.get(name, "").partition(",")[0].partition(":")[0]
    kind, _, size = across_nodes.strip().lower().partition("=")
    if kind in {"", "*", "block"}:
        return 0
    if kind in {"cyclic", "plane"}:
        _refuse_uneven_overcommit(environ)
    if kind == "cyclic":
        return 1
    if kind == "plane":
        # srun sets "plane" and the size in another variable; users write "plane=4".
        if size:
            return _number({f"{name} plane": size}, f"{name} plane", minimum=1)
        return _number(environ, "SLURM_DIST_PLANESIZE", minimum=1)
    if kind == "arbitrary":
        if environ.get(_SLURM_HOST_FILE):
            return None
        raise DecoderError(
            f"{name} is 'arbitrary', and the order of the nodes is only in the file"
            f" that {_SLURM_HOST_FILE} named at launch; use hostfile:PATH, or"
            f" {OWN_DECODER}"
        )
    raise DecoderError(
        f"{name} is {quoted(environ[name])}, not block, cyclic or plane=N;"
        f" {OWN_DECODER}"
    )


def _refuse_uneven_overcommit(environ: Mapping[str, str]) -> None:
    """Raise a DecoderError where nodes may take tasks in more than one deal.

    Without --overcommit, a node takes its turn until it has all its tasks. With it,
    and with nodes of different size, some versions of Slurm begin a second deal at a
    point that the counts of tasks do not show.
    """
    processors = "SLURM_JOB_CPUS_PER_NODE"
    if environ.get("SLURM_OVERCOMMIT") and environ.get(processors):
        sizes = _parse(environ, processors, parse_task_counts)
        if len(set(sizes)) > 1:
            raise DecoderError(
                f"SLURM_OVERCOMMIT is set, and {processors} is"
                f" {quoted(environ[processors])}: on nodes of different size, the order"
                f" of the tasks is not known; use --distribution=block, or"
                f" {OWN_DECODER}"
            )


def _slurm_hosts_in_file(
    environ: Mapping[str, str], hosts: list[str], counts: list[int], source: str
) -> list[int]:
    """Return the node of each task, in the order of the file of SLURM_HOSTFILE.

    The variable may be left over from another step, and the file may have changed
    since. A file with other numbers of tasks per node is refused.
    """
    path = environ[_SLURM_HOST_FILE]
    listed = _read(path, parse_slurm_host_file)[: sum(counts)]
    expected = dict(zip(hosts, counts, strict=True))
    if Counter(listed) != Counter(expected):
        raise DecoderError(
            f"{_SLURM_HOST_FILE} is {quoted(path)}, which assigns other numbers of"
            f" tasks to the nodes than {source}; use hostfile:PATH, or {OWN_DECODER}"
        )
    index = {host: node for node, host in enumerate(hosts)}
    return [index[host] for host in listed]


def torchrun(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name this host, and number the other nodes by their group rank.

    torchrun assigns group ranks at each rendezvous, and passes a worker no host but its
    own. If nodes have different numbers of workers, the other nodes' ranks are unknown.
    """
    rank = _number(environ, "RANK")
    local_size = _number(environ, "LOCAL_WORLD_SIZE", minimum=1)
    group = _number(environ, "GROUP_RANK")
    groups = _number(environ, "GROUP_WORLD_SIZE", minimum=1)
    size = _number(environ, "WORLD_SIZE", minimum=1)
    homogeneous = local_size * groups == size
    first = group * local_size
    if not homogeneous:
        first = rank - _number(environ, "LOCAL_RANK")
    own = range(first, first + local_size)
    if rank not in own or first < 0 or own.stop > size or group >= groups:
        raise DecoderError(
            f"RANK is {rank}, which is impossible for GROUP_RANK={group} of {groups}"
            f" groups with LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size}; start"
            f" with torchrun, or {OWN_DECODER}"
        )
    return _block_decoder(own, size, host or host_name(environ), numbered=homogeneous)


def kubernetes(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Name the pods of an Indexed Job, ``<job>-<index>``.

    The Job may be that of a JobSet or of a Kubeflow TrainJob. Ranks are assigned to
    pods in the order of their index, LOCAL_WORLD_SIZE to each (1 if not set).
    torchrun's agents keep that order only with a fixed node rank.
    """
    _refuse_if_set(environ, "OMPI_COMM_WORLD_RANK", "openmpi")
    index = _number(environ, "JOB_COMPLETION_INDEX")
    per_pod = 1
    if environ.get("LOCAL_WORLD_SIZE"):
        per_pod = _number(environ, "LOCAL_WORLD_SIZE", minimum=1)
    # The elastic rendezvous sorts by address, where job-10 is before job-2.
    # PET_NODE_RANK is torchrun's --node-rank, as Kubeflow and others set it.
    fixed = (
        environ.get("PET_NODE_RANK") == environ.get("GROUP_RANK") == str(index)
        and environ.get("PET_RDZV_BACKEND", "static") == "static"
    )
    if not fixed:
        _refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    if environ.get("RANK"):
        own = _number(environ, "RANK") // per_pod
        if own != index:
            raise DecoderError(
                f"RANK is {quoted(environ['RANK'])}, which is not a rank of pod"
                f" JOB_COMPLETION_INDEX={index} with {per_pod} per pod; {OWN_DECODER}"
            )
    size = _number(environ, "WORLD_SIZE") if environ.get("WORLD_SIZE") else None
    name = environ[_require(environ, "HOSTNAME")].partition(".")[0]
    job = name.removesuffix(f"-{index}")
    if job in {name, ""}:
        raise DecoderError(
            f"HOSTNAME is {quoted(name)}, which does not end in the"
            f" JOB_COMPLETION_INDEX -{index}; leave the pod's hostname unset, or"
            f" {OWN_DECODER}"
        )
    _refuse_several_jobs(environ, name, job)

    def pod(rank: int) -> str:
        if rank < 0 or (size is not None and rank >= size):
            raise LookupError(rank)
        return f"{job}-{rank // per_pod}"

    return pod


def _refuse_several_jobs(environ: Mapping[str, str], name: str, job: str) -> None:
    """Raise a DecoderError for the first Job of a JobSet that may have more of them.

    The ranks after its own are in the pods of the next Job, whose names end in
    ``-1-0``, not in ``-0-4``. In the other Jobs, the rank is not the index.
    """
    if job.endswith("-0") and environ.get(JOBSET_REPLICAS) != "1":
        raise DecoderError(
            f"HOSTNAME is {quoted(name)}, as in the first Job of a JobSet, and"
            f" {JOBSET_REPLICAS} is not 1; set it from the label"
            f" jobset.sigs.k8s.io/replicatedjob-replicas, or {OWN_DECODER}"
        )


def openmpi(
    environ: Mapping[str, str] = os.environ, *, host: str | None = None
) -> Decoder:
    """Name this host, and number the others if all have the same number of ranks.

    mpirun passes a process no host but its own. The decoder assumes mpirun's default,
    that ranks fill one host after the other. If this process's ranks contradict that,
    only its own rank is named.
    """
    _refuse_if_set(environ, "TORCHELASTIC_RUN_ID", "torchrun")
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE", minimum=1)
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", minimum=1)
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise DecoderError(
            f"OMPI_COMM_WORLD_RANK is {rank} of {size} and OMPI_COMM_WORLD_LOCAL_RANK"
            f" is {local_rank} of {local_size}, which is impossible; start with"
            f" mpirun, or {OWN_DECODER}"
        )
    _require_equal(environ, "RANK", rank, "OMPI_COMM_WORLD_RANK")
    _require_equal(environ, "WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")
    first = rank - local_rank
    own = range(first, first + local_size)
    homogeneous = size % local_size == 0
    if own.stop > size or (homogeneous and first % local_size):
        own, homogeneous = range(rank, rank + 1), False
    return _block_decoder(own, size, host or host_name(environ), numbered=homogeneous)


def hostfile(path: str | os.PathLike[str]) -> Decoder:
    """Assign ranks to the slots of a launcher's host file, in the order of the file."""
    shown = os.fspath(path)
    entries = _read(shown, parse_host_file)
    counts = [slots for _, slots in entries]
    if not any(counts):
        raise DecoderError(
            f"host file {shown!r} has no slots; add lines such as 'node1 slots=8', or"
            f" {OWN_DECODER}"
        )
    hosts = [host for host, _ in entries]
    return _table_decoder(hosts, assign_tasks(counts, max(counts)))


def _read(path: str, parser: Callable[[Iterable[str]], T]) -> T:
    """Parse a host file; an error becomes a DecoderError."""
    try:
        with open(path, encoding="utf-8") as lines:  # noqa: PTH123 - needs no Path
            return parser(lines)
    except OSError as error:
        raise DecoderError(
            f"host file {path!r} cannot be read ({error.strerror}); correct the path,"
            f" or {OWN_DECODER}"
        ) from None
    except UnicodeDecodeError:
        raise DecoderError(
            f"host file {path!r} is not UTF-8 text; correct the path, or {OWN_DECODER}"
        ) from None
    except ValueError as error:
        raise DecoderError(f"{path}:{error}; correct it, or {OWN_DECODER}") from None


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


def chain(*decoders: Decoder) -> Decoder:
    """Return a decoder that tries others in order, until one does not raise."""

    def first_name(rank: int) -> str:
        for decoder in decoders:
            try:
                return decoder(rank)
            except Exception:  # noqa: S112 - the next decoder may know the rank
                continue
        raise LookupError(rank)

    return first_name


def default_name(rank: int) -> str:
    """Return ``rank N``, the name of a rank that has no other."""
    return f"rank {rank}"


def auto(environ: Mapping[str, str] = os.environ) -> Decoder:
    """Chain all decoders that this environment supports, and `default_name`."""
    decoders: list[Decoder] = []
    for factory in (slurm, kubernetes, openmpi, torchrun):
        try:
            decoders.append(factory(environ))
        except DecoderError:
            continue
    return chain(*decoders, default_name)


_FACTORIES: dict[str, Callable[[Mapping[str, str]], Decoder]] = {
    "auto": auto,
    "kubernetes": kubernetes,
    "openmpi": openmpi,
    "slurm": slurm,
    "torchrun": torchrun,
}
_HOSTFILE = "hostfile:"


def by_name(name: str, environ: Mapping[str, str] = os.environ) -> Decoder:
    """Create a decoder by its name.

    Raises:
        DecoderError: There is no such decoder, or the environment does not support it.
    """
    if name.startswith(_HOSTFILE):
        return hostfile(name.removeprefix(_HOSTFILE))
    factory = _FACTORIES.get(name)
    if factory is None:
        raise DecoderError(
            f"unknown decoder {quoted(name)}; the decoders are"
            f" {', '.join(_FACTORIES)} and {_HOSTFILE}PATH"
        )
    return factory(environ)


def name_of(decoder: Decoder, rank: int) -> str:
    """Call a decoder that may be the user's; always returns a name.

    The name has at most 256 characters. If the decoder raises or returns None, as
    ``dict.get`` does, the name is `default_name`.
    """
    try:
        # Annotated as str, but it is the user's function.
        name: object = decoder(rank)
        return (key_text(str(name)) if name is not None else "") or default_name(rank)
    except Exception:
        return default_name(rank)


def by_host(ranks: Iterable[int], decoder: Decoder) -> dict[str, list[int]]:
    """Group ranks by name, in the order of each name's first rank."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        hosts.setdefault(name_of(decoder, rank), []).append(rank)
    return hosts


def describe_missing(
    ranks: Iterable[int], total: int, decoder: Decoder, max_hosts: int = 16
) -> str:
    """Describe missing ranks for the operator, in a text of bounded length.

    ``missing 9 of 64: node1 (ranks 8-15), rank 40``: first the hosts with their ranks,
    then the ranks without a known host.
    """
    groups = by_host(ranks, decoder)
    missing = sum(map(len, groups.values()))
    without_host = [
        group[0]
        for name, group in groups.items()
        if len(group) == 1 and name == default_name(group[0])
    ]
    for rank in without_host:
        del groups[default_name(rank)]
    hosts = [f"{host} ({ranks_text(group)})" for host, group in groups.items()]
    parts = hosts[:max_hosts]
    if rest := len(hosts) - len(parts):
        parts.append(f"... and {plural(rest, 'more host')}")
    if without_host:
        parts.append(ranks_text(without_host))
    return f"missing {missing} of {total}" + (f": {', '.join(parts)}" if parts else "")


def hosts_never_joined(
    present: Collection[str], nodes: int, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return the hosts of a job that are not among those of known agents.

    Args:
        present: The addresses of the agents that joined, or were there before.
        nodes: The number of nodes of the job, with one agent each.
        environ: The environment of an agent.

    Returns:
        The hosts, in the order of the launcher's list. None of them if the list is not
        that of this job: it has another length, or lacks the host of an agent.
    """
    hosts = _agents_of_slurm(environ) or _agents_of_kubernetes(environ, nodes)
    seen = [_short(address) for address in present]
    listed = {_short(host): host for host in hosts}
    distinct = len(listed) == len(hosts) == nodes and len(set(seen)) == len(seen)
    if not distinct or not listed.keys() >= set(seen):
        return []
    return [host for short, host in listed.items() if short not in seen]


def _agents_of_slurm(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the nodes of a step with one task on each, which are torchrun's agents."""
    nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    try:
        hosts = _parse(environ, nodes, parse_node_list)
        counts = _parse(environ, tasks, parse_task_counts)
    except (DecoderError, KeyError):
        return ()
    return hosts if counts == [1] * len(hosts) else ()


def _agents_of_kubernetes(environ: Mapping[str, str], nodes: int) -> Sequence[str]:
    """Return the pods of an Indexed Job with one agent each."""
    # The variables of workers are not the agent's, and a rank would be a node here.
    pods = {
        name: value
        for name, value in environ.items()
        if name not in {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    }
    try:
        decoder = kubernetes(pods)
    except DecoderError:
        return ()
    return [decoder(node) for node in range(nodes)]


def _short(host: str) -> str:
    # An agent's address is the full name of its host; a launcher has mostly the short.
    return host.partition(".")[0].lower()
