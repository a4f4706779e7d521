"""The variables of a dashboard."""

from grafana_foundation_sdk.builders.dashboard import DatasourceVariable, QueryVariable
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

from generator import config
from tracedstore import names

# Labels from service discovery, and the regular expression of "All". The values of each
# variable depend on the variables before it. Where a target is a node, its samples have
# the rank. A process without a rank (torchrun's agent) has no such label and is part of
# "All", and so is one without a namespace of Kubernetes; job and instance are always
# present.
TARGET: dict[str, tuple[str, str]] = {
    "job": ("Prometheus job", ".+"),
    "namespace": ("Namespace", ".*"),
    "run_id": ("Run", ".*"),
    "host": ("Host", ".*"),
    "rank": ("Rank", ".*"),
    "instance": ("Instance", ".+"),
}


def sources() -> list[DatasourceVariable]:
    """The data sources; every panel uses one of them."""
    return [
        DatasourceVariable(name).label(label).type(kind)
        for name, label, kind in (
            (config.PROMETHEUS, "Prometheus", "prometheus"),
            (config.LOKI, "Loki", "loki"),
            (config.TEMPO, "Tempo", "tempo"),
        )
    ]


def targets() -> list[QueryVariable]:
    """The job, runs, hosts, ranks and instances to show."""
    variables = []
    chosen: list[str] = []
    for name, (label, every) in TARGET.items():
        matchers = ", ".join(f'{other}=~"${other}"' for other in chosen)
        series = f"{names.BUILD_INFO.name}{{{matchers}}}"
        variables.append(
            _query(name, label, every, config.PROMETHEUS, "prometheus").query(
                {"query": f"label_values({series}, {name})", "refId": name}
            )
        )
        chosen.append(name)
    return variables


def service() -> QueryVariable:
    """The log streams to show; Loki sets this label on every stream."""
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
