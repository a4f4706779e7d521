"""Whom a rank in a collective waits for, and why a group does not go on."""

from dataclasses import replace
from typing import Any

import pytest

from tracedstore.diagnosis.judgement.collective_waits import (
    Known,
    judge_calls,
    judge_waits,
    resolve,
)
from tracedstore.diagnosis.judgement.verdict import Verdict, find_suspects
from tracedstore.diagnosis.observe.blocked_record import (
    BlockedRecord,
    Called,
    CollectivePosition,
)

NOW = 1_000_000.0
WORLD_SIZE = 4


def call(
    rank: int,
    number: int | None = 7,
    operation: str = "all_reduce",
    *,
    members: tuple[int, ...] | None = None,
    awaits: tuple[int, ...] | None = None,
    started: float = NOW - 40,
    **position: Any,
) -> BlockedRecord:
    """Return the record of a rank in a collective."""
    fields = {"group": "0", "description": "default_pg", "place": "train.py:88 step"}
    sizes = {"sizes": "[10]", "dtype": "Float"} if operation == "all_reduce" else {}
    found = CollectivePosition(
        number=number, operation=operation, **{**fields, **sizes, **position}
    )
    return BlockedRecord(
        rank=rank,
        host=f"node{rank}",
        pid=100 + rank,
        operation=operation,
        keys=(),
        phase=found.phase,
        protocol="collective",
        group=found.group,
        members=members,
        awaits=awaits,
        started=started,
        collective=found,
    )


def in_store(rank: int, awaits: tuple[int, ...]) -> BlockedRecord:
    """Return the record of a rank that creates a group."""
    return BlockedRecord(
        rank=rank,
        host=f"node{rank}",
        pid=100 + rank,
        operation="get",
        keys=("default_pg/0//1//cpu//0/0",),
        phase="new_group 1",
        protocol="gloo",
        group="default_pg/0//1//cpu//0",
        awaits=awaits,
        started=NOW - 40,
    )


def awaits_of(
    *records: BlockedRecord, known: Known | None = None
) -> dict[int, tuple[int, ...] | None]:
    """Return whom each rank waits for."""
    blocked = {one.rank: one for one in records}
    found = resolve(blocked, WORLD_SIZE, known)
    return {rank: one.awaits for rank, one in found.items()}


def verdict_on(*records: BlockedRecord) -> Verdict:
    """Judge these records; no process answers."""
    blocked = resolve({one.rank: one for one in records}, WORLD_SIZE)
    return judge_waits(
        blocked,
        find_suspects(blocked, WORLD_SIZE),
        WORLD_SIZE,
        {},
        {},
        lambda _: "",
        NOW,
    )


class TestResolve:
    """Edges of the graph of waits."""

    def test_members_that_have_not_called_it(self) -> None:
        """The others have records at this number, or at a later one."""
        found = awaits_of(call(0), call(1, 8, "barrier"), call(3, 6))

        assert found == {0: (2, 3), 1: (0, 2, 3), 3: (2,)}

    def test_members_of_the_group(self) -> None:
        """A rank outside of the group is not awaited."""
        group: dict[str, Any] = {"members": (0, 2), "group": "1"}

        assert awaits_of(call(0, **group), call(1, members=(1, 3), group="2")) == {
            0: (2,),
            1: (3,),
        }

    def test_another_group(self) -> None:
        """A number of another group says nothing."""
        assert awaits_of(call(0), call(1, 9, group="1"))[0] == (1, 2, 3)

    def test_ledger_and_answers(self) -> None:
        """Ranks are known to have called it without a record."""
        known = Known(
            entered={("0", 7): (1, 2), ("1", 7): (3,)},
            called={3: {"0": 7}, 2: {"0": 6}},
        )

        assert awaits_of(call(0), known=known) == {0: ()}
        known = replace(known, called={3: {"0": 6}})
        assert awaits_of(call(0), known=known) == {0: (3,)}

    def test_process_that_has_ended(self) -> None:
        """It may have done its part of a broadcast; an all_reduce needs all of them."""
        known = Known(ended={2})
        some = call(0, operation="broadcast"), call(1, operation="broadcast")

        assert awaits_of(*some, known=known)[0] == (3,)
        assert awaits_of(call(0), call(1), known=known)[0] == (2, 3)
        # No other rank is left.
        assert awaits_of(*some, known=Known(ended={2, 3}))[0] == (2, 3)

    def test_called_before_another_one(self) -> None:
        """The sender of a reduce has ended it, and waits in another group."""
        other = call(1, 2, group="1", members=(1, 3), called={"0": 7, "1": 2})

        assert awaits_of(call(0, operation="reduce"), other)[0] == (2, 3)

    def test_stale_recorder(self) -> None:
        """A rank whose watchdog hangs looks late, and has called what the others have.

        A barrier ends nowhere before all ranks have called it.
        """
        barrier = Called(number=7, operation="barrier")
        others = [call(n, 8, recent=(barrier,)) for n in (0, 1, 3)]
        late = call(2, 3, called={"0": 8})

        assert awaits_of(late, *others) == {0: (), 1: (), 2: (), 3: ()}
        verdict = verdict_on(late, *others)
        assert (verdict.cause, verdict.sequence) == ("all_entered", 8)
        # Nothing is known of rank 3 but that the barrier has ended.
        assert awaits_of(call(0, 7), call(1, 8, recent=(barrier,)))[0] == ()

    def test_without_numbers(self) -> None:
        """Calls that stacks show are compared by what they are."""
        found = awaits_of(
            call(0, None, "monitored_barrier"),
            call(1, None, "monitored_barrier"),
            call(2, 7),
            call(3, None),
        )

        assert found == {0: (2, 3), 1: (2, 3), 2: (0, 1), 3: (0, 1)}

    def test_point_to_point(self) -> None:
        """A receiver waits for its sender, unless that one sends."""
        receives = call(0, None, "recv", awaits=(1,))

        assert awaits_of(receives) == {0: (1,)}
        assert awaits_of(receives, call(1)) == {0: (1,), 1: (0, 2, 3)}
        sends = call(1, None, "send", awaits=(0,))
        assert awaits_of(receives, sends) == {0: (), 1: ()}
        sends = call(1, None, "send", awaits=(2,))
        assert awaits_of(receives, sends) == {0: (1,), 1: (2,)}

    def test_waits_in_the_store_stay(self) -> None:
        """Both kinds of waits are in one graph."""
        found = awaits_of(call(0), in_store(1, (0, 2)))

        assert found == {0: (1, 2, 3), 1: (0, 2)}


