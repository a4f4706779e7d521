"""Dumps of Flight Recorder: what they show, and what they leave unknown."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from support.flight_entries import dump_of, entry, frames, write_dumps
from support.log_events import json_lines, stall_event
from support.pages import Page
from tracedstore.diagnosis.judgement.verdict import Verdict
from tracedstore.tools.cli.main import main
from tracedstore.tools.report.flight_dumps import (
    RankDump,
    judge_dumps,
    positions,
    read_dump,
)

# When the entries were made, in seconds since the epoch.
MADE = 1795062327.377632469
ALL = {"0": [0, 1, 2, 3]}
Entries = list[dict[str, Any]]


def steps(count: int, name: str = "nccl:all_reduce") -> Entries:
    """Return calls that have ended."""
    return [entry(number, name, frames=frames(30)) for number in range(1, count + 1)]


def waiting(number: int, name: str = "nccl:all_reduce", **fields: Any) -> Entries:
    """Return calls of which the last has not ended."""
    last = entry(number, name, frames=frames(42), retired=False, **fields)
    return [*steps(number - 1), last]


def dumps_of(
    by_rank: dict[int, Entries], groups: dict[str, list[int]] | None = None
) -> dict[int, RankDump]:
    """Return the dumps of ranks, written 600 s after the calls."""
    return {
        rank: read_dump(f"trace_{rank}", dump_of(entries, groups), MADE + 600)
        for rank, entries in by_rank.items()
    }


def judged(
    by_rank: dict[int, Entries],
    groups: dict[str, list[int]] | None = None,
    world_size: int = 0,
) -> Verdict:
    """Return the verdict on dumps."""
    verdict = judge_dumps(dumps_of(by_rank, groups), world_size, lambda _: "")
    assert verdict is not None
    return verdict


class TestVerdict:
    """Whom the job waited for, by the code that judges live collectives."""

    def test_missing_rank(self) -> None:
        """A rank that has not called it is named, with the lines of both sides."""
        found = judged({rank: waiting(5) for rank in (0, 1, 3)} | {2: steps(4)}, ALL)

        assert (found.awaited_ranks, found.cause) == ((2,), "busy")
        assert found.phase == "all_reduce 5 of group 0 (default_pg)"
        assert found.describe_awaited() == (
            "rank 2: alive, the last that it called is all_reduce 4 [10] Float at"
            " src/train.py:30 step"
        )
        assert "ranks 0-1,3 called it at src/train.py:42 step" in found.evidence
        assert found.waited_seconds == pytest.approx(600)

    def test_mismatch(self) -> None:
        """One rank calls another collective at the same number."""
        found = judged(
            {rank: waiting(5) for rank in (0, 1, 3)}
            | {2: waiting(5, "nccl:broadcast")},
            ALL,
        )

        assert (found.awaited_ranks, found.cause) == ((2,), "mismatch")
        assert "rank 2: called broadcast 5" in found.describe_awaited()
        assert "pid" not in found.describe_awaited()

    def test_skipped(self) -> None:
        """It has called what the others call next."""
        step = ["nccl:all_reduce", "nccl:broadcast", "nccl:all_gather"]

        def calls(last: str) -> Entries:
            ended = [entry(n + 1, step[n % 3]) for n in range(6)]
            return [*ended, entry(7, last, retired=False)]

        by_rank = {rank: calls("nccl:all_reduce") for rank in (0, 1, 3)}
        found = judged(by_rank | {2: calls("nccl:broadcast")}, ALL)

        assert found.describe_awaited() == (
            "rank 2: skipped all_reduce 7 [10] Float: called broadcast 7 [10] Float"
        )

    def test_all_entered(self) -> None:
        """NCCL's dumps have the members, so it is known that nobody is missing."""
        found = judged({rank: waiting(5) for rank in range(4)}, ALL)

        assert (found.awaited_ranks, found.cause) == ((), "all_entered")

    def test_another_group(self) -> None:
        """The head of the graph is named: whom the awaited rank waits for."""
        sub: dict[str, Any] = {"process_group": ["1", "tp"], "pg_id": 1}
        by_rank = {
            0: waiting(5),
            1: waiting(5),
            2: [*steps(4), entry(1, retired=False, **sub)],
            3: steps(4),
        }
        found = judged(by_rank, ALL | {"1": [2, 3]})

        assert (found.awaited_ranks, found.cause) == ((3,), "busy")

    def test_receive(self) -> None:
        """A peer is a rank of the group, by its position there."""
        p2p = {"is_p2p": True, "p2p_seq_id": 3, "process_group": ["1", "pp"]}
        receiver = [entry(0, "nccl:recv 0<-1", retired=False, **p2p)]
        found = judged({1: receiver, 3: steps(4)}, {"0": [0, 1, 2, 3], "1": [1, 3]})

        assert found.awaited_ranks == (3,)
        assert found.collective == "recv"

    def test_late_record(self) -> None:
        """A watchdog that hangs leaves entries that others show to have ended."""
        by_rank = {rank: steps(9) for rank in range(3)} | {3: waiting(5)}

        assert judge_dumps(dumps_of(by_rank, ALL), 0, lambda _: "") is None

    def test_coalesced(self) -> None:
        """Members of a coalesced call never retire."""
        members = [entry(5, retired=False), entry(5, retired=False)]
        entries = [*steps(4), *members, entry(5, "nccl:coalesced")]
        by_rank = dict.fromkeys(range(4), entries)

        assert judge_dumps(dumps_of(by_rank, ALL), 0, lambda _: "") is None


