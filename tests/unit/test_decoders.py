"""Decoders, and the errors of their factories."""

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tools import ROOT
from tracedstore.common.errors import TracedStoreError
from tracedstore.naming.decoders import (
    Decoder,
    DecoderError,
    auto,
    by_name,
    chain,
    hostfile,
    kubernetes,
    name_of,
    openmpi,
    slurm,
    torchrun,
)
from tracedstore.naming.rosters import (
    assign_tasks,
    parse_node_list,
    parse_slurm_host_file,
    parse_task_counts,
)

# What Slurm 22.05.8 (Debian's packages) set for the tasks of steps on three nodes of 4,
# 4 and 2 processors. Three slurmd ran on one machine. "job" is the same for all tasks.
RECORDED: dict[str, Any] = json.loads(
    (ROOT / "tests/support/slurm/recorded.json").read_text("utf-8")
)
# The file that SLURM_HOSTFILE named in these steps.
RECORDED_HOSTS = ["node02", "node01", "node03", "node01", "node02", "node02"]
# The environment of task 9 under srun, in a job of 4 nodes with 4 tasks each.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "node[01-03,07]",
    "SLURM_NODELIST": "node[01-03,07]",
    "SLURM_STEP_NODELIST": "node[01-03,07]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "node03",
    "SLURM_DISTRIBUTION": "block",
}
TORCHRUN = {
    "RANK": "11",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "WORLD_SIZE": "32",
    "TORCHELASTIC_RUN_ID": "none",
}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-llm-2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "12",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return an environment without some of its variables."""
    return {name: value for name, value in environ.items() if name not in names}


def minimal_slurm(nodes: str, tasks: str, distribution: str = "") -> dict[str, str]:
    """Return the three variables that determine the hosts."""
    return {
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": distribution,
    }


def names(decoder: Decoder, count: int) -> list[str]:
    """Return the names of the first ranks."""
    return [decoder(rank) for rank in range(count)]


def error_of(factory: Callable[[Mapping[str, str]], Decoder], **environ: str) -> str:
    """Return the message of the DecoderError that a factory raises."""
    with pytest.raises(DecoderError) as raised:
        factory(environ)
    return str(raised.value)


class TestNodeList:
    """Slurm's compact syntax for many hosts."""

    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("login1", ["login1"]),
            ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
            ("n[8-11]", ["n8", "n9", "n10", "n11"]),
            ("n[098-101]", ["n098", "n099", "n100", "n101"]),
            (
                "gpu-a[1-2]b[3-4],login1",
                ["gpu-a1b3", "gpu-a1b4", "gpu-a2b3", "gpu-a2b4", "login1"],
            ),
            ("node[009-011]", ["node009", "node010", "node011"]),
            ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
            ("[1-2]", ["1", "2"]),
            ("rack[1]-x.example.org", ["rack1-x.example.org"]),
            ("b,a", ["b", "a"]),
        ],
    )
    def test_expands(self, text: str, hosts: list[str]) -> None:
        """Ranges, padding, several brackets and plain names expand in Slurm's order."""
        assert hosts == parse_node_list(text)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "unbalanced brackets, or an empty name"),
            ("a,,b", "unbalanced brackets, or an empty name"),
            ("a,", "unbalanced brackets, or an empty name"),
            ("node[1-3", "unbalanced brackets, or an empty name"),
            ("node1-3]", "unbalanced brackets, or an empty name"),
            ("node[[1]]", "unbalanced brackets, or an empty name"),
            ("two words", "unbalanced brackets, or an empty name"),
            ("node[]", "[] is not a number or a range"),
            ("node[1,,2]", "[] is not a number or a range"),
            ("node[a-c]", "[a-c] is not a number or a range"),
            ("node[1-]", "[1-] is not a number or a range"),
            ("node[²]", "[²] is not a number or a range"),
            ("node[3-1]", "[3-1] is a descending range"),
        ],
    )
    def test_malformed(self, text: str, reason: str) -> None:
        """The error names the part that is malformed."""
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            parse_node_list(text)

    @pytest.mark.parametrize(
        "text",
        [
            "n[0-999999999]",
            "n[0-999999999999999999]",
            "n[0-999][0-999][0-1]",
            "n[0-999999],m",
            "n[0-499999,0-499999,1]",
            "n" + "[0-99]" * 1000,
        ],
    )
    def test_expansion_is_bounded(self, text: str) -> None:
        """More than a million hosts are refused before they are expanded."""
        with pytest.raises(ValueError, match="more than 1000000 hosts"):
            parse_node_list(text)

    def test_a_million_is_allowed(self) -> None:
        """The limit itself is allowed."""
        assert len(parse_node_list("n[0-999][000-999]")) == 1_000_000

    def test_length_of_names_is_bounded(self) -> None:
        """A long prefix is not repeated for each number of a wide bracket."""
        with pytest.raises(ValueError, match="longer than 253"):
            parse_node_list("n" * 100_000 + "[0-999999]")

    def test_parsing_stops_at_the_limit(self) -> None:
        """The brackets after the first excess are not parsed."""
        with pytest.raises(ValueError, match="longer than 253"):
            parse_node_list("n" + "[0]" * 40_000)

    @given(
        st.lists(
            st.lists(
                st.one_of(
                    st.text("abcxyz-._", min_size=1, max_size=5),
                    st.lists(
                        st.tuples(
                            st.integers(0, 1200), st.integers(0, 4), st.integers(1, 5)
                        ),
                        min_size=1,
                        max_size=3,
                    ),
                ),
                min_size=1,
                max_size=3,
            ),
            min_size=1,
            max_size=4,
        )
    )
    def test_equals_nested_loops(
        self, expressions: list[list[str | list[tuple[int, int, int]]]]
    ) -> None:
        """Brackets expand in the order of nested loops."""
        texts, expected = [], []
        for expression in expressions:
            text, hosts = "", [""]
            for part in expression:
                if isinstance(part, str):
                    text += part
                    hosts = [host + part for host in hosts]
                    continue
                items, numbers = [], []
                for first, length, width in part:
                    low = str(first).zfill(width)
                    high = str(first + length).zfill(len(low))
                    items.append(low if low == high else f"{low}-{high}")
                    run = range(first, first + length + 1)
                    numbers += [str(n).zfill(len(low)) for n in run]
                text += f"[{','.join(items)}]"
                hosts = [host + number for host in hosts for number in numbers]
            texts.append(text)
            expected += hosts

        assert expected == parse_node_list(",".join(texts))

    @given(st.text("[],-01ax \n²", max_size=9))
    def test_any_text(self, text: str) -> None:
        """Arbitrary text expands to valid names or raises ValueError."""
        try:
            hosts = parse_node_list(text)
        except ValueError:
            return

        assert hosts
        assert all(host and not set(host) & set("[], \n") for host in hosts)


