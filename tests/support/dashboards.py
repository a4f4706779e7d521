"""The committed dashboards and rules, with their queries."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
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
        """Return the dashboard, the panel and the query text."""
        return f"{self.dashboard}: {self.panel}: {self.text}"


def load(path: Path) -> dict[str, Any]:
    """Read a dashboard."""
    dashboard: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return dashboard


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard without its rows, those of closed rows too."""
    nested = (panel.get("panels") or [] for panel in dashboard["panels"])
    every = [*dashboard["panels"], *chain.from_iterable(nested)]
    return [panel for panel in every if panel["type"] != "row"]


def queries(kind: str | None = None) -> Iterator[Query]:
    """Yield the queries of all panels, or of one kind of data source."""
    for path in FILES:
        for panel in panels(load(path)):
            for target in panel["targets"]:
                source = target["datasource"]["type"]
                if kind in (None, source):
                    text = target.get("expr") or target["query"]
                    yield Query(path.stem, panel["title"], source, text, target)


def rules(path: Path) -> list[dict[str, Any]]:
    """Return the rules of a file."""
    groups = yaml.safe_load(path.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def filled(text: str, *, window: str = "5m", chosen: str = ".*") -> str:
    """Replace the variables of a query by values."""
    text = text.replace("$__rate_interval", window).replace("$__range", window)
    return re.sub(r"\$[a-z_]+", chosen, text)