class TestUnknown:
    """Nobody is accused of what the dumps do not show."""

    def test_no_dump(self) -> None:
        """A rank without a dump may have called it."""
        found = judged({rank: waiting(5) for rank in (0, 1, 3)}, ALL)

        assert (found.awaited_ranks, found.cause) == ((), "unknown")
        assert found.describe_awaited() == (
            "ranks 0-1,3 had called it; of rank 2 that is not known"
        )
        assert "no dump of rank 2 was read" in found.evidence

    def test_no_dump_of_another_rank(self) -> None:
        """One that has not called it is named, and the other is mentioned."""
        found = judged({0: waiting(5), 1: waiting(5), 2: steps(4)}, ALL)

        assert found.awaited_ranks == (2,)
        assert "no dump of rank 3 was read" in found.evidence

    def test_older_dump(self) -> None:
        """A dump of an earlier time says nothing about a later wait."""
        dumps = dumps_of({0: waiting(5), 1: steps(4)}, {"0": [0, 1]})
        early = dump_of([entry(4, time_created_ns=int((MADE - 90) * 1e9))])
        dumps[1] = read_dump("trace_1", early, MADE - 60)
        found = judge_dumps(dumps, 0, lambda _: "")

        assert found is not None
        assert (found.awaited_ranks, found.cause) == ((), "unknown")
        assert "the dump of rank 1 is older than this wait" in found.evidence

    def test_dump_of_an_earlier_attempt(self) -> None:
        """A copy of one has a new time; its calls are older than those of others."""
        early = int((MADE - 900) * 1e9)
        before = [entry(n, time_created_ns=early) for n in range(1, 5)]
        found = judged({0: waiting(5), 1: before}, {"0": [0, 1]})

        assert (found.awaited_ranks, found.cause) == ((), "unknown")
        assert "the dump of rank 1 is older than this wait" in found.evidence

    def test_members_of_gloo(self) -> None:
        """Dumps of gloo have no members: all that are there does not mean all."""
        by_rank = {rank: waiting(5, "gloo:all_reduce") for rank in range(2)}
        found = judged(by_rank)

        assert (found.awaited_ranks, found.cause) == ((), "unknown")
        assert "do not say whether the group has more ranks" in found.known
        assert judged(by_rank, world_size=2).cause == "all_entered"
        assert judged(by_rank, world_size=3).cause == "unknown"

    def test_copied_dump(self) -> None:
        """A copy has a later time; then it is not known for how long it waited."""
        dump = read_dump("trace_0", dump_of(waiting(5)), MADE + 90_000)

        assert dump.written == 0


