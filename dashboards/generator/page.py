"""Builds a dashboard from rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

from generator import config, variables


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title; a row that is closed shows its title only."""

    title: str
    panels: list[Any]
    closed: bool = False


def page(
    uid: str,
    title: str,
    description: str,
    *rows: Row,
    first: Sequence[Any] = (),
    annotations: Sequence[Any] = (),
    one_run: bool = False,
) -> Any:
    """Build a dashboard with the variables and links to the other dashboards.

    Args:
        uid: Its uid.
        title: Its title, after the name of the project.
        description: What it is for.
        rows: Its rows.
        first: Panels above all rows.
        annotations: What marks all panels over time.
        one_run: It shows one run.
    """
    dashboard = (
        builders.Dashboard(f"{config.TAG} {title}")
        .uid(uid)
        .description(description)
        .tags([config.TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            builders.DashboardLink(config.TAG)
            .type(DashboardLinkType.DASHBOARDS)
            .tags([config.TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in (
        *variables.sources(),
        *variables.targets(one_run=one_run),
        variables.service(),
    ):
        dashboard = dashboard.with_variable(variable)
    for annotation in annotations:
        dashboard = dashboard.annotation(annotation)
    numbers = count(1)
    for panel in first:
        dashboard = dashboard.with_panel(panel.id(next(numbers)))
    for row in rows:
        header = builders.Row(row.title).id(next(numbers))
        if row.closed:
            for panel in row.panels:
                header = header.with_panel(panel.id(next(numbers)))
            dashboard = dashboard.with_row(header)
            continue
        dashboard = dashboard.with_row(header)
        for panel in row.panels:
            dashboard = dashboard.with_panel(panel.id(next(numbers)))
    return dashboard.build()
