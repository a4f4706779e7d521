"""The parts of ``tracedstore top`` that need neither a terminal nor a server."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rich.cells import cell_len

from support.jobs_in_stores import arrive, block, judge, register, time_out
from tracedstore import names
from tracedstore.common.causes import Cause
from tracedstore.coordination.arrivals import (
    BarrierKeys,
    confirm_arrival,
    record_arrival,
)
from tracedstore.coordination.rank_registry import RankInfo
from tracedstore.diagnosis.observe.blocked_record import (
    COLLECTIVE,
    BlockedRecord,
    CollectivePosition,
    blocked_key,
)
from tracedstore.local.facts import ProcessFacts
from tracedstore.signals.inflight import InFlight
from tracedstore.tools.attach import live_view
from tracedstore.tools.attach.job_reading import Answers, JobReading
from tracedstore.tools.attach.job_state import read_job_state, select_keys
from tracedstore.tools.attach.live_view import view_of
from tracedstore.tools.attach.rank_endpoints import Reply
from tracedstore.tools.attach.store_snapshot import StoreSnapshot
from tracedstore.tools.job_view import BarrierView, JobView, RankState, RankView
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.top import fleet, views
from tracedstore.tools.top.fleet import GLYPHS
from tracedstore.tools.top.rates import RateMeter, parse, quantile
from tracedstore.tools.top.rows import fit, plain_text, shorten, sparkline, wrap
from tracedstore.tools.top.saving import Seen
from tracedstore.tools.top.selection import Selection

NOW = 1000.0
HOSTILE = "\x1b[31mred\x07\u202egnp.exe\x9b2J[bold]x[/bold]\n"


def model_of(
    store: Any,
    replies: Mapping[RankInfo, Reply] | None = None,
    after: float = 5.0,
    now: float = NOW,
) -> JobView:
    """Make the model of a store."""
    job = read_job_state(StoreSnapshot.take(store, select_keys))
    return view_of(
        JobReading(store="s", now=now, job=job, replies=replies or {}, after=after)
    )


def job(world_size: int, registered: int | None = None) -> Any:
    """Return a store in which ranks have registered."""
    store = dist.HashStore()
    for rank in range(world_size if registered is None else registered):
        register(store, rank, world_size)
    return store


def states(model: JobView) -> str:
    """Return the state of each rank, a character each."""
    return "".join(GLYPHS[rank.state] for rank in model.ranks)


def rank(number: int, state: RankState = RankState.RUNNING, host: str = "") -> RankView:
    """Return a rank; eight of them share a host."""
    return RankView(
        rank=number, host=host or f"node{number // 8}", state=state, registered=1.0
    )


def text_of(rows: Any) -> str:
    """Return rows as text."""
    return plain_text(rows)


class TestStates:
    """The state of each rank, and the headline."""

    def test_healthy(self) -> None:
        """Nothing is missing from a job whose ranks have registered."""
        model = model_of(job(16))

        assert states(model) == "." * 16
        assert (model.level, model.headline) == (
            "good",
            "healthy: 16 ranks on 2 hosts, none is missing",
        )

    def test_empty(self) -> None:
        """An empty store is not called healthy."""
        model = model_of(dist.HashStore())

        assert model.level == "notable"
        assert model.headline.startswith("nothing is known")

    def test_not_started(self) -> None:
        """Ranks that have not registered are shown, and are in the headline."""
        model = model_of(job(4, registered=2))

        assert states(model) == "..--"
        assert model.headline == "missing: 2 ranks not registered"

    def test_starting(self) -> None:
        """A job whose ranks are registering is not called healthy."""
        store = dist.HashStore()
        register(store, 0, 2, started=NOW - 1)

        model = model_of(store)

        assert (model.level, model.headline) == (
            "notable",
            "1 of 2 ranks have registered",
        )

    @pytest.mark.parametrize("cause", ["late", "not_started"])
    def test_process_without_registration(self, cause: Cause) -> None:
        """A rank whose process runs has started, also if it has not registered."""
        store = job(4, registered=3)
        for number in range(3):
            block(store, number, NOW - 45, awaits=(3,))
        judge(store, NOW, range(3), {3: cause})
        model = model_of(store)

        assert states(model) == ("wwwA" if cause == "late" else "www-")
        assert model.ranks[3].host == ("node0" if cause == "late" else "")

        state = read_job_state(StoreSnapshot.take(store, select_keys))
        facts = ProcessFacts(rank=3, host="node0", pid=7, state="running")
        answers = Answers(
            world_size=4, registered={}, answers={3: facts}, asked_all=False
        )
        reading = JobReading(
            store="s", now=NOW, job=state, replies={}, answers=[answers]
        )
        if cause == "not_started":
            assert states(view_of(reading)) == "wwwA"

    def test_several_prefixes(self) -> None:
        """A process that registered under two prefixes is one rank."""
        store = job(4)
        other: Any = dist.PrefixStore("default_pg/0", store)
        for number in (0, 1, 3):
            register(other, number, 4)
        arrive(other, "step/7", {0: 960.0, 1: 961.0, 3: 962.0})

        model = model_of(store)

        assert states(model) == "wwAw"
        assert {barrier.group for barrier in model.in_progress} == {
            one.group for one in model.ranks
        }

    def test_absurd_world_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The ranks of a world size that any client can write are bounded."""
        monkeypatch.setattr(live_view, "MAX_ABSENT", 10)

        model = model_of(job(1_000_000, registered=1))

        assert states(model) == "." + "-" * 10
        assert model.headline == "missing: 999,999 ranks not registered"

    def test_barrier(self) -> None:
        """Ranks at a barrier wait; a late one is awaited, and in the headline."""
        store = job(4)
        arrive(store, "step/7", {0: 960.0, 1: 961.0, 3: 962.0})

        model = model_of(store)

        assert states(model) == "wwAw"
        assert model.headline == (
            "barrier step/7 waits for 40 s: missing 1 of 4: node0 (rank 2)"
        )
        assert model.ranks[1].doing == "at barrier step/7"
        assert model.ranks[1].waited == pytest.approx(39.0)
        assert model.ranks[2].doing == "missing at barrier step/7"

    def test_young_barrier(self) -> None:
        """Nobody is awaited in a barrier that has just begun."""
        store = job(4)
        arrive(store, "step/7", {0: 996.0})

        model = model_of(store)

        assert states(model) == "w..."
        assert model.level == "good"

    def test_timed_out(self) -> None:
        """Ranks that have timed out do not wait any more."""
        store = job(3)
        arrive(store, "step/7", {0: 900.0, 1: 900.0})
        time_out(store, "step/7", 0, 1)

        model = model_of(store)

        assert states(model) == "..A"
        assert model.headline.startswith("barrier step/7 timed out, it began 1 min")
        assert model.ranks[0].doing == "timed out at barrier step/7"

    def test_timed_out_without_ledger(self, tmp_path: Path) -> None:
        """On a store that cannot append, each rank has a key that records it."""
        store = dist.FileStore(str(tmp_path / "store"), 3)
        keys = BarrierKeys("step/7")
        for rank in range(3):
            register(store, rank, 3)
        for rank in range(2):
            record_arrival(store, keys, rank)
            store.add(keys.num_members, 1)

        assert model_of(store).headline.startswith("barrier step/7 waits")

        for rank in range(2):
            confirm_arrival(store, keys, rank)

        assert model_of(store).headline.startswith("barrier step/7 timed out")

    def test_not_registered_at_barrier(self) -> None:
        """A rank that never registered has not started, also if it is awaited."""
        store = job(3, registered=2)
        arrive(store, "step/7", {0: 900.0, 1: 900.0})

        assert states(model_of(store)) == "ww-"

    @pytest.mark.parametrize(
        ("cause", "glyph"),
        [("gone", "X"), ("stopped", "S"), ("busy", "A"), ("unknown", "A")],
    )
    def test_verdict(self, cause: Cause, glyph: str) -> None:
        """The verdict is the headline, and the awaited rank has its cause."""
        store = job(3)
        block(store, 0, 950.0)
        block(store, 1, 940.0)
        judge(store, 990.0, [0, 1], {2: cause})

        model = model_of(store)

        assert states(model) == f"ww{glyph}"
        assert model.level == "bad"
        assert model.headline == (
            "stalled in new_group 1 for 40 s: waiting for rank 2 on node0 (pid 1002):"
            f" known to be {cause}"
        )
        assert model.details[0] == f"cause: {cause}"
        assert model.details[-1] == "remedy: look at them"
        assert model.ranks[0].doing == (
            "new_group 1: waits for rank 2 (get default_pg/0//1//cpu//0/2)"
        )
        assert model.ranks[2].doing == f"known to be {cause}"

    def test_verdict_that_has_ended(self) -> None:
        """A wait that has ended accuses nobody; an ended process stays so."""
        store = job(3)
        block(store, 0, 950.0, failed=985.0, awaits=(1, 2))
        judge(store, 990.0, [0], {1: "gone", 2: "busy"})

        model = model_of(store)

        assert states(model) == ".X."
        assert model.headline == "missing: 1 stall reported"

    def test_verdict_that_is_not_confirmed(self) -> None:
        """A claim that no record confirms accuses nobody, and is a note."""
        store = job(3)
        judge(store, 990.0, [0], {1: "gone", 2: "busy"})

        model = model_of(store)

        assert states(model) == "..."
        assert (model.level, model.stalls) == ("good", ())
        assert model.headline.startswith("healthy: 3 ranks")
        assert model.notes[0].startswith("claimed, not confirmed: no rank that it says")

    def test_endpoints(self) -> None:
        """A long call is a wait; silence counts if others of the host answer."""
        store = dist.HashStore()
        infos = [
            register(store, one, 4, host=host, metrics=f"http://{host}:9{one}/metrics")
            for one, host in enumerate("aaab")
        ]
        replies = {
            infos[0]: _answered(infos[0], 7.0),
            infos[1]: Reply(state="silent", error="connection refused"),
            infos[2]: Reply(state="silent", error="responded 401 Unauthorized"),
            # An endpoint behind a firewall: no other rank of its host answers.
            infos[3]: Reply(state="silent", error="no response within 1 s"),
        }

        model = model_of(store, replies)

        assert states(model) == "w?.."
        assert model.ranks[0].doing == "in get k"
        assert model.ranks[1].doing == (
            "its endpoint does not answer: connection refused"
        )


