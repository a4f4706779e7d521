"""Write the Grafana dashboards, alert rules and provisioning of this version.

Use them with your own Grafana, Prometheus and Loki. They match the metrics of
this version: export them again after an upgrade.

Examples:
  tracedstore dashboards export monitoring/
  tracedstore dashboards export monitoring/ --runbook-url https://wiki/runbook

Exit codes: 0 written, 1 a file cannot be written, 64 invalid command line
"""

import argparse
import sys
import tomllib
from pathlib import Path

from tracedstore.core.errors import CommandError

# The wheel has the files here; pyproject.toml lists them.
_IN_WHEEL = Path(__file__).parent / "shipped"
_REPOSITORY = Path(__file__).parents[3]
_RUNBOOK = "docs/runbook.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=["export"], help="write all files")
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the target folder, made if missing"
    )
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        default=_RUNBOOK,
        help=f"the address of the runbook in alerts ({_RUNBOOK})",
    )


def shipped() -> dict[str, Path]:
    """Map each exported name to its file, in the wheel or in a development checkout."""
    if _IN_WHEEL.is_dir():
        paths = (path for path in _IN_WHEEL.rglob("*") if path.is_file())
        files = {str(path.relative_to(_IN_WHEEL)): path for path in paths}
    else:
        project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text("utf-8"))
        wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
        files = {
            str(Path(target).relative_to("tracedstore/cli/shipped")): _REPOSITORY / path
            for path, target in wheel["force-include"].items()
        }
    return dict(sorted(files.items()))


def run(arguments: argparse.Namespace) -> int:
    """Write all files, and print their paths."""
    for name, source in shipped().items():
        target: Path = arguments.folder / name
        try:
            text = source.read_text("utf-8")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(_RUNBOOK, arguments.runbook_url), "utf-8")
        except OSError as error:
            # A failed write has no file name.
            path = error.filename or target
            raise CommandError(
                f"{path} cannot be read or written: {error.strerror}"
            ) from None
        sys.stdout.write(f"{target}\n")
    return 0
