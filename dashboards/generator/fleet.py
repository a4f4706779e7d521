"""The dashboard "Fleet": all runs at a glance. For the team of the platform."""

from typing import Any

from generator import config, panels
from generator.page import Row, page
from generator.panels import STATES, Column
from generator.targets import now, over_time, recorded, series
from generator.targets import rows as as_rows
from generator.variables import JOB_STATE
from tracedstore import names

_RUN = "run_id"
_MAX_RUNS = 200
_STATE = f"max by ({_RUN}) ({recorded('job_run_id', JOB_STATE, 'max')})"
_OPEN = f"/d/{config.JOB}?var-run_id=${{__value.raw}}&${{__url_time_range}}"


def build() -> Any:
    """Build the dashboard."""
    return page(
        config.FLEET,
        "Fleet",
        "All runs: their state, since when, why, and whom they wait for. A click on a"
        " run opens it.",
        _over_time(),
        first=[_counts(), _runs()],
    )


def _counts() -> Any:
    return panels.number(
        "Runs by state",
        "Runs that are scraped, by their state. Open the stalled ones in the table"
        " below.",
        *(
            now(f"count({_STATE} == {value})", text)
            for value, (text, _) in sorted(STATES.items(), reverse=True)
        ),
        bad=None,
        colors=dict(STATES.values()),
        empty="0",
        width=24,
    )


def _runs() -> Any:
    stalled = f"min by ({_RUN}, cause, awaited) ({series(names.JOB_STALLED_START)})"
    return panels.rows(
        "Runs, the worst first",
        "One row a run, at most 200. Stalled for minutes: open it, and read whom it"
        " waits for. Restarts: a run that restarts again and again has a broken node or"
        " program. Lost ranks do not answer. Telemetry failures: see Telemetry health.",
        {
            "Value #A": Column("State", states=True, width=160),
            _RUN: Column("Run", link=_OPEN),
            "Value #B": Column("Stalled for", unit="s", width=110),
            "cause": Column("Cause", width=110),
            "awaited": Column("Waits for"),
            "Value #C": Column("Awaited", width=90),
            "Value #D": Column("Ranks", width=80),
            "Value #E": Column("Lost", width=70),
            "Value #F": Column("Hosts", width=80),
            "Value #G": Column("Restarts", width=90),
            "Value #H": Column("Telemetry failures", width=100),
        },
        as_rows(f"topk({_MAX_RUNS}, {_STATE})"),
        as_rows(f"time() - bottomk by ({_RUN}) (1, {stalled})"),
        *(
            as_rows(f"{aggregate} by ({_RUN}) ({expr})")
            for aggregate, expr in (
                ("max", recorded("job_run_id", names.JOB_AWAITED, "max")),
                ("sum", recorded("job_run_id", "up", "sum")),
                ("sum", recorded("job_run_id", "up_zero", "count")),
                ("count", f"count by ({_RUN}, host) ({series(names.BUILD_INFO)})"),
                ("max", series(names.RENDEZVOUS_ROUND)),
                ("sum", f"{series(names.TELEMETRY_FAILURES)} > bool 0"),
            )
        ),
        empty="No run is scraped, or the recording rules are not loaded.",
        key=_RUN,
        worst="State",
        width=24,
        height=16,
    )


def _over_time() -> Row:
    return Row(
        "Over time",
        [
            panels.state_over_time(
                "The worst runs over time",
                "The state of the 20 runs that are worst now.",
                over_time(f"topk(20, {_STATE})", "{{run_id}}"),
                height=12,
            ),
        ],
    )