def _answered(info: RankInfo, waited: float) -> Reply:
    call = InFlight(
        operation="get",
        store="tcp",
        server="s",
        key="k",
        key_count=1,
        key_family="k",
        started=NOW - waited,
        waited_seconds=waited,
        thread="MainThread",
    )
    status = ProcessFacts(host="", recording=True, in_flight=(call,))
    return Reply(state="answered", status=status)


class TestFleet:
    """The grid of ranks."""

    def test_worst_first(self) -> None:
        """Hosts with the worst ranks are first; a host is a line."""
        ranks = [rank(n) for n in range(24)]
        ranks[9] = rank(9, RankState.WAITING)
        ranks[20] = rank(20, RankState.GONE)

        lines = text_of(fleet.layout(ranks, 80, 20).rows).splitlines()

        assert [line.split()[:2] for line in lines] == [
            ["node2", "....X..."],
            ["node1", ".w......"],
            ["node0", "........"],
        ]
        assert lines[0].endswith("1 gone, 7 running")

    def test_large_job_is_folded(self) -> None:
        """Of 4,096 ranks, what is wrong is on the screen, and the rest is counted."""
        ranks = [rank(n, RankState.WAITING) for n in range(4096)]
        ranks[1234] = rank(1234, RankState.AWAITED)

        grid = fleet.layout(ranks, 80, 12)

        assert text_of(grid.rows).splitlines() == [
            "node154  wwAwwwww  1 awaited, 7 waiting",
            *(f"node{n:<4} wwwwwwww  8 waiting" for n in range(10)),
            "w 501 more hosts, 4,008 ranks, all waiting  (Enter shows them)",
        ]
        assert (
            len(fleet.layout(ranks, 80, 12, unfolded={RankState.WAITING}).rows) == 512
        )

    def test_a_line_for_each_rank(self) -> None:
        """If all ranks fit, each has a line with what is known about it."""
        ranks = [
            replace(
                rank(2, RankState.AWAITED),
                doing="alive, no store call for 35 s, in data.py:88 load_dataset",
                waited=35.2,
                cpu=0.994,
                memory=312_000_000,
            ),
            replace(
                rank(9, RankState.WAITING),
                doing="new_group 1: waits for rank 2 (wait key)",
                waited=33.1,
                memory=1_500_000_000,
            ),
            rank(10),
        ]

        assert text_of(fleet.layout(ranks, 80, 4).rows).splitlines() == [
            "  rank host          for   CPU  memory  in",
            "A    2 node0      35.2 s   99%  312 MB  in data.py:88 load_dataset",
            "w    9 node1      33.1 s        1.5 GB  new_group 1",
            ".   10 node1                            running",
        ]
        # On a phone.
        assert text_of(fleet.layout(ranks, 60, 4).rows).splitlines()[1] == (
            "A    2 node0      35.2 s  in data.py:88 load_dataset"
        )
        assert len(fleet.layout(ranks, 80, 3).rows) == 2

    def test_headings_are_not_selected(self) -> None:
        """The worst rank is selected; the line above the first one cannot be."""
        ranks = (rank(0), rank(1, RankState.AWAITED))
        model = JobView(source="s", time=NOW, ranks=ranks)
        selection = Selection()

        selection.arrange(model, 80, 20)
        assert selection.target == ("rank", ("", 1))
        selection.move(-10, 0)
        assert selection.target == ("rank", ("", 0))

    def test_many_ranks_on_a_host(self) -> None:
        """The ranks of a large host are several lines."""
        ranks = [rank(n, host="big") for n in range(100)]

        grid = fleet.layout(ranks, 80, 12)

        assert [len(line) for line in grid.ranks] == [44, 44, 12]
        assert all(cell_len(one.text) <= 80 for one in grid.rows)

    @pytest.mark.parametrize(
        ("pattern", "found"),
        [
            ("node1", [8, 9]),
            ("3", [3]),
            ("rank 3", [3]),
            ("2-4", [2, 3, 4]),
            ("awaited", [9]),
            ("NODE0", list(range(8))),
            ("nothing", []),
            ("", list(range(10))),
        ],
    )
    def test_filter(self, pattern: str, found: list[int]) -> None:
        """A filter is a host, a rank, a range of ranks or a state."""
        ranks = [rank(n) for n in range(9)]
        ranks.append(rank(9, RankState.AWAITED))

        shown = [one.rank for one in ranks if fleet.matches(one, pattern)]

        assert shown == found