class TestMissing:
    """A rank that has not called what the others wait in."""

    def test_named(self) -> None:
        """The verdict has the collective, and where the others called it."""
        verdict = verdict_on(call(0), call(1), call(3, place="train.py:99 step"))

        assert verdict.awaited_ranks == (2,)
        assert verdict.phase == "all_reduce 7 of group 0 (default_pg)"
        assert (verdict.group, verdict.sequence, verdict.key) == ("0", 7, "")
        assert verdict.group_ranks == (0, 1, 2, 3)
        assert (verdict.collective, verdict.sizes) == ("all_reduce", "[10]")
        assert "each awaited rank has not called it" in verdict.evidence
        assert "ranks 0-1 called it at train.py:88 step" in verdict.evidence
        assert "rank 3 called it at train.py:99 step" in verdict.evidence
        assert not [one for one in verdict.evidence if "key" in one]

    def test_head_of_many_groups(self) -> None:
        """Of groups that wait for each other, the one without the rank is reported."""
        verdict = verdict_on(
            call(0, 3, group="a", members=(0, 1), started=NOW - 90),
            call(1, 5, group="b", members=(1, 2)),
            call(3, 9, group="c", members=(0, 3), started=NOW - 80),
        )

        assert verdict.awaited_ranks == (2,)
        assert verdict.phase == "all_reduce 5 of group b (default_pg)"
        assert verdict.waiting_ranks == (0, 1, 3)

    def test_a_rank_that_waits_in_the_store(self) -> None:
        """A rank in new_group waits for the rank that is missing there."""
        verdict = verdict_on(call(0), call(1), in_store(3, (2,)))

        assert verdict.awaited_ranks == (2,)


