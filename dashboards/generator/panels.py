"""The types of panels. The description of each panel is an instruction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    heatmap,
    logs,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode

from generator import config
from generator.targets import Target

_GREEN, _RED, _GREY = "green", "red", "#808080"
_HEIGHT = 8
# Fields of results that no table shows.
_HIDDEN = ("Time", "__name__")
_LOADED = "No telemetry. Is the run scraped, and are the recording rules loaded?"
# The states of a run, by the value of the recording rule. Grey is for no telemetry.
STATES = {
    0: ("Ended or lost", "purple"),
    1: ("Starting", "blue"),
    2: ("Running", _GREEN),
    3: ("Nothing moves", "yellow"),
    4: ("Waits for busy ranks", "orange"),
    5: ("Stalled", _RED),
}


def number(
    title: str,
    what_to_do: str,
    *targets: Target,
    unit: str = "short",
    bad: float | None = 1,
    width: int = 6,
    empty: str = _LOADED,
    color: str = _RED,
    colors: Mapping[str, str] | None = None,
) -> Any:
    """Numbers that have a color from `bad` on; no data is a text without color.

    Args:
        title: Its title.
        what_to_do: Its description.
        targets: The queries.
        unit: The unit of the numbers.
        bad: The number from which on it has the color; None for no such number.
        width: Its width.
        empty: What is shown where there is no data.
        color: The color.
        colors: The color of each number, by its legend.
    """
    panel = _stat({None: _GREY} if bad is None else {None: _GREEN, bad: color}, empty)
    for name, fixed in (colors or {}).items():
        value = {"mode": "fixed", "fixedColor": fixed}
        override = models.DynamicConfigValue(id_val="color", value=value)
        panel = panel.override_by_name(name, [override])
    return _panel(panel, title, what_to_do, unit, width, 4, *targets)


def state(title: str, what_to_do: str, target: Target, width: int = 6) -> Any:
    """The state of a run."""
    panel = _stat({None: _GREY}, _LOADED, _job_states())
    return _panel(panel, title, what_to_do, "none", width, 4, target)


def state_over_time(
    title: str, what_to_do: str, target: Target, height: int = 4
) -> Any:
    """The state of runs over time."""
    panel = statetimeline.Panel().mappings([_job_states()]).no_value(_LOADED)
    panel = panel.thresholds(_thresholds({None: _GREY}))
    return _panel(panel, title, what_to_do, "none", 24, height, target)


def yes_or_no(title: str, what_to_do: str, target: Target, yes: str, no: str) -> Any:
    """One of two states over time."""
    panel = statetimeline.Panel().thresholds(_thresholds({None: _RED, 1: _GREEN}))
    panel = panel.mappings([_mapped({0: (no, _RED), 1: (yes, _GREEN)})])
    return _panel(panel, title, what_to_do, "short", 12, _HEIGHT, target)


def lines(
    title: str, what_to_do: str, unit: str, *targets: Target, width: int = 12
) -> Any:
    """Time series, with the legend on the right, where all of it is seen."""
    panel = timeseries.Panel().fill_opacity(10).min(0)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.RIGHT)
        .show_legend(True)
        .calcs(["lastNotNull"])
    )
    panel = panel.tooltip(
        common.VizTooltipOptions()
        .mode(common_models.TooltipDisplayMode.MULTI)
        .sort(common_models.SortOrder.DESCENDING)
    )
    return _panel(panel, title, what_to_do, unit, width, _HEIGHT, *targets)


def bars(title: str, what_to_do: str, unit: str, target: Target) -> Any:
    """One bar per series."""
    panel = bargauge.Panel().orientation(common_models.VizOrientation.HORIZONTAL)
    panel = panel.min(0).thresholds(_thresholds({None: _GREEN})).decimals(0)
    panel = panel.reduce_options(_last())
    return _panel(panel, title, what_to_do, unit, 24, _HEIGHT, target)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        unit: The unit of its values. Labels have none: a rank is no number of anything.
        width: Its width in pixels; None for what is left.
        states: Its values are states of runs.
        link: What a click opens.
    """

    title: str
    unit: str = ""
    width: int | None = None
    states: bool = False
    link: str = ""

    def overrides(self) -> list[models.DynamicConfigValue]:
        """Return what differs from other columns."""
        properties: dict[str, object] = {}
        if self.unit:
            properties["unit"] = self.unit
        if self.width is not None:
            properties["custom.width"] = self.width
        if self.states:
            properties["mappings"] = [_job_states()]
            properties["custom.cellOptions"] = {"type": "color-background"}
        if self.link:
            properties["links"] = [{"title": "Open the run", "url": self.link}]
        return [models.DynamicConfigValue(*item) for item in properties.items()]