class TestTasks:
    """Tasks per node, and the assignment of tasks to nodes."""

    @pytest.mark.parametrize(
        ("text", "counts"),
        [
            ("8", [8]),
            ("8(x4),4", [8, 8, 8, 8, 4]),
            ("2(x3),1", [2, 2, 2, 1]),
            ("1,2,1(x3),3,2", [1, 2, 1, 1, 1, 3, 2]),
        ],
    )
    def test_counts(self, text: str, counts: list[int]) -> None:
        """Repetitions such as 8(x4) are expanded."""
        assert counts == parse_task_counts(text)

    @pytest.mark.parametrize(
        "text", ["1(x999999999)", "0(x999999999)", "999999999", "500001(x2)"]
    )
    def test_counts_are_bounded(self, text: str) -> None:
        """More than a million tasks are refused before they are expanded."""
        with pytest.raises(ValueError, match="more than 1000000 tasks"):
            parse_task_counts(text)

    def test_work_is_proportional_to_tasks(self) -> None:
        """A node that has all its tasks is skipped in later rounds.

        With a step per node in each round, this would take 10^11 steps.
        """
        assigned = assign_tasks([1] * 100_000 + [900_000], 1)

        assert len(assigned) == 1_000_000
        assert set(assigned[100_001:]) == {100_000}

    @given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 10))
    def test_every_task_once(self, counts: list[int], plane_size: int) -> None:
        """Each node gets its count of tasks, with any plane size."""
        assigned = assign_tasks(counts, plane_size)

        assert counts == [assigned.count(node) for node in range(len(counts))]


