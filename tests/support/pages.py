"""A page as a reader has it: its tables, and what is written under an id."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from tempfile import mkdtemp

from support.tools import tool

# No disk is asked for a profile, no server for anything.
_BROWSER = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
    *("--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--v=0"),
)


class Page(HTMLParser):
    """What a page shows.

    Attributes:
        tables: The cells of each table by its id, the head first; tables of one id
            stand after each other.
        texts: What is written in elements with an id.
        tags: The kinds of elements there are.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self.tags: set[str] = set()
        self._table = ""
        self._open: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        self.tags.add(tag)
        name = dict(attrs).get("id")
        if tag == "table":
            self._table = str(name)
            self.tables.setdefault(self._table, [])
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in {"td", "th"}:
            self.tables[self._table][-1].append("")
        if tag not in {"meta", "link", "br"}:
            self._open.append((tag, name))

    def handle_endtag(self, tag: str) -> None:
        """End it."""
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        """Take a text in."""
        for tag, name in self._open:
            if name is not None and tag != "table":
                self.texts[name] = self.texts.get(name, "") + data
            if tag in {"td", "th"}:
                self.tables[self._table][-1][-1] += data

    def rows(self, name: str) -> list[dict[str, str]]:
        """Give a table's rows, by its head."""
        head, *rows = self.tables[name]
        return [dict(zip(head, row, strict=True)) for row in rows if row != head]


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in a real browser."""
    profile = mkdtemp(prefix="browser-")
    try:
        return subprocess.run(
            [
                *(tool("chromium"), *_BROWSER, f"--user-data-dir={profile}"),
                *(*options, page.resolve().as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def console(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Everything that a page made the browser say in its console."""
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
