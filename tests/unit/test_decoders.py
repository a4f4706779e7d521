"""Ranks become host names, or the factory says why not."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.coordination.decoders import (
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
from tracedstore.coordination.rosters import counts_in, hosts_in, place
from tracedstore.core.errors import TracedStoreError

# As srun gives them to task 9 of a job of 4 nodes with 4 tasks each.
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
    """An environment without some of its variables."""
    return {name: value for name, value in environ.items() if name not in names}


def minimal_slurm(nodes: str, tasks: str, distribution: str = "") -> dict[str, str]:
    """The three variables that make a roster."""
    return {
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_DISTRIBUTION": distribution,
    }


def names(decoder: Decoder, count: int) -> list[str]:
    """The names of the first ranks."""
    return [decoder(rank) for rank in range(count)]


def refusal(factory: Callable[[Mapping[str, str]], Decoder], **environ: str) -> str:
    """What a factory says when it cannot work."""
    with pytest.raises(DecoderError) as refused:
        factory(environ)
    return str(refused.value)


class TestNodeList:
    """Slurm's grammar for many hosts in few words."""

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
            ("[1-2]", ["1", "2"]),
            ("rack[1]-x.example.org", ["rack1-x.example.org"]),
            ("b,a", ["b", "a"]),
        ],
    )
    def test_expands(self, text: str, hosts: list[str]) -> None:
        """Ranges, padding, several brackets and plain names, in Slurm's order."""
        assert hosts == hosts_in(text)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "brackets do not match, or a name is empty"),
            ("a,,b", "brackets do not match, or a name is empty"),
            ("a,", "brackets do not match, or a name is empty"),
            ("node[1-3", "brackets do not match, or a name is empty"),
            ("node1-3]", "brackets do not match, or a name is empty"),
            ("node[[1]]", "brackets do not match, or a name is empty"),
            ("two words", "brackets do not match, or a name is empty"),
            ("node[]", "[] is not a number or a range"),
            ("node[1,,2]", "[] is not a number or a range"),
            ("node[a-c]", "[a-c] is not a number or a range"),
            ("node[1-]", "[1-] is not a number or a range"),
            ("node[²]", "[²] is not a number or a range"),
            ("node[3-1]", "[3-1] runs backwards"),
        ],
    )
    def test_malformed(self, text: str, reason: str) -> None:
        """What is no node list is refused with the place that is wrong."""
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            hosts_in(text)

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
        """A million hosts is the most, and more of them are never made."""
        with pytest.raises(ValueError, match="more than 1000000 hosts"):
            hosts_in(text)

    def test_a_million_is_allowed(self) -> None:
        """The bound itself is inside."""
        assert len(hosts_in("n[0-999][000-999]")) == 1_000_000

    def test_length_of_names_is_bounded(self) -> None:
        """A long prefix is not multiplied by a wide bracket."""
        with pytest.raises(ValueError, match="longer than 253"):
            hosts_in("n" * 100_000 + "[0-999999]")

    def test_work_is_bounded_by_the_first_excess(self) -> None:
        """Thousands of brackets are not gone through to find the name too long."""
        with pytest.raises(ValueError, match="longer than 253"):
            hosts_in("n" + "[0]" * 40_000)

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
    def test_as_a_simple_expansion(
        self, expressions: list[list[str | list[tuple[int, int, int]]]]
    ) -> None:
        """Whatever is written with brackets reads as nested loops would have it."""
        written, expected = [], []
        for expression in expressions:
            text, hosts = "", [""]
            for part in expression:
                if isinstance(part, str):
                    text += part
                    hosts = [host + part for host in hosts]
                    continue
                items, numbers = [], []
                for first, more, width in part:
                    low = str(first).zfill(width)
                    high = str(first + more).zfill(len(low))
                    items.append(low if low == high else f"{low}-{high}")
                    run = range(first, first + more + 1)
                    numbers += [str(n).zfill(len(low)) for n in run]
                text += f"[{','.join(items)}]"
                hosts = [host + number for host in hosts for number in numbers]
            written.append(text)
            expected += hosts

        assert expected == hosts_in(",".join(written))

    @given(st.text("[],-01ax \n²", max_size=9))
    def test_any_text(self, text: str) -> None:
        """Text of any kind gives non-empty names or a ValueError, nothing else."""
        try:
            hosts = hosts_in(text)
        except ValueError:
            return

        assert hosts
        assert all(host and not set(host) & set("[], \n") for host in hosts)


