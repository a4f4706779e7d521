"""The alert rules parse, fire when they should, and have a runbook section."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import LOKI_RULES, RULES, rules
from support.tools import ROOT, query_errors, run
from tracedstore import names
from tracedstore.common.causes import CAUSES

CASES = RULES.with_name("prometheus_test.yaml")
RUNBOOK = ROOT / "docs/runbook.md"
ALERTS = [rule for rule in rules(RULES) if "alert" in rule]
LOKI_ALERTS = rules(LOKI_RULES)


def cases() -> list[dict[str, Any]]:
    """Return the expected alerts of all promtool test cases."""
    tests = yaml.safe_load(CASES.read_text("utf-8"))["tests"]
    return [case for test in tests for case in test.get("alert_rule_test", [])]


class TestPromtool:
    """The checks of promtool and amtool."""

    def test_rules(self) -> None:
        """The rules load."""
        completed = run("promtool", "check", "rules", RULES)

        assert completed.returncode == 0, completed.stderr
        assert f"{len(rules(RULES))} rules found" in completed.stdout

    def test_behaviour(self) -> None:
        """All promtool test cases pass."""
        completed = run("promtool", "test", "rules", CASES)

        assert completed.returncode == 0, completed.stdout + completed.stderr

    def test_cases_detect_broken_rule(self, tmp_path: Path) -> None:
        """The test cases fail for a rule that never fires."""
        (tmp_path / CASES.name).write_text(CASES.read_text())
        broken = RULES.read_text().replace(
            "missing_ranks:max > 0\n          unless",
            "missing_ranks:max > 99\n          unless",
        )
        (tmp_path / RULES.name).write_text(broken)

        completed = run("promtool", "test", "rules", tmp_path / CASES.name)

        assert completed.returncode != 0
        assert "TracedstoreBarrierStalled" in completed.stdout + completed.stderr

    def test_configuration(self, tmp_path: Path) -> None:
        """The Prometheus configuration loads, with local paths."""
        text = (ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8")
        text = text.replace("/etc/prometheus/rules/tracedstore.yaml", str(RULES))
        text = text.replace("/etc/prometheus/targets", str(tmp_path))
        (tmp_path / "ranks.json").write_text("[]")
        (tmp_path / "prometheus.yml").write_text(text)

        completed = run("promtool", "check", "config", tmp_path / "prometheus.yml")

        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert "1 rule files found" in completed.stdout

    def test_configurations_in_docs(self, tmp_path: Path) -> None:
        """Promtool accepts every configuration in docs/scale.md, the last as agent."""
        text = (ROOT / "docs/scale.md").read_text("utf-8")
        configurations = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        (tmp_path / "tracedstore.yaml").write_text(RULES.read_text("utf-8"))
        assert len(configurations) == 4
        for number, configuration in enumerate(configurations, 1):
            path = tmp_path / f"{number}.yaml"
            path.write_text(configuration)
            agent = ["--agent"] if number == len(configurations) else []

            completed = run("promtool", "check", "config", *agent, path)

            assert completed.returncode == 0, completed.stdout + completed.stderr

    def test_alertmanager(self) -> None:
        """The Alertmanager configuration loads."""
        completed = run(
            "amtool", "check-config", "deploy/alertmanager/alertmanager.yml"
        )

        assert completed.returncode == 0, completed.stdout + completed.stderr

    @pytest.mark.parametrize(
        ("labels", "receiver"),
        [
            (["alertname=TracedstoreBarrierStalled", "severity=critical"], "on-call"),
            (["alertname=TracedstoreTelemetryOff", "severity=info"], "discard"),
        ],
    )
    def test_routes(self, labels: list[str], receiver: str) -> None:
        """Alertmanager routes an alert to its receiver."""
        config = "--config.file=deploy/alertmanager/alertmanager.yml"

        completed = run("amtool", "config", "routes", "test", config, *labels)

        assert completed.stdout.strip() == receiver, completed.stderr


class TestAlert:
    """Rules for every alert on metrics."""

    def test_has_cases(self, subtests: pytest.Subtests) -> None:
        """Every alert has a case that fires it and a case that does not."""
        for alert in ALERTS:
            with subtests.test(alert=alert["alert"]):
                own_cases = [
                    case for case in cases() if case["alertname"] == alert["alert"]
                ]

                assert any(case["exp_alerts"] for case in own_cases)
                assert any(not case["exp_alerts"] for case in own_cases)

    def test_metrics_exist(self, subtests: pytest.Subtests) -> None:
        """The expression and the description query existing metrics only."""
        for alert in ALERTS:
            with subtests.test(alert=alert["alert"]):
                recorded = {rule["record"] for rule in rules(RULES) if "record" in rule}
                known = {metric.name for metric in names.METRICS}
                text = alert["expr"] + alert["annotations"]["description"]
                for record in sorted(recorded, key=len, reverse=True):
                    text = text.replace(record, "")
                metrics = re.findall(r"\btracedstore_[a-z_]*[a-z]\b", text)

                assert (
                    metrics
                    or "up{" in text
                    or any(r in alert["expr"] for r in recorded)
                )
                for name in metrics:
                    assert re.sub(r"_(bucket|count|sum)$", "", name) in known, name

    def test_one_alert_per_run(self, subtests: pytest.Subtests) -> None:
        """The expression aggregates by run, not by instance."""
        for alert in ALERTS:
            with subtests.test(alert=alert["alert"]):
                assert "instance" not in alert["expr"]
                assert re.search(
                    r"by \(job, namespace, run_id|job_run_id\w*:", alert["expr"]
                )


RECORDS = [rule for rule in rules(RULES) if "record" in rule]


class TestRecord:
    """Rules for every recording rule."""

    def test_level(self, subtests: pytest.Subtests) -> None:
        """The level is what the series keep of their labels: never rank or host.

        The namespace is part of the run.
        """
        for rule in RECORDS:
            with subtests.test(rule=rule["record"]):
                level = rule["record"].split(":")[0]
                grouped = re.findall(r"by \(([^)]*)\)", rule["expr"])

                assert level.startswith("job_run_id")
                assert not {"rank", "host", "instance"} & {*re.findall("[a-z]+", level)}
                assert grouped
                assert all(by.startswith("job, namespace, run_id") for by in grouped)
                assert level.startswith(
                    tuple(
                        by.replace("namespace, ", "").replace(", ", "_")
                        for by in grouped
                    )
                )

    def test_metrics_exist(self, subtests: pytest.Subtests) -> None:
        """The expression reads existing metrics, or other recording rules."""
        for rule in RECORDS:
            with subtests.test(rule=rule["record"]):
                known = {metric.name for metric in names.METRICS}
                text = rule["expr"]
                for record in sorted(
                    (r["record"] for r in RECORDS), key=len, reverse=True
                ):
                    text = text.replace(record, "")

                for name in re.findall(r"\btracedstore_[a-z_]*[a-z]\b", text):
                    assert re.sub(r"_(bucket|count|sum)$", "", name) in known, name

    def test_has_a_case(self, subtests: pytest.Subtests) -> None:
        """A case reads it, or an alert that has cases."""
        for rule in RECORDS:
            with subtests.test(rule=rule["record"]):
                read = CASES.read_text("utf-8") + "".join(a["expr"] for a in ALERTS)

                assert rule["record"] in read


def test_annotations(subtests: pytest.Subtests) -> None:
    """Every alert has a summary, a description, a severity and a runbook section."""
    for alert in ALERTS + LOKI_ALERTS:
        with subtests.test(alert=alert["alert"]):
            annotations = alert["annotations"]
            page, _, anchor = annotations["runbook_url"].partition("#")
            sections = re.findall(
                r"^## (\w+)", RUNBOOK.read_text("utf-8"), re.MULTILINE
            )

            assert annotations["summary"].endswith(".")
            assert "{{" not in annotations["summary"]
            assert "{{ $labels.run_id }}" in annotations["description"]
            severity = alert["labels"]["severity"]
            # One severity, or one by cause.
            assert re.fullmatch(r"critical|warning|info|.*cause.*", severity, re.DOTALL)
            assert ROOT / page == RUNBOOK
            assert anchor in {section.lower() for section in sections}


def test_runbook_sections() -> None:
    """The runbook has exactly one section per alert, in the order of the rules."""
    text = RUNBOOK.read_text("utf-8")
    sections = re.findall(r"^## (Tracedstore\w+)", text, re.MULTILINE)

    # An alert may have a rule for each severity.
    assert sections == list(dict.fromkeys(alert["alert"] for alert in ALERTS))


class TestCauses:
    """The alert on a stalled job, its runbook section and the causes agree."""

    SECTION = (
        RUNBOOK.read_text("utf-8")
        .partition("## TracedstoreJobStalled\n")[2]
        .partition("\n## ")[0]
    )

    def test_one_section_for_each_cause(self) -> None:
        """The runbook has a section for each cause of a verdict, in their order."""
        sections = re.findall(r"^### Cause: (.*)", self.SECTION, re.MULTILINE)
        linked = re.findall(
            r"^\| `(\w+)` \| \[.+\]\(#cause-(\w+)\) \|$", self.SECTION, re.MULTILINE
        )

        assert sections == list(CAUSES)
        assert linked == [(cause, cause) for cause in CAUSES]

    def test_content(self, subtests: pytest.Subtests) -> None:
        """A section has what the cause means, what to check and what to do."""
        for cause in CAUSES:
            with subtests.test(cause=cause):
                _, _, rest = self.SECTION.partition(f"### Cause: {cause}\n")
                section = rest.partition("\n### ")[0]

                parts = re.findall(r"^\*\*(\w+)\*\*: \S", section, re.MULTILINE)
                assert parts == ["Meaning", "Check", "Do"]

    @pytest.mark.parametrize("path", [RULES, LOKI_RULES], ids=lambda path: path.stem)
    def test_alert_has_the_cause(self, path: Path) -> None:
        """The alerts on metrics contain the cause, and those on logs where it is."""
        alerts = [
            rule
            for rule in rules(path)
            if str(rule.get("alert")).startswith("TracedstoreJobStalled")
        ]

        assert alerts
        for alert in alerts:
            text, link = (
                alert["annotations"][n] for n in ("description", "runbook_url")
            )
            assert "abels.cause" in text or "job.stalled in its log" in text
            assert link.endswith("#tracedstorejobstalled")

    def test_cases_use_causes(self) -> None:
        """The causes in promtool's test cases are those of a verdict."""
        used = set(re.findall(r'cause="(\w+)"', CASES.read_text("utf-8")))

        assert {"busy", "late", "gone", "mismatch", "all_entered", "unknown"} <= used
        assert used <= set(CAUSES)


