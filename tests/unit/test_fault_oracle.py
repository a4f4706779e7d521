"""The oracle of the fault suite: each column can be other than zero."""

import signal
from dataclasses import replace
from typing import Any

import pytest
from faults import plan
from faults.oracle import (
    ABORTS,
    COLUMNS,
    DISAGREEMENTS,
    EXIT_BOUND,
    HANGS,
    LOST,
    READ_BOUND,
    VERDICT_BOUND,
    WRONG,
    Judgement,
    RankRecord,
    judge_barrier,
)
from faults.rendezvous_oracle import judge_rendezvous
from faults.results import ResultsFile, table

TIMEOUT = 1.0


def arrived(rank: int, missing: tuple[int, ...] = (), **fields: Any) -> RankRecord:
    """Return a rank that arrived at 10 s and named ranks at 11 s."""
    steps = {
        "start": 9.8,
        "recorded": 9.9,
        "counting": 9.95,
        "counted": 10.0,
        "waiting": 10.01,
        "timed_out": 11.0,
        "confirmed": 11.0,
    }
    record = RankRecord(
        rank=rank,
        steps=steps,
        result={"outcome": "timeout", "missing": list(missing)},
        ended=11.1,
        exited=11.2,
        events=[{"event": "barrier.timeout", "missing_ranks": list(missing)}],
    )
    return replace(record, **fields)


def never_started(rank: int) -> RankRecord:
    """Return a rank that did nothing."""
    return RankRecord(rank=rank)


def only(column: str, judgement: Judgement) -> bool:
    """Return whether there are findings in this column and in no other."""
    return {c for c in COLUMNS if judgement.findings[c]} == {column}


def judge(*ranks: RankRecord) -> Judgement:
    """Judge a barrier of these ranks."""
    return judge_barrier(ranks, len(ranks), TIMEOUT)


