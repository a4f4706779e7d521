"""Pictures of the demo: nothing of their maker's, and in step with the program."""

import ast
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tracedstore.demo import acts

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
SVG = PICTURES / "demo.svg"
# Between the two moments that it shows, and on the frame: the picture's own words.
FRAME = {"a few seconds later", "tracedstore demo"}
WORD = re.compile(r"[A-Za-z]{2,}")


def texts() -> list[str]:
    """What the picture of the demo says, line by line."""
    lines: dict[float, str] = {}
    for text in ET.parse(SVG).iter("{http://www.w3.org/2000/svg}text"):
        height = float(text.attrib["y"])
        lines[height] = lines.get(height, "") + "".join(text.itertext())
    said = [lines[height].replace("\xa0", " ").rstrip() for height in sorted(lines)]
    return [line for line in said if line.strip(" -") not in FRAME]


def strings() -> str:
    """Every text in the program that the demo can say."""
    rooms = [ROOT / "src/tracedstore" / room for room in ("demo", "coordination")]
    found = []
    for module in (path for room in rooms for path in room.glob("*.py")):
        tree = ast.parse(module.read_text("utf-8"))
        # A docstring is a statement of its own.
        said = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in said
        ]
    return "\n".join(found)


class TestDemo:
    """docs/pictures/demo.svg."""

    def test_loads_nothing(self) -> None:
        """Neither a font nor anything else, and it runs nothing."""
        svg = SVG.read_text("utf-8")

        assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
        assert not re.findall(r"url\((?!#)", svg)
        assert not re.search(r"@import|@font-face|href|<script|<image|\son\w+=", svg)
        assert len(svg) < 100_000

    def test_nothing_of_its_maker(self) -> None:
        """No path, and no host but the simulated ones."""
        for line in texts():
            assert not re.search(r"(^|\s)[/~]\S", line), line
        named = set(re.findall(r"\bon ([\w-]+)", "\n".join(texts())))
        assert named
        assert all(re.fullmatch(r"sim-node-\d", name) for name in named - {"the"})

    def test_says_what_the_program_says(self) -> None:
        """Every word of it is one that the program has."""
        known = set(WORD.findall(strings()))

        assert len(texts()) > 20
        for line in texts():
            assert set(WORD.findall(line)) <= known, line

    def test_docs_say_so_too(self) -> None:
        """What docs/demo.md shows of a run, the same way."""
        page = (ROOT / "docs/demo.md").read_text("utf-8")
        (shown,) = re.findall(r"\n\n```\n(.*?)\n```\n", page, re.DOTALL)
        known = {*WORD.findall(strings()), "demo", "host"}

        assert set(WORD.findall(shown)) <= known
        for title in re.findall(r"Act \d of \d: (.*)", shown):
            assert title in strings()
        assert all(len(line) <= 80 for line in shown.splitlines())

    def test_shows_the_last_act(self) -> None:
        """Who was killed is named early, while others wait, and by all at last."""
        lines = texts()
        picture = "\n".join(lines)
        (act, *_) = lines
        warned = re.findall(r"\(rank (\d+)\)", lines[4])
        silent = re.findall(r"^ +(\d+) +\S+ +no answer ", picture, re.MULTILINE)
        waiting = re.findall(r"waiting \d\.\d s at checkpoint/1", picture)

        assert act == f"Act 4 of {acts._ACTS}: two ranks die"
        assert act.partition(": ")[2] in strings()
        assert lines[1] in strings()
        assert warned == silent == re.findall(r"\d+", lines[-2].partition(" on ")[0])
        assert len(waiting) == 8 - len(warned)
        assert f"missing ranks {','.join(warned)}" in picture
        assert all(len(line) <= 80 for line in lines)


class TestReport:
    """docs/pictures/report.png."""

    @pytest.fixture
    def png(self) -> bytes:
        """What is in it."""
        return (PICTURES / "report.png").read_bytes()

    def test_size(self, png: bytes) -> None:
        """A picture for a page, which nobody waits for."""
        width, height = struct.unpack(">II", png[16:24])

        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        assert 1000 <= width <= 2400
        assert 600 <= height <= 1800
        assert 20_000 < len(png) < 300_000

    def test_nothing_of_its_maker(self, png: bytes) -> None:
        """Pixels only: no chunk in which programs leave words."""
        kinds, at = set(), 8
        while at < len(png):
            (length,) = struct.unpack(">I", png[at : at + 4])
            kinds.add(png[at + 4 : at + 8])
            at += 12 + length

        assert not kinds & {b"tEXt", b"iTXt", b"zTXt", b"eXIf", b"tIME"}
