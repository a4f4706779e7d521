"""The dashboards match their generator, work in any Grafana and query real metrics.

The checks are the rules of Grafana's dashboard-linter that apply. Exceptions are listed
here with their reasons.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from support.dashboards import (
    FILES,
    FOLDER,
    RULES,
    filled,
    load,
    panels,
    queries,
    rules,
)
from support.tools import ROOT, query_errors, run
from tracedstore import names

# Metrics that Prometheus adds to every target.
RAW_COUNTS = (
    *("Parts that failed", "Events dropped", "Runs, the worst first"),
    "Ended by TRACEDSTORE_ON_STALL",
)
PROMETHEUS_METRICS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
TARGET_LABELS = {
    *("job", "instance", "namespace", "run_id", "host", "rank", "local_rank"),
}
LABELS = {
    metric.name: {*metric.labels, *TARGET_LABELS, "le"} for metric in names.METRICS
}
SELECTOR = re.compile(r"([a-z_][\w:]*)\{([^}]*)\}")
# The labels of recording rules: their levels, and the namespace of the run.
RECORDED = {
    rule["record"]: {
        "namespace",
        *re.findall(r"run_id|[a-z]+", rule["record"].split(":")[0]),
    }
    for rule in rules(RULES)
    if "record" in rule
}

PROMQL = list(queries("prometheus"))


def metric_of(name: str) -> names.Metric | None:
    """Return the metric that a series belongs to, or None."""
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    return next((m for m in names.METRICS if m.name in (name, base)), None)


def kind_of(panel: dict[str, Any]) -> str:
    """Return the kind of the data source of a panel."""
    kind: str = panel["datasource"]["type"]
    return kind


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the generator of a directory in check mode."""
    return subprocess.run(
        [sys.executable, folder / "generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


class TestGenerated:
    """The committed dashboards match the generator."""

    def test_up_to_date(self) -> None:
        """`make dashboards` changes nothing."""
        completed = check(FOLDER)

        assert (completed.returncode, completed.stdout) == (0, ""), completed.stderr
        assert len(FILES) == 4

    def test_check_detects_manual_edit(self, tmp_path: Path) -> None:
        """The check fails for a dashboard that was edited by hand."""
        copy = shutil.copytree(FOLDER, tmp_path / "dashboards")
        edited = copy / FILES[0].name
        edited.write_text(edited.read_text().replace("stalled", "idle"))

        completed = check(copy)

        assert completed.returncode == 1
        assert completed.stdout == (
            f"not up to date: {edited.name}; run `make dashboards`\n"
        )

    def test_generator_imports_metric_names(self, subtests: pytest.Subtests) -> None:
        """The generator takes metric names from names.py, and modules stay small."""
        for module in sorted(FOLDER.rglob("*.py")):
            with subtests.test(module=module.name):
                text = module.read_text("utf-8")

                assert "tracedstore_" not in text
                assert len(text.splitlines()) <= 400

    def test_every_metric_is_shown(self) -> None:
        """A panel queries every metric."""
        text = " ".join(query.text for query in PROMQL)

        for metric in names.METRICS:
            assert metric.name in text, metric.name


class TestDashboard:
    """Rules for every dashboard."""

    def test_can_be_provisioned(self, subtests: pytest.Subtests) -> None:
        """A dashboard has a uid, no id, and is read-only in Grafana."""
        for path in FILES:
            with subtests.test(dashboard=path.stem):
                dashboard = load(path)

                assert dashboard["uid"] == path.stem
                assert dashboard.get("id") is None
                assert dashboard["editable"] is False
                assert dashboard["title"]
                assert dashboard["description"]
                assert dashboard["title"].startswith("tracedstore ")
                rows = [row for row in dashboard["panels"] if row["type"] == "row"]
                ids = [panel["id"] for panel in panels(dashboard) + rows]
                assert len(ids) == len(set(ids))

    def test_sources_are_variables(self, subtests: pytest.Subtests) -> None:
        """There is one data source variable per kind, with its conventional name."""
        for path in FILES:
            with subtests.test(dashboard=path.stem):
                sources = {
                    variable["name"]: variable["query"]
                    for variable in load(path)["templating"]["list"]
                    if variable["type"] == "datasource"
                }

                assert sources == {
                    "prometheus_datasource": "prometheus",
                    "loki_datasource": "loki",
                    "tempo_datasource": "tempo",
                }

    def test_variables(self, subtests: pytest.Subtests) -> None:
        """A run is chosen from a list that a text filters; ranks are a text."""
        for path in FILES:
            with subtests.test(dashboard=path.stem):
                variables: dict[str, dict[str, Any]] = {
                    variable["name"]: variable
                    for variable in load(path)["templating"]["list"]
                }
                one_run = path.stem == "tracedstore-job"

                for name in ("job", "run_id", "service_name"):
                    several = not (one_run and name == "run_id")
                    variable = variables[name]
                    assert (variable["multi"], variable["includeAll"]) == (
                        several,
                        several,
                    ), name
                    # Refreshed when the time range changes.
                    assert variable["refresh"] == 2, name
                    assert variable["label"], name
                    assert re.fullmatch(
                        r"\$\{\w+_datasource\}", variable["datasource"]["uid"]
                    )
                # An agent has no rank, and a process may have no run id: "All" must
                # match them too.
                assert variables["run_id"]["allValue"] == ".*"
                assert variables["job"]["allValue"] == ".+"
                for name, every in {
                    "host": ".*",
                    "rank": ".*",
                    "instance": ".+",
                }.items():
                    assert variables[name]["type"] == "textbox", name
                    assert variables[name]["query"] == every, name
                shown = {name for name, one in variables.items() if not one.get("hide")}
                assert shown - {s for s in shown if "datasource" in s} == {
                    "find",
                    "run_id",
                }
                for name in ("job", "run_id"):
                    assert "$find" in variables[name]["query"]["query"]

    def test_panels(self, subtests: pytest.Subtests) -> None:
        """Each panel has a title, a description, a unit and queries."""
        for path in FILES:
            with subtests.test(dashboard=path.stem):
                for panel in panels(load(path)):
                    title = panel["title"]
                    assert title
                    assert len(panel["description"]) > 20, title
                    assert panel["fieldConfig"]["defaults"]["unit"], title
                    # Labels have no unit: only the columns of values have one.
                    if panel["type"] == "table":
                        assert panel["fieldConfig"]["defaults"]["unit"] == "none", title
                    # Nor has it the color of what is well.
                    if panel["type"] == "stat":
                        (color,) = [
                            mapping["options"]["result"]["color"]
                            for mapping in panel["fieldConfig"]["defaults"]["mappings"]
                            if mapping["type"] == "special"
                        ]
                        assert color == "#808080", title
                    # No data is told in words where it means something.
                    if panel["type"] in ("stat", "table") and kind_of(panel) != "tempo":
                        assert panel["fieldConfig"]["defaults"]["noValue"], title
                    assert panel["targets"], title
                    kind = panel["datasource"]["type"]
                    uid = f"${{{kind}_datasource}}"
                    for owner in (panel, *panel["targets"]):
                        assert owner["datasource"] == {"type": kind, "uid": uid}, title
                    refs = [target["refId"] for target in panel["targets"]]
                    assert len(set(refs)) == len(refs), title
                    assert all(refs), title

    def test_layout(self, subtests: pytest.Subtests) -> None:
        """No panel overlaps another or exceeds the grid."""
        for path in FILES:
            with subtests.test(dashboard=path.stem):
                taken: set[tuple[int, int]] = set()
                rows = [row for row in load(path)["panels"] if row["type"] == "row"]
                for panel in panels(load(path)) + rows:
                    area = panel["gridPos"]
                    assert area["x"] + area["w"] <= 24, panel["title"]
                    cells = {
                        (x, y)
                        for x in range(area["x"], area["x"] + area["w"])
                        for y in range(area["y"], area["y"] + area["h"])
                    }
                    assert not cells & taken, panel["title"]
                    taken |= cells


class TestPromql:
    """Rules for every PromQL query."""

    def test_parses(self, subtests: pytest.Subtests) -> None:
        """The query parses, with valid types."""
        for query in PROMQL:
            with subtests.test(query=f"{query.panel} {query.target['refId']}"):
                promql_parser.parse(filled(query.text))

    def test_metrics_and_labels_exist(self, subtests: pytest.Subtests) -> None:
        """The query selects exported metrics and their labels only."""
        for query in PROMQL:
            with subtests.test(query=f"{query.panel} {query.target['refId']}"):
                selectors = SELECTOR.findall(query.text)
                assert selectors
                known: set[str] = set()
                for name, matchers in selectors:
                    metric = metric_of(name)
                    known_name = name in PROMETHEUS_METRICS or name in RECORDED
                    assert metric is not None or known_name, f"{query}: {name}"
                    labels = LABELS[metric.name] if metric else RECORDED.get(name)
                    labels = TARGET_LABELS if labels is None else labels
                    known |= labels
                    assert (
                        set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)) <= labels
                    ), query
                for grouping in re.findall(r"(?:by|on) \(([^)]*)\)", query.text):
                    assert set(grouping.split(", ")) <= known, query

    def test_selectors_use_variables(self, subtests: pytest.Subtests) -> None:
        """Every selector uses the variables whose labels its series have."""
        for query in PROMQL:
            with subtests.test(query=f"{query.panel} {query.target['refId']}"):
                of_others = {
                    names.BARRIER_RANK_MISSING.name: "missing_",
                    names.JOB_RANK_AWAITED.name: "awaited_",
                }
                for name, matchers in SELECTOR.findall(query.text):
                    prefix = of_others.get(name, "")
                    for label in ("job", "namespace", "run_id"):
                        assert f'{label}=~"${label}"' in matchers, query
                    if name in RECORDED:
                        continue
                    assert 'instance=~"$instance"' in matchers, query
                    # What an agent sums over its ranks has none.
                    summed = name.startswith(tuple(one.name for one in names.NODE_SUMS))
                    rank = "$rank|" if summed else "$rank"
                    assert f'{prefix}host=~"$host"' in matchers, query
                    assert f'{prefix}rank=~"{rank}"' in matchers, query

    def test_counters_are_rates(self, subtests: pytest.Subtests) -> None:
        """Counters are inside rate() or increase() over $__rate_interval.

        Exceptions: some panels show the raw count, because their series appear with
        their first value, and two cover the whole time range.
        """
        for query in PROMQL:
            with subtests.test(query=f"{query.panel} {query.target['refId']}"):
                for match in re.finditer(
                    r"\w+(?:_total|_bucket|_count|_sum)\{", query.text
                ):
                    before = query.text[: match.start()]
                    if query.panel not in RAW_COUNTS:
                        assert before.endswith(("rate(", "increase(")), query
                windows = set(re.findall(r"\[([^]]*)\]", query.text))
                of_range = query.panel in ("Last arrivals by rank", "State")
                whole_range = {"$__range"} if of_range else set()
                assert windows <= {"$__rate_interval", *whole_range}, query


