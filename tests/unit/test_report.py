"""``tracedstore report``: reading logs, analysing them, and the page."""

import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.log_events import (
    EVENT_LINE,
    Event,
    completed_event,
    event,
    json_lines,
    missing_event,
    read_file,
    span_from_event,
    stall_event,
)
from support.pages import Page
from tracedstore import names
from tracedstore.tools.cli.main import main
from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.barriers import BarrierInstance
from tracedstore.tools.report.headline import headline
from tracedstore.tools.report.job_output import JobOutput
from tracedstore.tools.report.log_reader import (
    ReadStats,
    event_from_span,
    find_files,
    read_events,
)
from tracedstore.tools.report.logged_events import (
    COMPLETED,
    FAILED,
    TIMEOUT,
    WAITING,
    LoggedEvents,
)
from tracedstore.tools.report.page import page


def analysis_of(events: Sequence[Event]) -> Analysis:
    """Analyse events. All of them have to be valid."""
    records = LoggedEvents()
    for each in events:
        assert records.add(each), each
    return analyse(records)


def barriers_of(events: Sequence[Event]) -> list[BarrierInstance]:
    """Return the barrier instances of events."""
    return analysis_of(events).barriers


def page_of(events: Sequence[Event]) -> str:
    """Return the page of events as HTML."""
    return page(analysis_of(events), ReadStats())


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], tuple[list[Event], ReadStats]]:
    """Return a function that reads a log file with some content."""

    def reader(content: bytes) -> tuple[list[Event], ReadStats]:
        file = tmp_path / "rank.log"
        file.write_bytes(content)
        return read_file(file)

    return reader


Reader = Callable[[bytes], tuple[list[Event], ReadStats]]