class TestSlurm:
    """Hosts of a Slurm step."""

    def test_block(self) -> None:
        """By default, nodes are filled one after the other."""
        decoder = slurm(SLURM)

        assert names(decoder, 16) == (
            ["node01"] * 4 + ["node02"] * 4 + ["node03"] * 4 + ["node07"] * 4
        )

    def test_uneven(self) -> None:
        """Nodes may have different numbers of tasks."""
        decoder = slurm(minimal_slurm("a[1-3],login1", "2(x3),1"))

        assert names(decoder, 7) == ["a1", "a1", "a2", "a2", "a3", "a3", "login1"]

    @pytest.mark.parametrize(
        "distribution",
        ["", "*", "block", "block:cyclic", "block,Pack", "block:block:cyclic,NoPack"],
    )
    def test_distribution_inside_nodes(self, distribution: str) -> None:
        """The distribution over sockets and cores does not change the node."""
        decoder = slurm(minimal_slurm("a,b", "2(x2)", distribution))

        assert names(decoder, 4) == ["a", "a", "b", "b"]

    @pytest.mark.parametrize("distribution", ["cyclic", "cyclic:cyclic", "Cyclic,Pack"])
    def test_cyclic(self, distribution: str) -> None:
        """Nodes take one task in turn, until each has its count."""
        decoder = slurm(minimal_slurm("a,b,c", "3,1,2", distribution))

        assert names(decoder, 6) == ["a", "b", "c", "a", "c", "a"]

    def test_plane(self) -> None:
        """The example of Slurm's source: planes of 2, and nodes of 4, 1 and 1 tasks."""
        user = minimal_slurm("a,b,c", "4,1,1", "plane=2")
        srun = minimal_slurm("a,b,c", "4,1,1", "plane") | {"SLURM_DIST_PLANESIZE": "2"}

        assert names(slurm(user), 6) == ["a", "a", "b", "c", "a", "a"]
        assert names(slurm(srun), 6) == names(slurm(user), 6)

    def test_step_on_fewer_nodes_than_the_job(self) -> None:
        """The step's node list is used with the step's task counts."""
        environ = minimal_slurm("a[1-8]", "4(x8)") | {
            "SLURM_STEP_NODELIST": "a[3-4]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        }

        assert names(slurm(environ), 2) == ["a3", "a4"]

    @pytest.mark.parametrize(
        "name", ["SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"]
    )
    def test_any_node_list(self, name: str) -> None:
        """Which variable is set depends on Slurm's version and command."""
        decoder = slurm({name: "a[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"})

        assert names(decoder, 2) == ["a1", "a2"]

    @pytest.mark.parametrize("rank", [-1, 16, 10**30])
    def test_unknown_ranks(self, rank: int) -> None:
        """A rank outside the step raises LookupError; a negative one too."""
        with pytest.raises(LookupError):
            slurm(SLURM)(rank)

    def test_missing(self) -> None:
        """Outside of Slurm, the error names the variables."""
        assert error_of(slurm) == (
            "SLURM_JOB_NODELIST or SLURM_NODELIST or SLURM_STEP_NODELIST is not set;"
            " start under its launcher, or pass your own decoder"
        )
        assert error_of(slurm, SLURM_JOB_NODELIST="a") == (
            "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not set; start under"
            " its launcher, or pass your own decoder"
        )

    @pytest.mark.parametrize(
        ("nodes", "tasks", "distribution", "message"),
        [
            (
                "a[1-",
                "1",
                "",
                (
                    "SLURM_JOB_NODELIST is 'a[1-': unbalanced brackets, or an empty"
                    " name; correct it, or pass your own decoder"
                ),
            ),
            (
                "a[0-999999999]",
                "1",
                "",
                (
                    "SLURM_JOB_NODELIST is 'a[0-999999999]': more than 1000000 hosts;"
                    " correct it, or pass your own decoder"
                ),
            ),
            (
                "a1",
                "8(x",
                "",
                (
                    "SLURM_TASKS_PER_NODE is '8(x': '8(x' is not a count such as 8 or"
                    " 8(x4); correct it, or pass your own decoder"
                ),
            ),
            (
                "a[1-3]",
                "8(x4)",
                "",
                (
                    "SLURM_TASKS_PER_NODE is '8(x4)', which counts 4 nodes, but"
                    " SLURM_JOB_NODELIST names 3; run under srun, or pass your own"
                    " decoder"
                ),
            ),
            (
                "a1",
                "1",
                "arbitrary",
                (
                    "SLURM_DISTRIBUTION is 'arbitrary', and the order of the nodes is"
                    " only in the file that SLURM_HOSTFILE named at launch; use"
                    " hostfile:PATH, or pass your own decoder"
                ),
            ),
            (
                "a1",
                "1",
                "spiral:block",
                (
                    "SLURM_DISTRIBUTION is 'spiral:block', not block, cyclic or"
                    " plane=N; pass your own decoder"
                ),
            ),
            (
                "a1",
                "1",
                "plane",
                (
                    "SLURM_DIST_PLANESIZE is not set; start under its launcher, or"
                    " pass your own decoder"
                ),
            ),
            (
                "a1",
                "1",
                "plane=0",
                (
                    "SLURM_DISTRIBUTION plane is '0', not a whole number of at least"
                    " 1; correct it, or pass your own decoder"
                ),
            ),
        ],
    )
    def test_malformed(
        self, nodes: str, tasks: str, distribution: str, message: str
    ) -> None:
        """Each error has the variable, its value and the remedy."""
        assert message == error_of(slurm, **minimal_slurm(nodes, tasks, distribution))

    def test_long_values_are_cut(self) -> None:
        """The error for a node list of a hundred kilobytes is short."""
        assert len(error_of(slurm, **minimal_slurm("n[" * 50_000, "1"))) < 300

    def test_torchrun_inside(self) -> None:
        """With one torchrun per node, a rank is not a Slurm task."""
        assert error_of(slurm, **SLURM | TORCHRUN) == (
            "TORCHELASTIC_RUN_ID is 'none', so another launcher assigned the ranks;"
            " use the torchrun decoder, or pass your own decoder"
        )

    def test_mpirun_inside(self) -> None:
        """Inside an allocation, mpirun assigns the ranks."""
        assert "use the openmpi decoder" in error_of(slurm, **SLURM | OPENMPI)

    def test_other_ranks(self) -> None:
        """A script that starts 8 processes per task assigns other ranks."""
        assert error_of(slurm, **SLURM | {"WORLD_SIZE": "128"}) == (
            "WORLD_SIZE is '128', but 16 according to SLURM_STEP_TASKS_PER_NODE, so"
            " another launcher assigned the ranks; pass your own decoder"
        )
        assert error_of(slurm, **SLURM | {"RANK": "72"}) == (
            "RANK is '72', but 9 according to SLURM_PROCID, so another launcher"
            " assigned the ranks; pass your own decoder"
        )

    def test_same_ranks(self) -> None:
        """A script may copy Slurm's numbers into torch's variables."""
        decoder = slurm(SLURM | {"RANK": "9", "WORLD_SIZE": "16"})

        assert decoder(9) == "node03"

    @pytest.mark.parametrize("own", ["4", "99"])
    def test_own_host_differs(self, own: str) -> None:
        """A roster that puts this task on another host is refused."""
        assert error_of(slurm, **SLURM | {"SLURM_PROCID": own}) == (
            "SLURMD_NODENAME is 'node03', but SLURM_STEP_NODELIST and"
            f" SLURM_STEP_TASKS_PER_NODE put task {own} elsewhere; pass your own"
            " decoder"
        )


class TestRecordedSlurm:
    """What a real Slurm sets, in each distribution."""

    @pytest.fixture
    def _in_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The recorded SLURM_HOSTFILE is a relative path, as the job script set it.
        monkeypatch.chdir(tmp_path)
        (tmp_path / "hosts.txt").write_text("\n".join(RECORDED_HOSTS))

    @pytest.mark.usefixtures("_in_folder")
    @pytest.mark.parametrize("step", RECORDED)
    def test_never_wrong(self, step: str) -> None:
        """Every task names the hosts of all tasks right, or none of them."""
        recorded = RECORDED[step]
        ran_on = [task["SLURMD_NODENAME"] for task in recorded["tasks"]]
        refused = {"w_file_arb", "over_cyclic", "over_plane"}
        for task in recorded["tasks"]:
            environ = recorded["job"] | task
            if step in refused:
                error_of(slurm, **environ)
            else:
                assert names(slurm(environ), len(ran_on)) == ran_on
            # A script that starts one rank per task copies Slurm's numbers.
            rank = {"RANK": task["SLURM_PROCID"], "WORLD_SIZE": str(len(ran_on))}
            for other, host in enumerate(ran_on):
                assert auto(environ | rank)(other) in {host, f"rank {other}"}

    def test_other_host_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A host file that has changed since the step began is refused."""
        environ = RECORDED["hostfile"]["job"] | RECORDED["hostfile"]["tasks"][1]
        file = tmp_path / "hosts.txt"
        monkeypatch.chdir(tmp_path)

        assert error_of(slurm, **environ) == (
            "host file 'hosts.txt' cannot be read (No such file or directory); correct"
            " the path, or pass your own decoder"
        )
        file.write_text("node01\n" * 6)
        assert error_of(slurm, **environ) == (
            "SLURM_HOSTFILE is 'hosts.txt', which assigns other numbers of tasks to the"
            " nodes than SLURM_STEP_TASKS_PER_NODE; use hostfile:PATH, or pass your own"
            " decoder"
        )
        file.write_text("\n".join(reversed(RECORDED_HOSTS)))
        assert error_of(slurm, **environ) == (
            "SLURMD_NODENAME is 'node01', but SLURM_HOSTFILE puts task 1 elsewhere;"
            " pass your own decoder"
        )
        # Task 1 is where Slurm has put it, and the other task of its node is not.
        file.write_text("node02\nnode01\nnode01\nnode02\nnode03\nnode02\n")
        assert error_of(slurm, **environ) == (
            "SLURM_GTIDS is '1,3', but SLURM_HOSTFILE puts other tasks on this node;"
            " pass your own decoder"
        )

    def test_overcommitted(self) -> None:
        """The error has the variables and the remedy."""
        recorded = RECORDED["over_cyclic"]

        assert error_of(slurm, **recorded["job"] | recorded["tasks"][0]) == (
            "SLURM_OVERCOMMIT is set, and SLURM_JOB_CPUS_PER_NODE is '4(x2),2': on"
            " nodes of different size, the order of the tasks is not known; use"
            " --distribution=block, or pass your own decoder"
        )

    def test_overcommitted_on_equal_nodes(self) -> None:
        """On nodes of equal size, each node takes one task in turn."""
        environ = minimal_slurm("a,b", "3,2", "cyclic") | {
            "SLURM_OVERCOMMIT": "1",
            "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
        }

        assert names(slurm(environ), 5) == ["a", "b", "a", "b", "a"]

    def test_host_file(self) -> None:
        """Lines are node lists, with a number of tasks and comments."""
        lines = ["# first", "", "b,a[1-2]", " c*2 # two tasks"]

        assert parse_slurm_host_file(lines) == ["b", "a1", "a2", "c", "c"]

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("a*", "1: 'a*' is not a host such as n1*4"),
            ("a*b", "1: 'a*b' is not a host such as n1*4"),
            ("a b", "1: unbalanced brackets, or an empty name"),
            ("a*1000001", "1: more than 1000000 tasks"),
        ],
    )
    def test_malformed_host_file(self, line: str, reason: str) -> None:
        """The error names the line."""
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            parse_slurm_host_file([line])


class TestTorchrun:
    """What torchrun's variables show about hosts."""

    def test_homogeneous(self) -> None:
        """This host is named, the other nodes are numbered."""
        decoder = torchrun(TORCHRUN, host="me")

        assert names(decoder, 32) == (
            ["node 0"] * 8 + ["me"] * 8 + ["node 2"] * 8 + ["node 3"] * 8
        )

    def test_own_host_name(self) -> None:
        """The default host name is the system's."""
        assert torchrun(TORCHRUN)(8) == socket.gethostname()

    def test_heterogeneous(self) -> None:
        """With nodes of unequal size, only the ranks of this host are named."""
        decoder = torchrun(TORCHRUN | {"RANK": "7", "WORLD_SIZE": "20"}, host="me")

        assert [decoder(rank) for rank in range(4, 12)] == ["me"] * 8
        for rank in (0, 3, 12, 19):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize("rank", [-1, 32])
    def test_unknown_ranks(self, rank: int) -> None:
        """A rank beyond the world size raises LookupError."""
        with pytest.raises(LookupError):
            torchrun(TORCHRUN)(rank)

    @pytest.mark.parametrize(
        "name",
        ["RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE"],
    )
    def test_missing(self, name: str) -> None:
        """Each variable is required."""
        assert error_of(torchrun, **without(TORCHRUN, name)) == (
            f"{name} is not set; start under its launcher, or pass your own decoder"
        )

    @pytest.mark.parametrize("value", ["x", "-1", "1.0", "1_0", "²", "9" * 5000])
    def test_malformed(self, value: str) -> None:
        """Only decimal digits are accepted."""
        message = error_of(torchrun, **TORCHRUN | {"RANK": value})

        assert message.startswith(f"RANK is '{value[:80]}")
        assert message.endswith(
            ", not a whole number of at least 0; correct it, or pass your own decoder"
        )

    def test_no_workers(self) -> None:
        """A node has at least one worker."""
        assert error_of(torchrun, **TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}) == (
            "LOCAL_WORLD_SIZE is '0', not a whole number of at least 1; correct it, or"
            " pass your own decoder"
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"RANK": "3"},
            {"GROUP_RANK": "4", "RANK": "32"},
            {"WORLD_SIZE": "33", "LOCAL_RANK": "12"},
            {"WORLD_SIZE": "33", "RANK": "32", "LOCAL_RANK": "0"},
        ],
    )
    def test_contradictions(self, change: dict[str, str]) -> None:
        """Inconsistent numbers are refused."""
        message = error_of(torchrun, **TORCHRUN | change)

        assert message.startswith(
            f"RANK is {change.get('RANK', '11')}, which is impossible"
        )
        assert message.endswith("start with torchrun, or pass your own decoder")


