"""The pictures of the demo: up to date, and without traces of their maker."""

import ast
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tracedstore.names import JOB_RESUMED
from tracedstore.tools.demo.rank import load_dataset
from tracedstore.tools.demo.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
SVG = PICTURES / "demo.svg"
# The title of the picture, and empty lines.
PICTURE_TEXT = {"", "tracedstore demo"}
# In an SVG of rich.
CHARACTER_WIDTH = 12.2
WORD = re.compile(r"[A-Za-z]{2,}")


def texts() -> list[str]:
    """Return the lines of text in the picture of the demo, without empty ones."""
    lines: dict[float, str] = {}
    for text in ET.parse(SVG).iter("{http://www.w3.org/2000/svg}text"):
        height = float(text.attrib["y"])
        column = round(float(text.attrib["x"]) / CHARACTER_WIDTH)
        lines[height] = lines.get(height, "").ljust(column) + "".join(text.itertext())
    ordered = [lines[height].replace("\xa0", " ").rstrip() for height in sorted(lines)]
    return [line for line in ordered if line.strip() not in PICTURE_TEXT]


def hang(name: str) -> list[str]:
    """Return the names of the drawings of a hang: its log, and its screen."""
    return [f"hang-{name}-log", f"hang-{name}-top"]


def words() -> set[str]:
    """Return the words that a run of the demo can print."""
    printed = f"{strings()} {load_dataset.__name__} {JOB_RESUMED}"
    # The type is in the words of torch.
    return {*WORD.findall(printed), "tools", "demo", "host", "Float"}


def strings() -> str:
    """Return all strings of the program that the demo can print."""
    names = ("tools/demo", "coordination", "diagnosis", "common")
    packages = [ROOT / "src/tracedstore" / name for name in names]
    texts = []
    for module in (path for package in packages for path in package.rglob("*.py")):
        tree = ast.parse(module.read_text("utf-8"))
        # A docstring is an expression statement.
        docstrings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        texts += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in docstrings
        ]
    return "\n".join(texts)


class TestDemo:
    """docs/pictures/demo.svg."""

    def test_loads_nothing(self) -> None:
        """The picture loads no font or other file, and has no script."""
        svg = SVG.read_text("utf-8")

        assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
        assert not re.findall(r"url\((?!#)", svg)
        assert not re.search(r"@import|@font-face|href|<script|<image|\son\w+=", svg)
        assert len(svg) < 100_000

    def test_nothing_of_its_maker(self) -> None:
        """The picture has no path, and no host of its maker."""
        for line in texts():
            assert not re.search(r"(^|\s)[/~]\S", line), line
        named = set(re.findall(r"\bon ([\w-]+)", "\n".join(texts())))
        assert named == {"demo-host"}

    def test_text_is_current(self) -> None:
        """Every word in the picture is in a string of the program."""
        known = words()

        assert len(texts()) > 20
        for line in texts():
            assert set(WORD.findall(line)) <= known, line

    def test_docs_are_current(self) -> None:
        """Every word of the run in docs/demo.md is in a string of the program."""
        page = (ROOT / "docs/demo.md").read_text("utf-8")
        (shown,) = re.findall(r"\n\n```\n(.*?)\n```\n", page, re.DOTALL)

        assert set(WORD.findall(shown)) <= words()
        for title in re.findall(r"Scenario \d of \d: (.*)", shown):
            assert title in strings()
        assert all(len(line) <= 80 for line in shown.splitlines())

    def test_scenarios(self) -> None:
        """The busy rank and the killed ranks are named while others wait."""
        lines = texts()
        picture = "\n".join(lines)
        headings = [line for line in lines if line.startswith("Scenario ")]
        (warned,) = re.findall(r"missing 2 of 8: (?:.|\n)*?; ", picture)
        killed = re.findall(r"\d+", warned.partition(" (ranks ")[2].partition(")")[0])

        assert headings == [
            f"Scenario 2 of {SCENARIOS}: a skipped collective",
            f"Scenario {SCENARIOS - 1} of {SCENARIOS}: a busy rank",
            f"Scenario {SCENARIOS} of {SCENARIOS}: two ranks die",
        ]
        assert all(heading.partition(": ")[2] in strings() for heading in headings)
        assert re.search(
            r"job\.stalled: rank \d on demo-host(?:.|\n)*load_dataset", picture
        )
        assert re.search(r"skipped all_reduce \d(?:.|\n)*: called barrier \d", picture)
        assert killed == re.findall(r"\d+", lines[-2].partition(" on ")[0])
        assert f"missing ranks {','.join(killed)}" in picture
        assert all(len(line) <= 80 for line in lines)


class TestTop:
    """docs/pictures/top.svg, and the pictures of four hangs."""

    @pytest.mark.parametrize(
        ("names", "phase", "rank", "doing"),
        [
            (["top"], "new_group", 5, "in job/train.py:9 load_dataset"),
            (hang("asleep"), "init_process_group", 2, "in job/train.py:11 load_data"),
            (hang("crash"), "new_group 1", 2, "its process has ended"),
            (hang("loader"), "new_group 1", 2, "in job/train.py:11 load_dataset"),
            (hang("skipped"), "all_reduce 4", 2, "in job/train.py:15 evaluate"),
        ],
    )
    def test_picture(self, names: list[str], phase: str, rank: int, doing: str) -> None:
        """It loads nothing, has no path or host of its maker, and names the rank."""
        for name in names:
            svg = (PICTURES / f"{name}.svg").read_text("utf-8")
            # A terminal wraps where the line ends, `top` between words.
            shown = "".join("".join(ET.fromstring(svg).itertext()).split())
            named = set(re.findall(r"waitingforrank(\d+)on([\w-]+)\(pid", shown))

            assert not re.findall(r"url\((?!#)", svg)
            assert not re.search(
                r"@import|@font-face|href|<script|<image|\son\w+=", svg
            )
            assert not re.search(r"/(?:root|home|tmp)", shown)
            assert named == {(str(rank), "demo-host")}
            assert phase.replace(" ", "") in shown
            assert doing.replace(" ", "") in shown


class TestReport:
    """docs/pictures/report.png."""

    @pytest.fixture
    def png(self) -> bytes:
        """Return the bytes of the picture."""
        return (PICTURES / "report.png").read_bytes()

    def test_size(self, png: bytes) -> None:
        """The picture is large enough to read, and small enough to load."""
        width, height = struct.unpack(">II", png[16:24])

        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert 1000 <= width <= 2400
        assert 600 <= height <= 1800
        assert 20_000 < len(png) < 300_000

    def test_nothing_of_its_maker(self, png: bytes) -> None:
        """The file has no chunk with text or other metadata."""
        kinds, at = set(), 8
        while at < len(png):
            (length,) = struct.unpack(">I", png[at : at + 4])
            kinds.add(png[at + 4 : at + 8])
            at += 12 + length

        assert not kinds & {b"tEXt", b"iTXt", b"zTXt", b"eXIf", b"tIME"}
