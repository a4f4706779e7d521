"""The dashboards and rules as they are committed, with their queries."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.tools import ROOT

FOLDER = ROOT / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))
RULES = FOLDER / "rules/prometheus.yaml"
LOKI_RULES = FOLDER / "rules/loki.yaml"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of one panel."""

    dashboard: str
    panel: str
    kind: str
    text: str
    target: dict[str, Any]

    def __str__(self) -> str:
        """Say which."""
        return f"{self.dashboard}: {self.panel}: {self.text}"


def load(path: Path) -> dict[str, Any]:
    """Read a dashboard."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Give its panels, without the rows between them."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(kind: str | None = None) -> Iterator[Query]:
    """Give the queries of all panels, or those of one kind of source."""
    for path in FILES:
        for panel in panels(load(path)):
            for target in panel["targets"]:
                found = target["datasource"]["type"]
                if kind in (None, found):
                    text = target.get("expr") or target["query"]
                    yield Query(path.stem, panel["title"], found, text, target)


def rules(path: Path) -> list[dict[str, Any]]:
    """Give the rules of a file."""
    groups = yaml.safe_load(path.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def filled(text: str, *, window: str = "5m", chosen: str = ".*") -> str:
    """Put values where a query has variables."""
    text = text.replace("$__rate_interval", window).replace("$__range", window)
    return re.sub(r"\$[a-z_]+", chosen, text)