class TestPlace:
    """Tasks per node, and which of them goes where."""

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
        """Slurm's repetition is undone."""
        assert counts == counts_in(text)

    @pytest.mark.parametrize(
        "text", ["1(x999999999)", "0(x999999999)", "999999999", "500001(x2)"]
    )
    def test_counts_are_bounded(self, text: str) -> None:
        """A million tasks is the most, and more of them are never made."""
        with pytest.raises(ValueError, match="more than 1000000 tasks"):
            counts_in(text)

    def test_rounds_are_as_many_as_tasks(self) -> None:
        """One node with very many tasks does not make every round go over all nodes.

        With a step for each node in each round this would be 10^11 steps.
        """
        placed = place([1] * 100_000 + [900_000], 1)

        assert len(placed) == 1_000_000
        assert set(placed[100_001:]) == {100_000}

    @given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 10))
    def test_every_task_once(self, counts: list[int], turn: int) -> None:
        """However tasks are dealt, each node gets its count."""
        placed = place(counts, turn)

        assert counts == [placed.count(node) for node in range(len(counts))]


class TestSlurm:
    """The roster of a Slurm step."""

    def test_block(self) -> None:
        """Without more said, nodes are filled one after the other."""
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
    def test_only_the_nodes_part_counts(self, distribution: str) -> None:
        """How sockets and cores are dealt out moves no task to another node."""
        decoder = slurm(minimal_slurm("a,b", "2(x2)", distribution))

        assert names(decoder, 4) == ["a", "a", "b", "b"]

    @pytest.mark.parametrize("distribution", ["cyclic", "cyclic:cyclic", "Cyclic,Pack"])
    def test_cyclic(self, distribution: str) -> None:
        """One task to each node in turn, until a node has all of its own."""
        decoder = slurm(minimal_slurm("a,b,c", "3,1,2", distribution))

        assert names(decoder, 6) == ["a", "b", "c", "a", "c", "a"]

    def test_plane(self) -> None:
        """The example in Slurm's source: planes of 2, and nodes of 4, 1 and 1."""
        user = minimal_slurm("a,b,c", "4,1,1", "plane=2")
        srun = minimal_slurm("a,b,c", "4,1,1", "plane") | {"SLURM_DIST_PLANESIZE": "2"}

        assert names(slurm(user), 6) == ["a", "a", "b", "c", "a", "a"]
        assert names(slurm(srun), 6) == names(slurm(user), 6)

    def test_step_on_fewer_nodes_than_the_job(self) -> None:
        """The step's nodes go with the step's tasks."""
        environ = minimal_slurm("a[1-8]", "4(x8)") | {
            "SLURM_STEP_NODELIST": "a[3-4]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        }

        assert names(slurm(environ), 2) == ["a3", "a4"]

    @pytest.mark.parametrize(
        "name", ["SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"]
    )
    def test_any_node_list(self, name: str) -> None:
        """Versions and commands of Slurm differ in which of them they set."""
        decoder = slurm({name: "a[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"})

        assert names(decoder, 2) == ["a1", "a2"]

    @pytest.mark.parametrize("rank", [-1, 16, 10**30])
    def test_unknown_ranks(self, rank: int) -> None:
        """A rank outside the step has no host; a negative one is not the last."""
        with pytest.raises(LookupError):
            slurm(SLURM)(rank)

    def test_missing(self) -> None:
        """Outside of Slurm it says what it looked for."""
        assert refusal(slurm) == (
            "SLURM_JOB_NODELIST or SLURM_NODELIST or SLURM_STEP_NODELIST is not set;"
            " start under its launcher, or pass a decoder of your own"
        )
        assert refusal(slurm, SLURM_JOB_NODELIST="a") == (
            "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not set; start under"
            " its launcher, or pass a decoder of your own"
        )

    @pytest.mark.parametrize(
        ("nodes", "tasks", "distribution", "message"),
        [
            (
                "a[1-",
                "1",
                "",
                (
                    "SLURM_JOB_NODELIST is 'a[1-': brackets do not match, or a name is"
                    " empty; correct it, or pass a decoder of your own"
                ),
            ),
            (
                "a[0-999999999]",
                "1",
                "",
                (
                    "SLURM_JOB_NODELIST is 'a[0-999999999]': more than 1000000 hosts;"
                    " correct it, or pass a decoder of your own"
                ),
            ),
            (
                "a1",
                "8(x",
                "",
                (
                    "SLURM_TASKS_PER_NODE is '8(x': '8(x' is not a count such as 8 or"
                    " 8(x4); correct it, or pass a decoder of your own"
                ),
            ),
            (
                "a[1-3]",
                "8(x4)",
                "",
                (
                    "SLURM_TASKS_PER_NODE is '8(x4)', which counts 4 nodes, but"
                    " SLURM_JOB_NODELIST names 3; run under srun, or pass a decoder of"
                    " your own"
                ),
            ),
            (
                "a1",
                "1",
                "arbitrary",
                (
                    "SLURM_DISTRIBUTION is 'arbitrary', and the order of the nodes is"
                    " in the file SLURM_HOSTFILE named at launch only; use"
                    " hostfile:PATH, or pass a decoder of your own"
                ),
            ),
            (
                "a1",
                "1",
                "spiral:block",
                (
                    "SLURM_DISTRIBUTION is 'spiral:block'; known are block, cyclic and"
                    " plane=N, else pass a decoder of your own"
                ),
            ),
            (
                "a1",
                "1",
                "plane",
                (
                    "SLURM_DIST_PLANESIZE is not set; start under its launcher, or pass"
                    " a decoder of your own"
                ),
            ),
            (
                "a1",
                "1",
                "plane=0",
                (
                    "SLURM_DISTRIBUTION plane is '0'; accepted is a whole number from"
                    " 1, else pass a decoder of your own"
                ),
            ),
        ],
    )
    def test_malformed(
        self, nodes: str, tasks: str, distribution: str, message: str
    ) -> None:
        """Each refusal names the variable, its value and the remedy."""
        assert message == refusal(slurm, **minimal_slurm(nodes, tasks, distribution))

    def test_long_values_are_cut_in_messages(self) -> None:
        """A node list of a hundred kilobytes takes a line."""
        assert len(refusal(slurm, **minimal_slurm("n[" * 50_000, "1"))) < 300

    def test_torchrun_on_top(self) -> None:
        """With one torchrun on each node, a rank is no longer a Slurm task."""
        assert refusal(slurm, **SLURM | TORCHRUN) == (
            "TORCHELASTIC_RUN_ID is 'none', so ranks were given by another launcher;"
            " use the torchrun decoder, or pass a decoder of your own"
        )

    def test_mpirun_on_top(self) -> None:
        """Inside an allocation mpirun maps ranks in its own way."""
        assert "use the openmpi decoder" in refusal(slurm, **SLURM | OPENMPI)

    def test_other_world(self) -> None:
        """A script that starts 8 processes in each task has ranks of its own."""
        assert refusal(slurm, **SLURM | {"WORLD_SIZE": "128"}) == (
            "WORLD_SIZE is '128', but SLURM_STEP_TASKS_PER_NODE tells 16, so ranks were"
            " given by another launcher; pass a decoder of your own"
        )
        assert refusal(slurm, **SLURM | {"RANK": "72"}) == (
            "RANK is '72', but SLURM_PROCID tells 9, so ranks were given by another"
            " launcher; pass a decoder of your own"
        )

    def test_same_world(self) -> None:
        """A script that copies Slurm's numbers into torch's variables is fine."""
        decoder = slurm(SLURM | {"RANK": "9", "WORLD_SIZE": "16"})

        assert decoder(9) == "node03"

    @pytest.mark.parametrize("own", ["4", "99"])
    def test_own_host_is_the_proof(self, own: str) -> None:
        """A roster that puts this very task on another host is wrong about others."""
        assert refusal(slurm, **SLURM | {"SLURM_PROCID": own}) == (
            "SLURMD_NODENAME is 'node03', which is not where SLURM_STEP_NODELIST and"
            f" SLURM_STEP_TASKS_PER_NODE put task {own}; pass a decoder of your own"
        )


class TestTorchrun:
    """What torchrun tells its workers, and that is little."""

    def test_homogeneous(self) -> None:
        """The own host by name, the other nodes by number."""
        decoder = torchrun(TORCHRUN, host="me")

        assert names(decoder, 32) == (
            ["node 0"] * 8 + ["me"] * 8 + ["node 2"] * 8 + ["node 3"] * 8
        )

    def test_own_host_name(self) -> None:
        """Unless told, the host's name is the system's."""
        assert torchrun(TORCHRUN)(8) == socket.gethostname()

    def test_heterogeneous(self) -> None:
        """With uneven nodes only the own ranks are known."""
        decoder = torchrun(TORCHRUN | {"RANK": "7", "WORLD_SIZE": "20"}, host="me")

        assert [decoder(rank) for rank in range(4, 12)] == ["me"] * 8
        for rank in (0, 3, 12, 19):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize("rank", [-1, 32])
    def test_unknown_ranks(self, rank: int) -> None:
        """A rank outside the world has no host."""
        with pytest.raises(LookupError):
            torchrun(TORCHRUN)(rank)

    @pytest.mark.parametrize(
        "name",
        ["RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE"],
    )
    def test_missing(self, name: str) -> None:
        """Each of its variables is needed."""
        assert refusal(torchrun, **without(TORCHRUN, name)) == (
            f"{name} is not set; start under its launcher, or pass a decoder of your"
            " own"
        )

    @pytest.mark.parametrize("value", ["x", "-1", "1.0", "1_0", "²", "9" * 5000])
    def test_malformed(self, value: str) -> None:
        """A rank is digits and nothing else."""
        message = refusal(torchrun, **TORCHRUN | {"RANK": value})

        assert message.startswith(f"RANK is '{value[:80]}")
        assert message.endswith(
            "; accepted is a whole number from 0, else pass a decoder of your own"
        )

    def test_no_workers(self) -> None:
        """A group has at least one worker."""
        assert refusal(torchrun, **TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}) == (
            "LOCAL_WORLD_SIZE is '0'; accepted is a whole number from 1, else pass a"
            " decoder of your own"
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
        """Numbers that cannot go together did not come from torchrun."""
        message = refusal(torchrun, **TORCHRUN | change)

        assert message.startswith(f"RANK is {change.get('RANK', '11')}, which GROUP_")
        assert message.endswith("start with torchrun, or pass a decoder of your own")


class TestKubernetes:
    """Pods of an Indexed Job."""

    def test_one_rank_a_pod(self) -> None:
        """Without more said, the index is the rank."""
        decoder = kubernetes(KUBERNETES)

        assert names(decoder, 3) == ["train-llm-0", "train-llm-1", "train-llm-2"]

    def test_ranks_per_pod(self) -> None:
        """Several ranks share a pod, in order, up to the world's size."""
        environ = {"LOCAL_WORLD_SIZE": "8", "RANK": "17", "WORLD_SIZE": "32"}
        decoder = kubernetes(KUBERNETES | environ)

        assert decoder(0) == decoder(7) == "train-llm-0"
        assert decoder(31) == "train-llm-3"
        for rank in (-1, 32):
            with pytest.raises(LookupError):
                decoder(rank)

    def test_full_host_name(self) -> None:
        """With setHostnameAsFQDN the first label is the pod's."""
        name = "train-llm-2.svc.default.svc.cluster.local"

        assert kubernetes(KUBERNETES | {"HOSTNAME": name})(0) == "train-llm-0"

    def test_torchrun_with_node_rank(self) -> None:
        """Where --node-rank is the index, groups are pods."""
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
        """An elastic rendezvous gives pods any order."""
        environ = KUBERNETES | TORCHRUN | {"GROUP_RANK": "2", "RANK": "19"} | change

        assert "use the torchrun decoder" in refusal(kubernetes, **environ)

    def test_mpirun_on_top(self) -> None:
        """Ranks of an mpirun inside a pod are not pods."""
        environ = KUBERNETES | OPENMPI

        assert "use the openmpi decoder" in refusal(kubernetes, **environ)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"JOB_COMPLETION_INDEX": ""},
                (
                    "JOB_COMPLETION_INDEX is not set; start under its launcher, or pass"
                    " a decoder of your own"
                ),
            ),
            (
                {"JOB_COMPLETION_INDEX": "two"},
                (
                    "JOB_COMPLETION_INDEX is 'two'; accepted is a whole number from 0,"
                    " else pass a decoder of your own"
                ),
            ),
            (
                {"HOSTNAME": ""},
                (
                    "HOSTNAME is not set; start under its launcher, or pass a decoder"
                    " of your own"
                ),
            ),
            (
                {"HOSTNAME": "ip-10-0-0-1"},
                (
                    "HOSTNAME is 'ip-10-0-0-1', which does not end in the"
                    " JOB_COMPLETION_INDEX -2; leave the pod's hostname unset, or pass"
                    " a decoder of your own"
                ),
            ),
            (
                {"HOSTNAME": "-2"},
                (
                    "HOSTNAME is '-2', which does not end in the JOB_COMPLETION_INDEX"
                    " -2; leave the pod's hostname unset, or pass a decoder of your own"
                ),
            ),
            (
                {"LOCAL_WORLD_SIZE": "0"},
                (
                    "LOCAL_WORLD_SIZE is '0'; accepted is a whole number from 1, else"
                    " pass a decoder of your own"
                ),
            ),
            (
                {"RANK": "5"},
                (
                    "RANK is '5', which is not a rank of pod JOB_COMPLETION_INDEX=2 at"
                    " 1 in each; pass a decoder of your own"
                ),
            ),
        ],
    )
    def test_malformed(self, change: dict[str, str], message: str) -> None:
        """Each refusal names the variable, its value and the remedy."""
        assert message == refusal(kubernetes, **KUBERNETES | change)


