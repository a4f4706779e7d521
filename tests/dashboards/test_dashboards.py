"""The dashboards: made by their generator, fit for any Grafana, and about real metrics.

The rules are those of Grafana's dashboard-linter, where they apply; exceptions stand
here with their reasons.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from support.dashboards import FILES, FOLDER, Query, filled, load, panels, queries
from support.tools import query_errors
from tracedstore import names

# What Prometheus adds to every target itself.
OF_PROMETHEUS = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}
TARGET_LABELS = {"job", "instance", "run_id", "host", "rank", "local_rank"}
LABELS = {
    metric.name: {*metric.labels, *TARGET_LABELS, "le"} for metric in names.METRICS
}
SELECTOR = re.compile(r"([a-z_]\w*)\{([^}]*)\}")

PROMQL = list(queries("prometheus"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
every_promql = pytest.mark.parametrize(
    "query", PROMQL, ids=lambda query: f"{query.panel} {query.target['refId']}"
)


def metric_of(name: str) -> names.Metric | None:
    """Find the metric that a series belongs to."""
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    return next((m for m in names.METRICS if m.name in (name, base)), None)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    """Have the generator check the dashboards beside it."""
    return subprocess.run(
        [sys.executable, folder / "generate.py", "--check"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


class TestGenerated:
    """What is committed is what the generator makes."""

    def test_up_to_date(self) -> None:
        """`make dashboards` would change nothing."""
        done = check(FOLDER)

        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert len(FILES) == 3

    def test_the_check_can_fail(self, tmp_path: Path) -> None:
        """A dashboard that was changed by hand is noticed."""
        copy = shutil.copytree(FOLDER, tmp_path / "dashboards")
        by_hand = copy / FILES[0].name
        by_hand.write_text(by_hand.read_text().replace("stalled", "idle"))

        done = check(copy)

        assert done.returncode == 1
        assert done.stdout == (
            f"not up to date: {by_hand.name}; run `make dashboards`\n"
        )

    @pytest.mark.parametrize(
        "module", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.name
    )
    def test_names_are_not_spelled_again(self, module: Path) -> None:
        """Metrics have their names from names.py, and modules stay small."""
        text = module.read_text("utf-8")

        assert "tracedstore_" not in text
        assert len(text.splitlines()) <= 400

    def test_every_metric_is_shown(self) -> None:
        """None is exported for nobody."""
        text = " ".join(query.text for query in PROMQL)

        for metric in names.METRICS:
            assert metric.name in text, metric.name


@every_file
class TestDashboard:
    """What every dashboard keeps to."""

    def test_can_be_provisioned(self, path: Path) -> None:
        """It has an address of its own, no number, and is changed in its generator."""
        dashboard = load(path)

        assert dashboard["uid"] == path.stem
        assert dashboard.get("id") is None
        assert dashboard["editable"] is False
        assert dashboard["title"]
        assert dashboard["description"]
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(ids) == len(set(ids))

    def test_sources_are_variables(self, path: Path) -> None:
        """One variable a kind, by the names that tools know."""
        found = {
            variable["name"]: variable["query"]
            for variable in load(path)["templating"]["list"]
            if variable["type"] == "datasource"
        }

        assert found == {
            "prometheus_datasource": "prometheus",
            "loki_datasource": "loki",
            "tempo_datasource": "tempo",
        }

    def test_variables(self, path: Path) -> None:
        """Run, host and rank can be chosen, several at a time, or all."""
        found: dict[str, dict[str, Any]] = {
            variable["name"]: variable
            for variable in load(path)["templating"]["list"]
            if variable["type"] == "query"
        }

        assert {"job", "instance", "run_id", "host", "rank"} < set(found)
        for name, variable in found.items():
            assert (variable["multi"], variable["includeAll"]) == (True, True), name
            assert variable["refresh"] == 2, name  # on a change of the time range
            assert variable["label"], name
            assert re.fullmatch(r"\$\{\w+_datasource\}", variable["datasource"]["uid"])
            # An agent has no rank, and a process may have no run: "All" has them too.
            optional = name in ("run_id", "host", "rank")
            assert variable["allValue"] == (".*" if optional else ".+"), name

    def test_panels(self, path: Path) -> None:
        """Each says what it shows, in which unit, and what to do about it."""
        for panel in panels(load(path)):
            title = panel["title"]
            assert title
            assert len(panel["description"]) > 20, title
            assert panel["fieldConfig"]["defaults"]["unit"], title
            assert panel["targets"], title
            kind = panel["datasource"]["type"]
            uid = f"${{{kind}_datasource}}"
            for place in (panel, *panel["targets"]):
                assert place["datasource"] == {"type": kind, "uid": uid}, title
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs), title
            assert all(refs), title

    def test_layout(self, path: Path) -> None:
        """No panel lies over another, or beyond the edge."""
        taken: set[tuple[int, int]] = set()
        for panel in load(path)["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24, panel["title"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, panel["title"]
            taken |= cells


@every_promql
class TestPromql:
    """What every query of Prometheus keeps to."""

    def test_parses(self, query: Query) -> None:
        """With its types."""
        promql_parser.parse(filled(query.text))

    def test_metrics_and_labels_exist(self, query: Query) -> None:
        """What it asks for is exported, with those labels."""
        selectors = SELECTOR.findall(query.text)
        assert selectors
        known = set()
        for name, matchers in selectors:
            metric = metric_of(name)
            assert metric is not None or name in OF_PROMETHEUS, f"{query}: {name}"
            labels = TARGET_LABELS if metric is None else LABELS[metric.name]
            known |= labels
            assert set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)) <= labels, query
        for grouping in re.findall(r"(?:by|on) \(([^)]*)\)", query.text):
            assert set(grouping.split(", ")) <= known, query

    def test_selectors_choose(self, query: Query) -> None:
        """Every one follows all variables; who is missing is chosen by their own."""
        for name, matchers in SELECTOR.findall(query.text):
            missing = "missing_" * (name == names.BARRIER_RANK_MISSING.name)
            for label in ("job", "instance", "run_id"):
                assert f'{label}=~"${label}"' in matchers, query
            for label in ("host", "rank"):
                assert f'{missing}{label}=~"${label}"' in matchers, query

    def test_counters_are_rates(self, query: Query) -> None:
        """A counter by itself says how old a process is; rates follow the resolution.

        Two exceptions: whether a part of the telemetry ever failed is the count, and
        who came last is counted over all the time that is shown.
        """
        for found in re.finditer(r"\w+(?:_total|_bucket|_count|_sum)\{", query.text):
            before = query.text[: found.start()]
            if query.panel != "Parts that failed":
                assert before.endswith(("rate(", "increase(")), query
        windows = set(re.findall(r"\[([^]]*)\]", query.text))
        range_ = {"$__range"} if query.panel == "Last arrivals by rank" else set()
        assert windows <= {"$__rate_interval", *range_}, query


def test_logql_and_traceql_parse() -> None:
    """By Grafana's own grammars."""
    asked = [query for query in queries() if query.kind != "prometheus"]
    assert {query.kind for query in asked} == {"loki", "tempo"}

    told = query_errors([(query.kind, filled(query.text)) for query in asked])

    for query, complaint in zip(asked, told, strict=True):
        assert complaint == "", query


def test_logs_are_about_real_events() -> None:
    """Every event that is looked for is one, and no event is looked for nowhere."""
    asked = {
        name.replace("[.]", ".")
        for query in queries("loki")
        for pattern in re.findall(r'event=~"([^"]*)"', query.text)
        for name in pattern.split("|")
    }

    # Told at debug level, to those who configured their log so.
    assert asked == set(names.EVENT_NAMES) - {names.BARRIER_COMPLETED}


def test_traces_are_about_real_attributes() -> None:
    """Every attribute of ours that is looked for is on spans."""
    for query in queries("tempo"):
        for name in re.findall(r"span\.(tracedstore[.\w]*)", query.text):
            assert name in names.ATTRIBUTES, query


def test_exemplars_are_asked_for() -> None:
    """On the histograms of calls, over time: that is where they are."""
    asked = [query for query in PROMQL if query.target.get("exemplar")]

    assert {query.panel for query in asked} == {"Duration, p99", "Waits that ended"}
    assert all("_bucket{" in query.text for query in asked)