class TestKubernetes:
    """Pods of an Indexed Job."""

    def test_one_rank_per_pod(self) -> None:
        """By default, the index is the rank."""
        decoder = kubernetes(KUBERNETES)

        assert names(decoder, 3) == ["train-llm-0", "train-llm-1", "train-llm-2"]

    def test_ranks_per_pod(self) -> None:
        """Pods have LOCAL_WORLD_SIZE ranks each, up to the world size."""
        environ = {"LOCAL_WORLD_SIZE": "8", "RANK": "17", "WORLD_SIZE": "32"}
        decoder = kubernetes(KUBERNETES | environ)

        assert decoder(0) == decoder(7) == "train-llm-0"
        assert decoder(31) == "train-llm-3"
        for rank in (-1, 32):
            with pytest.raises(LookupError):
                decoder(rank)

    def test_full_host_name(self) -> None:
        """With setHostnameAsFQDN, the first label is the pod's name."""
        name = "train-llm-2.svc.default.svc.cluster.local"

        assert kubernetes(KUBERNETES | {"HOSTNAME": name})(0) == "train-llm-0"

    def test_torchrun_with_node_rank(self) -> None:
        """If --node-rank is the index, group ranks are pod indexes."""
        environ = KUBERNETES | TORCHRUN | {"GROUP_RANK": "2", "RANK": "19"}
        decoder = kubernetes(environ | {"PET_NODE_RANK": "2"})

        assert decoder(31) == "train-llm-3"

    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"PET_NODE_RANK": "1"},
            {"PET_NODE_RANK": "2", "GROUP_RANK": "1"},
            {"PET_NODE_RANK": "2", "PET_RDZV_BACKEND": "c10d"},
        ],
    )
    def test_elastic_torchrun(self, change: dict[str, str]) -> None:
        """An elastic rendezvous may assign pods in any order."""
        environ = KUBERNETES | TORCHRUN | {"GROUP_RANK": "2", "RANK": "19"} | change

        assert "use the torchrun decoder" in error_of(kubernetes, **environ)

    def test_pod_of_a_job_set(self) -> None:
        """A JobSet with one Job has the pods of that Job."""
        environ = {"HOSTNAME": "train-workers-0-1", "JOB_COMPLETION_INDEX": "1"}
        decoder = kubernetes(environ | {"TRACEDSTORE_JOBSET_REPLICAS": "1"})

        assert names(decoder, 3) == [f"train-workers-0-{pod}" for pod in range(3)]

    @pytest.mark.parametrize("replicas", ["", "2"])
    def test_job_set_with_more_jobs(self, replicas: str) -> None:
        """The ranks of other Jobs are in pods that this one cannot name."""
        environ = {"HOSTNAME": "train-workers-0-1", "JOB_COMPLETION_INDEX": "1"}
        environ |= {"TRACEDSTORE_JOBSET_REPLICAS": replicas}

        assert error_of(kubernetes, **environ) == (
            "HOSTNAME is 'train-workers-0-1', as in the first Job of a JobSet, and"
            " TRACEDSTORE_JOBSET_REPLICAS is not 1; set it from the label"
            " jobset.sigs.k8s.io/replicatedjob-replicas, or pass your own decoder"
        )
        # The first pod of the second Job has rank 2 and index 0.
        second = {"HOSTNAME": "train-workers-1-0", "JOB_COMPLETION_INDEX": "0"}
        assert "not a rank of pod" in error_of(kubernetes, **second, RANK="2")

    def test_train_job(self) -> None:
        """Kubeflow's trainer sets torchrun's options as PET_ variables."""
        environ = {
            "HOSTNAME": "llm-node-0-1",
            "JOB_COMPLETION_INDEX": "1",
            "TRACEDSTORE_JOBSET_REPLICAS": "1",
            "PET_NNODES": "4",
            "PET_NPROC_PER_NODE": "8",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "llm-node-0-0.llm",
            "PET_MASTER_PORT": "29500",
        }
        decoder = auto(environ | TORCHRUN)

        assert decoder(0) == "llm-node-0-0"
        assert decoder(31) == "llm-node-0-3"

    def test_mpirun_inside(self) -> None:
        """Inside a pod, mpirun assigns the ranks."""
        environ = KUBERNETES | OPENMPI

        assert "use the openmpi decoder" in error_of(kubernetes, **environ)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"JOB_COMPLETION_INDEX": ""},
                (
                    "JOB_COMPLETION_INDEX is not set; start under its launcher, or"
                    " pass your own decoder"
                ),
            ),
            (
                {"JOB_COMPLETION_INDEX": "two"},
                (
                    "JOB_COMPLETION_INDEX is 'two', not a whole number of at least 0;"
                    " correct it, or pass your own decoder"
                ),
            ),
            (
                {"HOSTNAME": ""},
                (
                    "HOSTNAME is not set; start under its launcher, or pass your own"
                    " decoder"
                ),
            ),
            (
                {"HOSTNAME": "ip-10-0-0-1"},
                (
                    "HOSTNAME is 'ip-10-0-0-1', which does not end in the"
                    " JOB_COMPLETION_INDEX -2; leave the pod's hostname unset, or pass"
                    " your own decoder"
                ),
            ),
            (
                {"HOSTNAME": "-2"},
                (
                    "HOSTNAME is '-2', which does not end in the JOB_COMPLETION_INDEX"
                    " -2; leave the pod's hostname unset, or pass your own decoder"
                ),
            ),
            (
                {"LOCAL_WORLD_SIZE": "0"},
                (
                    "LOCAL_WORLD_SIZE is '0', not a whole number of at least 1;"
                    " correct it, or pass your own decoder"
                ),
            ),
            (
                {"RANK": "5"},
                (
                    "RANK is '5', which is not a rank of pod JOB_COMPLETION_INDEX=2"
                    " with 1 per pod; pass your own decoder"
                ),
            ),
        ],
    )
    def test_malformed(self, change: dict[str, str], message: str) -> None:
        """Each error has the variable, its value and the remedy."""
        assert message == error_of(kubernetes, **KUBERNETES | change)


