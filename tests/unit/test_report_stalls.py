"""Stalls of a job on the page of ``tracedstore report``."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from support.log_events import Event, completed_event, missing_event, stall_event
from support.pages import Page
from tracedstore import names
from tracedstore.tools.report import logged_events
from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.headline import headline
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.page import page

AWAITED = "rank 2 on node1 (pid 812): in data.py:88 load"
WAITING = f"The job was waiting in new_group 1 for {AWAITED}"
WHY = (
    "Cause: busy. Rank 2 answered itself. Remedy: look at what each awaited rank"
    " executes."
)


def resumed(rank: int, second: float, waited: float) -> Event:
    """Return the report of the end of a stall."""
    return stall_event(rank, second, waited, name=names.JOB_RESUMED)


def analysis_of(events: Sequence[Event]) -> Analysis:
    """Analyse events. All of them have to be valid."""
    records = LoggedEvents()
    for each in events:
        assert records.add(each), each
    return analyse(records)


def page_of(events: Sequence[Event]) -> Page:
    """Return the page of events."""
    return Page(page(analysis_of(events), ReadStats()))


class TestMerging:
    """Reports of one stall are one stall."""

    TWO_RANKS = (
        stall_event(0, 60, 30.0),
        stall_event(1, 60.5, 30.0),
        stall_event(0, 90, 60.0),
        stall_event(1, 90.5, 60.0),
        resumed(0, 95, 65.0),
        resumed(1, 95.25, 65.0),
    )

    def test_two_ranks(self) -> None:
        """Repeated reports of two ranks are one stall, in any order of the logs."""
        for events in itertools.islice(
            itertools.permutations(self.TWO_RANKS), 0, 720, 37
        ):
            (stall,) = analysis_of(events).stalls

            assert stall.ranks == {0, 1}
            assert stall.last.waited == 60.0
            assert stall.duration == pytest.approx(65.25)

    def test_two_copies_of_a_log(self) -> None:
        """A log that is read twice has the same stalls."""
        assert len(analysis_of(self.TWO_RANKS * 2).stalls) == 1

    def test_same_phase_again(self) -> None:
        """A wait that began after the last report is another stall."""
        events = [
            stall_event(0, 60, 30.0),
            resumed(0, 70, 40.0),
            stall_event(0, 130, 30.0),
        ]

        first, second = analysis_of(events).stalls

        assert (first.duration, first.resumed_at is None) == (40.0, False)
        assert (second.duration, second.resumed_at) == (30.0, None)

    def test_same_phase_again_without_an_end(self) -> None:
        """The end of the first stall need not be in the logs."""
        events = [stall_event(0, 60, 30.0), stall_event(0, 130, 30.0)]

        assert len(analysis_of(events).stalls) == 2

    def test_another_rank_still_waits(self) -> None:
        """A stall has not ended if a rank reports it after another one resumed."""
        events = [
            stall_event(0, 60, 30.0),
            stall_event(1, 60, 30.0),
            resumed(0, 61, 31.0),
            stall_event(1, 90, 60.0),
        ]

        (stall,) = analysis_of(events).stalls

        assert stall.resumed_at is None

    @pytest.mark.parametrize("field", ["phase", "run_id"])
    def test_different(self, field: str) -> None:
        """Stalls of other phases and other jobs are not merged."""
        events = [stall_event(0, 60, 30.0), stall_event(0, 60, 30.0, **{field: "x"})]

        assert len(analysis_of(events).stalls) == 2

    def test_end_without_a_stall(self) -> None:
        """The end of a stall that is not in the logs is no stall."""
        assert analysis_of([resumed(0, 70, 40.0)]).stalls == []

    def test_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reports beyond the limit are counted, and the page has the number."""
        monkeypatch.setattr(logged_events, "_MAX_STALL_REPORTS", 2)
        events = [stall_event(0, 60 + n, 0.5, phase=f"p{n}") for n in range(5)]

        html = page(analysis_of(events), ReadStats())

        assert len(Page(html).rows("t-stalls")) == 2
        assert "3 more reports of stalls not read." in html


