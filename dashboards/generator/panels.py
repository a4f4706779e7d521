"""The types of panels. The description of each panel is an instruction."""

from collections.abc import Mapping
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

_GREEN, _RED = "green", "red"
_HEIGHT = 8


def number(
    title: str, what_to_do: str, target: Target, unit: str = "short", bad: float = 1
) -> Any:
    """A number that is red from `bad` on."""
    panel = stat.Panel().color_mode(common_models.BigValueColorMode.BACKGROUND)
    panel = panel.graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.reduce_options(_last()).thresholds(
        _thresholds({None: _GREEN, bad: _RED})
    )
    return _panel(panel, title, what_to_do, unit, 6, 4, target)


def states(title: str, what_to_do: str, target: Target, yes: str, no: str) -> Any:
    """One of two states over time."""
    panel = statetimeline.Panel().thresholds(_thresholds({None: _RED, 1: _GREEN}))
    panel = panel.mappings([_state_names(yes, no)])
    return _panel(panel, title, what_to_do, "short", 12, _HEIGHT, target)


def lines(
    title: str, what_to_do: str, unit: str, *targets: Target, width: int = 12
) -> Any:
    """Time series."""
    panel = timeseries.Panel().fill_opacity(10).min(0)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.TABLE)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
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
    panel = panel.min(0).thresholds(_thresholds({None: _GREEN}))
    panel = panel.reduce_options(_last())
    return _panel(panel, title, what_to_do, unit, 12, _HEIGHT, target)


def rows(
    title: str,
    what_to_do: str,
    columns: Mapping[str, str],
    *targets: Target,
    unit: str = "short",
    width: int = 12,
) -> Any:
    """A table; `columns` maps result columns to headings, in their order."""
    panel = table.Panel().filterable(True)
    panel = panel.with_transformation(
        models.DataTransformerConfig(id_val="merge", options={})
    )
    panel = panel.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True},
                "indexByName": {name: i for i, name in enumerate(columns)},
                "renameByName": dict(columns),
            },
        )
    )
    return _panel(panel, title, what_to_do, unit, width, _HEIGHT, *targets)


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
    for ref_id, target in zip("ABCDEF", targets, strict=False):
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


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _thresholds(steps: Mapping[float | None, str]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=v, color=color) for v, color in steps.items()])
    )


def _state_names(yes: str, no: str) -> models.ValueMap:
    return models.ValueMap(
        options={
            "0": models.ValueMappingResult(text=no, color=_RED),
            "1": models.ValueMappingResult(text=yes, color=_GREEN),
        }
    )