class TestOpenMPI:
    """What mpirun's variables show about hosts."""

    def test_homogeneous(self) -> None:
        """This host is named, the others are numbered."""
        decoder = openmpi(OPENMPI, host="me")

        assert names(decoder, 12) == ["node 0"] * 4 + ["me"] * 4 + ["node 2"] * 4
        with pytest.raises(LookupError):
            decoder(12)

    def test_own_host_name(self) -> None:
        """The default host name is the system's."""
        assert openmpi(OPENMPI)(4) == socket.gethostname()

    def test_heterogeneous(self) -> None:
        """With hosts of unequal size, only the ranks of this host are named."""
        decoder = openmpi(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "10"}, host="me")

        assert [decoder(rank) for rank in range(4, 8)] == ["me"] * 4
        for rank in (3, 8):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize(
        "change",
        [
            # Second rank on its host; three hosts take ranks in turn.
            {"OMPI_COMM_WORLD_RANK": "4"},
            {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "11"},
        ],
    )
    def test_not_by_slot(self, change: dict[str, str]) -> None:
        """If ranks do not fill hosts in order, only this rank is named."""
        decoder = openmpi(OPENMPI | change, host="me")
        own = int(change["OMPI_COMM_WORLD_RANK"])

        assert decoder(own) == "me"
        for rank in (own - 1, own + 1):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize("name", [name for name in OPENMPI if "NODE" not in name])
    def test_missing(self, name: str) -> None:
        """Each variable is required."""
        assert error_of(openmpi, **without(OPENMPI, name)) == (
            f"{name} is not set; start under its launcher, or pass your own decoder"
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"OMPI_COMM_WORLD_RANK": "12"},
            {"OMPI_COMM_WORLD_RANK": "0"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE": "13"},
        ],
    )
    def test_contradictions(self, change: dict[str, str]) -> None:
        """Inconsistent numbers are refused."""
        message = error_of(openmpi, **OPENMPI | change)

        assert message.startswith("OMPI_COMM_WORLD_RANK is ")
        assert message.endswith(
            "which is impossible; start with mpirun, or pass your own decoder"
        )

    def test_other_ranks(self) -> None:
        """Ranks that torchrun or a script assigned are refused."""
        assert "use the torchrun decoder" in error_of(openmpi, **OPENMPI | TORCHRUN)
        assert error_of(openmpi, **OPENMPI | {"RANK": "40"}) == (
            "RANK is '40', but 5 according to OMPI_COMM_WORLD_RANK, so another"
            " launcher assigned the ranks; pass your own decoder"
        )
        assert "12 according to OMPI_COMM_WORLD_SIZE" in error_of(
            openmpi, **OPENMPI | {"WORLD_SIZE": "96"}
        )