class TestStalledJob:
    """The panels about a stalled job, evaluated by promtool."""

    REPORTERS = ('rank="0",host="n0"', 'rank="1",host="n1"')

    def samples(self, panel: str, tmp_path: Path, *expected: tuple[str, float]) -> None:
        """Check the first query of a panel: one stalled run, and one that has ended."""
        query = next(query for query in PROMQL if query.panel == panel)
        target = 'job="training",instance="a:1"'
        awaited = 'awaited_rank="2",awaited_host="n1",cause="busy"'
        verdict = 'cause="gone",phase="barrier",awaited="rank 2",remedy="read its log"'
        up = f'up{{{target},run_id="ended",rank="0"}}'
        series = {up: "1 1 stale"}
        for reporter in self.REPORTERS:
            labels = f'{target},run_id="r",{reporter}'
            series[f'{names.JOB_AWAITED.name}{{{labels},cause="gone"}}'] = "1x5"
            series[f"{names.JOB_RANK_AWAITED.name}{{{labels},{awaited}}}"] = "1x5"
            series[f"{names.JOB_STALLED_START.name}{{{labels},{verdict}}}"] = "30x5"
        test = {
            "interval": "30s",
            "input_series": [{"series": s, "values": v} for s, v in series.items()],
            "promql_expr_test": [
                {
                    "expr": filled(query.text),
                    "eval_time": "2m",
                    "exp_samples": [
                        {"labels": labels, "value": value} for labels, value in expected
                    ],
                }
            ],
        }
        file = tmp_path / "test.yaml"
        file.write_text(
            json.dumps(
                {
                    "rule_files": [str(RULES)],
                    "evaluation_interval": "30s",
                    "tests": [test],
                }
            )
        )

        completed = run("promtool", "test", "rules", file)

        assert completed.returncode == 0, completed.stdout + completed.stderr

    def test_verdict(self, tmp_path: Path) -> None:
        """The first panel has one row for what two ranks report, with its start."""
        labels = '{cause="gone",phase="barrier",awaited="rank 2",remedy="read its log"}'
        self.samples("Whom the job waits for, and what to do", tmp_path, (labels, 3e4))

    def test_table(self, tmp_path: Path) -> None:
        """A row has rank, host and cause."""
        self.samples(
            "Who the job waits for",
            tmp_path,
            ('{awaited_rank="2",awaited_host="n1",cause="busy"}', 1),
        )

    def test_state(self, tmp_path: Path) -> None:
        """The state is that of the worst run that is chosen."""
        self.samples("State", tmp_path, ("{}", 5))

    def test_runs_are_counted(self, tmp_path: Path) -> None:
        """A stalled run is counted once."""
        self.samples("Runs by state", tmp_path, ("{}", 1))


