"""The pictures of the demo: up to date, and without traces of their maker."""

import ast
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tracedstore.demo.rank import load_dataset
from tracedstore.demo.scenarios import SCENARIOS
from tracedstore.names import JOB_RESUMED

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
SVG = PICTURES / "demo.svg"
# Text of the picture itself, between its two parts and in its title.
PICTURE_TEXT = {"", "a few seconds later", "tracedstore demo"}
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
    return [line for line in ordered if line.strip(" -") not in PICTURE_TEXT]


def strings() -> str:
    """Return all strings of the program that the demo can print."""
    names = ("demo", "coordination", "diagnosis")
    packages = [ROOT / "src/tracedstore" / name for name in names]
    texts = []
    for module in (path for package in packages for path in package.glob("*.py")):
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
        """The picture has no path, and only simulated hosts."""
        for line in texts():
            assert not re.search(r"(^|\s)[/~]\S", line), line
        named = set(re.findall(r"\bon ([\w-]+)", "\n".join(texts())))
        assert named
        assert all(re.fullmatch(r"sim-node-\d", name) for name in named - {"the"})

    def test_text_is_current(self) -> None:
        """Every word in the picture is in a string of the program."""
        known = set(WORD.findall(strings()))

        assert len(texts()) > 20
        for line in texts():
            assert set(WORD.findall(line)) <= known, line

    def test_docs_are_current(self) -> None:
        """Every word of the run in docs/demo.md is in a string of the program."""
        page = (ROOT / "docs/demo.md").read_text("utf-8")
        (shown,) = re.findall(r"\n\n```\n(.*?)\n```\n", page, re.DOTALL)
        busy_in = load_dataset.__name__
        known = {*WORD.findall(f"{strings()} {busy_in} {JOB_RESUMED}"), "demo", "host"}

        assert set(WORD.findall(shown)) <= known
        for title in re.findall(r"Scenario \d of \d: (.*)", shown):
            assert title in strings()
        assert all(len(line) <= 80 for line in shown.splitlines())

    def test_last_scenario(self) -> None:
        """The killed ranks are named while others wait, and at the end."""
        lines = texts()
        picture = "\n".join(lines)
        (heading, *_) = lines
        warned = re.findall(r"\(rank (\d+)\)", lines[4])
        silent = re.findall(r"^ +(\d+) +\S+ +no answer ", picture, re.MULTILINE)
        waiting = re.findall(r"waiting \d\.\d s at checkpoint/1", picture)

        assert heading == f"Scenario {SCENARIOS} of {SCENARIOS}: two ranks die"
        assert heading.partition(": ")[2] in strings()
        assert lines[1] in strings()
        assert warned == silent == re.findall(r"\d+", lines[-2].partition(" on ")[0])
        assert len(waiting) == 8 - len(warned)
        assert f"missing ranks {','.join(warned)}" in picture
        assert all(len(line) <= 80 for line in lines)


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