class TestHostfile:
    """Hosts from a launcher's host file."""

    def test_formats(self, tmp_path: Path) -> None:
        """The slots of Open MPI and DeepSpeed, MPICH's colon, and plain names."""
        path = tmp_path / "hosts"
        path.write_text(
            "# made by hand\n"
            "\n"
            "node1 slots=2\n"
            "node2:2   # the slow one\n"
            "  node3\n"
            "node4 max_slots=8 slots = 1\n"
            "node5:1 binding=user:0\n"
        )

        decoder = hostfile(path)

        assert names(decoder, 7) == (
            ["node1", "node1", "node2", "node2", "node3", "node4", "node5"]
        )
        for rank in (-1, 7):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize(
        "line",
        [
            "node1 slots=many",
            "node1 slots=-1",
            "node1 slots=",
            "node1 8",
            "node1:",
            "node1:x",
            ":8",
            "slots=8",
        ],
    )
    def test_malformed(self, tmp_path: Path, line: str) -> None:
        """The error has the file and the line."""
        path = tmp_path / "hosts"
        path.write_text(f"node0 slots=8\n\n{line}\n")

        with pytest.raises(DecoderError) as raised:
            hostfile(path)

        assert str(raised.value) == (
            f"{path}:3: '{line}' is not a host such as node1, node1:8 or node1"
            " slots=8; correct it, or pass your own decoder"
        )

    def test_bounded(self, tmp_path: Path) -> None:
        """More than a million slots are refused before they are expanded."""
        path = tmp_path / "hosts"
        path.write_text("node0\nnode1 slots=999999999999\n")

        with pytest.raises(DecoderError, match=":2: more than 1000000 slots; correct"):
            hostfile(path)

    @pytest.mark.parametrize("text", ["", "# comment\n", "node1 slots=0\n"])
    def test_empty(self, tmp_path: Path, text: str) -> None:
        """A file without slots is refused."""
        path = tmp_path / "hosts"
        path.write_text(text)

        with pytest.raises(DecoderError) as raised:
            hostfile(path)

        assert str(raised.value) == (
            f"host file '{path}' has no slots; add lines such as 'node1 slots=8', or"
            " pass your own decoder"
        )

    def test_unreadable(self, tmp_path: Path) -> None:
        """A missing file and a binary file are refused."""
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe\x00")

        with pytest.raises(DecoderError) as raised:
            hostfile(tmp_path / "none")
        assert str(raised.value) == (
            f"host file '{tmp_path}/none' cannot be read (No such file or directory);"
            " correct the path, or pass your own decoder"
        )
        with pytest.raises(DecoderError, match="is not UTF-8 text; correct"):
            hostfile(binary)


