"""The variables of a dashboard."""

from grafana_foundation_sdk.builders.dashboard import (
    DatasourceVariable,
    QueryVariable,
    TextBoxVariable,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from generator import config
from tracedstore import names

# The recording rule that has the state of each run, and its name without level.
JOB_STATE = f"{names.SCOPE}_job_state"
STATE = f"job_run_id:{JOB_STATE}:max"

# Labels from service discovery, and the regular expression of "All". Where a target is
# a node, its samples have the rank. A process without a rank (torchrun's agent) has no
# such label and is part of "All", and so is one without a namespace of Kubernetes; job
# and instance are always present. Host, rank and instance are text: a list of the ranks
# of a large job is of no use.
TARGET: dict[str, tuple[str, str]] = {
    "job": ("Prometheus job", ".+"),
    "namespace": ("Namespace", ".*"),
    "run_id": ("Run", ".*"),
    "host": ("Host", ".*"),
    "rank": ("Rank", ".*"),
    "instance": ("Instance", ".+"),
}
_LISTED = ("job", "run_id")
FIND = "find"


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


def targets(*, one_run: bool) -> list[QueryVariable | TextBoxVariable]:
    """The job, runs, hosts, ranks and instances to show.

    Args:
        one_run: One run is shown, not any number of them.
    """
    # The lists have runs that ended in the time range, too.
    state = f'{STATE}{{run_id=~".*${FIND}.*"}}'
    variables: list[QueryVariable | TextBoxVariable] = [
        _text(FIND, "Find run", "").hide(VariableHide.DONT_HIDE)
    ]
    for name, (label, every) in TARGET.items():
        if name not in _LISTED:
            variables.append(_text(name, label, every))
            continue
        listed = _query(name, label, every, config.PROMETHEUS, "prometheus").query(
            {"query": f"label_values({state}, {name})", "refId": name}
        )
        if name == "run_id":
            listed = listed.hide(VariableHide.DONT_HIDE).allow_custom_value(True)
            # Names of runs often begin with their date.
            listed = listed.sort(VariableSort.NATURAL_DESC)
            if one_run:
                listed = listed.multi(False).include_all(False)
        variables.append(listed)
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
        .hide(VariableHide.IN_CONTROLS_MENU)
    )


def _text(name: str, label: str, default: str) -> TextBoxVariable:
    return (
        TextBoxVariable(name)
        .label(label)
        .default_value(default)
        .current(VariableOption(text=default, value=default))
        .hide(VariableHide.IN_CONTROLS_MENU)
    )
