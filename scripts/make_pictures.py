"""Make the README's pictures, from a real run of the demo: ``make pictures``.

docs/pictures/demo.svg is what the demo writes on a terminal: its last act while the
others still wait, and below that how it ends. docs/pictures/report.png is the page
that ``tracedstore report`` makes of what the same run left. Both are made anew by one
command; the run has a host name of its own, and a folder without a path.
"""

import argparse
import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.pages import browse  # noqa: E402 - of the tests, which open pages too

_COLUMNS, _ROWS = 80, 60
_HOST = "demo-host"
_WITHIN = 120.0
_ERASE = re.compile(r"\r\x1b\[(\d+)A\x1b\[J")
_STYLE = re.compile(r"\x1b\[\d*m")
_PAGE = (1200, 700)
# Readable on a light page and on a dark one.
_THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        *[(72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)],
        *[(121, 192, 255), (210, 168, 255), (86, 212, 221), (201, 209, 217)],
    ],
)
# No font is loaded: where the picture is shown as an image, none would be.
_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix, .{unique_id}-title {{
  font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
    "Liberation Mono", monospace;
}}
.{unique_id}-matrix {{
  font-size: {char_height}px;
  line-height: {line_height}px;
  white-space: pre;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})"
   clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run it, and make both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures")
    output: Path = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        seen = screens(run_demo(folder))
        (output / "demo.svg").write_text(drawn(chosen(seen)), "utf-8")
        photograph(folder, output / "report.png")
    for picture in ("demo.svg", "report.png"):
        print(f"{output / picture}: {(output / picture).stat().st_size:,} bytes")


def run_demo(folder: Path) -> str:
    """Run the demo on a terminal; give what it wrote."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (_ROWS, _COLUMNS))
    # Somebody who is not root needs a user namespace to name a host.
    namespace = (
        ["--uts"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--uts"]
    )
    named = ["sh", "-c", f'hostname {_HOST} && exec "$@"', "sh"]
    command = [sys.executable, "-m", "tracedstore.cli.main", "demo", "--output", "demo"]
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.Popen(  # noqa: S603 - as written here
        ["unshare", *namespace, *named, *command],  # noqa: S607 - of the PATH
        cwd=folder,
        env={**environ, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    try:
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            while new := terminal.read(65536):
                written += new
    except OSError:  # its other end is closed: nobody writes any more
        pass
    text = written.decode().replace("\r\n", "\n")
    if code := process.wait(_WITHIN):
        sys.exit(f"the demo ended with {code}:\n{text}")
    return text


def screens(written: str) -> list[list[str]]:
    """Give the lines on the terminal after each time that something was drawn."""
    first, *others = _ERASE.split(written)
    lines = first.split("\n")
    seen = [lines]
    for up, text in zip(others[::2], others[1::2], strict=True):
        lines = [*lines[: -1 - int(up)], *text.split("\n")]
        seen.append(lines)
    return seen


def chosen(seen: list[list[str]]) -> list[str]:
    """Choose what to show: the last act in its middle, and the end."""
    *_, last = seen
    act = _first(last, "Act 4 of ")
    gives_up, files = _first(last, " gives up after "), _first(last, "Files in ")
    # The early warning is there, and everybody still waits.
    stalled = [
        lines
        for lines in seen
        if len(lines) > gives_up
        and lines[:gives_up] == last[:gives_up]
        and any("no answer" in line for line in lines[gives_up:])
    ]
    stalled = [lines for lines in stalled if " gives up after " not in "".join(lines)]
    middle = stalled[len(stalled) // 2]
    later = "\x1b[2m" + " a few seconds later ".center(_COLUMNS - 1, "-") + "\x1b[0m"
    return [*middle[act:], later, "", *last[gives_up : files - 1]]


def _first(lines: list[str], text: str) -> int:
    plain = (_STYLE.sub("", line) for line in lines)
    return next(number for number, line in enumerate(plain) if text in line)


def drawn(lines: list[str]) -> str:
    """Draw lines with their colours."""
    console = Console(
        record=True,
        width=_COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
    )
    console.print(Text.from_ansi("\n".join(lines)), highlight=False, soft_wrap=True)
    svg = console.export_svg(
        title="tracedstore demo", theme=_THEME, code_format=_SVG, unique_id="demo"
    )
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())


def photograph(folder: Path, picture: Path) -> None:
    """Make the page of the run, and open it in a browser."""
    command = [sys.executable, "-m", "tracedstore.cli.main", "report"]
    given = ["demo/logs", "--traces", "demo/traces", "--output", "report.html"]
    subprocess.run([*command, *given], cwd=folder, check=True)  # noqa: S603 - ours
    browse(
        folder / "report.html",
        f"--screenshot={picture}",
        f"--window-size={_PAGE[0]},{_PAGE[1]}",
        "--force-device-scale-factor=1",
    )


if __name__ == "__main__":
    main()