class TestGroups:
    """The process groups in which a collective does not end."""

    @staticmethod
    def blocked(number: int, place: str = "train.py:12 main", **fields: Any) -> Any:
        """Return the record of a rank in all_reduce 51 of the default group."""
        position = CollectivePosition(
            group="0",
            description="default_pg",
            number=51,
            operation="all_reduce",
            sizes="[10]",
            place=place,
            called={"0": 51, "tp": 7},
        )
        record = BlockedRecord(
            rank=number,
            host="node0",
            pid=1000 + number,
            operation="all_reduce",
            keys=(),
            phase=position.phase,
            protocol=COLLECTIVE,
            awaits=(2,),
            started=NOW - 35,
            collective=position,
        )
        return replace(record, **fields)

    def model(self, records: Any, answers: Any = ()) -> JobView:
        """Make the model of four ranks of which some are blocked."""
        store = job(4)
        for one in records:
            store.set(blocked_key(one.rank), one.to_bytes())
        state = read_job_state(StoreSnapshot.take(store, select_keys))
        reading = JobReading(
            store="s", now=NOW, job=state, replies={}, answers=tuple(answers)
        )
        return view_of(reading)

    def test_behind(self) -> None:
        """The rank that has not called what the others wait in is behind, at 50."""
        facts = ProcessFacts(rank=2, host="node0", state="running", called={"0": 50})
        answers = Answers(
            world_size=4, registered={}, answers={2: facts}, asked_all=False
        )
        model = self.model([self.blocked(n) for n in (0, 1, 3)], [answers])

        rows = text_of(views.group_rows(model, 80)).splitlines()
        assert rows[1].split() == [
            *("0", "(default_pg)", "4", "35", "s"),
            *("rank", "2", "at", "50"),
        ]
        assert text_of(views.group_detail(model, "0", 80)).splitlines() == [
            "group 0 (default_pg): 4 ranks, 0-3",
            "  wait in all_reduce 51 [10]: ranks 0-1,3",
            "    called at train.py:12 main: ranks 0-1,3",
            "  behind: rank 2 at 50",
        ]

    def test_arrived_since(self) -> None:
        """A rank that waits there is not behind, whatever an older record says."""
        records = [self.blocked(0), self.blocked(2, awaits=())]
        (group,) = self.model(records).process_groups

        assert group.behind == ()
        assert "no rank: all have called it" in text_of(
            views.group_rows(self.model(records), 80)
        )

    def test_unknown_number(self) -> None:
        """The number of a rank that has not been asked is unknown."""
        model = self.model([self.blocked(0)])

        assert "rank 2 at an unknown number" in text_of(views.group_rows(model, 80))

    def test_moving_job(self) -> None:
        """Nobody is behind in a job in which no collective is stuck."""
        assert "no collective is stuck" in text_of(views.group_rows(self.model([]), 80))


