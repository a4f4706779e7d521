"""Whole screens of ``tracedstore top``, compared with pictures of them.

After an intended change, `UPDATE_SNAPSHOTS=1 pytest tests/unit/test_top_snapshots.py`
writes the pictures again. Look at them before you commit them.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.jobs_in_stores import arrive, block, judge
from support.pseudo_terminal import SIZE
from tracedstore.tools.job_view import JobView
from tracedstore.tools.top import views
from tracedstore.tools.top.live import LiveApp
from tracedstore.tools.top.reader_process import (
    ReaderAnswer,
    ReaderLostError,
    ReaderRequest,
)
from tracedstore.tools.top.saving import screen_svg
from unit.test_top import NOW, job, model_of

KEYS = {"/": "slash", "\n": "enter"}
SNAPSHOTS = Path(__file__).parent / "snapshots"


def large() -> Any:
    """Return a job of 1,024 ranks, of which one is missing at a barrier."""
    store = job(1024)
    arrive(store, "step/7", {r: NOW - 60 + r / 1024 for r in range(1024) if r != 700})
    return store


def slow() -> Any:
    """Return a job of 16 ranks: a straggler at one barrier, two missing at the next."""
    store = job(16)
    times = {r: NOW - 60 + r / 8 for r in range(16) if r != 5} | {5: NOW - 52}
    arrive(store, "step/1", times, complete=True)
    arrive(store, "step/2", {r: NOW - 40 + r for r in range(16) if r not in {5, 11}})
    return store


def stopped() -> Any:
    """Return a job of 16 ranks, which waits for a process that is stopped."""
    store = job(16)
    for rank in (0, 1):
        block(store, rank, NOW - 45)
    judge(store, NOW, [0, 1], {2: "stopped"})
    return store


class Source:
    """A job that does not change."""

    source = "tcp://node1:29400"
    asks = False

    def __init__(self, model: JobView) -> None:
        self._model = model

    def read(self, _request: ReaderRequest) -> ReaderAnswer:
        """Return the job."""
        return ReaderAnswer(job=self._model)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Show times as they are in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("name", "make", "keys"),
    [
        ("fleet-of-1024", large, ""),
        ("barriers", slow, "2"),
        ("stragglers", slow, "3"),
        ("verdict", stopped, "i"),
        ("filter", large, "/7\n"),
    ],
)
def test_screen(name: str, make: Callable[[], Any], keys: str, tmp_path: Path) -> None:
    """The screen is that of the picture."""
    app = LiveApp(Source(model_of(make())), 60.0, tmp_path)

    async def scenario() -> str:
        async with app.run_test(size=SIZE) as pilot:
            while not app.has_read:
                await pilot.pause(0.01)
            await pilot.press(*(KEYS.get(key, key) for key in keys))
            await pilot.pause()
            return screen_svg(app, "tracedstore top")

    svg = asyncio.run(scenario())
    text = "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())
    snapshot = SNAPSHOTS / f"{name}.svg"
    if "UPDATE_SNAPSHOTS" in os.environ:
        snapshot.parent.mkdir(exist_ok=True)
        snapshot.write_text(text, "utf-8")
    if snapshot.read_text("utf-8") != text:
        found = tmp_path / snapshot.name
        found.write_text(text, "utf-8")
        pytest.fail(f"the screen differs from {snapshot}: it is in {found}")


def test_phone(tmp_path: Path) -> None:
    """A narrow screen names the views without numbers; words stand for keys."""
    app = LiveApp(Source(model_of(stopped())), 60.0, tmp_path)

    async def scenario() -> None:
        async with app.run_test(size=(60, 50)) as pilot:
            while not app.has_read:
                await pilot.pause(0.01)
            assert app.lines("tabs").rows[0].text.split() == list(views.VIEWS)
            footer = app.lines("footer").rows[0].text
            await pilot.click("#footer", offset=(footer.index("i why"), 0))
            await pilot.pause()
            assert app.zoomed
            detail = app.lines("detail").rows
            assert any("remedy: " in one.text for one in detail)
            await pilot.click("#footer", offset=(footer.index("Esc"), 0))
            await pilot.pause()
            assert not app.zoomed

    asyncio.run(scenario())


def test_loading(tmp_path: Path) -> None:
    """Until the first reading the screen says that it loads, and nothing of ranks."""

    class Slow(Source):
        def read(self, _request: ReaderRequest) -> ReaderAnswer:
            ended.wait()
            raise ReaderLostError

    ended = threading.Event()
    app = LiveApp(Slow(model_of(job(1))), 60.0, tmp_path)

    async def scenario() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause()
            assert app.shown_job().headline.startswith("loading for ")
            assert [one.text for one in app.lines("main").rows] == []
            await pilot.press("up", "enter", "escape", "6", "1")
            ended.set()

    asyncio.run(scenario())
