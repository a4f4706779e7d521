"""The queries of panels, each with a templated source."""

from grafana_foundation_sdk.builders import loki, prometheus, tempo
from grafana_foundation_sdk.models.common import DataSourceRef
from grafana_foundation_sdk.models.loki import LokiQueryType
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.tempo import SearchTableType

from generator import config
from generator.variables import TARGET
from tracedstore import names

Target = prometheus.Dataquery | loki.Dataquery | tempo.Dataquery

CHOSEN = ", ".join(f'{name}=~"${name}"' for name in TARGET)
# Who is missing has the labels of who says so; the variables then mean the missing.
CHOSEN_MISSING = ", ".join(
    f'{"missing_" * (name in ("host", "rank"))}{name}=~"${name}"' for name in TARGET
)

# For traces, which know their run as an attribute.
OF_RUN = f'span.{names.RUN_ID} =~ "$run_id"'


def series(metric: names.Metric | str, *matchers: str, suffix: str = "") -> str:
    """Select a metric of the processes that were chosen."""
    name = metric if isinstance(metric, str) else metric.name
    return f"{name}{suffix}{{{', '.join((CHOSEN, *matchers))}}}"


def rate(metric: names.Metric, *matchers: str, suffix: str = "") -> str:
    """Give how often something happens a second."""
    return f"rate({series(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def quantile(q: float, metric: names.Metric, *by: str) -> str:
    """Estimate a quantile of a histogram."""
    buckets = rate(metric, suffix="_bucket")
    return f"histogram_quantile({q}, sum by ({', '.join((*by, 'le'))}) ({buckets}))"


def age(metric: names.Metric, *matchers: str) -> str:
    """Give the seconds since a moment."""
    return f"(time() - {series(metric, *matchers)})"


def over_time(expr: str, legend: str, *, exemplars: bool = False) -> Target:
    """Ask Prometheus for a time range."""
    return _prometheus(expr).range().legend_format(legend).exemplar(exemplars)


def now(expr: str, legend: str = "") -> Target:
    """Ask Prometheus for one moment."""
    return _prometheus(expr).instant().legend_format(legend)


def rows(expr: str) -> Target:
    """Ask Prometheus for one moment, as rows of a table."""
    return _prometheus(expr).instant().format(PromQueryFormat.TABLE)


def buckets(metric: names.Metric) -> Target:
    """Ask Prometheus for a histogram over time."""
    increase = f"increase({series(metric, suffix='_bucket')}[$__rate_interval])"
    found = _prometheus(f"sum by (le) ({increase})").range().exemplar(True)
    return found.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")


def events(*found: str) -> Target:
    """Ask Loki for events by their names, of the run, hosts and ranks chosen."""
    pattern = "|".join(name.replace(".", "[.]") for name in found)
    chosen = " | ".join(f'{name}=~"${name}"' for name in ("run_id", "host", "rank"))
    expr = f'{{service_name=~"$service_name"}} | json | event=~"{pattern}" | {chosen}'
    return (
        loki.Dataquery()
        .datasource(DataSourceRef(type_val="loki", uid=f"${{{config.LOKI}}}"))
        .expr(expr)
        .query_type(LokiQueryType.RANGE)
    )


def traces(query: str) -> Target:
    """Ask Tempo for traces."""
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