class TestSelection:
    """Moving the selection."""

    def test_fleet(self) -> None:
        """The worst rank is selected; arrows move by rank and by host."""
        ranks = [rank(n) for n in range(24)]
        ranks[20] = rank(20, RankState.GONE)
        model = JobView(source="s", time=NOW, ranks=tuple(ranks))
        selection = Selection()

        selection.arrange(model, 80, 20)
        assert selection.target == ("rank", ("", 20))
        selection.move(0, 1)
        assert selection.target == ("rank", ("", 21))
        selection.move(0, 100)
        assert selection.target == ("rank", ("", 23))
        assert selection.move(1, 0) == 1
        assert selection.target == ("rank", ("", 7))
        selection.move(100, -100)
        assert selection.target == ("rank", ("", 8))

    def test_selection_stays(self) -> None:
        """A rank stays selected when its host moves on the screen."""
        ranks = [rank(n) for n in range(16)]
        selection = Selection()
        selection.arrange(JobView(source="s", time=NOW, ranks=tuple(ranks)), 80, 20)
        selection.select(("rank", ("", 3)))
        ranks[15] = rank(15, RankState.GONE)

        selection.arrange(JobView(source="s", time=NOW, ranks=tuple(ranks)), 80, 20)

        assert selection.target == ("rank", ("", 3))

    def test_worst_is_followed(self) -> None:
        """Until the user selects a rank, the one that becomes the worst is."""
        ranks = [rank(n) for n in range(16)]
        selection = Selection()
        selection.arrange(JobView(source="s", time=NOW, ranks=tuple(ranks)), 80, 20)
        ranks[15] = rank(15, RankState.GONE)

        selection.arrange(JobView(source="s", time=NOW, ranks=tuple(ranks)), 80, 20)

        assert selection.target == ("rank", ("", 15))

    def test_fold(self) -> None:
        """The line of folded hosts can be selected and opened."""
        ranks = [rank(n) for n in range(800)]
        model = JobView(source="s", time=NOW, ranks=tuple(ranks))
        selection = Selection()

        selection.arrange(model, 80, 10)
        assert len(selection.rows) == 10
        selection.move(9, 0)
        targets = [selection.target]
        assert selection.rank(model) is None
        assert selection.unfold()
        selection.arrange(model, 80, 10)

        targets.append(selection.target)
        assert len(selection.rows) == 100
        assert targets == [("fold", RankState.RUNNING), ("rank", ("", 0))]
        assert not selection.unfold()

    def test_barriers(self) -> None:
        """Headings are skipped."""
        model = JobView(
            source="s",
            time=NOW,
            in_progress=(BarrierView(prefix="a", arrived=1),),
            finished=(BarrierView(prefix="b", complete=True, arrived=2),),
        )
        selection = Selection()
        selection.view = "barriers"

        selection.arrange(model, 80, 20)
        assert selection.target == ("barrier", "a")
        selection.move(1, 0)
        assert selection.target == ("barrier", "b")
        assert selection.move(-5, 0) == 0


