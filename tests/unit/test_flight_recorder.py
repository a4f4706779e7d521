"""Flight Recorder's format: records of gloo's and NCCL's form, and hostile ones."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.flight_entries import entry
from tracedstore.diagnosis.observe import flight_recorder
from tracedstore.diagnosis.observe.flight_recorder import (
    Signature,
    operation_of,
    parse,
    records_of,
)


def dump(*entries: dict[str, Any]) -> str:
    """Return what torch writes: without spaces, with the keys in order."""
    whole = {
        "comm_lib_version": "",
        "entries": list(entries),
        "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "3"}},
        "version": "2.10",
    }
    return json.dumps(whole, separators=(",", ":"))


def record(*entries: dict[str, Any]) -> flight_recorder.GroupRecord:
    """Return the record of group 0."""
    return records_of([parse(dump(*entries))])["0"]


class TestEntries:
    """The entries of one recorder."""

    def test_pending(self) -> None:
        """The first entry that has not retired is pending; the last retired counts."""
        found = record(
            entry(1),
            entry(2, "nccl:broadcast"),
            entry(3, retired=False, state="started"),
            entry(4, retired=False),
        )

        assert found.pending is not None
        assert (found.pending.number, found.last_number) == (3, 2)
        assert found.pending.signature == Signature(
            operation="all_reduce", sizes="[10]", dtype="Float"
        )
        assert found.pending.description == "default_pg"
        assert found.pending.thread_id == 140308167977856
        assert found.pending.created == pytest.approx(1795062327.377632469)

    def test_only_retired_counts(self) -> None:
        """NCCL says "completed" of work that was never launched; gloo "scheduled"."""
        assert record(entry(1, state="completed", retired=False)).pending is not None
        assert record(entry(1, state="scheduled", retired=True)).pending is None

    def test_coalesced(self) -> None:
        """Members of a coalesced call never retire, and the call does."""
        members = [entry(5, retired=False), entry(5, "nccl:broadcast", retired=False)]

        assert record(*members, entry(5, "nccl:coalesced")).pending is None
        found = record(*members, entry(5, "nccl:coalesced", retired=False)).pending
        assert found is not None
        assert found.signature == Signature(operation="coalesced")

    def test_point_to_point(self) -> None:
        """A pending one has its own number and its peer; a collective comes first."""
        fields = {"is_p2p": True, "p2p_seq_id": 7, "retired": False}
        found = record(entry(3), entry(3, "nccl:recv 0<-2", **fields))
        assert found.pending is not None
        assert (found.pending.number, found.pending.peer) == (7, 2)
        assert found.pending.is_p2p
        assert found.last_number == 3

        found = record(entry(3, "nccl:send 0->1", **fields), entry(4, retired=False))
        assert found.pending is not None
        assert (found.pending.number, found.pending.is_p2p) == (4, False)

    def test_expected(self) -> None:
        """What followed the same collective before would be the next one."""
        step = ["all_reduce", "broadcast", "reduce"]
        calls = [entry(n + 1, f"nccl:{step[n % 3]}") for n in range(6)]

        found = record(*calls, entry(7, "nccl:all_reduce", retired=False))

        assert found.expected is not None
        assert found.expected.operation == "broadcast"
        assert record(entry(1, retired=False)).expected is None

    def test_groups(self) -> None:
        """Each group has its own numbers; gloo's group without a name is none."""
        other: dict[str, Any] = {"process_group": ["dp", "undefined"]}
        found = records_of(
            [
                parse(
                    dump(
                        entry(9),
                        entry(1, retired=False, **other),
                        entry(1, process_group=["", ""]),
                    )
                )
            ]
        )

        assert found.keys() == {"0", "dp"}
        assert found["0"].pending is None
        pending = found["dp"].pending
        assert pending is not None
        assert (pending.number, pending.description) == (1, "")

    def test_a_later_group_of_the_same_name(self) -> None:
        """The entries of a group that was destroyed do not count."""
        found = record(
            entry(8),
            entry(9, retired=False),
            entry(1, pg_id=2),
            entry(2, pg_id=2),
        )

        assert (found.pending, found.last_number) == (None, 2)

    def test_two_recorders(self) -> None:
        """Of a group in both, the recorder with the pending entry counts."""
        gloo = parse(dump(entry(1, "gloo:barrier", time_created_ns=2 * 10**18)))
        nccl = parse(dump(entry(8, retired=False)))

        for recorders in ([gloo, nccl], [nccl, gloo]):
            pending = records_of(recorders)["0"].pending
            assert pending is not None
            assert pending.number == 8

    def test_only_the_tail_is_parsed(self) -> None:
        """Of many entries, the last ones and the pending ones are read."""
        entries = [entry(n) for n in range(1, 5001)]
        entries[10]["retired"] = False

        parsed = parse(dump(*entries))

        assert len(parsed) < 1000
        numbers = [one.number for one in parsed]
        assert (numbers[0], numbers[-1]) == (11, 5000)
        pending = records_of([parsed])["0"].pending
        assert pending is not None
        assert pending.number == 11

    def test_text_in_a_name_is_no_entry(self) -> None:
        """A thread or a group may have any name."""
        trap = '"retired":false},{"process_group":["0","x"]},{'
        entries = [entry(n, thread_name=trap) for n in range(1, 3001)]
        entries[5]["retired"] = False

        found = records_of([parse(dump(*entries))])

        assert found["0"].pending is not None
        assert found["0"].pending.number == 6


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (entry(1), entry(1, "gloo:all_reduce"), True),
        (entry(1), entry(1, "nccl:broadcast"), False),
        (entry(1), entry(1, sizes=[[11]]), False),
        (entry(1), entry(1, input_dtypes=["Long"]), False),
        # Without elements the type does not matter.
        (entry(1, sizes=[[0]]), entry(1, sizes=[[0]], input_dtypes=["Long"]), True),
        (
            entry(1, "nccl:all_to_all"),
            entry(1, "nccl:all_to_all", sizes=[[99]]),
            True,
        ),
        # The root alone has the inputs of a scatter, and the outputs of a gather.
        (
            entry(1, "gloo:scatter"),
            entry(1, "gloo:scatter", input_sizes=[[10], [10]]),
            True,
        ),
        (
            entry(1, "gloo:scatter"),
            entry(1, "gloo:scatter", output_sizes=[[11]]),
            False,
        ),
        (entry(1, "gloo:gather"), entry(1, "gloo:gather", output_sizes=[]), True),
        # Lists are spelled in several ways.
        (
            entry(1, "nccl:all_gather"),
            entry(1, "nccl:_all_gather_base", output_sizes=[[20]]),
            True,
        ),
        (entry(1, sizes=[[10], [20]]), entry(1, sizes=[[30]]), True),
        # Each rank has sizes of its own.
        (
            entry(1, "nccl:all_gather_v"),
            entry(1, "nccl:all_gather_v", sizes=[[3]]),
            True,
        ),
    ],
)
def test_signatures(one: dict[str, Any], two: dict[str, Any], same: bool) -> None:
    """Two ranks may be in the same collective if what both must have is equal."""
    first, second = (parse(dump(each))[0].signature for each in (one, two))

    assert first.matches(second) is same
    assert second.matches(first) is same