class TestMismatch:
    """Ranks that called different things with one number."""

    def test_another_operation(self) -> None:
        """The rank that the others do not follow is named; both sides are there."""
        odd = call(2, 7, "barrier", place="train.py:90 step")

        verdict = verdict_on(call(0), call(1), odd, call(3))

        assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (2,))
        assert verdict.describe_awaited() == (
            "rank 2 on node2 (pid 102): called barrier 7 at train.py:90 step"
        )
        assert verdict.evidence == (
            "ranks 0-1,3: all_reduce 7 [10] Float at train.py:88 step",
            "rank 2: barrier 7 at train.py:90 step",
        )
        assert verdict.phase == "all_reduce 7 of group 0 (default_pg)"
        assert "same collectives in the same order" in verdict.remedy

    def test_skipped(self) -> None:
        """It called what the others would call next."""
        expected = Called(number=0, operation="barrier")
        usual = [call(n, expected=expected) for n in (0, 1, 3)]

        verdict = verdict_on(*usual, call(2, 7, "barrier", place="train.py:90 step"))

        assert verdict.awaited[0].doing == (
            "skipped all_reduce 7 [10] Float: called barrier 7 at train.py:90 step"
        )

    @pytest.mark.parametrize("field", [{"sizes": "[11]"}, {"dtype": "Long"}])
    def test_sizes_and_types(self, field: dict[str, Any]) -> None:
        """They are compared where all ranks have them in common."""
        verdict = verdict_on(call(0), call(1), call(2, **field), call(3))

        assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (2,))

    def test_one_side_has_gone_on(self) -> None:
        """The source of a broadcast has ended it, and waits in the next collective."""
        broadcast = Called(number=7, operation="broadcast", sizes="[10]", dtype="Float")
        root = call(0, 8, recent=(broadcast,))

        verdict = verdict_on(root, call(1), call(2), call(3))

        assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (0,))
        assert verdict.awaited[0].doing == "called broadcast 7 [10] Float"

    def test_two_sides_of_one_size(self) -> None:
        """Neither is the odd one."""
        verdict = verdict_on(
            *(call(n) for n in (0, 1)), *(call(n, 7, "barrier") for n in (2, 3))
        )

        assert verdict.cause == "mismatch"
        assert verdict.awaited_ranks == (0, 1, 2, 3)
        assert len(verdict.evidence) == 2

    def test_what_is_not_recorded(self) -> None:
        """One rank is in monitored_barrier, or receives from one in a collective."""
        verdict = verdict_on(
            *(call(n) for n in (0, 1, 3)), call(2, None, "monitored_barrier")
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (2,))

        verdict = verdict_on(
            *(call(n) for n in (0, 1, 3)), call(2, None, "recv", awaits=(1,))
        )
        assert (verdict.cause, verdict.awaited_ranks) == ("mismatch", (2,))

    def test_a_missing_rank_comes_first(self) -> None:
        """Whether two ranks would agree matters when all have come."""
        verdict = verdict_on(call(0), call(1, 7, "barrier"), call(3))

        assert (verdict.cause, verdict.awaited_ranks) == ("not_started", (2,))


class TestOrder:
    """Ranks in different groups that wait for each other."""

    def test_another_order_of_two_groups(self) -> None:
        """Both ranks are named with what they wait in and have not called."""
        first: dict[str, Any] = {"group": "a", "description": "tp", "members": (0, 1)}
        second: dict[str, Any] = {"group": "b", "description": "dp", "members": (0, 1)}

        verdict = verdict_on(
            call(0, 5, **first), call(1, 3, place="train.py:99 step", **second)
        )

        assert (verdict.cause, verdict.awaited_ranks) == ("diverged", (0, 1))
        assert verdict.phase == "all_reduce 5 of group a (tp)"
        assert [one.doing for one in verdict.awaited] == [
            "waits in all_reduce 5 of group a (tp) at train.py:88 step, for rank 1",
            "waits in all_reduce 3 of group b (dp) at train.py:99 step, for rank 0",
        ]
        assert verdict.remedy == (
            "make all ranks call the same collectives in the same order"
        )

    def test_new_group_and_a_collective(self) -> None:
        """A wait in the store and one in a collective are a circle, too."""
        verdict = verdict_on(*(call(n) for n in (0, 1, 2)), in_store(3, (0, 1, 2)))

        assert (verdict.cause, verdict.awaited_ranks) == ("diverged", (3,))
        assert "waits in new_group 1" in verdict.awaited[0].doing


class TestAllEntered:
    """A collective that all ranks have called."""

    def test_no_rank_is_named(self) -> None:
        """It is not a rank's code."""
        verdict = verdict_on(*(call(n) for n in range(4)))

        assert (verdict.cause, verdict.awaited_ranks) == ("all_entered", ())
        assert verdict.known == "all 4 ranks have called it, and it does not end"
        assert verdict.describe().startswith(
            "waiting in all_reduce 7 of group 0 (default_pg): all 4 ranks"
        )
        assert verdict.evidence == ("ranks 0-3 called it at train.py:88 step",)

    def test_rank_may_have_gone_on(self) -> None:
        """A rank whose call has failed may have caught that, and be elsewhere."""
        failed = replace(call(3), failed=NOW - 1)

        verdict = judge_calls(
            Verdict(phase="x", cause="unknown"),
            resolve(
                {one.rank: one for one in (*(call(n) for n in range(3)), failed)}, 4
            ),
            4,
        )

        assert verdict is None

    def test_head_of_many_groups(self) -> None:
        """A group that waits for a rank of another one is not the reason."""
        verdict = verdict_on(
            call(0, 3, group="a", members=(0, 1), started=NOW - 90),
            call(1, 5, group="b", members=(1, 2)),
            call(2, 5, group="b", members=(1, 2)),
        )

        assert verdict.cause == "all_entered"
        assert verdict.group == "b"
        assert verdict.known == "all 2 ranks have called it, and it does not end"

    def test_waits_for_keys_are_judged_without_it(self) -> None:
        """Without a collective there is no such verdict."""
        assert judge_calls(Verdict(phase="x", cause="unknown"), {}, 4) is None