class TestWaterfall:
    """Arrivals over time."""

    def test_by_rank(self) -> None:
        """Missing ranks are first; a line begins when its rank arrived."""
        barrier = BarrierView(
            prefix="step/7",
            arrived=3,
            world_size=4,
            missing_ranks=(2,),
            ranks=(0, 1, 3),
            times=(900.0, 900.0, 950.0),
            first=900.0,
            last=950.0,
        )
        model = JobView(source="s", time=NOW, ranks=tuple(rank(n) for n in range(4)))

        title, *lines = text_of(views.waterfall(model, barrier, 80)).splitlines()

        assert title == (
            "step/7: 3 of 4 arrived within 50 s, the first 1 min 40 s ago (in progress)"
        )
        assert [line.split()[0] for line in lines] == ["2", "3", "0", "1"]
        assert lines[0].endswith("missing")
        assert lines[1].endswith("━ +50 s")
        # Half of the time: half of the width.
        assert lines[1].count("━") == pytest.approx(lines[2].count("━") / 2, abs=1)
        assert max(map(cell_len, lines)) <= 80

    def test_by_host(self) -> None:
        """The ranks of a large job are shown by host."""
        times = {n: 900.0 + n / 100 for n in range(64) if n != 13}
        barrier = BarrierView(
            prefix="b",
            arrived=63,
            missing_ranks=(13,),
            ranks=tuple(times),
            times=tuple(times.values()),
            first=900.0,
            last=900.63,
        )
        model = JobView(source="s", time=NOW, ranks=tuple(rank(n) for n in range(64)))

        _, *lines = text_of(views.waterfall(model, barrier, 80)).splitlines()

        assert [line.split()[0] for line in lines] == [
            "node1",
            *(f"node{n}" for n in (7, 6, 5, 4, 3, 2, 0)),
        ]
        assert lines[0].startswith(" node1 (13)")
        assert lines[0].endswith("1 missing")

    def test_without_ledger(self) -> None:
        """A barrier without times has none."""
        text = text_of(
            views.waterfall(JobView(source="s", time=NOW), BarrierView(prefix="b"), 80)
        )

        assert "no times: the store has no ledger" in text