def rows(
    title: str,
    what_to_do: str,
    columns: Mapping[str, Column],
    *targets: Target,
    empty: str,
    key: str = "",
    worst: str = "",
    width: int = 12,
    height: int = _HEIGHT,
) -> Any:
    """A table.

    Args:
        title: Its title.
        what_to_do: Its description.
        columns: Its columns, by the fields of the results, in their order.
        targets: The queries; results of several have equal labels, or `key`.
        empty: What is shown where there is no row.
        key: The label by which results are joined that have other labels too.
        worst: The heading of the column with the highest value in the first row.
        width: Its width.
        height: Its height.
    """
    panel = table.Panel().filterable(True).no_value(empty)
    panel = panel.cell_options(common_models.TableAutoCellOptions(wrap_text=True))
    if worst:
        panel = panel.sort_by(
            [common.TableSortByFieldState().display_name(worst).desc(True)]
        )
    joined: dict[str, object] = {"byField": key, "mode": "outer"} if key else {}
    values = () if "Value" in columns else ("Value",)
    others = [f"{name} {number}" for name in _HIDDEN for number in range(1, 9)]
    for id_val, options in (
        ("joinByField" if key else "merge", joined),
        (
            "organize",
            {
                "excludeByName": dict.fromkeys((*_HIDDEN, *others, *values), True),
                "indexByName": {name: i for i, name in enumerate(columns)},
                "renameByName": {name: one.title for name, one in columns.items()},
            },
        ),
    ):
        panel = panel.with_transformation(
            models.DataTransformerConfig(id_val=id_val, options=options)
        )
    for column in columns.values():
        if overrides := column.overrides():
            panel = panel.override_by_name(column.title, overrides)
    return _panel(panel, title, what_to_do, "none", width, height, *targets)


def heat(title: str, what_to_do: str, target: Target) -> Any:
    """A heatmap of durations over time."""
    panel = heatmap.Panel().calculate(False).cell_gap(1)
    panel = panel.exemplars_color("rgba(255, 0, 255, 0.7)")
    panel = panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
    )
    panel = panel.y_axis(heatmap.YAxisConfig().unit("s"))
    return _panel(panel, title, what_to_do, "short", 24, _HEIGHT, target)


def log_lines(title: str, what_to_do: str, target: Target) -> Any:
    """Log lines, newest first."""
    panel = logs.Panel().show_time(True).wrap_log_message(True).enable_log_details(True)
    panel = panel.sort_order(common_models.LogsSortOrder.DESCENDING)
    return _panel(panel, title, what_to_do, "none", 24, 10, target, source=config.LOKI)


def traces(title: str, what_to_do: str, target: Target) -> Any:
    """A table of traces, with links."""
    return _panel(
        table.Panel(), title, what_to_do, "none", 24, 8, target, source=config.TEMPO
    )


def _panel(
    panel: Any,
    title: str,
    what_to_do: str,
    unit: str,
    width: int,
    height: int,
    *targets: Target,
    source: str = config.PROMETHEUS,
) -> Any:
    for ref_id, target in zip("ABCDEFGH", targets, strict=False):
        panel = panel.with_target(target.ref_id(ref_id))
    kind = source.removesuffix("_datasource")
    return (
        panel.title(title)
        .description(what_to_do)
        .unit(unit)
        .span(width)
        .height(height)
        .datasource(common_models.DataSourceRef(type_val=kind, uid=f"${{{source}}}"))
    )


def _stat(
    steps: Mapping[float | None, str], empty: str, *mappings: models.ValueMap
) -> stat.Panel:
    # No data would have the color of the lowest numbers, which is green.
    none = models.SpecialValueMap(
        options=models.DashboardSpecialValueMapOptions(
            match=models.SpecialValueMatch.NULL_AND_NAN,
            result=models.ValueMappingResult(text=empty, color=_GREY),
        )
    )
    panel = stat.Panel().color_mode(common_models.BigValueColorMode.BACKGROUND)
    panel = panel.graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.reduce_options(_last()).thresholds(_thresholds(steps))
    return panel.mappings([*mappings, none]).no_value(empty)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _thresholds(steps: Mapping[float | None, str]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=v, color=color) for v, color in steps.items()])
    )


def _job_states() -> models.ValueMap:
    return _mapped(STATES)


def _mapped(texts: Mapping[int, tuple[str, str]]) -> models.ValueMap:
    return models.ValueMap(
        options={
            str(value): models.ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(texts.items())
        }
    )