class TestBarrier:
    """Verdicts of a barrier of three, of which rank 2 never starts."""

    def test_right(self) -> None:
        """Exact verdicts are good."""
        judgement = judge(arrived(0, (2,)), arrived(1, (2,)), never_started(2))

        assert judgement.good
        assert judgement.verdict_seconds == pytest.approx([0.1, 0.1])

    def test_present_rank_accused(self) -> None:
        """A rank that had arrived is named."""
        judgement = judge(arrived(0, (1, 2)), arrived(1, (1, 2)), never_started(2))

        assert only(WRONG, judgement)

    def test_missing_rank_not_named(self) -> None:
        """A rank that did not arrive is not named."""
        judgement = judge(arrived(0), arrived(1), never_started(2))

        assert only(WRONG, judgement)

    def test_possible_only(self) -> None:
        """A rank is named as possible, although the store has its certain name."""
        vague = {"outcome": "timeout", "missing": [], "possibly": [2]}
        events = [{"event": "barrier.timeout", "missing_ranks": []}]
        ranks = [arrived(r, result=vague, events=events) for r in (0, 1)]

        assert only(WRONG, judge(*ranks, never_started(2)))
        plain = replace(ranks[1], flavour="torch", events=[])
        assert judge(ranks[0], plain, never_started(2)).good

    def test_possible_only_at_the_bound(self) -> None:
        """A rank that had no time left to read may name ranks as possible."""
        vague = {"outcome": "timeout", "missing": [], "possibly": [2]}
        events = [{"event": "barrier.timeout", "missing_ranks": []}]
        held = arrived(0, result=vague, events=events)
        held.ended = held.asked + READ_BOUND
        held.exited = held.ended + 1

        assert judge(held, arrived(1, (2,)), never_started(2)).good

    def test_plain_rank_and_rank_in_between(self) -> None:
        """A rank that is not counted yet stands for a plain rank that is."""
        plain = arrived(1, flavour="torch", events=[])
        between = arrived(2, (3,))
        between.steps |= {"recorded": 11.0, "counting": 11.04, "counted": 11.05}

        accused = judge(arrived(0, (1, 3)), plain, between, never_started(3))
        assert not accused.findings[WRONG]
        between.steps |= {"recorded": 10.0, "counting": 10.0, "counted": 10.1}
        accused = judge(arrived(0, (1, 3)), plain, between, never_started(3))
        assert accused.findings[WRONG]

    def test_completed_without_rank(self) -> None:
        """A barrier completes before all ranks have arrived."""
        ranks = [arrived(r, result={"outcome": "completed"}, events=[]) for r in (0, 1)]

        assert only(WRONG, judge(*ranks, never_started(2)))

    def test_timed_out_after_completion(self) -> None:
        """A rank times out although the barrier was completed long before."""
        last = arrived(2, result={"outcome": "completed"}, events=[])
        last.steps["completed"] = 10.1

        assert only(WRONG, judge(arrived(0), arrived(1), last))
        last.steps["completed"] = 10.9
        assert judge(arrived(0), arrived(1), last).good

    def test_failed_without_fault(self) -> None:
        """The store of a rank fails, and no fault was injected there."""
        failed = {"outcome": "failed", "error": "DistNetworkError"}
        record = arrived(0, result=failed, events=[{"event": "barrier.failed"}])

        assert only(WRONG, judge(record, arrived(1, (2,)), never_started(2)))
        record = replace(record, may_fail=True)
        assert judge(record, arrived(1, (2,)), never_started(2)).good

    def test_warning_accuses(self) -> None:
        """A warning names a rank that had arrived."""
        record = arrived(0, (2,))
        record.events.append({"event": "barrier.waiting", "missing_ranks": [1, 2]})

        assert only(WRONG, judge(record, arrived(1, (2,)), never_started(2)))

    @pytest.mark.parametrize("count", [0, 2])
    def test_event_missing(self, count: int) -> None:
        """A timeout has exactly one event."""
        record = arrived(0, (2,))
        record.events *= count

        assert only(WRONG, judge(record, arrived(1, (2,)), never_started(2)))

    def test_disagreement(self) -> None:
        """Ranks name different ranks."""
        findings = judge(
            arrived(0, (1, 2)), arrived(1, (2,)), never_started(2)
        ).findings

        assert findings[DISAGREEMENTS]
        assert findings[WRONG]

    def test_arrival_while_reading(self) -> None:
        """A rank that arrives while others read may be named or not."""
        late = arrived(2, result={"outcome": "completed"}, events=[])
        late.steps |= {"counting": 11.02, "counted": 11.05}
        judgement = judge(arrived(0, (2,)), arrived(1, (2,)), late)

        assert judgement.good
        assert judgement.skewed

    def test_no_result(self) -> None:
        """A rank has no result."""
        hung = arrived(1, result=None, exit_status=None, events=[])

        assert only(HANGS, judge(arrived(0, (2,)), hung, never_started(2)))

    def test_late_verdict(self) -> None:
        """A verdict is later than the bound."""
        late = arrived(1, (2,), ended=11.5 + VERDICT_BOUND, exited=12 + VERDICT_BOUND)

        assert only(HANGS, judge(arrived(0, (2,)), late, never_started(2)))

    @pytest.mark.parametrize("exited", [None, 12.0 + EXIT_BOUND])
    def test_does_not_exit(self, exited: float | None) -> None:
        """A process has a verdict and does not end."""
        status = None if exited is None else 0
        stuck = arrived(1, (2,), exit_status=status, exited=exited or 0.0)

        assert only(HANGS, judge(arrived(0, (2,)), stuck, never_started(2)))

    @pytest.mark.parametrize("report", ["store.operation.stalled", "job.stalled"])
    def test_blocked_without_report(self, report: str) -> None:
        """A rank that its store blocks reports the stall, or that the job stalls."""
        fields: dict[str, Any] = {"result": None, "exit_status": None}
        blocked = arrived(1, **fields, may_block=True, events=[])
        in_wait = {k: v for k, v in blocked.steps.items() if v < 11}
        after_wait, blocked.steps = blocked.steps, in_wait

        assert only(HANGS, judge(arrived(0, (2,)), blocked, never_started(2)))
        blocked.events.append({"event": report})
        assert judge(arrived(0, (2,)), blocked, never_started(2)).good
        # After its wait, its verdict is due.
        blocked.steps = after_wait
        assert only(HANGS, judge(arrived(0, (2,)), blocked, never_started(2)))

    @pytest.mark.parametrize("status", [-signal.SIGABRT, -signal.SIGSEGV, 1])
    def test_abort(self, status: int) -> None:
        """A process ends with a signal or a status that the case did not cause."""
        aborted = arrived(1, (2,), exit_status=status)

        assert only(ABORTS, judge(arrived(0, (2,)), aborted, never_started(2)))

    def test_child_aborts(self) -> None:
        """A process that a rank forked aborts."""
        parent = arrived(1, (2,), children=[{"status": -signal.SIGABRT}])

        assert only(ABORTS, judge(arrived(0, (2,)), parent, never_started(2)))

    def test_killed_by_case(self) -> None:
        """A rank that the case killed is neither an abort nor a hang."""
        killed = RankRecord(
            rank=2, steps={"start": 9.8}, exit_status=-signal.SIGKILL, killed=True
        )

        assert judge(arrived(0, (2,)), arrived(1, (2,)), killed).good

    def test_lost_count(self) -> None:
        """Calls, or calls of a forked child, were not counted."""
        losing = arrived(1, (2,))
        assert losing.result is not None
        losing.result["counts"] = {"tcp_store.add": (2, 1)}
        parent = arrived(
            1, (2,), children=[{"status": 0, "counts": {"barriers": (1, 2)}}]
        )

        assert only(LOST, judge(arrived(0, (2,)), losing, never_started(2)))
        assert only(LOST, judge(arrived(0, (2,)), parent, never_started(2)))


