"""The variables at the top of a dashboard."""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

from generator import config
from tracedstore import names

# Labels of the target, from service discovery, each chosen among what those before it
# leave. A process without a rank (torchrun's agent) has no such label, and is not to
# be left out by "All"; job and instance are never missing.
TARGET: dict[str, tuple[str, str]] = {
    "job": ("Prometheus job", ".+"),
    "run_id": ("Run", ".*"),
    "host": ("Host", ".*"),
    "rank": ("Rank", ".*"),
    "instance": ("Instance", ".+"),
}


def sources() -> list[DatasourceVariable]:
    """Where data comes from; every panel has one of these."""
    return [
        DatasourceVariable(name).label(label).type(kind)
        for name, label, kind in (
            (config.PROMETHEUS, "Prometheus", "prometheus"),
            (config.LOKI, "Loki", "loki"),
            (config.TEMPO, "Tempo", "tempo"),
        )
    ]


def targets() -> list[QueryVariable]:
    """Which run, hosts and ranks to look at."""
    found = []
    chosen: list[str] = []
    for name, (label, every) in TARGET.items():
        matchers = ", ".join(f'{other}=~"${other}"' for other in chosen)
        series = f"{names.BUILD_INFO.name}{{{matchers}}}"
        found.append(
            _query(name, label, every, config.PROMETHEUS, "prometheus").query(
                {"query": f"label_values({series}, {name})", "refId": name}
            )
        )
        chosen.append(name)
    return found


def service() -> QueryVariable:
    """Which streams of logs; Loki gives every stream that label."""
    return _query("service_name", "Log service", ".+", config.LOKI, "loki").query(
        {"label": "service_name", "refId": "service_name", "stream": "", "type": 1}
    )


def _query(name: str, label: str, every: str, source: str, kind: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(label)
        .datasource(DataSourceRef(type_val=kind, uid=f"${{{source}}}"))
        .multi(True)
        .include_all(True)
        .all_value(every)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.NUMERICAL_ASC)
    )