def test_operations_have_the_names_of_torch_distributed() -> None:
    """Backends have other names, and several for one collective."""
    assert operation_of("gloo:all_reduce") == "all_reduce"
    assert operation_of("nccl:_reduce_scatter_base") == "reduce_scatter"
    assert operation_of("nccl:all_gather_into_tensor_coalesced") == (
        "all_gather_into_tensor_coalesced"
    )
    assert operation_of("nccl:alltoall_base") == "all_to_all"
    assert operation_of("nccl:recv 0<-1") == "recv"
    assert operation_of("") == "collective"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"entries":',
        '{"entries":null}',
        '{"entries":[1,"x",null,[],{}]}',
        '{"entries":[' + "[" * 100_000,
        '{"entries":[{"process_group":["0"],"collective_seq_id":' + "9" * 5000 + "}]}",
        dump(entry(-1), entry(2**70), entry(1, process_group=[7])),
        dump(entry(1, profiling_name=None), entry(1, is_p2p=1, p2p_seq_id="x")),
        '"retired":false},{' * 10_000,
        '{"entries":[' + '{"retired":false},{' * 30_000,
    ],
)
def test_malformed(text: str) -> None:
    """Anything else has no entries, and nothing is raised."""
    for one in parse(text):
        assert 0 <= one.number < 2**63


