"""A dashboard, from its rows."""

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
    """Put rows under the variables, and a way to the other dashboards on top."""
    found = (
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
        found = found.with_variable(variable)
    number = 0
    for row in rows:
        number += 1
        found = found.with_row(builders.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            found = found.with_panel(panel.id(number))
    return found.build()