class TestRendezvous:
    """Verdicts of a rendezvous of two, of which node 1 never starts."""

    @staticmethod
    def node(*joined: str, **fields: Any) -> RankRecord:
        """Return node 0, which joined, timed out and listed nodes."""
        event = {"event": "rendezvous.timeout", "joined": list(joined)}
        record = RankRecord(
            rank=0,
            steps={
                "start": 1.0,
                "compare_set:1": 1.1,
                "joined": 1.2,
                "get:1": 1.5,
                "get returned:1": 1.6,
            },
            result={"outcome": "timeout"},
            ended=3.0,
            exited=3.1,
            events=[event | {"waiting": [], "left": []}],
        )
        return replace(record, **fields)

    def test_right(self) -> None:
        """The node that joined is listed, the other one is not."""
        judgement = judge_rendezvous([self.node("127.0.0.1"), never_started(1)], 2, 2.0)

        assert judgement.good

    def test_lists_absent_node(self) -> None:
        """A node that never joined is listed."""
        node = self.node("127.0.0.1", "127.0.0.2")

        assert only(WRONG, judge_rendezvous([node, never_started(1)], 2, 2.0))

    def test_omits_node(self) -> None:
        """A node that joined is not listed."""
        assert only(WRONG, judge_rendezvous([self.node(), never_started(1)], 2, 2.0))

    def test_wrong_world(self) -> None:
        """A node completes with more nodes than joined."""
        node = self.node(result={"outcome": "completed", "world": 2}, events=[])

        assert only(WRONG, judge_rendezvous([node, never_started(1)], 2, 2.0))

    def test_hang(self) -> None:
        """A node has no result."""
        node = self.node(result=None, exit_status=None, events=[])

        assert only(HANGS, judge_rendezvous([node, never_started(1)], 2, 2.0))


class TestPlan:
    """The cases of a run."""

    def test_repeatable(self) -> None:
        """A case depends on seed and number alone."""
        cases = [plan.make_case(7, number) for number in range(200)]

        assert cases == [plan.make_case(7, number) for number in range(200)]
        assert cases != [plan.make_case(8, number) for number in range(200)]
        assert {case.fault_class for case in cases} == set(plan.classes())

    @pytest.mark.parametrize("fault_class", plan.classes())
    def test_injects(self, fault_class: str) -> None:
        """Each case of a class injects something into ranks that exist."""
        for number in range(100):
            case = plan.make_case(1, number, fault_class)
            started = set(range(case.world_size)) - set(case.absent)

            assert case.faults or case.absent
            assert {fault.rank for fault in case.faults} <= started
            assert sorted(case.order) == list(range(case.world_size))
            assert len(case.flavours) == case.world_size


class TestResults:
    """The results file and the table."""

    def test_resumes(self, tmp_path: Any) -> None:
        """Results of the same run are read; a line that was cut off is not."""
        file = ResultsFile(tmp_path / "results.jsonl", 7, "")
        file.append({"number": 3})
        ResultsFile(file.path, 8, "").append({"number": 4})
        with file.path.open("a") as half:
            half.write('{"number": 5, "se')

        assert list(file.read()) == [3]

    def test_counts_findings(self) -> None:
        """The table counts what the oracle found."""
        result = {
            "class": "barrier",
            "faults": 2,
            "findings": {column: [] for column in COLUMNS} | {WRONG: ["a", "b"]},
            "verdict_seconds": [0.25],
        }

        assert "| all | 1 | 2 | 2 | 0 | 0 | 0 | 0 | 0.25 s |" in table([result])
