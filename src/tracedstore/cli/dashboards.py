"""Write the dashboards, alert rules and provisioning that this version has.

For a Grafana, a Prometheus and a Loki of your own. They belong to the metrics
of this version: export them anew after an upgrade.

Examples:
  tracedstore dashboards export monitoring/
  tracedstore dashboards export monitoring/ --runbook-url https://wiki/runbook

Exit codes: 0 written, 1 cannot be written, 64 the command line makes no sense
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
    """Say what it takes."""
    parser.add_argument("action", choices=["export"], help="write them to a folder")
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if need be")
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        default=_RUNBOOK,
        help=f"where alerts say that the runbook is ({_RUNBOOK})",
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
    """Write them all."""
    for name, source in shipped().items():
        target: Path = arguments.folder / name
        try:
            text = source.read_text("utf-8")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(_RUNBOOK, arguments.runbook_url), "utf-8")
        except OSError as error:
            raise CommandError(
                f"{error.filename} cannot be read or written: {error.strerror}"
            ) from None
        sys.stdout.write(f"{target}\n")
    return 0
