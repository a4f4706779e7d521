"""The table of torch's store keys, and the members of process groups."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracedstore.diagnosis.observe import torch_keys
from tracedstore.diagnosis.observe.torch_keys import (
    DEVICES,
    ROWS,
    KeyMeaning,
    Row,
    meaning,
    nccl_roots,
)

SHA1 = "ad56679d2c95f00a464e146ac76c2deb475d8262"


def known(key: str) -> KeyMeaning:
    """Return the meaning of a key that has one."""
    found = meaning(key)
    assert found is not None
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row.example for row in ROWS])
class TestRows:
    """Every row of the table."""

    def test_example(self, row: Row) -> None:
        """The first row that matches the example is its own."""
        (first, *_) = [one for one in ROWS if re.fullmatch(one.pattern, row.example)]
        found = known(row.example)

        assert first is row
        assert (found.protocol, found.agents) == (row.protocol, row.agents)
        assert found.last_arrival == row.last_arrival == (row.counter is not None)
        assert (found.writers is None) == (row.writers is None)
        assert found.phase
        assert "{" not in found.phase
        assert row.example.startswith(found.group)
        assert found.observed == row.observed

    def test_leading_slash(self, row: Row) -> None:
        """With a leading slash, keys have it too; the group is the same."""
        plain, rooted = known(row.example), known(f"/{row.example}")

        assert rooted.group == plain.group
        assert rooted.writers == plain.writers
        for one, other in (
            (plain.counter, rooted.counter),
            (plain.sibling, rooted.sibling),
        ):
            assert other == (None if one is None else f"/{one}")

    def test_below_a_prefix(self, row: Row) -> None:
        """A PrefixStore of the application above torch's changes only the prefix."""
        found, plain = known(f"job/7/{row.example}"), known(row.example)

        assert (found.protocol, found.writers) == (plain.protocol, plain.writers)
        assert found.group_name == plain.group_name

    def test_sibling(self, row: Row) -> None:
        """The sibling of a writer is its key; braces in a prefix are literal."""
        found = known("a{0}{rank}/" + row.example)

        if found.sibling is not None and found.writers is not None:
            assert found.sibling.format(rank=found.writers[0]) == (
                "a{0}{rank}/" + row.example
            )

    def test_cut_key(self, row: Row) -> None:
        """A key without its last component is not this key."""
        found, whole = meaning(row.example.rpartition("/")[0]), known(row.example)

        assert found is None or (found.protocol, found.group) != (
            whole.protocol,
            whole.group,
        )


