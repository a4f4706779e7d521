"""The files of what is on the screen, and of the report of what was seen."""

import io
import re
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracedstore import names
from tracedstore.tools.job_view import (
    BarrierView,
    JobView,
    RankName,
    RankView,
    StallView,
)
from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.page import page
from tracedstore.tools.top.rows import plain_text
from tracedstore.tools.top.views import detail_of_headline

if TYPE_CHECKING:
    from tracedstore.tools.top.app import TopApp

_MAX_WIDTH = 200
_NAME = "tracedstore-top-%Y%m%d-%H%M%S"

# Arrivals that are kept, of the newest barriers; a million take about 12 MB.
_MAX_ARRIVALS = 1_000_000
_MAX_STALLS = 1000
# Ranks that are named as those that reported a stall.
_MAX_REPORTERS = 64

_Key = tuple[str, float]

# The text of each file, by its suffix.
Files = Mapping[str, str]


class Seen:
    """Barriers and stalls, each as it was seen last."""

    def __init__(self) -> None:
        self._barriers: dict[_Key, tuple[BarrierView, float]] = {}
        self._stalls: dict[_Key, StallView] = {}
        self._ranks: dict[RankName, RankView] = {}
        self._arrivals = 0

    def add(self, job: JobView) -> None:
        """Add what a reading has."""
        for rank in job.ranks:
            if rank.registered is not None:
                self._ranks[rank.name] = rank
        for barrier in (*job.finished, *job.unfinished):
            if barrier.first is None:
                continue
            key = barrier.prefix, barrier.first
            before = self._barriers.get(key)
            new = len(barrier.ranks) - (len(before[0].ranks) if before else 0)
            if before is not None and before[0].complete:
                continue
            self._arrivals += new
            self._barriers[key] = barrier, job.time
            while self._arrivals > _MAX_ARRIVALS:
                self._forget_oldest()
        for stall in job.stalls:
            if len(self._stalls) < _MAX_STALLS:
                self._stalls[stall.phase, stall.reported] = stall

    def _forget_oldest(self) -> None:
        oldest, _ = self._barriers.pop(next(iter(self._barriers)))
        self._arrivals -= len(oldest.ranks)

    def copy(self) -> "Seen":
        """Return a copy, for another thread."""
        other = Seen()
        other._barriers = dict(self._barriers)
        other._stalls = dict(self._stalls)
        other._ranks = dict(self._ranks)
        return other

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that the ranks would have logged."""
        for barrier, seen in self._barriers.values():
            yield from self._barrier(barrier, seen)
        for stall in self._stalls.values():
            for rank in stall.reporters[:_MAX_REPORTERS] or (None,):
                event = self._event(names.JOB_STALLED, stall.reported, "", rank)
                yield {**event, **stall.fields}

    def _barrier(self, barrier: BarrierView, seen: float) -> Iterator[dict[str, Any]]:
        end = (barrier.last if barrier.complete else seen) or seen
        group = barrier.group or ""
        size = barrier.world_size or barrier.arrived
        for order, (rank, arrival) in enumerate(
            zip(barrier.ranks, barrier.times, strict=False), 1
        ):
            name = (
                names.BARRIER_COMPLETED if barrier.complete else names.BARRIER_WAITING
            )
            event = self._event(name, end, group, rank) | {
                "barrier": barrier.prefix,
                "world_size": size,
                "waited_seconds": max(0.0, end - arrival),
            }
            if barrier.complete:
                event |= {"last_rank": barrier.last_rank, "arrival_order": order}
            else:
                missing = list(barrier.missing_ranks)
                event |= {
                    "arrived_count": barrier.arrived,
                    "missing": barrier.missing,
                    "missing_ranks": missing,
                    "missing_names": [self._host(group, one) for one in missing],
                }
            yield event

    def _host(self, group: str, number: int) -> str:
        rank = self._ranks.get((group, number))
        return rank.host if rank is not None else f"rank {number}"

    def _event(
        self, name: str, time: float, group: str, number: int | None
    ) -> dict[str, Any]:
        event: dict[str, Any] = {"event": name, "timestamp": time}
        if number is None:
            return event
        rank = self._ranks.get((group, number))
        event["rank"] = number
        if rank is not None:
            event |= {"host": rank.host, "pid": rank.pid}
            if rank.run_id:
                event["run_id"] = rank.run_id
        return event


def screen_files(app: "TopApp") -> Files:
    """Return the screen as SVG, and all rows of the view as text."""
    width = max(app.size.width, min(_MAX_WIDTH, 120))
    job = app.shown_job()
    rows = [
        *app.lines("title").rows,
        *detail_of_headline(job, width),
        *app.lines("tabs").rows,
        *app.lines("main").rows,
        *app.detail_rows(job, width),
    ]
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    svg = screen_svg(app, f"tracedstore top {when}")
    return {".txt": f"{when}\n{plain_text(rows)}", ".svg": svg}


def screen_svg(app: "TopApp", title: str) -> str:
    """Return the screen as SVG, which loads nothing when it is opened."""
    svg = app.export_screenshot(title=title, simplify=True)
    return re.sub(r"\s*@font-face\s*{[^}]*}", "", svg)


def report_files(seen: Seen) -> Files:
    """Return a report of what was seen; nothing if there is nothing to report."""
    records, stats = LoggedEvents(), ReadStats()
    for event in seen.events():
        stats.lines += 1
        if records.add(event):
            stats.events += 1
        else:
            stats.invalid += 1
    return page_files(analyse(records), stats) if records.event_counts else {}


def page_files(analysis: Analysis, stats: ReadStats) -> Files:
    """Return the page of a report."""
    return {".html": page(analysis, stats)}


def write_files(files: Files, folder: Path) -> str:
    """Write files of one name into a folder; return a message."""
    try:
        stem = _new_stem(folder, tuple(files))
        for suffix, text in files.items():
            _write(stem.with_suffix(suffix), text)
    except OSError as error:
        return f"cannot be saved: {error.filename}: {error.strerror}"
    return f"saved {stem.name}{' and '.join(files)}"


def send_files(files: Files, app: "TopApp") -> str:
    """Let the browser download files, several in an archive; return a message."""
    name = time.strftime(_NAME)
    if len(files) == 1:
        ((suffix, text),) = files.items()
        content = io.BytesIO(text.encode("utf-8", "replace"))
    else:
        suffix, content = ".zip", io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for one, text in files.items():
                archive.writestr(name + one, text.encode("utf-8", "replace"))
    app.deliver_binary(content, save_filename=name + suffix)
    return f"sent {name}{suffix} to the browser"


def _new_stem(folder: Path, suffixes: tuple[str, ...]) -> Path:
    stem = folder / time.strftime(_NAME)
    number = 1
    while any(stem.with_suffix(suffix).exists() for suffix in suffixes):
        number += 1
        stem = folder / time.strftime(f"{_NAME}-{number}")
    return stem


def _write(path: Path, text: str) -> None:
    # "x": neither overwrites a file nor follows a link that another user made.
    with path.open("x", encoding="utf-8", errors="replace") as file:
        file.write(text)
