"""``tracedstore report``: what is read, what is made of it, and what is passed over."""

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
    LINE,
    Event,
    completed,
    event,
    gathered,
    lines,
    missed,
    span_of,
)
from support.pages import Page
from tracedstore import names
from tracedstore.cli.main import main
from tracedstore.report.analysis import Analysis, analysed
from tracedstore.report.formatting import duration, ranks
from tracedstore.report.headline import headline
from tracedstore.report.page import page
from tracedstore.report.reader import ReadStats, files_in, read_events
from tracedstore.report.records import COMPLETED, FAILED, TIMEOUT, WAITING, Facts


def analysis_of(told: Sequence[Event]) -> Analysis:
    """What is made of events."""
    facts = Facts()
    for each in told:
        assert facts.add(each), each
    return analysed(facts)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], tuple[list[Event], ReadStats]]:
    """Read a file that has this in it."""

    def reader(content: bytes) -> tuple[list[Event], ReadStats]:
        file = tmp_path / "rank.log"
        file.write_bytes(content)
        return gathered(file)

    return reader


Reader = Callable[[bytes], tuple[list[Event], ReadStats]]


class TestReading:
    """Lines of ours among all others."""

    def test_foreign(self, read: Reader) -> None:
        """Whatever a job prints, and JSON of others, is counted and passed over."""
        other = b'{"event": "epoch.done", "loss": 1}\nloss 0.5\n\n\xff\xfe\x00\n'

        found, stats = read(other + LINE + b"\n")

        assert [each["event"] for each in found] == [names.BARRIER_COMPLETED]
        assert (stats.lines, stats.foreign, stats.events) == (5, 4, 1)
        assert (stats.broken, stats.skipped) == (0, 4)

    @pytest.mark.parametrize(
        "before",
        [b"[default0]:", b"[rank3]: ", b"2026-11-16T09:00:00Z stderr F ", b"\x1b[0m"],
    )
    def test_what_launchers_put_before_a_line(
        self, read: Reader, before: bytes
    ) -> None:
        """Prefixes of torchrun and of container runtimes do no harm."""
        found, stats = read(before + LINE + b"\n")

        assert (found, stats.skipped) == ([json.loads(LINE)], 0)

    def test_other_renderers(self, read: Reader) -> None:
        """A renderer without blanks writes the same events."""
        tight = json.dumps(json.loads(LINE), separators=(",", ":")).encode()

        assert read(tight)[0] == [json.loads(LINE)]

    def test_truncated(self, read: Reader) -> None:
        """A rank that is killed leaves half a line."""
        for length in range(2, len(LINE)):
            found, stats = read(LINE[:length])

            assert (found, stats.broken) == ([], 1), LINE[:length]

    def test_mixed(self, read: Reader) -> None:
        """Two writers in one line: what is whole is read, what is not is counted."""
        found, stats = read(LINE[:70] + LINE + b"\n" + LINE + LINE + b"\n")

        assert (len(found), stats.events, stats.broken) == (3, 3, 1)

    def test_unfit(self) -> None:
        """An event whose fields are not what they should be is no event."""
        good = completed(0, 1.0, 0.5)
        wrong: list[Event] = [
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

        for change in wrong:
            facts = Facts()
            assert not facts.add(good | change), change
            assert (len(facts.visits), dict(facts.events)) == (0, {})
        assert not Facts().add(missed(0, 1.0) | {"missing_ranks": [0, "1"]})
        assert Facts().add(good)

    def test_times(self) -> None:
        """As structlog's TimeStamper writes them in any of its ways."""
        for written in ("2026-11-16T09:00:01Z", "2026-11-16T10:00:01+01:00"):
            facts = Facts()
            facts.add(completed(0, 1.0, 0.5) | {"timestamp": written})
            assert facts.first == 1794819601.0
        for other in ("2026-11-16T09:00:01", 1794819601.0):
            facts = Facts()
            facts.add(completed(0, 1.0, 0.5) | {"timestamp": other})
            assert facts.first == 1794819601.0

    def test_gzip(self, read: Reader) -> None:
        """Compressed, also when the end is missing."""
        packed = gzip.compress(lines([completed(0, 1.0, 0.5)] * 5000).encode(), 0)

        assert len(read(packed)[0]) == 5000
        found, stats = read(packed[: len(packed) // 2])
        assert 2000 < len(found) < 3000
        assert len(stats.damaged) == 1

    def test_long_lines(self, read: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
        """A line without end is not kept in memory."""
        monkeypatch.setattr("tracedstore.report.reader.LONGEST_LINE", 1000)

        found, stats = read(b"x" * 5000 + LINE + b"\n" + LINE + b"\n")

        assert (len(found), stats.long, stats.lines) == (1, 1, 2)

    def test_nested(self, read: Reader) -> None:
        """JSON that nests without end is broken, not the reader."""
        bomb = b'{"event": "barrier.completed", "a": ' + b"[" * 100_000

        assert read(bomb)[1].broken == 1

    def test_spans_on_many_lines(self, read: Reader) -> None:
        """ConsoleSpanExporter indents by default; such spans are read as well."""
        told = completed(2, 1.0, 0.5)
        written = "loss 0.5\n" + json.dumps(span_of(told), indent=4) + "\n"

        found, stats = read(written.encode())

        assert [each["rank"] for each in found] == [2]
        assert (stats.spans, stats.foreign) == (1, 1)

    def test_odd_lines_in_an_indented_span(self, read: Reader) -> None:
        """However its lines look, they are that span's, and counted once."""
        span = json.dumps(span_of(completed(2, 1.0, 0.5)), indent=4).splitlines()
        # One that looks cut off, and one that a runtime has as a line of two.
        odd = ['"links": [{"a": 1,', '"b": 2}],', '{"log":"\\"c\\":\\n3,\\n"}']

        found, stats = read("\n".join(["loss", span[0], *odd, *span[1:]]).encode())

        assert [each["rank"] for each in found] == [2]
        assert (stats.spans, stats.foreign, stats.broken) == (1, 1, 0)

    def test_objects_of_others(self, read: Reader) -> None:
        """One that a line has in its middle is not cut off; one without an end is."""
        _, stats = read(b'INFO args={"lr": 0.1} starting\nINFO args={"lr": 0.1, "b\n')

        assert (stats.foreign, stats.broken) == (1, 1)

    def test_indented_without_end(
        self, read: Reader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What begins with a brace is not held for ever, also if it is blank lines."""
        monkeypatch.setattr("tracedstore.report.reader.LONGEST_LINE", 5000)
        span = json.dumps(span_of(completed(2, 1.0, 0.5)), indent=4).encode()
        begin, rest = span.split(b"\n", 1)

        near, far = (
            read(begin + b"\n" * blank + rest)[1].spans for blank in (1000, 5000)
        )

        assert (near, far) == (1, 0)

    def test_folders(self, tmp_path: Path) -> None:
        """All below a folder, each file once, pipes and the report itself not."""
        deep = tmp_path / "attempt_0" / "0"
        deep.mkdir(parents=True)
        (deep / "stderr.log").write_text("x")
        (tmp_path / "again.log").symlink_to(deep / "stderr.log")
        (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
        (tmp_path / "report.html").write_text("<!DOCTYPE html>")
        os.mkfifo(tmp_path / "pipe")

        found = files_in(
            [str(tmp_path), str(deep / "stderr.log")], tmp_path / "report.html"
        )

        assert found == [str(tmp_path / "again.log")]


class TestRounds:
    """Who was at a barrier at the same time."""

    def test_arrivals(self) -> None:
        """They are by how long each waited, whatever the clocks of hosts say."""
        told = [completed(0, 10, 3.0), completed(1, 10, 2.5)]
        # The other host is a minute ahead.
        told += [completed(2, 70, 1.0), completed(3, 70, 0.0)]

        (seen,) = analysis_of(told).rounds

        assert seen.kind == COMPLETED
        assert dict(zip(seen.ranks, seen.late, strict=True)) == pytest.approx(
            {0: 0.0, 1: 0.5, 2: 2.0, 3: 3.0}
        )
        assert (seen.last, seen.spread) == (3, 3.0)

    def test_log_and_trace(self) -> None:
        """What both tell is told once; what only one tells is there."""
        from tracedstore.report.span_files import as_event

        both = [completed(0, 10, 3.0), completed(1, 10, 2.0), missed(0, 20, 1)]
        spans = [as_event(span_of(each)) for each in [*both, completed(2, 10, 1.0)]]

        one, other = analysis_of([*both, *(each for each in spans if each)]).rounds

        assert sorted(one.ranks) == [0, 1, 2]
        assert (other.kind, list(other.ranks), len(other.reports)) == (TIMEOUT, [0], 1)

    def test_copies(self) -> None:
        """A log that is given twice counts once."""
        told = [completed(rank, 10, 3.0 - rank) for rank in range(4)]

        (seen,) = analysis_of(told * 2).rounds

        assert sorted(seen.ranks) == [0, 1, 2, 3]

    def test_restart(self) -> None:
        """The same prefix after a restart is another barrier."""
        told = [missed(rank, 10, 3) for rank in range(3)]
        told += [completed(rank, 30, 1.0, "b/1") for rank in range(4)]

        one, other = analysis_of(told).rounds

        assert (one.kind, sorted(one.ranks)) == (TIMEOUT, [0, 1, 2])
        assert (other.kind, sorted(other.ranks)) == (COMPLETED, [0, 1, 2, 3])

    def test_jobs(self) -> None:
        """Two jobs with the same keys are two."""
        told = [completed(0, 10, 1.0) | {"run_id": job} for job in ("one", "two")]

        assert len(analysis_of(told).rounds) == 2

    def test_last_unknown(self) -> None:
        """Where the last one did not say so, it is told by who waited least."""
        told = [completed(rank, 10, 4.0 - rank, last=None) for rank in range(4)]

        assert analysis_of(told).rounds[0].last == 3
        assert analysis_of(told[:3]).rounds[0].last == -1

    def test_nobody(self) -> None:
        """A completion of which is known neither whose nor of how many."""
        told = completed(0, 10, 4.0, last=None)
        del told["rank"], told["world_size"]

        (seen,) = analysis_of([told]).rounds

        assert (seen.kind, list(seen.ranks), seen.last) == (COMPLETED, [], -1)


def article(told: Sequence[Event]) -> str:
    """What the page says of the only incident."""
    html = page(analysis_of(told), ReadStats())
    found = re.search(r"<article.*?</article>", html, re.DOTALL)
    assert found
    return re.sub(r"<[^>]*>", " ", found[0]).replace("  ", " ").replace(" .", ".")


class TestIncidents:
    """Who was missing."""

    def test_agreed(self) -> None:
        """All say the same; it is counted how many."""
        told = [missed(rank, 10 + rank / 10, 3) for rank in range(3)]

        (incident,) = analysis_of(told).incidents

        assert (incident.missing, incident.came) == ([3], [])
        (opinion,) = incident.opinions
        assert [report.rank for report in opinion.reports] == [0, 1, 2]

    def test_not_agreed(self) -> None:
        """Who was missed by one and came later is not missing."""
        told = [missed(0, 10, 2, 3), missed(1, 10, 2, 3), missed(2, 14, 3)]

        (incident,) = analysis_of(told).incidents

        assert (incident.missing, incident.came) == ([3], [2])
        assert [len(opinion.reports) for opinion in incident.opinions] == [2, 1]

    def test_late(self) -> None:
        """It was waited for, and it completed: told once, and after the others."""
        waiting = names.BARRIER_WAITING
        told = [
            missed(0, 10, 3, name=waiting, barrier="b/0", waited=2.0),
            missed(0, 12, 3, name=waiting, barrier="b/0", waited=4.0),
            *(completed(rank, 13, 5.0 if rank < 3 else 0.0) for rank in range(4)),
            missed(0, 40, 2),
        ]

        bad, late = analysis_of(told).incidents

        assert bad.round.kind == TIMEOUT
        assert (late.round.kind, late.missing, late.came) == (COMPLETED, [], [3])
        assert [report.waited for report in late.opinions[0].reports] == [5.0]
        (row,) = Page(page(analysis_of(told), ReadStats())).rows("t-late")
        assert (row["barrier"], row["came late"]) == ("b/0", "rank 3 on node1")
        assert (row["missed by"], row["wait"]) == ("rank 0", "5 s")

    def test_killed(self) -> None:
        """A job that was killed while it waited has no end in its log."""
        told = [missed(0, 10, 3, name=names.BARRIER_WAITING, waited=2.0)]

        (incident,) = analysis_of(told).incidents

        assert (incident.round.kind, incident.missing) == (WAITING, [3])
        shown = article(told)
        assert "Missing when last heard, at 09:00:10.000 UTC" in shown
        assert "rank 3 on node1. No end was seen" in shown

    def test_failed_after_warnings(self) -> None:
        """The error, and who had been missing before it."""
        waiting = names.BARRIER_WAITING
        failed = missed(0, 14, name=names.BARRIER_FAILED, waited=6.0)
        failed |= {"error_type": "torch.distributed.DistNetworkError", "error": "gone"}
        told = [
            missed(0, 10, 2, 3, name=waiting, waited=2.0),
            missed(0, 12, 3, name=waiting, waited=4.0),
            failed,
            failed | {"rank": 1},
        ]

        (incident,) = analysis_of(told).incidents

        assert (incident.round.kind, incident.missing) == (FAILED, [3])
        assert sorted(len(opinion.reports) for opinion in incident.opinions) == [1, 1]
        shown = article(told)
        assert "Missing when last heard, at 09:00:12.000 UTC" in shown
        assert "rank 3 on node1. Then the store failed" in shown
        assert "DistNetworkError: gone before that: missing 1 of 4" in shown
        assert "2 ranks said so, and they agree." in shown
        assert "nobody knows who was missing" in article([failed])

    def test_went_on(self) -> None:
        """Completions are seldom logged: who came to a later barrier was let go."""
        waiting = names.BARRIER_WAITING
        told = [
            missed(0, 10, 3, name=waiting, waited=2.0),
            missed(1, 11, 3, name=waiting, waited=2.0),
        ]
        later = missed(0, 60, 2, name=waiting, barrier="b/2", waited=2.0)

        last, late = analysis_of([*told, later]).incidents
        found = analysis_of([*told, later | {"pid": 8}]).incidents

        assert (last.round.barrier.prefix, last.missing) == ("b/2", [2])
        assert (late.missing, late.came) == ([], [3])
        shown = Page(page(analysis_of([*told, later]), ReadStats()))
        counts = [shown.texts[f"n-{name}"] for name in ("completed", "guessed", "open")]
        assert counts == ["0", "1", "1"]
        (row,) = shown.rows("t-late")
        assert (row["barrier"], row["completed (UTC)"]) == ("b/1", "after 09:00:11.000")
        # Another process of that rank: the job was killed there, and began anew.
        assert [each.missing for each in found] == [[3], [2]]

    def test_went_on_as_it_seems(self) -> None:
        """What is not known to have completed is not said to have."""
        warned = [
            missed(rank, 30, 2, name=names.BARRIER_WAITING, waited=30.0)
            for rank in (0, 1)
        ]
        # The next warning is due at 60; who is elsewhere before that may have two
        # threads, and one of them may wait still.
        early, later = (
            [completed(rank, end, 1.0, "b/2") for rank in (0, 1, 2, 3)]
            for end in (59.0, 61.0)
        )

        (maybe,) = analysis_of([*warned, *early]).incidents
        (seems,) = analysis_of([*warned, *later]).incidents

        assert (maybe.round.completed, maybe.missing) == (False, [2])
        assert (seems.round.completed, seems.came) == (True, [2])
        assert "this one may have completed" in article([*warned, *early])
        said = headline(analysis_of([*warned, *early]))
        assert said.text == "Rank 2 on node1 had not come to b/1 at the last warning"
        assert said.more.endswith(
            "No end was seen, but one came to another barrier later."
        )
        said = headline(analysis_of([*warned, *later]))
        assert said.text == (
            "All 2 barriers completed, as far as can be told, but rank 2 on node1 kept"
            " the others waiting at b/1"
        )
        assert (
            said.more == "For 30 s or longer. The end of 1 barrier is not in the logs."
        )

    def test_waits_at_two(self) -> None:
        """Two threads that hang at two barriers have not gone on from the first."""
        told = [
            missed(
                0,
                when,
                3,
                name=names.BARRIER_WAITING,
                barrier=barrier,
                waited=when - came,
            )
            for barrier, came in (("b/1", 1), ("b/2", 6))
            for when in (came + 30, came + 60)
        ]

        found = analysis_of(told).incidents

        assert [each.missing for each in found] == [[3], [3]]
        assert not any(each.round.went_on for each in found)

    def test_others_still_wait(self) -> None:
        """One that went elsewhere is no proof, as long as another one waits here."""
        waiting = names.BARRIER_WAITING
        told = [
            missed(0, 10, 3, name=waiting, waited=2.0),
            completed(0, 20, 1.0, "b/2"),
            missed(1, 24, 3, name=waiting, waited=16.0),
        ]

        (incident,) = analysis_of(told).incidents

        assert (incident.missing, incident.round.went_on) == ([3], False)

    def test_late_then_killed(self) -> None:
        """What hangs comes before what may have been late only."""
        waiting = names.BARRIER_WAITING
        told = [
            missed(0, 60, 3, name=waiting, waited=60.0),
            missed(0, 96, 2, name=waiting, barrier="b/2", waited=30.0),
        ]

        said = headline(analysis_of(told))

        assert said.text == "Rank 2 on node1 had not come to b/2 when the logs end"
        assert said.more.endswith("1 more barrier may not have completed.")

    def test_last_word(self) -> None:
        """Of those that are missing, by what it was."""
        early = [completed(2, 3, 1.0), completed(3, 4, 1.0)]

        shown = article([*early, missed(0, 20, 1, 2, 3)])

        assert (
            "Last word in the logs: rank 1: none; ranks 2-3: barrier.completed at"
            " 09:00:03.000 to 09:00:04.000." in shown
        )

    def test_later_looks_know_better(self) -> None:
        """Who is not missed any more has come, also if it could not say so itself."""
        waiting = names.BARRIER_WAITING
        first = missed(1, 10, 2, 3, name=waiting, waited=2.0)

        for when, came in ((10.5, []), (12.0, [2])):
            told = [first, missed(0, when, 3, name=waiting, waited=4.0)]
            (incident,) = analysis_of(told).incidents

            assert incident.missing == ([3] if came else [2, 3])
            assert incident.came == came


class TestStragglers:
    """Who the others wait for."""

    def test_ranked(self) -> None:
        """Those that never came first, then by what they cost."""
        told = []
        for number in range(5):
            late = 2 if number == 4 else 3
            told += [
                completed(
                    rank,
                    10 * number + 9,
                    0 if rank == late else 4.0,
                    f"b/{number}",
                    late,
                )
                for rank in range(4)
            ]
        told += [missed(0, 100, 1, barrier="b/9")]

        first, second, third = analysis_of(told).stragglers

        assert (first.rank, first.missing, first.last) == (1, 1, 0)
        assert (second.rank, second.last, second.rounds) == (3, 4, 5)
        assert (second.cost, second.late, second.worst) == pytest.approx((16, 4, 4))
        assert (third.rank, third.last, third.late, third.worst_at) == (2, 1, 0, "b/4")

    def test_clocks(self) -> None:
        """A host whose clock is ahead is known by when its ranks were let go."""
        told = [
            completed(rank, 10 * number + (1.5 if rank == 4 else 0), 1.0, f"b/{number}")
            for number in range(1, 6)
            for rank in range(5)
        ]

        found = analysis_of([*told, missed(4, 100, 3)])

        assert found.clocks == pytest.approx(
            {"node0": 0, "node1": 0, "node2": 1.5}, abs=1e-3
        )
        shown = Page(page(found, ReadStats()))
        assert [row["ahead of most by"] for row in shown.rows("t-clocks")] == ["1.5 s"]
        assert "(its clock is ahead of most by 1.5 s)" in shown.texts["first-failure"]


class TestHeadline:
    """What went wrong, said at once."""

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
    LATE = missed(0, 11, 3, name=WAITING, barrier="b/0", waited=2.0)
    BROKEN = event(
        names.OPERATION_FAILED,
        3,
        2,
        operation="get",
        key="k",
        duration_seconds=1,
        error_type="timeout",
        error="late",
    )
    STALLED = event(
        names.OPERATION_STALLED,
        30,
        operation="wait",
        key="default_pg/0//cpu//0/1",
        waited_seconds=30.0,
        world_size=3,
    )
    ALL = tuple(completed(rank, 12, 3.0 if rank < 3 else 0.0) for rank in range(4))

    @pytest.mark.parametrize(
        ("told", "said", "more"),
        [
            (
                [missed(0, 10, 1, 3), missed(2, 11, 1, 3)],
                "Ranks 1 and 3 on node0 and node1 never came to b/1",
                "2 ranks of 4 gave up after 5 s, the last at 09:00:11.000 UTC.",
            ),
            (
                [missed(0, 10, 3), missed(0, 90, 3, barrier="b/2"), *ALL],
                "Rank 3 on node1 never came to b/1",
                (
                    "1 rank of 4 gave up after 5 s, the last at 09:00:10.000 UTC."
                    " 1 more barrier did not complete either."
                ),
            ),
            (
                [missed(0, 10)],
                "b/1 timed out, and nobody could say who was missing",
                "1 rank of 4 gave up after 5 s, the last at 09:00:10.000 UTC.",
            ),
            (
                [missed(0, 10, 3, name=WAITING)],
                "Rank 3 on node1 had not come to b/1 when the logs end",
                (
                    "1 rank had waited for up to 5 s when last heard, at 09:00:10.000"
                    " UTC. No end was seen."
                ),
            ),
            (
                [missed(0, 10, 2, 3, name=WAITING, waited=2.0), FAILED],
                "The store failed at b/1 while ranks 2 and 3 on node1 were missing",
                "gone: no server, at 09:00:14.000 UTC.",
            ),
            (
                [FAILED],
                "The store failed at b/1",
                "gone: no server, at 09:00:14.000 UTC.",
            ),
            (
                [BROKEN, *ALL],
                "Rank 2 on node1 failed: get k",
                "timeout: late, at 09:00:03.000 UTC.",
            ),
            (
                [LATE, *ALL],
                (
                    "The only barrier completed, but rank 3 on node1 kept the others"
                    " waiting at b/0"
                ),
                "For 3 s.",
            ),
            (
                [STALLED, STALLED | {"rank": 2, "waited_seconds": 60.0}],
                "Ranks 0 and 2 on node0 were blocked in wait default_pg/0//cpu//0/1",
                "For 60 s or longer. Nothing was heard of rank 1.",
            ),
            (
                [*ALL, *(each | {"barrier": "b/2"} for each in ALL)],
                "All 2 barriers completed",
                "Nothing that was told of failed.",
            ),
        ],
    )
    def test_said(self, told: list[Event], said: str, more: str) -> None:
        """The worst of it, and when."""
        shown = Page(page(analysis_of(told), ReadStats()))

        assert (shown.texts["headline"], shown.texts["lead"]) == (said, more)

    def test_short(self) -> None:
        """However many ranks, and whatever a barrier is called."""
        waited = missed(0, 10, *range(1, 2000, 2), barrier="b" * 500)

        said = headline(analysis_of([waited | {"missing_names": []}])).text

        assert said.startswith("Ranks 1,3,5,")
        assert ", ... never came to bbb" in said
        assert len(said) < 200


HOSTILE = "</code><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def everything() -> list[Event]:
    """One of every event, with texts that would like to be HTML."""
    call: Event = {
        "operation": "get",
        "store": "tcp_store",
        "key": HOSTILE,
        "key_family": HOSTILE + "/*",
        "suppressed_count": 2,
    }
    failed: Event = {"error_type": "timeout", "error": HOSTILE}
    told = [
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
        event(names.TELEMETRY_DISABLED, 7, observer="spans", **failed),
        event(names.TELEMETRY_SERVING, 8, url="http://node0:9400"),
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
        missed(0, 20, 3, barrier=HOSTILE + "/1") | {"missing": HOSTILE},
        missed(1, 20, 3, barrier="w", name=names.BARRIER_WAITING),
    ]
    told += [completed(rank, 12, 3.0 - rank, HOSTILE + "/0") for rank in range(4)]
    assert {each["event"] for each in told} == set(names.EVENT_NAMES)
    return told


class TestPage:
    """What a reader gets to see."""

    def test_everything(self) -> None:
        """Numbers are the input's, and nothing of it is HTML."""
        html = page(analysis_of(everything()), ReadStats())

        shown = Page(html)
        assert not shown.tags & {"script", "img", "iframe", "object"}
        assert "default-src 'none'" in html
        assert "http://" not in html
        assert "https://" not in html
        assert shown.texts["n-ranks"] == "4 of 4"
        ended = {
            name: shown.texts[f"n-{name}"] for name in ("timeouts", "failed", "open")
        }
        assert ended == {"timeouts": "1", "failed": "1", "open": "1"}
        slow = [row for row in shown.rows("t-calls") if row[""] == "slow"]
        assert [(row["calls"], row["ranks"], row["longest"]) for row in slow] == [
            ("6", "2", "1.5 s")
        ]
        assert slow[0]["key family"] == HOSTILE + "/*"
        cas = {row[""]: row["most in a row"] for row in shown.rows("t-cas")}
        assert cas == {
            "lost compare-and-sets": "9",
            "lost writes of the rendezvous": "5",
        }
        assert shown.texts["first-failure"].startswith(f"pid 7 on {HOSTILE} at")
        counted = {row["event"]: row["how many"] for row in shown.rows("t-events")}
        assert counted.keys() == set(names.EVENT_NAMES)
        assert counted[names.BARRIER_COMPLETED] == "4"

    def test_one_line_is_enough(self) -> None:
        """Whatever the only event is, there is a page."""
        for told in everything():
            shown = Page(page(analysis_of([told]), ReadStats()))

            assert [row["event"] for row in shown.rows("t-events")] == [told["event"]]

    def test_one_barrier(self) -> None:
        """Its ranks stand side by side, those that never came as well."""
        html = page(
            analysis_of([missed(0, 10, 2, 3), missed(1, 10, 2, 3)]), ReadStats()
        )

        places = re.findall(r'class="dot" cx="([0-9.]+)"', html)
        crosses = re.findall(r'class="cross" d="M([0-9.]+)', html)
        assert len({*places, *crosses}) == 4
        assert 'id="lateness"' not in html

    def test_its_size_is_bounded(self) -> None:
        """Many ranks and barriers make no larger a page."""
        told = [
            completed(rank, 10 * (number + 1), rank / 100, f"b/{number}")
            for number in range(250)
            for rank in range(120)
        ]

        html = page(analysis_of(told), ReadStats())

        assert len(html) < 300_000
        assert html.count("<circle") <= 60

    @pytest.mark.parametrize(
        ("seconds", "shown"),
        [
            (0, "0"),
            (0.0000123, "12 µs"),
            (0.00345, "3.45 ms"),
            (12.34, "12.3 s"),
            (125, "2 min 5 s"),
            (11045, "3 h 4 min"),
            (-0.5, "-500 ms"),
        ],
    )
    def test_durations(self, seconds: float, shown: str) -> None:
        """In the unit that fits."""
        assert duration(seconds) == shown

    def test_ranks(self) -> None:
        """Folded, and of very many the first."""
        assert ranks([3]) == "rank 3"
        assert ranks([1, 2, 5]) == "ranks 1-2,5"
        assert ranks([]) == "nobody"
        assert len(ranks(range(0, 9999, 2))) < 350


class TestCommand:
    """From the terminal."""

    def test_written(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Logs and spans, one page, and two lines that say what is in it."""
        told = [completed(0, 10, 3.0), missed(0, 20, 1)]
        (tmp_path / "rank0.log").write_text("loss 0.5\n" + lines(told))
        spans = [span_of(completed(1, 10, 0.0))]
        (tmp_path / "spans.jsonl").write_text(lines(spans))
        output = tmp_path / "out.html"
        traces = ["--traces", str(tmp_path / "spans.jsonl")]

        code = main(
            ["report", str(tmp_path / "rank0.log"), *traces, "--output", str(output)]
        )

        assert code == 0
        assert capsys.readouterr().out == (
            f"{output}: 2 ranks, 2 barriers, 1 incident\n"
            "4 lines read: 2 events, 1 barrier span, 1 of others, 0 damaged\n"
        )
        assert Page(output.read_text("utf-8")).texts["n-ranks"] == "2 of 4"

    def test_counted_once(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Every line is in one of the numbers: what does not fit is no event."""
        late = completed(1, 10, 0.0)
        unfit = [completed(0, 10, 3.0) | {"rank": "0"}, span_of(late | {"rank": "1"})]
        log = tmp_path / "rank.log"
        text = lines([completed(0, 10, 3.0), span_of(late), *unfit])
        log.write_text(f'{text}args={{"lr": 0.1}} starting\nloss\n{{"timesta')
        output = tmp_path / "out.html"

        assert main(["report", str(log), "--output", str(output)]) == 0

        assert capsys.readouterr().out.endswith(
            "\n7 lines read: 1 event, 1 barrier span, 2 of others, 3 damaged\n"
        )
        rows = Page(output.read_text("utf-8")).rows("t-read")
        assert [row["how many"] for row in rows] == ["7", "1", "1", "2", "1", "2", "0"]

    def test_standard_input(self, tmp_path: Path) -> None:
        """From a pipe; a lone surrogate in a key does no harm."""
        told = lines([completed(0, 10, 3.0, "b/\ud800")])

        done = subprocess.run(
            [sys.executable, "-m", "tracedstore.cli.main", "report", "-"],
            input=told,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "report.html").stat().st_size > 5000

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["nowhere.log"], "nowhere.log cannot be read: No such file or directory"),
            (["people.log"], "none of 2 lines in people.log is an event that can be"),
            (["people.log", "bin"], "none of 5 lines in 2 files is an event that can"),
            (["empty"], "no file is in empty: name the ranks' logs, or a folder"),
            (["none.log"], "none.log: nothing is written there; name the ranks' logs"),
            (["/dev/null"], "/dev/null: nothing is written there; name the ranks'"),
            (["/proc/self/mem"], "cannot be read: /proc/self/mem: Input/output error"),
            (["cut.gz"], "cannot be read: cut.gz: Compressed file ended before"),
            (["good.log", "x" * 300], f"{'x' * 300} cannot be read: File name too"),
            (
                ["good.log", "--output", "no/where.html"],
                "no/where.html cannot be written: there is no folder no; make it",
            ),
            (
                ["good.log", "--output", "good.log/x.html"],
                "good.log/x.html cannot be written: there is no folder good.log; make",
            ),
            (
                ["good.log", "--output", "empty"],
                "empty is a folder: name a file in it, as --output empty/report.html",
            ),
            (["good.log", "--output", "/dev/full"], "/dev/full cannot be written: No"),
            (["good.log", "--output", "x" * 300], f"{'x' * 300} cannot be written: F"),
            (
                ["people.log", "good.log", "--output", "good.log"],
                "good.log is one of the logs, and would be written over: name another",
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
        said: str,
    ) -> None:
        """One sentence each."""
        monkeypatch.chdir(tmp_path)
        Path("empty").mkdir()
        Path("people.log").write_text("[warning  ] barrier.timeout  rank=3\nloss\n")
        Path("good.log").write_bytes(LINE)
        Path("none.log").touch()
        Path("bin").write_bytes(b"\x7fELF\0\n\xff\xfe{\n\0")
        Path("cut.gz").write_bytes(gzip.compress(b"x" * 999)[:12])

        assert main(["report", *arguments]) == 1

        errors = capsys.readouterr().err
        assert errors.startswith(f"tracedstore: {said}")
        assert errors.count("\n") == 1
        assert Path("good.log").read_bytes() == LINE

    def test_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A report among the logs is written anew, also into an empty file."""
        monkeypatch.chdir(tmp_path)
        Path("good.log").write_bytes(LINE)
        Path("report.html").touch()

        for _ in range(2):
            assert main(["report", "good.log", "report.html"]) == 0
            assert main(["report", "."]) == 0

        shown = Page(Path("report.html").read_text("utf-8"))
        assert shown.rows("t-read")[0]["how many"] == "1"

    @pytest.mark.parametrize("twice", [["-", "-"], ["-", "--traces", "-"]])
    def test_standard_input_twice(
        self, twice: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It can be read once."""
        with pytest.raises(SystemExit, match="64"):
            main(["report", *twice])

        assert "- is given twice" in capsys.readouterr().err

    def test_pipe(self, tmp_path: Path) -> None:
        """One into which nobody writes is said to be waited for; Ctrl-C ends that."""
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        command = [sys.executable, "-m", "tracedstore.cli.main", "report"]
        output = ["--output", str(tmp_path / "out.html")]
        for place, told in ((str(pipe), str(pipe)), ("-", "standard input")):
            with subprocess.Popen(
                [*command, place, *output],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            ) as running:
                assert running.stderr is not None
                said = running.stderr.readline()
                running.send_signal(signal.SIGINT)
                rest = running.communicate(timeout=20)

            assert said.startswith(f"tracedstore: waiting for {told}, in which nothing")
            assert (running.returncode, rest) == (130, ("", ""))

    def test_pipe_with_a_writer(self, tmp_path: Path) -> None:
        """As of ``<(zcat old.gz)``: nothing is said, and it is read."""
        reading, writing = os.pipe()
        os.write(writing, gzip.compress(LINE))
        os.close(writing)
        output = tmp_path / "out.html"

        code = main(["report", f"/dev/fd/{reading}", "--output", str(output)])

        os.close(reading)
        assert code == 0
        assert Page(output.read_text("utf-8")).texts["n-ranks"] == "1 of 4"

    def test_traces_without_spans(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Who gives a file of spans in another format learns of it."""
        (tmp_path / "a.log").write_bytes(LINE)
        (tmp_path / "otlp.json").write_text('{"resourceSpans": []}')
        output = ["--output", str(tmp_path / "out.html")]
        traces = ["--traces", str(tmp_path / "otlp.json")]

        assert main(["report", str(tmp_path / "a.log"), *traces, *output]) == 0

        assert capsys.readouterr().err.startswith(
            "tracedstore: no span of a barrier could be read"
        )

    def test_damaged_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What cannot be read to its end is said, there and on the page."""
        (tmp_path / "a.log").write_bytes(LINE)
        (tmp_path / "b.log.gz").write_bytes(gzip.compress(LINE)[:-12])
        output = tmp_path / "out.html"

        assert main(["report", str(tmp_path), "--output", str(output)]) == 0

        assert "b.log.gz" in capsys.readouterr().err
        assert "b.log.gz" in Page(output.read_text("utf-8")).texts["damaged"]

    def test_help(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has examples and the exit codes, and fits a terminal."""
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit, match="0"):
            main(["report", "--help"])

        said = capsys.readouterr().out
        assert "tracedstore report logs/ --output report.html" in said
        assert "Exit codes: 0 written, 1 there is nothing to read" in said
        assert "130 Ctrl-C" in said
        assert max(map(len, said.splitlines())) <= 80


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """An event, or a span, to which something happened."""
    told = dict(draw(st.sampled_from(everything())))
    if "barrier" in told and told["event"] in {
        names.BARRIER_COMPLETED,
        names.BARRIER_TIMEOUT,
    }:
        told = span_of(told) if draw(st.booleans()) else told
    for name in draw(st.lists(st.sampled_from(sorted(told)), max_size=2)):
        told[name] = draw(JSON_VALUES)
    line = json.dumps(told).encode()
    cut = draw(st.integers(0, len(line)))
    return draw(
        st.sampled_from(
            [line, line[:cut], line[cut:], line + line[:cut], line[:cut] + line]
        )
    )


class TestFuzz:
    """A folder of logs that anything may have happened to."""

    @given(
        files=st.lists(
            st.lists(spoiled() | st.binary(max_size=50), max_size=8), max_size=3
        ),
        pack=st.booleans(),
    )
    def test_there_is_a_page_or_a_sentence(
        self,
        files: list[list[bytes]],
        pack: bool,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        """Never a traceback; every line is read or counted; all of it is escaped."""
        folder = tmp_path_factory.mktemp("fuzz")
        for number, content in enumerate(files):
            written = b"\n".join(content)
            packed = gzip.compress(written) if pack and number == 0 else written
            (folder / f"rank{number}.log").write_bytes(packed)
        output = folder / "report.html"
        stats = ReadStats()
        facts = Facts()
        read_events(files_in([str(folder)], output), facts.add, stats)

        code = main(["report", str(folder), "--output", str(output)])

        assert code == (0 if facts.events else 1)
        assert stats.events + stats.spans + stats.skipped >= stats.lines
        assert min(stats.foreign, stats.broken) >= 0
        assert sum(facts.events.values()) == stats.events + stats.spans
        if code == 0:
            shown = Page(io.StringIO(output.read_text("utf-8")).read())
            assert not shown.tags & {"script", "img"}
            assert "read" in shown.texts
