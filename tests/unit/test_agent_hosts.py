"""Hosts of agents that never joined."""

import pytest

from tracedstore.naming.decoders import hosts_never_joined

SLURM = {"SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"}
POD = {"HOSTNAME": "train-0", "JOB_COMPLETION_INDEX": "0"}


def test_slurm() -> None:
    """The nodes of the step, without those of agents with their full names."""
    assert hosts_never_joined(["n2.cluster", "N1"], 3, SLURM) == ["n3"]
    assert hosts_never_joined([], 3, SLURM) == ["n1", "n2", "n3"]


def test_kubernetes() -> None:
    """The pods of the Job, by their index."""
    present = ["train-0.train.default.svc.cluster.local"]

    assert hosts_never_joined(present, 3, POD) == ["train-1", "train-2"]
    # A variable of a job script is not the agent's.
    assert hosts_never_joined(present, 3, POD | {"WORLD_SIZE": "1"}) == [
        "train-1",
        "train-2",
    ]


@pytest.mark.parametrize(
    ("present", "nodes", "change"),
    [
        # An agent elsewhere, two agents on one node, an address instead of a name.
        (["n1", "login"], 3, {}),
        (["n1", "n1.cluster"], 3, {}),
        (["10.0.0.1"], 3, {}),
        # The step has other nodes than the job.
        (["n1"], 2, {}),
        (["n1"], 3, {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}),
        (["n1"], 3, {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}),
        (["n1"], 3, {"SLURM_STEP_NODELIST": "n["}),
        (["n1"], 3, {"SLURM_STEP_NODELIST": "n1.a,n1.b,n2"}),
    ],
)
def test_not_certain(present: list[str], nodes: int, change: dict[str, str]) -> None:
    """Without a list that must be that of this job, no host is named."""
    assert hosts_never_joined(present, nodes, SLURM | change) == []


def test_no_launcher() -> None:
    """Elsewhere there is no list."""
    assert hosts_never_joined(["n1"], 2, {}) == []