class TestMeaning:
    """The parts of a key."""

    @pytest.mark.parametrize(
        ("key", "phase", "group", "name", "writer"),
        [
            ("0//cpu//0/1", "init_process_group", "0//cpu//0", "0", 1),
            (
                "default_pg/0//cpu//0/3",
                "init_process_group",
                "default_pg/0//cpu//0",
                "0",
                3,
            ),
            (
                "default_pg/0//12//xpu//1/0",
                "new_group 12",
                "default_pg/0//12//xpu//1",
                "12",
                0,
            ),
            (
                f"default_pg/0//{SHA1}//cpu//0/0",
                f"new_group {SHA1}",
                f"default_pg/0//{SHA1}//cpu//0",
                SHA1,
                0,
            ),
            (
                "AsyncCheckpointProcess//0//cpu//0/2",
                "init_process_group",
                "AsyncCheckpointProcess//0//cpu//0",
                "0",
                2,
            ),
            (
                "0//1//cuda//7",
                "NCCL unique id of group 1",
                "0//1//cuda//7",
                "1",
                0,
            ),
            (
                "0//cuda//IntraNodeComm/CUDASymmetricMemory/4/1",
                "symmetric memory exchange 4",
                "0//cuda//IntraNodeComm/CUDASymmetricMemory/4",
                "0",
                1,
            ),
            (
                "0//symmetric_memory-0_1/NVSHMEMSymmetricMemory/4/1",
                "symmetric memory exchange 4",
                "0//symmetric_memory-0_1/NVSHMEMSymmetricMemory/4",
                "0",
                1,
            ),
        ],
    )
    def test_groups(
        self, key: str, phase: str, group: str, name: str, writer: int
    ) -> None:
        """The name is the innermost group's; the prefixes above do not matter."""
        found = known(key)

        assert (found.phase, found.group, found.group_name, found.writers) == (
            phase,
            group,
            name,
            (writer,),
        )

    def test_store_based_barrier(self) -> None:
        """All ranks call it after new_group; members only with a hashed name."""
        for prefix, barrier, name in (
            ("default_pg/", "0", "0"),
            ("default_pg/0//", "1", "0"),
            (f"default_pg/0//{SHA1}//", SHA1, SHA1),
            ("", "0", "0"),
        ):
            counter = f"{prefix}store_based_barrier_key:{barrier}"
            found = known(f"{counter}:last_worker")

            assert found.counter == found.group == counter
            assert found.phase == f"store-based barrier of group {barrier}"
            assert found.group_name == name

    @pytest.mark.parametrize("size", [1, 128, 129, 300, 1000])
    @pytest.mark.parametrize("ranks_per_root", [1, 7, 128])
    def test_nccl_roots(self, size: int, ranks_per_root: int) -> None:
        """Roots are spread evenly: the first of each share, larger shares first."""
        roots = nccl_roots(size, ranks_per_root)
        shares = [
            end - start for start, end in zip(roots, [*roots[1:], size], strict=True)
        ]

        assert roots[0] == 0
        assert sum(shares) == size
        assert max(shares) <= ranks_per_root
        assert shares == sorted(shares, reverse=True)
        assert max(shares) - min(shares) <= 1

    def test_writers_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A root's rank follows from the group's size and torch's variable."""
        second = known("default_pg/0//cuda//UniqueNCCLID:1")

        assert second.writers is None
        assert second.writers_in(300) == (100,)
        assert second.writers_in(100) is None  # it has one root
        assert known("default_pg/0//cuda//0").writers_in(300) == (0,)
        monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", "50")
        assert second.writers_in(100) == (50,)
        monkeypatch.setenv("TORCH_NCCL_RANKS_PER_ROOT", "many")
        assert second.writers_in(256) == (128,)


class TestOtherKeys:
    """Keys of applications, and hostile ones."""

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "/",
            "worker/3",
            "rank3",
            "epoch/3/go",
            "a/b/0",
            "x//y//0",
            "x//y//0/1",
            "cpu//0/1",
            "a//cpu/0/1",
            "//cpu//0/1",
            "0//cpu//00/1",
            "0//cpu//0/01",
            "0//cpu//0/-1",
            "0//cpu//0/1/2",
            "0//cpu//0/1\n",
            "0//cpu//0/\N{ARABIC-INDIC DIGIT ONE}",
            "0//tpu//0/1",
            "0//split//0/1",
            "0//cpu//0",
            "0//cuda//x",
            "0//cpu//0/1000000",
            "job/MASTER_ADDR",
            "last_member",
            "num_members",
            "team/num_members",
            "TRACE",
            "a/TRACE",
            "torchelastic/role_info/",
            "torchelastic/role_info/x",
            "mytorchelastic/role_info/1",
            "my_rpc_prefix_0/names/1",
            "tracedstore/RANKS/1",
            "tracedstore/BLOCKED/1",
        ],
    )
    def test_no_meaning(self, key: str) -> None:
        """A key of similar form is not torch's."""
        assert meaning(key) is None

    @given(st.text())
    def test_any_text(self, key: str) -> None:
        """Any text is a key; without a word of torch it has no meaning."""
        found = meaning(key)

        words = ["//", "/last_member", "/TRAC", "MASTER_", "rendezvous", "rpc_prefix_"]
        words += ["debug_server/"]
        assert found is None or any(word in key for word in words)

    @given(
        st.lists(
            st.text("abcxyz0123456789_-.:", min_size=1, max_size=9), max_size=6
        ).map("/".join)
    )
    def test_paths_of_applications(self, key: str) -> None:
        """Words and numbers with single slashes have no meaning."""
        assert meaning(key) is None

    @given(
        st.lists(
            st.sampled_from(
                [*DEVICES, "/", "//", "0", "1", "a", ":", "{", "}", "{rank}", "pg"]
                + [part for row in ROWS for part in row.example.split("/")]
            ),
            max_size=30,
        ).map("".join)
    )
    def test_pieces_of_torch_keys(self, key: str) -> None:
        """Any combination of torch's words is parsed or refused, without an error."""
        found = meaning(key)

        if found is not None:
            assert found.group in key
            if found.sibling is not None:
                assert found.sibling.format(rank=0).startswith(key[:1])

    @pytest.mark.parametrize(
        "piece",
        ["/", "//", "0", "a/", "0//", "0//cpu//", "cpu//0/", "torch.rendezvous..1/"]
        + [row.example for row in ROWS]
        + [row.example + "/" for row in ROWS],
    )
    def test_bounded_time(self, piece: str) -> None:
        """The longest key takes milliseconds; the bound is for a loaded machine."""
        key = (piece * 1024)[:1023] + "\x00"
        started = time.thread_time()

        meaning(key)

        assert time.thread_time() - started < 0.5

    def test_long_keys(self) -> None:
        """A key of more than 1024 characters has no meaning."""
        end = "/0//cpu//0/1"

        assert meaning("a" * (1024 - len(end)) + end) is not None
        assert meaning("a" * (1025 - len(end)) + end) is None


