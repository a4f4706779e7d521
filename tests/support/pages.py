"""Parses HTML pages, and opens them in a browser."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from tempfile import mkdtemp

from support.tools import tool

# Chromium uses a new profile and no network.
BROWSER_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--v=0"),
)
_VOID_ELEMENTS = {"meta", "link", "br"}


class Page(HTMLParser):
    """The texts of a page. White space is collapsed, as in a browser.

    Attributes:
        tables: The cells of each table by its id, with the head as the first row. The
            rows of several tables with one id follow each other.
        texts: The text of each element with an id, except tables.
        tags: The names of all elements.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.tags: set[str] = set()
        self._table = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)
        self.texts = {name: _collapse(text) for name, text in self.texts.items()}
        self.tables = {
            name: [[_collapse(cell) for cell in row] for row in rows]
            for name, rows in self.tables.items()
        }

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element."""
        self.tags.add(tag)
        name = dict(attrs).get("id")
        if tag == "table":
            self._table = str(name)
            self.tables.setdefault(self._table, [])
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in {"td", "th"}:
            self.tables[self._table][-1].append("")
        if tag not in _VOID_ELEMENTS:
            self._open.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        """Close an element."""
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Add text to all open elements."""
        for tag, name in self._open:
            if name is not None and tag != "table":
                self.texts[name] = self.texts.get(name, "") + data
            if tag in {"td", "th"}:
                self.tables[self._table][-1][-1] += data

    def rows(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table, with the texts of its head as keys."""
        head, *rows = self.tables[name]
        return [dict(zip(head, row, strict=True)) for row in rows if row != head]


def _collapse(text: str) -> str:
    return " ".join(text.split())


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in headless Chromium."""
    profile = mkdtemp(prefix="browser-")
    try:
        return subprocess.run(
            [
                *(tool("chromium"), *BROWSER_OPTIONS, f"--user-data-dir={profile}"),
                *(*options, page.resolve().as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def console_messages(browser: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the messages in the console of the browser."""
    return [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