class TestViews:
    """The other views."""

    def test_stragglers(self) -> None:
        """The rank that cost most is first."""
        store = job(4)
        for number in range(3):
            at = 100.0 * number
            times = {0: at, 1: at, 2: at, 3: at + 5.0 + number}
            arrive(store, f"step/{number}", times, complete=True)
        arrive(store, "end", {3: 500.0, 1: 500.0, 2: 500.0, 0: 500.4}, complete=True)

        model = model_of(store)
        lines = text_of(views.straggler_rows(model, 80)).splitlines()

        assert lines[1].split() == ["3", "node0", "3", "7", "s", "18", "s"]
        assert lines[2].split()[:3] == ["0", "node0", "1"]

    def test_barriers(self) -> None:
        """In progress with who is missing, finished with spread and last rank."""
        store = job(4)
        arrive(store, "step/1", {0: 900.0, 1: 900.0, 3: 900.0, 2: 904.0}, complete=True)
        arrive(store, "step/2", {0: 960.0})

        text = text_of(views.barrier_rows(model_of(store), 80))

        assert "  step/2" in text
        assert "1/4        40 s  3 of 4: node0 (ranks 1-3)" in text
        assert "4         4 s  rank 2 on node0, 1 min 36 s ago" in text

    def test_rank(self) -> None:
        """A rank has its registration, what it does and its last barriers."""
        store = job(4)
        arrive(store, "step/1", {0: 900.0, 1: 900.0, 3: 900.0, 2: 904.0}, complete=True)
        arrive(store, "step/2", {0: 960.0})
        model = model_of(store)

        text = text_of(views.rank_rows(model, model.ranks[2], 80, ("a stack",)))

        assert "rank 2 on node0: awaited for 40 s\n" in text
        assert "  missing at barrier step/2\n" in text
        assert "  pid 1002, registered 16 min 39 s ago\n" in text
        assert "  a stack\n" in text
        assert text.splitlines()[-2].split() == ["step/2", "missing"]
        assert text.endswith("number 4 of 4, 4 s after the first\n")

    @pytest.mark.parametrize("view", views.VIEWS)
    def test_hostile_names(self, view: str) -> None:
        """Escape sequences, markup, and long names are harmless in every view."""
        store = dist.HashStore()
        register(store, 0, 3, host=HOSTILE, run_id=HOSTILE)
        register(store, 1, 3, host="x" * 1000)
        register(store, 2, 3, host="節" * 300)
        arrive(store, HOSTILE, {1: 900.0, 0: 900.0}, complete=False)
        arrive(store, "y" * 900, {1: 900.0, 2: 901.0, 0: 900.0}, complete=True)
        model = replace(model_of(store), headline=HOSTILE * 20)
        selection = Selection()
        selection.view = view

        selection.arrange(model, 80, 20)
        rows = [
            *selection.rows,
            *selection.detail_rows(model, 80, {("", 0): (HOSTILE,)}),
            *views.rank_rows(model, model.ranks[0], 80, (HOSTILE,)),
            *views.headline_rows(model, 80, 3),
            views.title_row(replace(model, source=HOSTILE), 80, "00:00:00"),
            *views.waterfall(model, model.in_progress[0], 80),
        ]

        text = text_of(rows)
        assert text.replace("\n", "").isprintable()
        assert "\u202e" not in text
        assert max(cell_len(line) for line in text.splitlines()) <= 80


