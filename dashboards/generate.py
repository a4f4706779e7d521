"""Generates the dashboards; ``--check`` compares them with the committed files."""

import json
import sys
from pathlib import Path

from generator import fleet, health, internals, job
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parent
PAGES = (job.build, fleet.build, internals.build, health.build)


def rendered() -> dict[Path, str]:
    """Return the JSON text of every dashboard by path."""
    texts = {}
    for build in PAGES:
        dashboard = build()
        text = json.dumps(dashboard, cls=JSONEncoder, indent=2, sort_keys=True)
        texts[FOLDER / f"{dashboard.uid}.json"] = text + "\n"
    return texts


def main(arguments: list[str]) -> int:
    """Write the outdated files, or print their names and return 1."""
    stale = [
        (path, text)
        for path, text in rendered().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    if "--check" in arguments:
        for path, _ in stale:
            print(f"not up to date: {path.name}; run `make dashboards`")
        return int(bool(stale))
    for path, text in stale:
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
