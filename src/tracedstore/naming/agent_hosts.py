"""The hosts of agents that never joined, from the launcher's list of hosts.

torchrun's rendezvous knows only the nodes that joined. Slurm and Kubernetes pass each
agent what determines all of them.
"""

import os
from collections.abc import Collection, Mapping, Sequence

from tracedstore.naming.environment import DecoderError, parse
from tracedstore.naming.launchers import kubernetes
from tracedstore.naming.rosters import parse_node_list, parse_task_counts


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
    hosts = _slurm(environ) or _kubernetes(environ, nodes)
    seen = [_short(address) for address in present]
    listed = {_short(host): host for host in hosts}
    distinct = len(listed) == len(hosts) == nodes and len(set(seen)) == len(seen)
    if not distinct or not listed.keys() >= set(seen):
        return []
    return [host for short, host in listed.items() if short not in seen]


def _slurm(environ: Mapping[str, str]) -> Sequence[str]:
    """Return the nodes of a step with one task on each, which are torchrun's agents."""
    nodes, tasks = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    try:
        hosts = parse(environ, nodes, parse_node_list)
        counts = parse(environ, tasks, parse_task_counts)
    except (DecoderError, KeyError):
        return ()
    return hosts if counts == [1] * len(hosts) else ()


def _kubernetes(environ: Mapping[str, str], nodes: int) -> Sequence[str]:
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