def test_logql_and_traceql_parse() -> None:
    """Grafana's grammars accept every LogQL and TraceQL query."""
    others = [query for query in queries() if query.kind != "prometheus"]
    assert {query.kind for query in others} == {"loki", "tempo"}

    errors = query_errors([(query.kind, filled(query.text)) for query in others])

    for query, error in zip(others, errors, strict=True):
        assert error == "", query


def test_log_panels_cover_all_events() -> None:
    """The log panels query every event, and no other names."""
    queried = {
        name.replace("[.]", ".")
        for query in queries("loki")
        for pattern in re.findall(r'event=~"([^"]*)"', query.text)
        for name in pattern.split("|")
    }

    # barrier.completed has level debug and is off by default.
    assert queried == set(names.EVENT_NAMES) - {names.BARRIER_COMPLETED}


def test_trace_panels_query_existing_attributes() -> None:
    """Every tracedstore attribute in a TraceQL query exists."""
    for query in queries("tempo"):
        for name in re.findall(r"span\.(tracedstore[.\w]*)", query.text):
            assert name in names.ATTRIBUTES, query


def test_few_panels_read_every_rank() -> None:
    """The dashboard Job reads recording rules; only panels that name ranks do not.

    Series of stalls and of a rendezvous are of a few processes.
    """
    of_few = {
        metric.name
        for metric in (
            names.JOB_AWAITED,
            names.JOB_RANK_AWAITED,
            names.BARRIER_RANK_MISSING,
            names.JOB_STALLED_START,
        )
    }
    of_ranks = {
        query.panel
        for query in PROMQL
        if query.dashboard == "tracedstore-job"
        for name, _ in SELECTOR.findall(query.text)
        if name not in of_few and name not in RECORDED and "rendezvous" not in name
    }

    assert of_ranks == {
        "Last arrivals by rank",
        "Waiting now",
        "Oldest wait by rank",
        "Ranks without progress",
    }


def test_exemplar_queries() -> None:
    """The duration histograms of calls request exemplars."""
    with_exemplars = [query for query in PROMQL if query.target.get("exemplar")]

    assert {query.panel for query in with_exemplars} == {
        "Duration, p99",
        "Waits that ended",
    }
    assert all("_bucket{" in query.text for query in with_exemplars)


def test_titles_in_docs_exist(subtests: pytest.Subtests) -> None:
    """Every dashboard or panel title in italics in the docs exists."""
    for page in ("dashboards.md", "runbook.md"):
        with subtests.test(page=page):
            text = (ROOT / "docs" / page).read_text("utf-8")
            mentioned = re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", text)
            dashboards = [load(path) for path in FILES]
            titles = {
                *(dashboard["title"] for dashboard in dashboards),
                *(panel["title"] for each in dashboards for panel in panels(each)),
                *(
                    variable["label"]
                    for each in dashboards
                    for variable in each["templating"]["list"]
                ),
            }

            assert mentioned
            assert set(mentioned) <= titles