REFUSED: dict[str, Any] = {
    "a class": b"\x80\x02cos\nsystem\n.",
    "nested tuples": pickle.dumps({"entries": [(("a",), "b")]}, 2),
    "a tuple of numbers": pickle.dumps({"entries": [(1, 2)]}, 2),
    "a long integer": pickle.dumps({"entries": [2**80]}, 2),
    "a gap in the memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a long text": pickle.dumps({"entries": ["x" * 2_000_000]}, 2),
    "many containers": b"\x80\x02](" + b"]" * 700_000 + b"e.",
    "no dump": pickle.dumps({"model": [1.0]}, 2),
    "no dict": pickle.dumps(["entries"], 2),
    "no end": pickle.dumps({"entries": []}, 2)[:-1],
    "garbage": b"\x80\xff\x00",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_refused(data: bytes) -> None:
    """What is no dump is refused before it can do harm."""
    with pytest.raises(ValueError, match=r"."):
        read_dump("trace_0", data, MADE)


def test_malformed_parts() -> None:
    """Parts of another form are left out."""
    bad_frames = [None, {"filename": 3}, {"filename": "a", "line": "b"}]
    entries = [
        *(entry(1, frames=some) for some in (7, bad_frames, [])),
        entry(2, process_group=[""]),
        entry(3, profiling_name=4),
    ]
    groups = {"0": {"ranks": "[0, 9999999999]"}, "1": 5, 3: {}, "2": {"ranks": "os"}}
    whole = pickle.loads(dump_of(entries)) | {"pg_config": groups}
    dump = read_dump("trace_7.gz", pickle.dumps(whole, 2), MADE)

    assert (dump.rank, dump.members) == (7, {})
    assert dump.records["0"].last_called == 1
    assert [one.place for one in positions({7: dump})] == [""]


class TestReport:
    """``tracedstore report`` with dumps."""

    def report(self, folder: Path, *arguments: str) -> Page:
        """Run the command; return its page."""
        output = folder / "report.html"
        assert main(["report", *arguments, "--output", str(output)]) == 0
        return Page(output.read_text("utf-8"))

    def test_prefix(self, tmp_path: Path) -> None:
        """What torch's variable has names all dumps; the page has positions."""
        by_rank = {rank: waiting(5) for rank in range(3)} | {3: steps(4)}
        write_dumps(tmp_path / "of_my_job_", by_rank, ALL)

        page = self.report(tmp_path, str(tmp_path / "of_my_job_"))

        assert "for rank 3: alive, the last that it called" in page.texts["headline"]
        rows = [row[:4] for row in page.tables["t-collectives"]]
        assert rows[1:] == [
            [
                "0 (default_pg)",
                "all_reduce 5 [10] Floathad not ended",
                "ranks 0-2",
                "src/train.py:42 step",
            ],
            [
                "0 (default_pg)",
                "all_reduce 4 [10] Floatthe last, ended",
                "rank 3",
                "src/train.py:30 step",
            ],
        ]

    def test_watchdog(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Dumps next to a log with NCCL's watchdog explain the timeout."""
        (tmp_path / "log").write_text(
            "[rank0]: [E1119 02:07:08.4 P.cpp:6] [Rank 0] Watchdog caught collective"
            " operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=10,"
            " Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
        )
        by_rank = {0: waiting(5), 1: steps(4)}
        write_dumps(tmp_path / "nccl_trace_rank_", by_rank, {"0": [0, 1]})

        page = self.report(tmp_path, str(tmp_path))

        assert "waiting in all_reduce 5 of group 0" in page.texts["headline"]
        assert "for rank 1" in page.texts["headline"]
        assert "SeqNum=5, OpType=ALLREDUCE did not end" in page.texts["lead"]
        assert capsys.readouterr().out.splitlines()[2].endswith("2 dumps")

    def test_reported_stall(self, tmp_path: Path) -> None:
        """What a rank logged about the same wait says more than a dump."""
        phase = "all_reduce 5 of group 0 (default_pg)"
        logged = stall_event(
            0, 40.0, 30.0, phase=phase, awaited="rank 1: in data.py:88"
        )
        (tmp_path / "log").write_text(json_lines([logged]))
        by_rank = {0: waiting(5), 1: steps(4)}
        write_dumps(tmp_path / "nccl_trace_rank_", by_rank, {"0": [0, 1]})

        page = self.report(tmp_path, str(tmp_path))

        assert "data.py:88" in page.texts["headline"]
        assert page.texts["n-stalls"] == "1"

    def test_other_pickles(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A pickle that is no dump is named, and the rest is read."""
        (tmp_path / "optimizer_1").write_bytes(pickle.dumps(object))
        (tmp_path / "dump").write_bytes(dump_of(waiting(5)))
        write_dumps(tmp_path / "nccl_trace_rank_", {0: waiting(5)})

        self.report(tmp_path, str(tmp_path))

        printed = capsys.readouterr().err
        assert "optimizer_1: the opcode" in printed
        assert "dump: the name of a dump must end with the rank" in printed