class TestThousandRanks:
    """A thousand affected ranks cause one alert, and one each where no verdict is."""

    DOWN = (7, 70, 700)

    def series(self, *, diagnosed: bool) -> list[dict[str, str]]:
        """Return the series of a barrier with 3 of 1000 ranks missing and down."""
        series = {}
        for rank in range(1000):
            target = (
                f'job="training",instance="n:{rank}",run_id="r",rank="{rank}",host="n"'
            )
            down = rank in self.DOWN
            series[f"up{{{target}}}"] = "1 1 0x38" if down else "1x40"
            if not down:
                call = f'{target},store="tcp_store",operation="wait"'
                series[f"{names.OLDEST_START.name}{{{call}}}"] = "0x40"
            if rank < 2:
                stalled = f'{target},cause="gone"'
                if diagnosed:
                    series[f"{names.JOB_AWAITED.name}{{{stalled}}}"] = "3x40"
                barrier = f'{target},barrier="b"'
                series[f"{names.BARRIER_MISSING.name}{{{barrier}}}"] = "3x40"
                for missing in self.DOWN:
                    rank_missing = (
                        f'{barrier},missing_rank="{missing}",missing_host="m"'
                    )
                    name = names.BARRIER_RANK_MISSING.name
                    series[f"{name}{{{rank_missing}}}"] = "1x40"
        return [{"series": name, "values": values} for name, values in series.items()]

    @pytest.mark.parametrize("diagnosed", [True, False])
    def test_one_alert_each(self, tmp_path: Path, *, diagnosed: bool) -> None:
        """With a verdict there is one alert; without one, one per run and barrier."""
        firing = 'ALERTS{alertstate="firing"}'
        labels = {"TracedstoreJobStalled": ""}
        if not diagnosed:
            labels = {
                "TracedstoreBarrierStalled": ',barrier="b"',
                "TracedstoreRankNotScraped": "",
            }
        samples = [
            {
                "labels": f'ALERTS{{alertname="{name}",alertstate="firing",'
                f'job="training",run_id="r",severity="{severity(name)}"{more}}}',
                "value": 1,
            }
            for name, more in labels.items()
        ]
        test = {
            "interval": "30s",
            "input_series": self.series(diagnosed=diagnosed),
            "promql_expr_test": [
                {"expr": firing, "eval_time": "15m", "exp_samples": samples}
            ],
        }
        (tmp_path / "test.yaml").write_text(
            json.dumps(
                {
                    "rule_files": [str(RULES)],
                    "evaluation_interval": "30s",
                    "tests": [test],
                }
            )
        )

        completed = run("promtool", "test", "rules", tmp_path / "test.yaml")

        assert completed.returncode == 0, completed.stdout + completed.stderr