class TestOpenMPI:
    """What mpirun tells its processes."""

    def test_homogeneous(self) -> None:
        """The own host by name, the others by number."""
        decoder = openmpi(OPENMPI, host="me")

        assert names(decoder, 12) == ["node 0"] * 4 + ["me"] * 4 + ["node 2"] * 4
        with pytest.raises(LookupError):
            decoder(12)

    def test_own_host_name(self) -> None:
        """Unless told, the host's name is the system's."""
        assert openmpi(OPENMPI)(4) == socket.gethostname()

    def test_heterogeneous(self) -> None:
        """With uneven hosts only the own ranks are known."""
        decoder = openmpi(OPENMPI | {"OMPI_COMM_WORLD_SIZE": "10"}, host="me")

        assert [decoder(rank) for rank in range(4, 8)] == ["me"] * 4
        for rank in (3, 8):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize(
        "change",
        [
            # Second rank on its host, of three hosts dealt to in turn.
            {"OMPI_COMM_WORLD_RANK": "4"},
            {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "11"},
        ],
    )
    def test_not_by_slot(self, change: dict[str, str]) -> None:
        """Where ranks do not fill hosts in order, only the own rank is known."""
        decoder = openmpi(OPENMPI | change, host="me")
        own = int(change["OMPI_COMM_WORLD_RANK"])

        assert decoder(own) == "me"
        for rank in (own - 1, own + 1):
            with pytest.raises(LookupError):
                decoder(rank)

    @pytest.mark.parametrize("name", [name for name in OPENMPI if "NODE" not in name])
    def test_missing(self, name: str) -> None:
        """Each of its variables is needed."""
        assert refusal(openmpi, **without(OPENMPI, name)) == (
            f"{name} is not set; start under its launcher, or pass a decoder of your"
            " own"
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
        """Numbers that cannot go together did not come from mpirun."""
        message = refusal(openmpi, **OPENMPI | change)

        assert message.startswith("OMPI_COMM_WORLD_RANK is ")
        assert message.endswith(
            "which cannot be; start with mpirun, or pass a decoder of your own"
        )

    def test_ranks_of_others(self) -> None:
        """Ranks that torchrun or a script gave are not mpirun's."""
        assert "use the torchrun decoder" in refusal(openmpi, **OPENMPI | TORCHRUN)
        assert refusal(openmpi, **OPENMPI | {"RANK": "40"}) == (
            "RANK is '40', but OMPI_COMM_WORLD_RANK tells 5, so ranks were given by"
            " another launcher; pass a decoder of your own"
        )
        assert "OMPI_COMM_WORLD_SIZE tells 12" in refusal(
            openmpi, **OPENMPI | {"WORLD_SIZE": "96"}
        )


class TestHostfile:
    """A launcher's host file, where there is one."""

    def test_all_three_ways(self, tmp_path: Path) -> None:
        """Slots of Open MPI and DeepSpeed, MPICH's colon, and bare names."""
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
        """The refusal names the file and the line."""
        path = tmp_path / "hosts"
        path.write_text(f"node0 slots=8\n\n{line}\n")

        with pytest.raises(DecoderError) as refused:
            hostfile(path)

        assert str(refused.value) == (
            f"{path}:3: '{line}' is not a host such as node1, node1:8 or node1"
            " slots=8; correct it, or pass a decoder of your own"
        )

    def test_bounded(self, tmp_path: Path) -> None:
        """A million slots is the most, and more of them are never made."""
        path = tmp_path / "hosts"
        path.write_text("node0\nnode1 slots=999999999999\n")

        with pytest.raises(DecoderError, match=":2: more than 1000000 slots; correct"):
            hostfile(path)

    @pytest.mark.parametrize("text", ["", "# nobody\n", "node1 slots=0\n"])
    def test_empty(self, tmp_path: Path, text: str) -> None:
        """A file without slots names no rank."""
        path = tmp_path / "hosts"
        path.write_text(text)

        with pytest.raises(DecoderError) as refused:
            hostfile(path)

        assert str(refused.value) == (
            f"host file '{path}' has no slots; add lines such as 'node1 slots=8', or"
            " pass a decoder of your own"
        )

    def test_unreadable(self, tmp_path: Path) -> None:
        """A path that leads nowhere, or to something else, is told."""
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe\x00")

        with pytest.raises(DecoderError) as refused:
            hostfile(tmp_path / "none")
        assert str(refused.value) == (
            f"host file '{tmp_path}/none' cannot be read (No such file or directory);"
            " correct the path, or pass a decoder of your own"
        )
        with pytest.raises(DecoderError, match="is not text in UTF-8; correct"):
            hostfile(binary)


class TestChain:
    """The first that answers."""

    def test_each_failure_costs_itself(self) -> None:
        """Whatever one raises, the next is asked."""

        def broken(rank: int) -> str:
            return str(1 // 0)

        decoder = chain(broken, {1: "one"}.__getitem__, lambda rank: f"host{rank}")

        assert names(decoder, 3) == ["host0", "one", "host2"]

    def test_nobody_knows(self) -> None:
        """A chain is a decoder: what no link knows is a LookupError."""
        with pytest.raises(LookupError):
            chain({1: "one"}.__getitem__)(2)
        with pytest.raises(LookupError):
            chain()(0)


class TestAuto:
    """Whatever the environment has."""

    def test_nothing(self) -> None:
        """At a desk a rank is a rank."""
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
    def test_who_answers(self, environ: dict[str, str], rank: int, name: str) -> None:
        """The launcher that gave the ranks, and never a guess of another one."""
        assert name == auto(environ)(rank)

    @given(
        st.dictionaries(
            st.sampled_from(sorted(SLURM | TORCHRUN | KUBERNETES | OPENMPI)),
            st.one_of(st.text(max_size=8), st.integers(0, 9).map(str)),
        ),
        st.integers(),
    )
    def test_any_environment(self, environ: dict[str, str], rank: int) -> None:
        """However the environment looks, there is a name."""
        assert auto(environ)(rank)


class TestByName:
    """A decoder from a setting."""

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
        """Each has its name, and reads the environment it is given."""
        assert by_name(name, environ)(0) == auto(environ)(0)

    def test_hostfile(self, tmp_path: Path) -> None:
        """A host file's name follows a colon, and may have one itself."""
        path = tmp_path / "a:b"
        path.write_text("node1\n")

        assert by_name(f"hostfile:{path}")(0) == "node1"

    @pytest.mark.parametrize("name", ["pbs", "", "Slurm", "hostfile"])
    def test_unknown(self, name: str) -> None:
        """The refusal lists what there is."""
        with pytest.raises(DecoderError) as refused:
            by_name(name, {})

        assert str(refused.value) == (
            f"there is no decoder '{name}'; there are auto, kubernetes, openmpi, slurm,"
            " torchrun and hostfile:PATH"
        )

    def test_what_it_names_does_not_work_here(self) -> None:
        """Asked for by name, a decoder that cannot work says so."""
        with pytest.raises(TracedStoreError, match="SLURM_JOB_NODELIST"):
            by_name("slurm", {})

    def test_own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless told, the environment is this process's, at the time of the call."""
        for name in os.environ:
            if name.startswith(("SLURM", "OMPI", "TORCHELASTIC", "WORLD", "RANK")):
                monkeypatch.delenv(name)
        for name, value in SLURM.items():
            monkeypatch.setenv(name, value)

        assert by_name("slurm")(0) == slurm()(0) == auto()(0) == "node01"


class TestNameOf:
    """A name in every case."""

    def test_asks(self) -> None:
        """What the decoder says is the name."""
        assert name_of(lambda rank: f"host{rank}", 3) == "host3"

    @pytest.mark.parametrize("error", [LookupError, ValueError, RecursionError])
    def test_a_decoder_that_raises(self, error: type[Exception]) -> None:
        """It costs that name only."""

        def moody(rank: int) -> str:
            if rank == 1:
                raise error
            return "host"

        assert [name_of(moody, rank) for rank in range(3)] == ["host", "rank 1", "host"]

    def test_not_a_decoder(self) -> None:
        """Neither does something that cannot be called."""
        assert name_of(None, 3) == "rank 3"  # type: ignore[arg-type]

    def test_answers_of_other_types(self) -> None:
        """Text is made of anything; nothing is no name."""

        class Unprintable:
            def __str__(self) -> str:
                raise RuntimeError

        answers: dict[int, object] = {0: 7, 1: b"h", 2: None, 3: "", 4: Unprintable()}

        shown = [name_of(answers.get, rank) for rank in range(5)]  # type: ignore[arg-type]

        assert shown == ["7", "b'h'", "rank 2", "rank 3", "rank 4"]

    @given(st.text(), st.integers(1, 1000))
    def test_bounded_and_encodable(self, text: str, times: int) -> None:
        """Whatever a decoder answers fits a log line."""
        name = name_of(lambda _: text * times, 0)

        assert 0 < len(name) <= 256
        name.encode("utf-8")
