"""``tracedstore top --replay``: a finished job at any time, and its keys."""

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from support.log_events import (
    completed_event,
    missing_event,
    stall_event,
    timestamp,
)
from tracedstore import names
from tracedstore.tools.job_view import JobView
from tracedstore.tools.report.analysis import analyse
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.top import fleet
from tracedstore.tools.top.fleet import GLYPHS
from tracedstore.tools.top.replay import Replay, ReplayApp

START = datetime.fromisoformat(timestamp(0)).timestamp()


@pytest.fixture
def replay() -> Replay:
    """Return a job: a barrier with a straggler, a stall, and one that times out."""
    records = LoggedEvents()
    events = [
        *(completed_event(rank, 20, 10 - 9 * (rank == 3)) for rank in range(4)),
        stall_event(0, 40, 8),
        stall_event(0, 45, 13, names.JOB_RESUMED),
        *(
            missing_event(rank, 70, 2, name=names.BARRIER_WAITING, waited=5.0)
            for rank in (0, 1, 3)
        ),
        *(missing_event(rank, 80, 2, waited=15.0) for rank in (0, 1, 3)),
        completed_event(0, 100, 0, "b/2", None),
    ]
    assert all([records.add(event) for event in events])  # noqa: C419 - adds all
    return Replay("logs", analyse(records))


def states(model: JobView) -> str:
    """Return the state of each rank, a character each."""
    return "".join(GLYPHS[rank.state] for rank in model.ranks)


class TestReplay:
    """The job at a time."""

    @pytest.mark.parametrize(
        ("second", "expected", "headline"),
        [
            (10.5, "www.", "the logs report no long wait"),
            (16, "wwwA", "barrier b/0 waits for 6 s: missing 1 of 4: node1 (rank 3)"),
            (30, "....", "the logs report no long wait"),
            (41, "wwAw", "stalled in new_group 1 for 9 s: waiting for rank 2"),
            (50, "....", "the logs report no long wait"),
            (67, "ww.w", "the logs report no long wait"),
            (71, "wwAw", "barrier b/1 waits for 6 s: missing 1 of 4: node1 (rank 2)"),
            (85, "....", "first failure 5 s ago, rank 0 on node0: b/1: missing 1"),
        ],
    )
    def test_states(
        self, replay: Replay, second: float, expected: str, headline: str
    ) -> None:
        """Ranks wait, are awaited and go on as the logs have it."""
        model = replay.view(START + second)

        assert states(model) == expected
        assert model.headline.startswith(headline)

    def test_barriers(self, replay: Replay) -> None:
        """A barrier is in progress, then finished, or given up."""
        early, late = replay.view(START + 16), replay.view(START + 90)

        assert [(one.prefix, one.arrived) for one in early.in_progress] == [("b/0", 3)]
        assert early.finished == ()
        assert [one.prefix for one in late.finished] == ["b/0"]
        assert late.finished[0].last_rank == 3
        assert [(one.prefix, one.abandoned) for one in late.unfinished] == [
            ("b/1", True)
        ]

    def test_stall_without_end(self) -> None:
        """A stall whose end was not logged ends when a later barrier completes."""
        records = LoggedEvents()
        records.add(stall_event(0, 40, 8))
        for rank in range(4):
            records.add(completed_event(rank, 61, 1, "b/5"))
        replay = Replay("logs", analyse(records))

        assert states(replay.view(START + 59)) == "wwAw"
        assert states(replay.view(START + 60.5)) == "wwww"

    def test_was_missing(self, replay: Replay) -> None:
        """Ranks that were missing are marked once the job has gone on."""
        before, during, after = (replay.view(START + n) for n in (30, 42, 60))

        assert [rank.was_missing for rank in before.ranks] == [False] * 4
        assert [rank.was_missing for rank in during.ranks] == [False] * 4
        assert [fleet.glyph(rank) for rank in after.ranks] == [".", ".", "!", "."]
        assert after.ranks[2].doing == "was awaited in new_group 1"

    def test_host_of_a_silent_rank(self) -> None:
        """A rank that hangs before its first event is under the host that others name.

        What the report says about times is as of the time that is shown.
        """
        records = LoggedEvents()
        awaited = "rank 2 on node4 (pid 7): alive, no store call for 30 s, in a.py:1 f"
        records.add(stall_event(0, 40, 8) | {"awaited": awaited})
        replay = Replay("logs", analyse(records))

        assert replay.view(START + 40).ranks[-1].host == "node4"
        assert "no store call for 30 s" in replay.view(START + 40).headline
        model = replay.view(replay.end)
        assert "waiting for rank 2 on node4" in model.headline
        grid = fleet.layout(model.ranks, 80, 2)
        assert grid.rows[0].text.startswith("node4 ")

    def test_bounds(self, replay: Replay) -> None:
        """The time bar is the time of the logs, with what went wrong in it."""
        assert (replay.start, replay.end) == (START + 10, START + 100)
        assert replay.incidents == [START + 40, START + 80]


class TestKeys:
    """Pause, steps, and the time bar."""

    def test_keys(self, replay: Replay, tmp_path: Path) -> None:
        """Keys move through the time; `r` writes the report of the logs."""

        async def scenario() -> None:
            app = ReplayApp(replay, ReadStats(), tmp_path)
            async with app.run_test(size=(80, 24)) as pilot:
                await pilot.press("space")
                assert app.lines("footer").rows[0].text.startswith("paused x2 ")
                await pilot.press("0", "space", "n")
                assert app.shown_job().time == START + 40
                assert "stalled in new_group 1" in app.lines("headline").rows[0].text
                first = app.lines("main").rows[1].text
                assert first.split()[:3] == ["A", "2", "node1"]
                await pilot.press("n")
                assert app.shown_job().time == START + 80
                assert app.lines("footer").rows[0].text.count("!") == 1
                await pilot.press("n")
                assert "no further time" in app.lines("footer").rows[0].text
                await pilot.press("p", "comma")
                assert app.shown_job().time == START + 38
                await pilot.press("full_stop", "greater_than_sign", "question_mark")
                rows = [one.text for one in app.lines("detail").rows]
                assert any("pause, go on" in text for text in rows)
                await pilot.press("r")
                await app.workers.wait_for_complete()
                await pilot.press("q")

        asyncio.run(scenario())
        (page,) = tmp_path.glob("*.html")
        assert "new_group 1" in page.read_text()