def severity(name: str) -> str:
    """Return the severity of an alert, of several the first."""
    rule = next(alert for alert in ALERTS if alert["alert"] == name)
    label: str = rule["labels"]["severity"]
    return "critical" if "cause" in label else label


class TestLoki:
    """The alert rules on logs."""

    def test_parse(self) -> None:
        """Grafana's grammar accepts the expressions."""
        errors = query_errors([("loki", alert["expr"]) for alert in LOKI_ALERTS])

        assert errors == [""] * len(LOKI_ALERTS)

    def test_parser_rejects_invalid_queries(self) -> None:
        """The parser returns an error for an invalid query."""
        invalid = [("loki", "sum by (x) (rate({a=1}[5m]))"), ("tempo", "{ a")]

        assert all(query_errors(invalid))

    def test_events_and_fields_exist(self) -> None:
        """The expressions use events and fields of the schema only."""
        schema = json.loads(
            (ROOT / "src/tracedstore/signals/events.schema.json").read_text("utf-8")
        )
        fields = set(re.findall(r'"(\w+)": \{', json.dumps(schema)))
        for alert in LOKI_ALERTS:
            named = re.findall(r'event=~?"([^"]*)"', alert["expr"])
            patterns = [name for name in named if name != "event"]
            assert patterns, alert["alert"]
            for pattern in patterns:
                assert any(re.fullmatch(pattern, name) for name in names.EVENT_NAMES)
            extracted = re.findall(r'\b\w+="(\w+)"', alert["expr"])
            assert set(extracted) <= fields, alert["alert"]
            by = re.findall(r"by \(([^)]*)\)", alert["expr"])[0].split(", ")
            # The collector of a cluster sets the namespace.
            assert by.pop(0) == "namespace"
            assert {f'{label}="' in alert["expr"] for label in by} == {True}


class TestAlertmanager:
    """Alertmanager sends one page per run."""

    CONFIG: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy/alertmanager/alertmanager.yml").read_text("utf-8")
    )

    def test_grouping(self) -> None:
        """No label that differs between ranks is in the group key."""
        assert self.CONFIG["route"]["group_by"] == ["namespace", "run_id"]

    def test_inhibition_names_existing_alerts(self) -> None:
        """Every matcher of an inhibition rule matches an existing alert."""
        known = [alert["alert"] for alert in ALERTS + LOKI_ALERTS]
        for rule in self.CONFIG["inhibit_rules"]:
            for matcher in rule["source_matchers"] + rule["target_matchers"]:
                for pattern in re.findall(r'alertname=~?"(.*)"', matcher):
                    assert any(re.fullmatch(pattern, name) for name in known), matcher
