"""Builds a dashboard from rows."""

from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models.dashboard import DashboardLinkType

from generator import config, variables


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title."""

    title: str
    panels: list[Any]


def page(uid: str, title: str, description: str, *rows: Row) -> Any:
    """Build a dashboard with the variables, links to the other dashboards, and rows."""
    dashboard = (
        builders.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([config.TAG])
        .readonly()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            builders.DashboardLink("tracedstore")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([config.TAG])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in (
        *variables.sources(),
        *variables.targets(),
        variables.service(),
    ):
        dashboard = dashboard.with_variable(variable)
    number = 0
    for row in rows:
        number += 1
        dashboard = dashboard.with_row(builders.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            dashboard = dashboard.with_panel(panel.id(number))
    return dashboard.build()