class TestRows:
    """Texts of a known width."""

    @pytest.mark.parametrize("text", ["a", "node-0123456789-end", "節" * 9, HOSTILE])
    @pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 40])
    def test_fit(self, text: str, width: int) -> None:
        """A text has exactly the width, whatever its characters."""
        assert cell_len(fit(text, width)) == width

    def test_ends_are_kept(self) -> None:
        """The number at the end of a long name is shown."""
        assert shorten("checkpoint/epoch/000123", 16) == "checkpo../000123"

    def test_wrap(self) -> None:
        """Text is broken at spaces, and words anywhere if they are too long."""
        rows = wrap("  one two three " + "x" * 30, 10, indent=4)

        assert [one.text for one in rows] == [
            "  one two",
            "    three",
            *["    xxxxxx"] * 5,
        ]

    def test_sparkline(self) -> None:
        """Bars are relative to the largest value, the latest ones are shown."""
        assert sparkline([9, 0, 1, 2], 3) == "▁▅█"
        assert sparkline([0, 0], 8) == "▁▁"
        assert sparkline([], 8) == ""


def _page(calls: int, slow: int = 0, lost: int = 0) -> bytes:
    name = f"{names.OPERATION_DURATION.name}_bucket"
    lines = [
        f'{name}{{store="tcp",operation="get",error_type="",le="{bound}"}} {number}'
        for bound, number in (
            ("0.001", calls),
            ("0.1", calls + slow),
            ("+Inf", calls + slow),
        )
    ]
    cas = names.CAS_ATTEMPTS.name
    lines += [
        f'{cas}{{store="tcp",operation="compare_set",result="lost"}} {lost}',
        f'{cas}{{store="tcp",operation="compare_set",result="won"}} 7',
        "garbage{",
        f'{name}{{operation="get",le="x"}} 1',
    ]
    return "\n".join(lines).encode()


