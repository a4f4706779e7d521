"""Make the README's pictures from a real run of the demo: ``make pictures``.

docs/pictures/demo.svg is the demo on a terminal: the skipped collective, the last
two scenarios and the summary. docs/pictures/report.png is the page of ``tracedstore
report`` for the same run. docs/pictures/top.svg is `tracedstore top` on a job of
torchrun that hangs. docs/pictures/hang-* are four hangs in terminals and a browser.

All of it runs on a host of its own, as far as a namespace is one: with another name,
other processes, ports and sockets. So the pictures show neither the host nor a path of
their maker, nor another job.
"""

import argparse
import io
import os
import pty
import socket
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

# The tests open pages and read terminals too.
from hang_pictures import make_pictures  # noqa: E402
from top_picture import make_picture  # noqa: E402

from support.pages import browse  # noqa: E402
from support.terminal import without_styles  # noqa: E402

_COLUMNS, _ROWS = 80, 60
_HOST = "demo-host"
# Without root, a user namespace is needed for the others.
_NAMESPACES = [
    *([] if os.geteuid() == 0 else ["--map-root-user"]),
    *("--uts", "--net", "--mount", "--mount-proc", "--pid", "--fork", "--kill-child"),
]
# gloo looks the host up. The directory of the sockets has other jobs of this user.
_SET_UP = f"""\
set -e
hostname {_HOST}
ip link set lo up
mkdir -p -m 700 /tmp/tracedstore-$(id -u)
mount -t tmpfs -o mode=700 tmpfs /tmp/tracedstore-$(id -u)
hosts=$(mktemp)
printf '%s\\n' '127.0.0.1 localhost {_HOST}' '::1 localhost' \
  '::ffff:127.0.0.1 localhost' > $hosts
mount --bind $hosts /etc/hosts
rm $hosts
mount -t tmpfs tmpfs /mnt
exec "$@"
"""
_DEMO_TIMEOUT = 120.0
_PAGE_SIZE = (1200, 700)
# Readable on a light page and on a dark one.
_THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        *[(72, 79, 88), (255, 123, 114), (86, 211, 100), (227, 179, 65)],
        *[(121, 192, 255), (210, 168, 255), (86, 212, 221), (201, 209, 217)],
    ],
)
# No font is loaded, because an image in a page cannot load one.
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
    """Run the demo and the job that hangs, and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/pictures")
    output: Path = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if socket.gethostname() != _HOST:
        run = ["sh", "-c", _SET_UP, "sh", sys.executable, *sys.argv]
        os.execvp("unshare", ["unshare", *_NAMESPACES, *run])  # noqa: S606, S607 - ours
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with TemporaryDirectory(prefix="pictures-") as name:
        folder = Path(name)
        lines = run_demo(folder).splitlines()
        svg = draw(select_lines(lines), "tracedstore demo")
        (output / "demo.svg").write_text(svg, "utf-8")
        take_screenshot(folder, output / "report.png")
        make_picture(folder, output / "top.svg")
        make_pictures(Path("/mnt/job"), output, draw)
    for picture in sorted(output.iterdir()):
        print(f"{picture}: {picture.stat().st_size:,} bytes")


def run_demo(folder: Path) -> str:
    """Run the demo on a terminal and return its output."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (_ROWS, _COLUMNS))
    command = [
        sys.executable,
        "-m",
        "tracedstore.tools.cli.main",
        "demo",
        "--output",
        "demo",
    ]
    ignored = {"NO_COLOR", "LINES", "COLUMNS"}
    environ = {name: os.environ[name] for name in os.environ.keys() - ignored}
    process = subprocess.Popen(  # noqa: S603 - fixed commands
        command,
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
    except OSError:  # the demo has closed the other end
        pass
    text = written.decode()
    if code := process.wait(_DEMO_TIMEOUT):
        sys.exit(f"the demo ended with {code}:\n{text}")
    return text


def select_lines(lines: list[str]) -> list[str]:
    """Return the lines of three scenarios, and of the summary."""
    skipped, after = _find(lines, ": a skipped coll"), _find(lines, ": contention")
    first, files = _find(lines, ": a busy rank"), _find(lines, "Files in ")
    # The empty line keeps the lower parts of the last line's letters in the picture.
    return [*lines[skipped:after], *lines[first:files]]


def _find(lines: list[str], text: str) -> int:
    plain = map(without_styles, lines)
    return next(number for number, line in enumerate(plain) if text in line)


def draw(lines: list[str], title: str) -> str:
    """Return an SVG of lines with their colours."""
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
        title=title, theme=_THEME, code_format=_SVG, unique_id="demo"
    )
    return "".join(f"{line.rstrip()}\n" for line in svg.splitlines() if line.strip())


def take_screenshot(folder: Path, picture: Path) -> None:
    """Make the report of the run, and open it in a browser."""
    command = [sys.executable, "-m", "tracedstore.tools.cli.main", "report"]
    given = ["demo/logs", "--traces", "demo/traces", "--output", "report.html"]
    subprocess.run([*command, *given], cwd=folder, check=True)  # noqa: S603 - our command
    browse(
        folder / "report.html",
        f"--screenshot={picture}",
        f"--window-size={_PAGE_SIZE[0]},{_PAGE_SIZE[1]}",
        "--force-device-scale-factor=1",
    )


if __name__ == "__main__":
    main()
