"""The files of what is on the screen, and of the report of what was seen."""

import io
import re
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tracedstore.tools.report.analysis import Analysis, analyse
from tracedstore.tools.report.log_reader import ReadStats
from tracedstore.tools.report.logged_events import LoggedEvents
from tracedstore.tools.report.page import page
from tracedstore.tools.top.rows import plain_text
from tracedstore.tools.top.screen_events import Seen
from tracedstore.tools.top.views import detail_of_headline

if TYPE_CHECKING:
    from tracedstore.tools.top.app import TopApp

_MAX_WIDTH = 200
_NAME = "tracedstore-top-%Y%m%d-%H%M%S"

# The text of each file, by its suffix.
Files = Mapping[str, str]


def screen_files(app: "TopApp") -> Files:
    """Return the screen as SVG, and all rows of the view as text."""
    width = max(app.size.width, min(_MAX_WIDTH, 120))
    model = app.shown_model()
    rows = [
        *app.lines("title").rows,
        *detail_of_headline(model, width),
        *app.lines("tabs").rows,
        *app.lines("main").rows,
        *app.detail_rows(model, width),
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