class TestRates:
    """Calls a second and quantiles."""

    def test_difference_of_two_readings(self) -> None:
        """Rates are per rank and in all; the first reading has none."""
        meter = RateMeter()
        processes = [(0, "a", 1), (1, "b", 2)]

        first = meter.update({p: _page(100) for p in processes}, 10.0, 5)
        second = meter.update(
            {processes[0]: _page(300, lost=4), processes[1]: _page(120, slow=20)},
            12.0,
            5,
        )

        assert (first.ranks, first.operations, first.serving) == ((), (), 5)
        (get,) = second.operations
        assert (get.operation, get.per_second) == ("get", 120.0)
        assert get.history == (120.0,)
        assert [(one.rank, one.per_second) for one in second.ranks] == [
            (0, 100.0),
            (1, 20.0),
        ]
        assert (second.lost, second.ranks[0].lost) == (2.0, 2.0)
        text = text_of(
            views.store_rows(JobView(source="s", time=NOW, rates=second), 80)
        )
        assert "get                 120.0" in text
        assert "2 of 5 ranks with an endpoint" in text

    def test_call_in_both_histograms(self) -> None:
        """With `full`, a blocking call is in both histograms, and counts once."""
        page = _page(100)
        wait, operation = (one.name.encode() for one in names.CALL_DURATIONS)
        waits = page.replace(operation, wait)

        assert parse(page + b"\n" + waits, 0.0).buckets == parse(waits, 0.0).buckets

    def test_quantile_of_operations_with_other_bounds(self) -> None:
        """Waits and other operations have other bounds; a rank's p99 is of both."""
        meter = RateMeter()
        bounds = {"set": ("0.0001", "0.1"), "wait": ("0.001", "30.0")}

        def page(calls: int) -> bytes:
            lines = []
            wait, quick = (one.name for one in names.CALL_DURATIONS)
            for name, operation in ((quick, "set"), (wait, "wait")):
                for bound in (*bounds[operation], "+Inf"):
                    number = 0 if bound == bounds[operation][0] else calls
                    labels = f'store="tcp",operation="{operation}",error_type=""'
                    lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {number}')
            return "\n".join(lines).encode()

        meter.update({(0, "a", 1): page(0)}, 10.0, 1)
        (rank,) = meter.update({(0, "a", 1): page(50)}, 20.0, 1).ranks

        assert rank.per_second == 10.0
        # Half of the calls are waits of up to 30 s.
        assert rank.p99 is not None
        assert 0.1 < rank.p99 <= 30.0

    def test_restarted_process(self) -> None:
        """Counters that start again make no negative rates."""
        meter = RateMeter()
        meter.update({(0, "a", 1): _page(100, lost=9)}, 10.0, 1)

        rates = meter.update({(0, "a", 1): _page(20)}, 12.0, 1)

        assert (rates.ranks[0].per_second, rates.lost) == (0.0, 0.0)

    def test_quantile(self) -> None:
        """Quantiles are interpolated in the bucket, as Prometheus does."""
        buckets = parse(_page(90, slow=10), 0.0).buckets
        counts = {bound: number for (_, bound), number in buckets.items()}

        assert quantile(counts, 0.5) == pytest.approx(0.001 * 50 / 90)
        assert quantile(counts, 0.99) == pytest.approx(0.001 + 0.099 * 0.9)
        assert quantile({inf: 0}, 0.5) is None
        assert quantile({0.1: 1, inf: 4}, 0.99) == 0.1


class TestSeen:
    """What was seen, as the events of a report."""

    def test_events(self) -> None:
        """The report reads barriers, missing ranks and the stall."""
        now = 1.8e9
        store = job(3)
        times = {0: now - 100, 1: now - 99, 2: now - 96}
        arrive(store, "step/1", times, complete=True)
        arrive(store, "step/2", {0: now - 40, 1: now - 39})
        block(store, 0, now - 40)
        judge(store, now - 10, [0, 1], {2: "busy"})
        seen, records = Seen(), LoggedEvents()
        model = model_of(store, now=now)

        seen.add(model)
        seen.add(replace(model, time=now + 2))

        assert all(records.add(event) for event in seen.copy().events())
        assert records.event_counts == {
            names.BARRIER_COMPLETED: 3,
            names.BARRIER_WAITING: 2,
            names.JOB_STALLED: 1,
        }
        assert records.hosts == {0: "node0", 1: "node0", 2: "node0"}
        assert list(records.barrier_calls.waited) == [4.0, 3.0, 0.0, 42.0, 41.0]

    def test_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A screen that is open for days keeps a bounded number of arrivals."""
        monkeypatch.setattr("tracedstore.tools.top.saving._MAX_ARRIVALS", 10)
        seen = Seen()
        for number in range(9):
            at = float(number)
            barrier = BarrierView(
                prefix=f"step/{number}",
                complete=True,
                arrived=4,
                ranks=(0, 1, 2, 3),
                times=(at,) * 4,
                first=at,
                last=at,
                last_rank=3,
            )
            seen.add(JobView(source="s", time=at, finished=(barrier,)))

        events = list(seen.events())

        # The newest ones.
        assert {event["barrier"] for event in events} == {"step/7", "step/8"}