def test_texts_are_bounded() -> None:
    """Descriptions are a program's own texts."""
    found = record(
        entry(
            1,
            f"nccl:{'x' * 5000}",
            retired=False,
            process_group=["0", "\x1b[31m" + "d" * 5000],
            sizes=[[1] * 500],
        )
    ).pending

    assert found is not None
    assert len(found.signature.operation) <= 128
    assert len(found.description) <= 128
    assert "\x1b" not in found.description
    assert len(found.signature.sizes) <= 100


def read_retired() -> dict[str, flight_recorder.GroupRecord]:
    """Read the recorders until the last call of group 0, which has returned, is over.

    It retires after that, in a thread of gloo.
    """
    deadline = time.monotonic() + 60
    while (found := flight_recorder.read())["0"].pending is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


class TestTorch:
    """The recorders of the installed torch."""

    @pytest.fixture(autouse=True)
    def group(self) -> Iterator[None]:
        """Create a group of one rank."""
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()

    def test_gloo(self) -> None:
        """What gloo's groups call is there, retired."""
        for _ in range(3):
            dist.all_reduce(torch.ones(4, 5))
        dist.barrier()

        found = read_retired()["0"]

        operations = [one.signature.operation for one in found.recent]
        assert operations == ["all_reduce"] * 3 + ["barrier"]
        assert str(found.recent[0].signature) == "all_reduce [4, 5] Float"
        assert found.last_number == 4

    def test_the_function_and_the_handler_write_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A torch without the handler is read through the function."""
        dist.all_reduce(torch.ones(4))
        by_handler = read_retired()
        monkeypatch.setattr(flight_recorder, "_dump_without_gil", lambda _: None)

        assert flight_recorder.read() == by_handler
        assert by_handler["0"].last_number == 1


@pytest.mark.parametrize(
    ("signature", "calls"),
    [
        ("_dump_fr_trace_json(onlyActive: bool | None = None) -> bytes", []),
        (
            "_dump_fr_trace_json(onlyActive: bool, backend: str = 'gloo') -> bytes",
            [(True, False, "nccl2")],
        ),
    ],
)
def test_recorders_of_other_backends(
    signature: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 and newer have one each; with entries, and not the active ones alone.

    Those leave out the entry that is stuck in the launch.
    """
    called = []

    def dump_of(*args: Any) -> bytes:
        called.append(args)
        return dump(entry(4, "nccl2:all_reduce", retired=False)).encode()

    dump_of.__doc__ = signature
    monkeypatch.setattr(flight_recorder, "_dumps", lambda **_: iter(()))
    monkeypatch.setattr(flight_recorder, "_torch_name", lambda _: dump_of)

    found = flight_recorder.read(backends={"nccl2", "gloo", "nccl"})
    flight_recorder.read(nccl=False, backends={"nccl2"})

    assert called == calls
    assert [one.pending is not None for one in found.values()] == [True] * len(calls)


def test_the_key_that_ends_all_ranks_is_never_written() -> None:
    """Every rank of NCCL dumps and terminates when it exists."""
    package = Path(flight_recorder.__file__).parents[2]
    sources = {one.name: one.read_text() for one in package.rglob("*.py")}

    assert len(sources) > 100
    # That module has its meaning, and writes no keys.
    assert {name for name, text in sources.items() if "exception_dump" in text} == {
        "torch_keys.py"
    }
