"""The queries of panels, each with the data source of a variable."""

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import loki, prometheus, tempo
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.loki import LokiQueryType
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType

from generator import config
from generator.variables import TARGET
from tracedstore import names

Target = prometheus.Dataquery | loki.Dataquery | tempo.Dataquery

# The labels of a run, which recording rules keep.
RUN = ("job", "namespace", "run_id")
CHOSEN = ", ".join(f'{name}=~"${name}"' for name in TARGET)

# One line an event, for people. Fields that an event does not have are empty.
_LINE = (
    "{{.event}}{{if .rank}} rank {{.rank}}{{end}} on {{.host}}"
    "{{if .phase}} in {{.phase}}{{end}}{{if .barrier}} at {{.barrier}}{{end}}"
    "{{if .operation}} {{.operation}} {{.key}}{{end}}:"
    " {{or .message .awaited .missing .error .url}}"
    "{{if .remedy}}; {{.remedy}}{{end}}"
)

# Spans have the run id as an attribute.
OF_RUN = f'span.{names.RUN_ID} =~ "$run_id"'


def series(metric: names.Metric | str, *matchers: str, suffix: str = "") -> str:
    """Select a metric of the processes that the variables select.

    What an agent has summed over its ranks has no rank, and is of each of them.
    """
    name = metric if isinstance(metric, str) else metric.name
    chosen = CHOSEN
    if metric in names.NODE_SUMS:
        chosen = chosen.replace('"$rank"', '"$rank|"')
    return f"{name}{suffix}{{{', '.join((chosen, *matchers))}}}"


def recorded(
    level: str, metric: names.Metric | str, operation: str, *matchers: str
) -> str:
    """Select a recording rule of whole runs, which has no labels of processes."""
    name = metric if isinstance(metric, str) else metric.name
    chosen = (f'{label}=~"${label}"' for label in RUN)
    return f"{level}:{name}:{operation}{{{', '.join((*chosen, *matchers))}}}"


def series_about(prefix: str, metric: names.Metric) -> str:
    """Select a metric about other ranks, which has their ranks and hosts as labels.

    A series has the target labels of the rank that reports it. The variables select
    the labels with the prefix instead.
    """
    chosen = (
        f'{prefix if name in ("host", "rank") else ""}{name}=~"${name}"'
        for name in TARGET
    )
    return f"{metric.name}{{{', '.join(chosen)}}}"


def rate(metric: names.Metric, *matchers: str, suffix: str = "") -> str:
    """Compute the rate per second."""
    return f"rate({series(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def quantile(q: float, metric: names.Metric, *by: str) -> str:
    """Estimate a quantile of a histogram."""
    buckets = rate(metric, suffix="_bucket")
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) ({buckets}))"


def grown(metric: names.Metric, *matchers: str, suffix: str = "") -> str:
    """Compute the increase: rare things are counted, they have no rate."""
    return f"increase({series(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def age(metric: names.Metric, *matchers: str) -> str:
    """Compute the seconds since a timestamp."""
    return f"(time() - {series(metric, *matchers)})"


def over_time(expr: str, legend: str, *, exemplars: bool = False) -> Target:
    """Query Prometheus for a time range."""
    return _prometheus(expr).range().legend_format(legend).exemplar(exemplars)


def now(expr: str, legend: str = "") -> Target:
    """Query Prometheus for one point in time."""
    return _prometheus(expr).instant().legend_format(legend)


def rows(expr: str) -> Target:
    """Query Prometheus for one point in time, in table format."""
    return _prometheus(expr).instant().format(PromQueryFormat.TABLE)


def buckets(metric: names.Metric) -> Target:
    """Query Prometheus for the buckets of a histogram over time."""
    increase = grown(metric, suffix="_bucket")
    query = _prometheus(f"sum by (le) ({increase})").range().exemplar(True)
    return query.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")


def events(*event_names: str) -> Target:
    """Query Loki for events by name, of the selected runs, hosts and ranks."""
    pattern = "|".join(name.replace(".", "[.]") for name in event_names)
    chosen = " | ".join(f'{name}=~"${name}"' for name in ("run_id", "host", "rank"))
    expr = f'{{service_name=~"$service_name"}} | json | event=~"{pattern}" | {chosen}'
    expr += f" | line_format `{_LINE}`"
    return (
        loki.Dataquery()
        .datasource(DataSourceRef(type_val="loki", uid=f"${{{config.LOKI}}}"))
        .expr(expr)
        .query_type(LokiQueryType.RANGE)
    )


def annotation(name: str, expr: str, text: str, color: str) -> builders.AnnotationQuery:
    """Mark the times at which a query has a result."""
    source = DataSourceRef(type_val="prometheus", uid=f"${{{config.PROMETHEUS}}}")
    return (
        builders.AnnotationQuery()
        .name(name)
        .datasource(source)
        .enable(True)
        .icon_color(color)
        .expr(expr)
        .title_format(name)
        .text_format(text)
    )


def traces(query: str) -> Target:
    """Query Tempo for traces."""
    return (
        tempo.Dataquery()
        .datasource(DataSourceRef(type_val="tempo", uid=f"${{{config.TEMPO}}}"))
        .query_type("traceql")
        .query(query)
        .limit(20)
        .table_type(SearchTableType.TRACES)
    )


def _prometheus(expr: str) -> prometheus.Dataquery:
    source = DataSourceRef(type_val="prometheus", uid=f"${{{config.PROMETHEUS}}}")
    return prometheus.Dataquery().datasource(source).expr(expr)