class TestReading:
    """Events among other lines."""

    def test_unrelated_lines(self, read: Reader) -> None:
        """Other output of a job, and other JSON, is counted and skipped."""
        other = b'{"event": "epoch.done", "loss": 1}\nloss 0.5\n\n\xff\xfe\x00\n'

        events, stats = read(other + EVENT_LINE + b"\n")

        assert [each["event"] for each in events] == [names.BARRIER_COMPLETED]
        assert (stats.lines, stats.unrelated, stats.events) == (5, 4, 1)
        assert (stats.truncated, stats.skipped) == (0, 4)

    @pytest.mark.parametrize(
        "prefix",
        [b"[default0]:", b"[rank3]: ", b"2026-11-16T09:00:00Z stderr F ", b"\x1b[0m"],
    )
    def test_prefixes_of_launchers(self, read: Reader, prefix: bytes) -> None:
        """The prefixes of torchrun and of container runtimes are skipped."""
        events, stats = read(prefix + EVENT_LINE + b"\n")

        assert (events, stats.skipped) == ([json.loads(EVENT_LINE)], 0)

    def test_json_without_spaces(self, read: Reader) -> None:
        """Events of a renderer that writes no spaces are read."""
        compact = json.dumps(json.loads(EVENT_LINE), separators=(",", ":")).encode()

        assert read(compact)[0] == [json.loads(EVENT_LINE)]

    def test_truncated_line(self, read: Reader) -> None:
        """The partial line of a killed rank is counted as truncated."""
        for length in range(2, len(EVENT_LINE)):
            events, stats = read(EVENT_LINE[:length])

            assert (events, stats.truncated) == ([], 1), EVENT_LINE[:length]

    def test_interleaved_lines(self, read: Reader) -> None:
        """Complete events in a line of two writers are read, the others counted."""
        mixed = EVENT_LINE[:70] + EVENT_LINE + b"\n"

        events, stats = read(mixed + EVENT_LINE + EVENT_LINE + b"\n")

        assert (len(events), stats.events, stats.truncated) == (3, 3, 1)

    def test_invalid_fields(self) -> None:
        """An event with an invalid field is rejected, and changes nothing."""
        valid = completed_event(0, 1.0, 0.5)
        invalid: list[Event] = [
            {"timestamp": None},
            {"timestamp": "yesterday"},
            {"timestamp": "0001-01-01T00:00:00+23:59"},
            {"rank": -1},
            {"rank": "0"},
            {"rank": True},
            {"rank": 10**9},
            {"waited_seconds": "1"},
            {"waited_seconds": -1},
            {"waited_seconds": 10**400},
            {"barrier": ["b"]},
            {"host": 7},
        ]

        for change in invalid:
            records = LoggedEvents()
            assert not records.add(valid | change), change
            assert (len(records.barrier_calls), dict(records.event_counts)) == (0, {})
        assert not LoggedEvents().add(
            missing_event(0, 1.0) | {"missing_ranks": [0, "1"]}
        )
        assert LoggedEvents().add(valid)

    def test_invalid_failed_call(self) -> None:
        """A failed call with an invalid run id is not counted."""
        records = LoggedEvents()

        failed = event(names.OPERATION_FAILED, 1.0, duration_seconds=1, run_id=7)

        assert not records.add(failed)
        assert (records.store_calls, records.first_failures) == ({}, {})

    def test_timestamps(self) -> None:
        """All formats of structlog's TimeStamper are read."""
        for timestamp in (
            "2026-11-16T09:00:01Z",
            "2026-11-16T10:00:01+01:00",
            "2026-11-16T09:00:01",
            1794819601.0,
        ):
            records = LoggedEvents()
            records.add(completed_event(0, 1.0, 0.5) | {"timestamp": timestamp})
            assert records.first_time == 1794819601.0

    def test_gzip(self, read: Reader) -> None:
        """Gzip files are read, as far as they are complete."""
        content = json_lines([completed_event(0, 1.0, 0.5)] * 5000).encode()
        packed = gzip.compress(content, 0)

        assert len(read(packed)[0]) == 5000
        events, stats = read(packed[: len(packed) // 2])
        assert 2000 < len(events) < 3000
        assert len(stats.incomplete_files) == 1

    def test_long_lines(self, read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
        """A line beyond the limit is skipped, and not kept in memory."""
        monkeypatch.setattr("tracedstore.tools.report.log_reader.MAX_LINE_BYTES", 1000)

        events, stats = read(b"x" * 5000 + EVENT_LINE + b"\n" + EVENT_LINE + b"\n")

        assert (len(events), stats.too_long, stats.lines) == (1, 1, 2)

    def test_deeply_nested_json(self, read: Reader) -> None:
        """JSON beyond the recursion limit counts as truncated."""
        nested = b'{"event": "barrier.completed", "a": ' + b"[" * 100_000

        assert read(nested)[1].truncated == 1

    def test_indented_span(self, read: Reader) -> None:
        """The indented JSON of ConsoleSpanExporter is read."""
        span = span_from_event(completed_event(2, 1.0, 0.5))
        content = "loss 0.5\n" + json.dumps(span, indent=4) + "\n"

        events, stats = read(content.encode())

        assert [each["rank"] for each in events] == [2]
        assert (stats.spans, stats.unrelated) == (1, 1)

    def test_unusual_lines_in_an_indented_span(self, read: Reader) -> None:
        """All lines of an indented span count as one span."""
        span = span_from_event(completed_event(2, 1.0, 0.5))
        first, *rest = json.dumps(span, indent=4).splitlines()
        # Incomplete JSON, and a line with the wrapping of Docker.
        unusual = ['"links": [{"a": 1,', '"b": 2}],', '{"log":"\\"c\\":\\n3,\\n"}']

        events, stats = read("\n".join(["loss", first, *unusual, *rest]).encode())

        assert [each["rank"] for each in events] == [2]
        assert (stats.spans, stats.unrelated, stats.truncated) == (1, 1, 0)

    def test_unrelated_objects(self, read: Reader) -> None:
        """An object within a line is complete; one without an end is truncated."""
        _, stats = read(b'INFO args={"lr": 0.1} starting\nINFO args={"lr": 0.1, "b\n')

        assert (stats.unrelated, stats.truncated) == (1, 1)

    def test_indented_json_without_end(
        self, read: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Indented JSON is dropped beyond the limit, even if its lines are empty."""
        monkeypatch.setattr("tracedstore.tools.report.log_reader.MAX_LINE_BYTES", 5000)
        span = span_from_event(completed_event(2, 1.0, 0.5))
        first, rest = json.dumps(span, indent=4).encode().split(b"\n", 1)

        below, beyond = (
            read(first + b"\n" * count + rest)[1].spans for count in (1000, 5000)
        )

        assert (below, beyond) == (1, 0)

    def test_directories(self, tmp_path: Path) -> None:
        """A directory is listed without duplicates, pipes and the report itself."""
        deep = tmp_path / "attempt_0" / "0"
        deep.mkdir(parents=True)
        (deep / "stderr.log").write_text("x")
        (tmp_path / "again.log").symlink_to(deep / "stderr.log")
        (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
        (tmp_path / "report.html").write_text("<!DOCTYPE html>")
        os.mkfifo(tmp_path / "pipe")

        files = find_files(
            [str(tmp_path), str(deep / "stderr.log")], tmp_path / "report.html"
        )

        assert files == [str(tmp_path / "again.log")]


class TestBarrierInstances:
    """Grouping barrier calls."""

    def test_delays(self) -> None:
        """Delays depend on the wait of each rank, not on the clocks of hosts."""
        events = [completed_event(0, 10, 3.0), completed_event(1, 10, 2.5)]
        # The clock of the second host is a minute ahead.
        events += [completed_event(2, 70, 1.0), completed_event(3, 70, 0.0)]

        (barrier,) = barriers_of(events)

        assert barrier.outcome == COMPLETED
        assert dict(zip(barrier.ranks, barrier.delays, strict=True)) == pytest.approx(
            {0: 0.0, 1: 0.5, 2: 2.0, 3: 3.0}
        )
        assert (barrier.last_rank, barrier.spread) == (3, 3.0)

    def test_event_and_span_of_one_call(self) -> None:
        """A call with an event and a span counts once."""
        logged = [
            completed_event(0, 10, 3.0),
            completed_event(1, 10, 2.0),
            missing_event(0, 20, 1),
        ]
        only_span = completed_event(2, 10, 1.0)
        spans = [
            event_from_span(span_from_event(each)) for each in [*logged, only_span]
        ]

        first, second = barriers_of([*logged, *(each for each in spans if each)])

        assert sorted(first.ranks) == [0, 1, 2]
        assert (second.outcome, list(second.ranks)) == (TIMEOUT, [0])
        assert len(second.reports) == 1

    def test_two_copies_of_a_log(self) -> None:
        """A log that is given twice counts once."""
        events = [completed_event(rank, 10, 3.0 - rank) for rank in range(4)]

        (barrier,) = barriers_of(events * 2)

        assert sorted(barrier.ranks) == [0, 1, 2, 3]

    def test_restart(self) -> None:
        """The same prefix after a restart is another barrier."""
        events = [missing_event(rank, 10, 3) for rank in range(3)]
        events += [completed_event(rank, 30, 1.0, "b/1") for rank in range(4)]

        first, second = barriers_of(events)

        assert (first.outcome, sorted(first.ranks)) == (TIMEOUT, [0, 1, 2])
        assert (second.outcome, sorted(second.ranks)) == (COMPLETED, [0, 1, 2, 3])

    def test_two_jobs(self) -> None:
        """The same prefix in another job is another barrier."""
        events = [
            completed_event(0, 10, 1.0) | {"run_id": job} for job in ("one", "two")
        ]

        assert len(barriers_of(events)) == 2

    def test_last_rank_is_not_logged(self) -> None:
        """The last rank is the one with the shortest wait, if all are logged."""
        events = [completed_event(rank, 10, 4.0 - rank, last=None) for rank in range(4)]

        assert barriers_of(events)[0].last_rank == 3
        assert barriers_of(events[:3])[0].last_rank == -1

    def test_no_rank_and_no_world_size(self) -> None:
        """A completion is counted without a rank and a world size."""
        completed = completed_event(0, 10, 4.0, last=None)
        del completed["rank"], completed["world_size"]

        (barrier,) = barriers_of([completed])

        assert (barrier.outcome, list(barrier.ranks)) == (COMPLETED, [])
        assert barrier.last_rank == -1


def article_of(events: Sequence[Event]) -> str:
    """Return the text of the only incident on the page."""
    article = re.search(r"<article.*?</article>", page_of(events), re.DOTALL)
    assert article
    text = " ".join(re.sub(r"<[^>]*>", " ", article[0]).split())
    return re.sub(r" (?=[.:;,])", "", text)


class TestIncidents:
    """Missing ranks."""

    def test_reports_agree(self) -> None:
        """Reports with the same content are one group."""
        events = [missing_event(rank, 10 + rank / 10, 3) for rank in range(3)]

        (incident,) = analysis_of(events).incidents

        assert (incident.missing, incident.late) == ([3], [])
        (group,) = incident.groups
        assert group.ranks == [0, 1, 2]

    def test_reports_differ_in_activity(self) -> None:
        """Reports that name the same ranks agree on them, whatever these ranks did."""
        events = [missing_event(rank, 10 + rank / 10, 3) for rank in range(3)]
        for seconds, report in enumerate(events):
            report["missing"] += f"; rank 3: alive, no store call for {seconds} s"

        (incident,) = analysis_of(events).incidents

        (group,) = incident.groups
        assert group.ranks == [0, 1, 2]
        assert "3 ranks reported this, and their reports agree." in article_of(events)

    def test_reports_differ(self) -> None:
        """A rank that one report names and that arrived later is not missing."""
        events = [
            missing_event(0, 10, 2, 3),
            missing_event(1, 10, 2, 3),
            missing_event(2, 14, 3),
        ]

        (incident,) = analysis_of(events).incidents

        assert (incident.missing, incident.late) == ([3], [2])
        assert [len(group.reports) for group in incident.groups] == [2, 1]

    def test_completed_late(self) -> None:
        """A barrier with warnings that completed is listed after the others."""
        waiting = names.BARRIER_WAITING
        events = [
            missing_event(0, 10, 3, name=waiting, barrier="b/0", waited=2.0),
            missing_event(0, 12, 3, name=waiting, barrier="b/0", waited=4.0),
            *(completed_event(rank, 13, 5.0 if rank < 3 else 0.0) for rank in range(4)),
            missing_event(0, 40, 2),
        ]

        timed_out, late = analysis_of(events).incidents

        assert timed_out.barrier.outcome == TIMEOUT
        assert late.barrier.outcome == COMPLETED
        assert (late.missing, late.late) == ([], [3])
        assert [report.waited for report in late.groups[0].reports] == [5.0]
        (row,) = Page(page_of(events)).rows("t-late")
        assert (row["barrier"], row["late ranks"]) == ("b/0", "rank 3 on node1")
        assert (row["reported by"], row["longest wait"]) == ("rank 0", "5 s")

    def test_killed_while_waiting(self) -> None:
        """A job that was killed while it waited has no end in its log."""
        events = [missing_event(0, 10, 3, name=names.BARRIER_WAITING, waited=2.0)]

        (incident,) = analysis_of(events).incidents

        assert (incident.barrier.outcome, incident.missing) == (WAITING, [3])
        article = article_of(events)
        assert "Missing when last checked, at 09:00:10.000 UTC" in article
        assert "rank 3 on node1. No end is logged" in article

    def test_failed_after_warnings(self) -> None:
        """A failed barrier shows the error, and the missing ranks of the warnings."""
        waiting = names.BARRIER_WAITING
        failed = missing_event(0, 14, name=names.BARRIER_FAILED, waited=6.0)
        failed |= {"error_type": "torch.distributed.DistNetworkError", "error": "gone"}
        events = [
            missing_event(0, 10, 2, 3, name=waiting, waited=2.0),
            missing_event(0, 12, 3, name=waiting, waited=4.0),
            failed,
            failed | {"rank": 1},
        ]

        (incident,) = analysis_of(events).incidents

        assert (incident.barrier.outcome, incident.missing) == (FAILED, [3])
        assert sorted(len(group.reports) for group in incident.groups) == [1, 1]
        article = article_of(events)
        assert "Missing when last checked, at 09:00:12.000 UTC" in article
        assert "rank 3 on node1. Then the store failed" in article
        assert "DistNetworkError: gone last warning: missing 1 of 4" in article
        assert "2 ranks reported this, and their reports agree." in article
        assert "so the missing ranks are not known" in article_of([failed])

    def test_continued_elsewhere(self) -> None:
        """A barrier without an end is presumed completed if its process went on.

        Completions are events of debug level, which few logs contain.
        """
        waiting = names.BARRIER_WAITING
        warnings = [
            missing_event(0, 10, 3, name=waiting, waited=2.0),
            missing_event(1, 11, 3, name=waiting, waited=2.0),
        ]
        later = missing_event(0, 60, 2, name=waiting, barrier="b/2", waited=2.0)

        unfinished, late = analysis_of([*warnings, later]).incidents
        restarted = analysis_of([*warnings, later | {"pid": 8}]).incidents

        assert unfinished.barrier.id.prefix == "b/2"
        assert unfinished.missing == [2]
        assert (late.missing, late.late) == ([], [3])
        shown = Page(page_of([*warnings, later]))
        counts = [shown.texts[f"n-{name}"] for name in ("completed", "guessed", "open")]
        assert counts == ["0", "1", "1"]
        (row,) = shown.rows("t-late")
        assert (row["barrier"], row["completed (UTC)"]) == ("b/1", "after 09:00:11.000")
        # With another pid, the job was killed at the first barrier and restarted.
        assert [each.missing for each in restarted] == [[3], [2]]

    def test_continued_before_the_next_warning(self) -> None:
        """A barrier is presumed completed only after its next warning was due."""
        warnings = [
            missing_event(rank, 30, 2, name=names.BARRIER_WAITING, waited=30.0)
            for rank in (0, 1)
        ]
        # The next warning is due at 60. A process that is at another barrier before may
        # have a second thread that still waits.
        before, after = (
            [completed_event(rank, end, 1.0, "b/2") for rank in (0, 1, 2, 3)]
            for end in (59.0, 61.0)
        )

        (unknown,) = analysis_of([*warnings, *before]).incidents
        (presumed,) = analysis_of([*warnings, *after]).incidents

        assert (unknown.barrier.completed, unknown.missing) == (False, [2])
        assert (presumed.barrier.completed, presumed.late) == (True, [2])
        article = article_of([*warnings, *before])
        assert "this barrier may have completed" in article
        text, details, _ = headline(analysis_of([*warnings, *before]))
        assert text == (
            "Rank 2 on node1 had not arrived at barrier b/1 at the last warning"
        )
        assert details.endswith(
            "No end is logged, but a waiting process arrived at another barrier later."
        )
        text, details, _ = headline(analysis_of([*warnings, *after]))
        assert text == (
            "All 2 barriers completed (1 presumed), but rank 2 on node1 kept the others"
            " waiting at barrier b/1"
        )
        assert details == "For 30 s or longer. The end of 1 barrier is not in the logs."

    def test_two_threads_wait(self) -> None:
        """Two threads that wait at two barriers have not continued elsewhere."""
        events = [
            missing_event(
                0,
                time,
                3,
                name=names.BARRIER_WAITING,
                barrier=barrier,
                waited=time - arrival,
            )
            for barrier, arrival in (("b/1", 1), ("b/2", 6))
            for time in (arrival + 30, arrival + 60)
        ]

        incidents = analysis_of(events).incidents

        assert [each.missing for each in incidents] == [[3], [3]]
        assert not any(each.barrier.continued for each in incidents)

    def test_another_rank_still_waits(self) -> None:
        """A rank that arrived elsewhere is no evidence while another one waits."""
        waiting = names.BARRIER_WAITING
        events = [
            missing_event(0, 10, 3, name=waiting, waited=2.0),
            completed_event(0, 20, 1.0, "b/2"),
            missing_event(1, 24, 3, name=waiting, waited=16.0),
        ]

        (incident,) = analysis_of(events).incidents

        assert (incident.missing, incident.barrier.continued) == ([3], False)

    def test_order_of_unfinished_barriers(self) -> None:
        """A barrier that hangs is listed before one that may have completed."""
        waiting = names.BARRIER_WAITING
        events = [
            missing_event(0, 60, 3, name=waiting, waited=60.0),
            missing_event(0, 96, 2, name=waiting, barrier="b/2", waited=30.0),
        ]

        text, details, _ = headline(analysis_of(events))

        assert text == (
            "Rank 2 on node1 had not arrived at barrier b/2 at the end of the logs"
        )
        assert details.endswith("1 more barrier may not have completed.")

    def test_last_events(self) -> None:
        """The last events of missing ranks are grouped by name."""
        early = [completed_event(2, 3, 1.0), completed_event(3, 4, 1.0)]

        article = article_of([*early, missing_event(0, 20, 1, 2, 3)])

        assert (
            "Last events of the missing ranks: rank 1: none; ranks 2-3:"
            " barrier.completed at 09:00:03.000 to 09:00:04.000." in article
        )

    def test_later_report_supersedes(self) -> None:
        """A rank has arrived if a later report does not name it any more."""
        waiting = names.BARRIER_WAITING
        first = missing_event(1, 10, 2, 3, name=waiting, waited=2.0)

        for time, late in ((10.5, []), (12.0, [2])):
            second = missing_event(0, time, 3, name=waiting, waited=4.0)
            (incident,) = analysis_of([first, second]).incidents

            assert incident.missing == ([3] if late else [2, 3])
            assert incident.late == late


class TestStragglers:
    """Ranks that the others wait for."""

    def test_order(self) -> None:
        """Missing ranks are first, then ranks by cost."""
        events = []
        for number in range(5):
            late = 2 if number == 4 else 3
            events += [
                completed_event(
                    rank,
                    10 * number + 9,
                    0 if rank == late else 4.0,
                    f"b/{number}",
                    late,
                )
                for rank in range(4)
            ]
        events += [missing_event(0, 100, 1, barrier="b/9")]

        first, second, third = analysis_of(events).stragglers

        assert (first.rank, first.missing_count, first.last_count) == (1, 1, 0)
        assert (second.rank, second.last_count, second.barrier_count) == (3, 4, 5)
        assert (second.cost, second.median_lag, second.worst_lag) == pytest.approx(
            (16, 4, 4)
        )
        assert (third.rank, third.last_count, third.median_lag) == (2, 1, 0)
        assert third.worst_prefix == "b/4"

    def test_clocks(self) -> None:
        """The offset of a clock follows from when its ranks were released."""
        events = [
            completed_event(
                rank, 10 * number + (1.5 if rank == 4 else 0), 1.0, f"b/{number}"
            )
            for number in range(1, 6)
            for rank in range(5)
        ]
        events.append(missing_event(4, 100, 3))

        assert analysis_of(events).clock_offsets == pytest.approx(
            {"node0": 0, "node1": 0, "node2": 1.5}, abs=1e-3
        )
        shown = Page(page_of(events))
        (row,) = shown.rows("t-clocks")
        assert row["ahead of most others by"] == "1.5 s"
        assert (
            "(its clock is ahead of most others by 1.5 s)"
            in shown.texts["first-failure"]
        )


class TestHeadline:
    """The most important finding."""

    WAITING = names.BARRIER_WAITING
    FAILED = event(
        names.BARRIER_FAILED,
        14,
        barrier="b/1",
        world_size=4,
        waited_seconds=6.0,
        error_type="gone",
        error="no server",
    )
    LATE = missing_event(0, 11, 3, name=WAITING, barrier="b/0", waited=2.0)
    FAILED_CALL = event(
        names.OPERATION_FAILED,
        3,
        2,
        operation="get",
        key="k",
        duration_seconds=1,
        error_type="timeout",
        error="late",
    )
    STALLED_CALL = event(
        names.OPERATION_STALLED,
        30,
        operation="wait",
        key="default_pg/0//cpu//0/1",
        waited_seconds=30.0,
        world_size=3,
    )
    COMPLETED = tuple(
        completed_event(rank, 12, 3.0 if rank < 3 else 0.0) for rank in range(4)
    )

    @pytest.mark.parametrize(
        ("events", "text", "details"),
        [
            (
                [missing_event(0, 10, 1, 3), missing_event(2, 11, 1, 3)],
                "Ranks 1 and 3 on node0 and node1 never arrived at barrier b/1",
                "2 of 4 ranks timed out after 5 s, the last at 09:00:11.000 UTC.",
            ),
            (
                [
                    missing_event(0, 10, 3),
                    missing_event(0, 90, 3, barrier="b/2"),
                    *COMPLETED,
                ],
                "Rank 3 on node1 never arrived at barrier b/1",
                (
                    "1 of 4 ranks timed out after 5 s, the last at 09:00:10.000 UTC."
                    " 1 more barrier did not complete."
                ),
            ),
            (
                [missing_event(0, 10)],
                "Barrier b/1 timed out, and the missing ranks are not known",
                "1 of 4 ranks timed out after 5 s, the last at 09:00:10.000 UTC.",
            ),
            (
                [missing_event(0, 10, 3, name=WAITING)],
                "Rank 3 on node1 had not arrived at barrier b/1 at the end of the logs",
                (
                    "1 rank had waited for up to 5 s at the last warning, at"
                    " 09:00:10.000 UTC. No end is logged."
                ),
            ),
            (
                [missing_event(0, 10, 2, 3, name=WAITING, waited=2.0), FAILED],
                (
                    "The store failed at barrier b/1 while ranks 2 and 3 on node1 were"
                    " missing"
                ),
                "gone: no server, at 09:00:14.000 UTC.",
            ),
            (
                [FAILED],
                "The store failed at barrier b/1",
                "gone: no server, at 09:00:14.000 UTC.",
            ),
            (
                [FAILED_CALL, *COMPLETED],
                "Rank 2 on node1 failed: get k",
                (
                    "timeout: late, at 09:00:03.000 UTC. This is a consequence, and no"
                    " failure in the logs is its cause."
                ),
            ),
            (
                [LATE, *COMPLETED],
                (
                    "The only barrier completed, but rank 3 on node1 kept the others"
                    " waiting at barrier b/0"
                ),
                "For 3 s.",
            ),
            (
                [STALLED_CALL, STALLED_CALL | {"rank": 2, "waited_seconds": 60.0}],
                "Ranks 0 and 2 on node0 were blocked in wait default_pg/0//cpu//0/1",
                "For 1 min 0 s or longer. No event of rank 1 is logged.",
            ),
            (
                [*COMPLETED, *(each | {"barrier": "b/2"} for each in COMPLETED)],
                "All 2 barriers completed",
                "No failure is logged.",
            ),
        ],
    )
    def test_text(self, events: list[Event], text: str, details: str) -> None:
        """The headline is the worst finding; the line below has time and duration."""
        shown = Page(page_of(events))

        assert (shown.texts["headline"], shown.texts["lead"]) == (text, details)

    def test_length(self) -> None:
        """The headline is short for many ranks and a long prefix."""
        timed_out = missing_event(0, 10, *range(1, 2000, 2), barrier="b" * 500)

        text = headline(analysis_of([timed_out | {"missing_names": []}])).text

        assert text.startswith("Ranks 1,3,5,")
        assert ",... and 988 more never arrived at barrier bbb" in text
        assert len(text) < 200


HOSTILE = "</code><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def all_events() -> list[Event]:
    """Return at least one event of each name, with HTML in their texts."""
    call: Event = {
        "operation": "get",
        "store": "tcp_store",
        "key": HOSTILE,
        "key_family": HOSTILE + "/*",
        "suppressed_count": 2,
    }
    failed: Event = {"error_type": "timeout", "error": HOSTILE}
    events = [
        event(names.OPERATION_SLOW, 1, duration_seconds=0.5, **call),
        event(names.OPERATION_SLOW, 2, 1, duration_seconds=1.5, **call),
        event(names.OPERATION_FAILED, 3, 2, duration_seconds=3, **call, **failed),
        event(names.OPERATION_STALLED, 4, waited_seconds=30.0, **call),
        event(names.CAS_CONTENDED, 5, losses_in_a_row=9, **call),
        event(names.RENDEZVOUS_CONFLICT, 6, None, losses_in_a_row=5, **call),
        event(
            names.RENDEZVOUS_TIMEOUT,
            2.5,
            None,
            host=HOSTILE,
            run_id=HOSTILE,
            endpoint="node1:29400",
            message=HOSTILE,
            cause="too_few_nodes",
        ),
        stall_event(0, 60, 30.0, phase=HOSTILE, awaited=HOSTILE, evidence=[HOSTILE]),
        stall_event(0, 80, 50.0, name=names.JOB_ABORTED, phase=HOSTILE),
        stall_event(0, 90, 60.0, name=names.JOB_RESUMED, phase=HOSTILE),
        event(names.STORE_STALE, 7, message=HOSTILE),
        event(names.TELEMETRY_DISABLED, 7, observer="spans", **failed),
        event(names.TELEMETRY_SERVING, 8, url="http://node0:27400"),
        event(names.EXPORT_FAILED, 8, signal="spans", error=HOSTILE),
        event(
            names.EXPORT_RESUMED,
            9,
            signal="spans",
            failed_seconds=9.5,
            failed_exports=3,
        ),
        event(names.BARRIER_STALE_KEY, 9, barrier=HOSTILE, waited_seconds=0),
        event(names.BARRIER_FAILED, 9, barrier=HOSTILE, waited_seconds=1, **failed),
        event(names.RENDEZVOUS_FAILED, 10, None, message="x", cause="closed"),
        event(
            names.RENDEZVOUS_WAITING,
            11,
            None,
            run_id=HOSTILE,
            joined_count=1,
            min_nodes=3,
        ),
        missing_event(0, 20, 3, barrier=HOSTILE + "/1") | {"missing": HOSTILE},
        missing_event(1, 20, 3, barrier="w", name=names.BARRIER_WAITING),
    ]
    events += [
        completed_event(rank, 12, 3.0 - rank, HOSTILE + "/0") for rank in range(4)
    ]
    assert {each["event"] for each in events} == set(names.EVENT_NAMES)
    return events


class TestPage:
    """The HTML page."""

    def test_all_events(self) -> None:
        """The page contains the numbers of the input, and no HTML from it."""
        html = page_of(all_events())

        shown = Page(html)
        assert not shown.tags & {"script", "img", "iframe", "object"}
        assert "default-src 'none'" in html
        assert "http://" not in html
        assert "https://" not in html
        assert shown.texts["n-ranks"] == "4 of 4"
        outcomes = {
            name: shown.texts[f"n-{name}"] for name in ("timeouts", "failed", "open")
        }
        assert outcomes == {"timeouts": "1", "failed": "1", "open": "1"}
        slow = [row for row in shown.rows("t-calls") if row["kind"] == "slow"]
        assert [(row["calls"], row["ranks"], row["longest"]) for row in slow] == [
            ("6", "2", "1.5 s")
        ]
        assert slow[0]["key family"] == HOSTILE + "/*"
        losses = {
            row["kind"]: row["most losses in a row"] for row in shown.rows("t-cas")
        }
        assert losses == {"lost compare-and-sets": "9", "lost rendezvous writes": "5"}
        failed_processes = [row["processes"] for row in shown.rows("t-failures")]
        assert f"pid 7 on {HOSTILE}" in failed_processes
        counts = {row["event"]: row["count"] for row in shown.rows("t-events")}
        assert counts.keys() == set(names.EVENT_NAMES)
        assert counts[names.BARRIER_COMPLETED] == "4"

    def test_control_characters(self) -> None:
        """Control characters and lone surrogates are replaced everywhere."""
        unprintable = "b/\x1b[31m\x00\x85\u202e\ud800"
        printable = (
            "b/" + "\N{REPLACEMENT CHARACTER}[31m" + 4 * "\N{REPLACEMENT CHARACTER}"
        )
        events = [
            completed_event(0, 10, 1.0, unprintable),
            completed_event(0, 20, 1.0, "b/2"),
            missing_event(0, 30, 1, barrier=unprintable + "/1")
            | {"host": unprintable, "missing": unprintable},
        ]

        html = page_of(events)

        _, _, body = html.partition("</style>")
        assert body.replace("\n", "").isprintable()
        shown = Page(html)
        assert f"never arrived at barrier {printable}/1" in shown.texts["headline"]
        assert shown.rows("t-opinions")[0]["report"] == printable
        assert f"rank 0 on {printable}: " in html

    def test_single_event(self) -> None:
        """There is a page for any single event."""
        for each in all_events():
            shown = Page(page_of([each]))

            assert [row["event"] for row in shown.rows("t-events")] == [each["event"]]

    def test_single_barrier(self) -> None:
        """A single barrier is plotted over its ranks, including the missing ones."""
        html = page_of([missing_event(0, 10, 2, 3), missing_event(1, 10, 2, 3)])

        dots = re.findall(r'class="dot" cx="([0-9.]+)"', html)
        crosses = re.findall(r'class="cross" d="M([0-9.]+)', html)
        assert len({*dots, *crosses}) == 4
        assert 'id="lateness"' not in html

    def test_size_is_bounded(self) -> None:
        """The size of the page is bounded for many ranks and barriers."""
        events = [
            completed_event(rank, 10 * (number + 1), rank / 100, f"b/{number}")
            for number in range(250)
            for rank in range(120)
        ]

        html = page_of(events)

        assert len(html) < 300_000
        assert html.count("<circle") <= 60


class TestCommand:
    """The command line."""

    def test_page_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The command writes a page from logs and spans, and prints two lines."""
        events = [completed_event(0, 10, 3.0), missing_event(0, 20, 1)]
        (tmp_path / "rank0.log").write_text("loss 0.5\n" + json_lines(events))
        spans = [span_from_event(completed_event(1, 10, 0.0))]
        (tmp_path / "spans.jsonl").write_text(json_lines(spans))
        output = tmp_path / "out.html"
        traces = ["--traces", str(tmp_path / "spans.jsonl")]

        code = main(
            ["report", str(tmp_path / "rank0.log"), *traces, "--output", str(output)]
        )

        assert code == 0
        assert capsys.readouterr().out == (
            "Rank 1 on node0 never arrived at barrier b/1\n"
            f"{output}: 2 ranks, 2 barriers, 1 incident, 1 failed process\n"
            "4 lines read: 2 events, 1 barrier span, 1 unrelated, 0 damaged\n"
        )
        assert Page(output.read_text("utf-8")).texts["n-ranks"] == "2 of 4"

    def test_counts_add_up(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every line is counted once; an invalid event is not counted as an event."""
        late = completed_event(1, 10, 0.0)
        invalid = [
            completed_event(0, 10, 3.0) | {"rank": "0"},
            span_from_event(late | {"rank": "1"}),
        ]
        log = tmp_path / "rank.log"
        valid = [completed_event(0, 10, 3.0), span_from_event(late)]
        text = json_lines([*valid, *invalid])
        log.write_text(f'{text}args={{"lr": 0.1}} starting\nloss\n{{"timesta')
        output = tmp_path / "out.html"

        assert main(["report", str(log), "--output", str(output)]) == 0

        assert capsys.readouterr().out.endswith(
            "\n7 lines read: 1 event, 1 barrier span, 2 unrelated, 3 damaged\n"
        )
        rows = Page(output.read_text("utf-8")).rows("t-read")
        assert [row["count"] for row in rows] == ["7", "1", "1", "2", "1", "2", "0"]

    def test_standard_input(self, tmp_path: Path) -> None:
        """Standard input is read; a lone surrogate in a key is replaced."""
        content = json_lines([completed_event(0, 10, 3.0, "b/\ud800")])

        done = subprocess.run(
            [sys.executable, "-m", "tracedstore.tools.cli.main", "report", "-"],
            input=content,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "report.html").stat().st_size > 5000

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["nowhere.log"], "nowhere.log cannot be read: No such file or directory"),
            (["text.log"], "no event in the 2 lines of text.log: logs have to be JSON"),
            (["text.log", "bin"], "no event in the 5 lines of 2 files: logs have to"),
            (["empty"], "no file in empty: name the logs of the ranks, or a directory"),
            (["none.log"], "none.log: empty; name the logs of the ranks"),
            (["/dev/null"], "/dev/null: empty; name the logs of the ranks"),
            (["/proc/self/mem"], "cannot be read: /proc/self/mem: Input/output error"),
            (["cut.gz"], "cannot be read: cut.gz: Compressed file ended before"),
            (["good.log", "x" * 300], f"{'x' * 300} cannot be read: File name too"),
            (
                ["good.log", "--output", "no/where.html"],
                "no/where.html cannot be written: there is no directory no; create it",
            ),
            (
                ["good.log", "--output", "good.log/x.html"],
                "good.log/x.html cannot be written: there is no directory good.log;",
            ),
            (
                ["good.log", "--output", "empty"],
                (
                    "empty is a directory: name a file in it, such as --output"
                    " empty/report.html"
                ),
            ),
            (["good.log", "--output", "/dev/full"], "/dev/full cannot be written: No"),
            (["good.log", "--output", "x" * 300], f"{'x' * 300} cannot be written: F"),
            (
                ["text.log", "good.log", "--output", "good.log"],
                "good.log is one of the logs, and would be overwritten: name another",
            ),
            ([".", "--output", "./good.log"], "good.log is one of the logs, and would"),
        ],
    )
    def test_errors(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        """Every error is one line, and the logs are not changed."""
        monkeypatch.chdir(tmp_path)
        Path("empty").mkdir()
        Path("text.log").write_text("[warning  ] barrier.timeout  rank=3\nloss\n")
        Path("good.log").write_bytes(EVENT_LINE)
        Path("none.log").touch()
        Path("bin").write_bytes(b"\x7fELF\0\n\xff\xfe{\n\0")
        Path("cut.gz").write_bytes(gzip.compress(b"x" * 999)[:12])

        assert main(["report", *arguments]) == 1

        errors = capsys.readouterr().err
        assert errors.startswith(f"tracedstore: {message}")
        assert errors.count("\n") == 1
        assert Path("good.log").read_bytes() == EVENT_LINE

    def test_existing_report(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A report or an empty file among the logs is overwritten, and not read."""
        monkeypatch.chdir(tmp_path)
        Path("good.log").write_bytes(EVENT_LINE)
        Path("report.html").touch()

        for _ in range(2):
            assert main(["report", "good.log", "report.html"]) == 0
            assert main(["report", "."]) == 0

        shown = Page(Path("report.html").read_text("utf-8"))
        assert shown.rows("t-read")[0]["count"] == "1"

    @pytest.mark.parametrize("arguments", [["-", "-"], ["-", "--traces", "-"]])
    def test_standard_input_twice(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Standard input cannot be given twice."""
        with pytest.raises(SystemExit, match="64"):
            main(["report", *arguments])

        assert "- is given twice" in capsys.readouterr().err

    def test_pipe_without_writer(self, tmp_path: Path) -> None:
        """The command reports that it waits for a pipe; Ctrl-C stops it."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        command = [sys.executable, "-m", "tracedstore.tools.cli.main", "report"]
        output = ["--output", str(tmp_path / "out.html")]
        for path, name in ((str(pipe), str(pipe)), ("-", "standard input")):
            with subprocess.Popen(
                [*command, path, *output],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stderr is not None
                message = process.stderr.readline()
                process.send_signal(signal.SIGINT)
                rest = process.communicate(timeout=240)

            assert message == (
                f"tracedstore: waiting for {name}, which has no data yet\n"
            )
            assert (process.returncode, rest) == (130, ("", ""))

    def test_pipe_with_writer(self, tmp_path: Path) -> None:
        """A pipe such as ``<(zcat old.gz)`` is read without a message."""
        reading, writing = os.pipe()
        os.write(writing, gzip.compress(EVENT_LINE))
        os.close(writing)
        output = tmp_path / "out.html"

        code = main(["report", f"/dev/fd/{reading}", "--output", str(output)])

        os.close(reading)
        assert code == 0
        assert Page(output.read_text("utf-8")).texts["n-ranks"] == "1 of 4"

    def test_traces_without_spans(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The command warns if --traces contains no barrier span."""
        (tmp_path / "a.log").write_bytes(EVENT_LINE)
        (tmp_path / "otlp.json").write_text('{"resourceSpans": []}')
        output = ["--output", str(tmp_path / "out.html")]
        traces = ["--traces", str(tmp_path / "otlp.json")]

        assert main(["report", str(tmp_path / "a.log"), *traces, *output]) == 0

        assert capsys.readouterr().err.startswith(
            "tracedstore: no barrier span could be read"
        )

    def test_incomplete_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An incomplete file is named on standard error and on the page."""
        (tmp_path / "a.log").write_bytes(EVENT_LINE)
        (tmp_path / "b.log.gz").write_bytes(gzip.compress(EVENT_LINE)[:-12])
        output = tmp_path / "out.html"

        assert main(["report", str(tmp_path), "--output", str(output)]) == 0

        assert "b.log.gz" in capsys.readouterr().err
        assert "b.log.gz" in Page(output.read_text("utf-8")).texts["damaged"]

    def test_jinja2_is_loaded_for_the_page_only(self) -> None:
        """Importing the command does not import Jinja2."""
        script = (
            "import sys, tracedstore.tools.cli.report; print('jinja2' in sys.modules)"
        )

        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )

        assert done.stdout == "False\n"

    def test_help(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The help has examples and exit codes, and fits a terminal."""
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit, match="0"):
            main(["report", "--help"])

        text = capsys.readouterr().out
        assert "tracedstore report logs/ --output report.html" in text
        assert (
            "Exit codes: 0 the page is written, 1 nothing of a job could be read"
            in text
        )
        assert "130 Ctrl-C" in text
        assert max(map(len, text.splitlines())) <= 80


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    """Draw an event or a span with random fields, cut or mixed with another one."""
    record = dict(draw(st.sampled_from(all_events())))
    if "barrier" in record and record["event"] in {
        names.BARRIER_COMPLETED,
        names.BARRIER_TIMEOUT,
    }:
        record = span_from_event(record) if draw(st.booleans()) else record
    for name in draw(st.lists(st.sampled_from(sorted(record)), max_size=2)):
        record[name] = draw(JSON_VALUES)
    line = json.dumps(record).encode()
    cut = draw(st.integers(0, len(line)))
    return draw(
        st.sampled_from(
            [line, line[:cut], line[cut:], line + line[:cut], line[:cut] + line]
        )
    )


class TestFuzz:
    """Random damage to logs."""

    @given(
        files=st.lists(
            st.lists(damaged_lines() | st.binary(max_size=50), max_size=8), max_size=3
        ),
        pack=st.booleans(),
    )
    def test_page_or_error(
        self,
        files: list[list[bytes]],
        pack: bool,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        """The command never raises, counts every line, and escapes all texts."""
        folder = tmp_path_factory.mktemp("fuzz")
        for number, lines in enumerate(files):
            content = b"\n".join(lines)
            packed = gzip.compress(content) if pack and number == 0 else content
            (folder / f"rank{number}.log").write_bytes(packed)
        output = folder / "report.html"
        stats = ReadStats()
        records = LoggedEvents()
        printed = JobOutput()
        files_read = find_files([str(folder)], output)
        read_events(files_read, records.add, stats, output=printed)

        code = main(["report", str(folder), "--output", str(output)])

        assert code == (0 if records.event_counts or printed.of_job else 1)
        assert stats.events + stats.spans + stats.skipped >= stats.lines
        assert min(stats.unrelated, stats.truncated) >= 0
        assert sum(records.event_counts.values()) == stats.events + stats.spans
        if code == 0:
            shown = Page(io.StringIO(output.read_text("utf-8")).read())
            assert not shown.tags & {"script", "img"}
            assert "read" in shown.texts