class TestChain:
    """The first decoder that does not raise is used."""

    def test_decoder_raises(self) -> None:
        """After any exception, the next decoder is called."""

        def broken(rank: int) -> str:
            return str(1 // 0)

        decoder = chain(broken, {1: "one"}.__getitem__, lambda rank: f"host{rank}")

        assert names(decoder, 3) == ["host0", "one", "host2"]

    def test_all_raise(self) -> None:
        """If no decoder knows the rank, the chain raises LookupError."""
        with pytest.raises(LookupError):
            chain({1: "one"}.__getitem__)(2)
        with pytest.raises(LookupError):
            chain()(0)


class TestAuto:
    """The decoder for the launcher of this environment."""

    def test_no_launcher(self) -> None:
        """Without a launcher, ranks have default names."""
        assert names(auto({}), 2) == ["rank 0", "rank 1"]

    @pytest.mark.parametrize(
        ("environ", "rank", "name"),
        [
            (SLURM, 15, "node07"),
            (SLURM, 16, "rank 16"),
            (KUBERNETES, 1, "train-llm-1"),
            (OPENMPI, 11, "node 2"),
            (TORCHRUN, 31, "node 3"),
            (SLURM | KUBERNETES, 0, "node01"),
            (SLURM | OPENMPI, 0, "node 0"),
            (SLURM | TORCHRUN, 0, "node 0"),
            (KUBERNETES | TORCHRUN, 0, "node 0"),
            (SLURM | {"SLURM_STEP_NODELIST": "["}, 0, "rank 0"),
            (TORCHRUN | {"SLURM_JOB_NODELIST": "["}, 0, "node 0"),
        ],
    )
    def test_launcher(self, environ: dict[str, str], rank: int, name: str) -> None:
        """The launcher that assigned the ranks names them, and no other one."""
        assert name == auto(environ)(rank)

    @given(
        st.dictionaries(
            st.sampled_from(sorted(SLURM | TORCHRUN | KUBERNETES | OPENMPI)),
            st.one_of(st.text(max_size=8), st.integers(0, 9).map(str)),
        ),
        st.integers(),
    )
    def test_any_environment(self, environ: dict[str, str], rank: int) -> None:
        """Any environment results in a name."""
        assert auto(environ)(rank)


class TestByName:
    """Decoders created by name."""

    @pytest.mark.parametrize(
        ("name", "environ"),
        [
            ("slurm", SLURM),
            ("torchrun", TORCHRUN),
            ("kubernetes", KUBERNETES),
            ("openmpi", OPENMPI),
            ("auto", SLURM),
        ],
    )
    def test_each(self, name: str, environ: dict[str, str]) -> None:
        """Each decoder is created from the given environment."""
        assert by_name(name, environ)(0) == auto(environ)(0)

    def test_hostfile(self, tmp_path: Path) -> None:
        """The path follows a colon, and may contain colons."""
        path = tmp_path / "a:b"
        path.write_text("node1\n")

        assert by_name(f"hostfile:{path}")(0) == "node1"

    @pytest.mark.parametrize("name", ["pbs", "", "Slurm", "hostfile"])
    def test_unknown(self, name: str) -> None:
        """The error lists the decoders."""
        with pytest.raises(DecoderError) as raised:
            by_name(name, {})

        assert str(raised.value) == (
            f"unknown decoder '{name}'; the decoders are auto, kubernetes, openmpi,"
            " slurm, torchrun and hostfile:PATH"
        )

    def test_unsupported_environment(self) -> None:
        """The error of the decoder's factory is raised."""
        with pytest.raises(TracedStoreError, match="SLURM_JOB_NODELIST"):
            by_name("slurm", {})

    def test_default_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default environment is this process's, at the time of the call."""
        for name in os.environ:
            if name.startswith(("SLURM", "OMPI", "TORCHELASTIC", "WORLD", "RANK")):
                monkeypatch.delenv(name)
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)

        assert by_name("slurm")(0) == slurm()(0) == auto()(0) == "node01"


