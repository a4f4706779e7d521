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
from pathlib import Path

from tracedstore.core.errors import CommandError

# The exported path of each file, and its path in the repository. A wheel has them in
# the folder of this module, under shipped/ and the exported path.
SHIPPED = {
    "dashboards/tracedstore-coordination.json": (
        "dashboards/tracedstore-coordination.json"
    ),
    "dashboards/tracedstore-health.json": "dashboards/tracedstore-health.json",
    "dashboards/tracedstore-internals.json": "dashboards/tracedstore-internals.json",
    "rules/prometheus.yaml": "dashboards/rules/prometheus.yaml",
    "rules/loki.yaml": "dashboards/rules/loki.yaml",
    "alertmanager.yml": "deploy/alertmanager/alertmanager.yml",
    "grafana/dashboards.yaml": "deploy/grafana/provisioning/dashboards/dashboards.yaml",
    "grafana/datasources.yaml": (
        "deploy/grafana/provisioning/datasources/datasources.yaml"
    ),
}
_WHEEL = Path(__file__).parent / "shipped"
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


def run(arguments: argparse.Namespace) -> int:
    """Write all files, and print their paths."""
    for name, original in SHIPPED.items():
        source = _WHEEL / name if _WHEEL.is_dir() else _REPOSITORY / original
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