class TestHeadline:
    """The first line of the page."""

    def test_stall_without_an_end(self) -> None:
        """The verdict is the headline, with cause, evidence and remedy."""
        shown = page_of([stall_event(0, 60, 30.0), stall_event(1, 90, 60.0)])

        assert shown.texts["headline"] == WAITING
        assert shown.texts["lead"] == (
            f"{WHY} Last reported after 1 min 0 s, at 09:01:30.000 UTC."
        )
        assert shown.texts["n-stalls"] == "1"

    def test_last_stall_without_an_end(self) -> None:
        """It is the headline, although a later stall has ended."""
        events = [
            stall_event(0, 60, 30.0),
            stall_event(0, 200, 30.0, phase="new_group 2"),
            stall_event(0, 300, 30.0, phase="new_group 3"),
            stall_event(0, 310, 40.0, name=names.JOB_RESUMED, phase="new_group 3"),
        ]

        assert headline(analysis_of(events)).text.startswith(
            "The job was waiting in new_group 2 for rank 2"
        )

    def test_timed_out_barrier(self) -> None:
        """A barrier that timed out is mentioned after the verdict."""
        found = headline(
            analysis_of([stall_event(0, 60, 30.0), missing_event(0, 70, 2, 3)])
        )

        assert found.text == WAITING
        assert found.details.endswith(
            " Also: Ranks 2 and 3 on node1 never arrived at barrier b/1."
        )

    def test_stall_that_ended(self) -> None:
        """It is the headline of a job in which nothing failed."""
        events = [
            stall_event(0, 60, 30.0),
            resumed(0, 95, 65.0),
            *(completed_event(rank, 100, 0.5) for rank in range(4)),
        ]

        found = headline(analysis_of(events))

        assert found.text == (
            f"The job waited in new_group 1 for {AWAITED}, and resumed"
        )
        assert (
            found.details == f"{WHY} It resumed after 1 min 5 s, at 09:01:35.000 UTC."
        )
        assert not found.is_failure

    def test_failure_after_a_stall_that_ended(self) -> None:
        """A stall that ended is not the reason of a later failure."""
        events = [
            stall_event(0, 60, 30.0),
            resumed(0, 95, 65.0),
            missing_event(0, 300, 3),
        ]

        assert headline(analysis_of(events)).text == (
            "Rank 3 on node1 never arrived at barrier b/1"
        )

    def test_unknown_ranks(self) -> None:
        """Without a name the headline has what is known."""
        unknown = stall_event(
            0,
            60,
            30.0,
            phase="key epoch/3/go",
            awaited="no rank has written a key like it",
            awaited_ranks=[],
            cause="unknown",
        )

        assert headline(analysis_of([unknown])).text == (
            "The job was waiting in key epoch/3/go: no rank has written a key like it"
        )

    def test_length(self) -> None:
        """Long texts of a verdict are cut."""
        report = stall_event(
            0,
            60,
            30.0,
            awaited="x" * 9000,
            evidence=["y" * 9000] * 99,
            remedy="z" * 999,
        )

        found = headline(analysis_of([report]))

        assert len(found.text) < 400
        assert len(found.details) < 1200


class TestSection:
    """The table of all stalls."""

    def test_rows(self) -> None:
        """A row has all facts of a stall, and the causes in their order."""
        events = [
            stall_event(0, 60, 30.0),
            stall_event(1, 60.5, 30.0),
            stall_event(0, 90, 60.0, cause="gone"),
            stall_event(3, 200, 30.0, phase="key a/1", key="a/1", waiting_ranks="3"),
            stall_event(
                3, 210, 40.0, name=names.JOB_RESUMED, phase="key a/1", key="a/1"
            ),
        ]

        first, second = page_of(events).rows("t-stalls")

        assert first == {
            "first report (UTC)": "09:01:00.000",
            "phase": "new_group 1default_pg/0//1//cpu//0/2waiting: 0-1,3",
            "waited for": f"{AWAITED} rank 2 answered itself"
            "Remedy: look at what each awaited rank executes",
            "cause": "busy, then gone",
            "duration": "1 min 0 sno end",
            "reported by": "ranks 0-1",
        }
        assert second["phase"] == "key a/1waiting: 3"
        assert (second["duration"], second["reported by"]) == ("40 s", "rank 3")

    def test_no_stall(self) -> None:
        """Without a stall there is no section."""
        shown = page_of([missing_event(0, 10, 2, 3)])

        assert "stalls" not in shown.texts
        assert "n-stalls" not in shown.texts

    def test_many_stalls(self) -> None:
        """The page is bounded for many stalls with long texts."""
        long: dict[str, Any] = {"awaited": "x" * 9000, "evidence": ["y" * 9000] * 99}
        events = [
            stall_event(0, 60 + n / 10, 0.05, phase=f"p{n}", **long)
            for n in range(1000)
        ]

        html = page(analysis_of(events), ReadStats())

        assert "and 950 more stalls" in " ".join(html.split())
        assert len(html) < 200_000


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("waited_seconds", -1),
        ("waited_seconds", "30"),
        ("awaited_ranks", ["2"]),
        ("awaited_ranks", [10**9]),
        ("evidence", "a sentence"),
        ("evidence", [7]),
        ("phase", None),
        ("remedy", {}),
    ],
)
def test_invalid_report(field: str, value: object) -> None:
    """A report with a field of a wrong type or value is not read."""
    records = LoggedEvents()

    assert not records.add(stall_event(0, 60, 30.0) | {field: value})
    assert records.stall_reports == []