class TestGroups:
    """The members of the process groups of this process."""

    @pytest.fixture(autouse=True)
    def _empty(self) -> None:
        torch_keys.forget_groups()

    def test_members(self) -> None:
        """The default group has all ranks; a later group replaces one of its name."""
        torch_keys.record_members("0", [], 3)
        torch_keys.record_members("1", [4, 2], 2)

        assert torch_keys.members_of("0") == (0, 1, 2)
        assert torch_keys.members_of("1") == (4, 2)
        torch_keys.record_members("1", [5], 1)
        assert torch_keys.members_of("1") == (5,)
        assert torch_keys.members_of("2") is None

    def test_unknown_ranks(self) -> None:
        """MPI passes no ranks and no size; that is not recorded."""
        torch_keys.record_members("0", [], -1)

        assert torch_keys.members_of("0") is None

    def test_bounded(self) -> None:
        """Only the latest groups are kept."""
        for number in range(torch_keys.MAX_GROUPS + 2):
            torch_keys.record_members(str(number), [number], 1)
            torch_keys.record_members("0", [0], 1)

        assert torch_keys.members_of("0") == (0,)
        assert torch_keys.members_of("1") is None
        assert torch_keys.members_of("2") is None
        assert torch_keys.members_of(str(torch_keys.MAX_GROUPS + 1)) is not None

    def test_reset(self) -> None:
        """A forked child has no groups."""
        torch_keys.record_members("0", [], 3)
        torch_keys.forget_groups()

        assert torch_keys.members_of("0") is None


class TestShownGroup:
    """Names of process groups for people."""

    def test_hash_of_a_known_group(self) -> None:
        """It is shown by its members, also in what a rank executes."""
        name = "3dc4379e" * 5
        known = torch_keys.meaning(f"0//{name}//cpu//0/1")
        assert known is not None
        assert torch_keys.shown_phase(known) == f"new_group {name}"
        torch_keys.record_members(name, (1, 5), 8)
        try:
            assert torch_keys.shown_group(name) == "of ranks 1,5"
            assert torch_keys.shown_phase(known) == "new_group of ranks 1,5"
        finally:
            torch_keys.forget_groups()

    @pytest.mark.parametrize("name", ["0", "default_pg", "mesh_dp", "f" * 40])
    def test_other_names(self, name: str) -> None:
        """A name that is none, or of an unknown group, is shown as it is."""
        assert torch_keys.shown_group(name) == name