class TestNameOf:
    """name_of returns a name in every case."""

    def test_name(self) -> None:
        """The name is the decoder's."""
        assert name_of(lambda rank: f"host{rank}", 3) == "host3"

    @pytest.mark.parametrize("error", [LookupError, ValueError, RecursionError])
    def test_decoder_raises(self, error: type[Exception]) -> None:
        """Only the rank for which it raises has the default name."""

        def decoder(rank: int) -> str:
            if rank == 1:
                raise error
            return "host"

        assert [name_of(decoder, rank) for rank in range(3)] == [
            "host",
            "rank 1",
            "host",
        ]

    def test_not_callable(self) -> None:
        """A decoder that cannot be called results in the default name."""
        assert name_of(None, 3) == "rank 3"  # type: ignore[arg-type]

    def test_names_of_other_types(self) -> None:
        """Other types are converted to text; None and "" are no names."""

        class Unprintable:
            def __str__(self) -> str:
                raise RuntimeError

        values: dict[int, object] = {0: 7, 1: b"h", 2: None, 3: "", 4: Unprintable()}

        result = [name_of(values.get, rank) for rank in range(5)]  # type: ignore[arg-type]

        assert result == ["7", "b'h'", "rank 2", "rank 3", "rank 4"]

    @given(st.text(), st.integers(1, 1000))
    def test_bounded_and_encodable(self, text: str, times: int) -> None:
        """Names are short and can be encoded, whatever the decoder returns."""
        name = name_of(lambda _: text * times, 0)

        assert 0 < len(name) <= 256
        name.encode("utf-8")
