"""The alerts: they parse, fire, stay silent, and lead to a section of the runbook."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import LOKI_RULES, RULES, rules
from support.tools import ROOT, query_errors, run
from tracedstore import names

CASES = RULES.with_name("prometheus_test.yaml")
RUNBOOK = ROOT / "docs/runbook.md"
ALERTS = [rule for rule in rules(RULES) if "alert" in rule]
LOKI_ALERTS = rules(LOKI_RULES)


def cases() -> list[dict[str, Any]]:
    """What the cases expect of which alert."""
    tests = yaml.safe_load(CASES.read_text("utf-8"))["tests"]
    return [case for test in tests for case in test.get("alert_rule_test", [])]


class TestPromtool:
    """Prometheus' own judgement."""

    def test_rules(self) -> None:
        """They load."""
        done = run("promtool", "check", "rules", RULES)

        assert done.returncode == 0, done.stderr
        assert f"{len(rules(RULES))} rules found" in done.stdout

    def test_behaviour(self) -> None:
        """Each case goes as it says."""
        done = run("promtool", "test", "rules", CASES)

        assert done.returncode == 0, done.stdout + done.stderr

    def test_behaviour_can_fail(self, tmp_path: Path) -> None:
        """A rule that never fires is noticed."""
        (tmp_path / CASES.name).write_text(CASES.read_text())
        dull = RULES.read_text().replace("missing_ranks) > 0", "missing_ranks) > 99")
        (tmp_path / RULES.name).write_text(dull)

        done = run("promtool", "test", "rules", tmp_path / CASES.name)

        assert done.returncode != 0
        assert "TracedstoreBarrierStalled" in done.stdout + done.stderr

    def test_configuration(self, tmp_path: Path) -> None:
        """The configuration of compose, with the paths of this machine."""
        text = (ROOT / "deploy/prometheus/prometheus.yml").read_text("utf-8")
        text = text.replace("/etc/prometheus/rules/tracedstore.yaml", str(RULES))
        text = text.replace("/etc/prometheus/targets", str(tmp_path))
        (tmp_path / "ranks.json").write_text("[]")
        (tmp_path / "prometheus.yml").write_text(text)

        done = run("promtool", "check", "config", tmp_path / "prometheus.yml")

        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 rule files found" in done.stdout

    def test_alertmanager(self) -> None:
        """Its configuration loads."""
        done = run("amtool", "check-config", "deploy/alertmanager/alertmanager.yml")

        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize(
        ("labels", "receiver"),
        [
            (["alertname=TracedstoreBarrierStalled", "severity=critical"], "on-call"),
            (["alertname=TracedstoreTelemetryOff", "severity=info"], "discard"),
        ],
    )
    def test_routes(self, labels: list[str], receiver: str) -> None:
        """Alerts reach whom they should."""
        config = "--config.file=deploy/alertmanager/alertmanager.yml"

        done = run("amtool", "config", "routes", "test", config, *labels)

        assert done.stdout.strip() == receiver, done.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
class TestAlert:
    """What every alert on metrics keeps to."""

    def test_has_cases(self, alert: dict[str, Any]) -> None:
        """One at least in which it fires, one in which it does not."""
        found = [case for case in cases() if case["alertname"] == alert["alert"]]

        assert any(case["exp_alerts"] for case in found)
        assert any(not case["exp_alerts"] for case in found)

    def test_metrics_exist(self, alert: dict[str, Any]) -> None:
        """What it asks for, in its text too, is exported or recorded."""
        recorded = {rule["record"] for rule in rules(RULES) if "record" in rule}
        known = {metric.name for metric in names.METRICS}
        text = alert["expr"] + alert["annotations"]["description"]
        for record in recorded:
            text = text.replace(record, "")
        found = re.findall(r"\btracedstore_[a-z_]*[a-z]\b", text)

        assert found or "up{" in text or any(r in alert["expr"] for r in recorded)
        for name in found:
            assert re.sub(r"_(bucket|count|sum)$", "", name) in known, name

    def test_one_a_run(self, alert: dict[str, Any]) -> None:
        """A thousand ranks make one alert: it is by run, and not by instance."""
        assert "instance" not in alert["expr"]
        assert re.search(r"by \(job, run_id|job_run_id_store:", alert["expr"])


@pytest.mark.parametrize(
    "alert", ALERTS + LOKI_ALERTS, ids=lambda alert: alert["alert"]
)
def test_words_and_runbook(alert: dict[str, Any]) -> None:
    """It says what is the matter, how bad it is, and where to read on."""
    said = alert["annotations"]
    page, _, anchor = said["runbook_url"].partition("#")
    sections = re.findall(r"^## (\w+)", RUNBOOK.read_text("utf-8"), re.MULTILINE)

    assert said["summary"].endswith(".")
    assert "{{" not in said["summary"]
    assert "{{ $labels.run_id }}" in said["description"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert ROOT / page == RUNBOOK
    assert anchor in {section.lower() for section in sections}


def test_runbook_has_no_more() -> None:
    """Every section is one of an alert, each of which is explained in full."""
    text = RUNBOOK.read_text("utf-8")
    sections = re.findall(r"^## (Tracedstore\w+)", text, re.MULTILINE)

    assert sections == [alert["alert"] for alert in ALERTS]


class TestThousandRanks:
    """However many see the trouble, it is one alert."""

    DOWN = (7, 70, 700)

    def series(self) -> list[dict[str, str]]:
        """A barrier that three ranks of a thousand do not come to; they are gone."""
        found = {}
        for rank in range(1000):
            target = (
                f'job="training",instance="n:{rank}",run_id="r",rank="{rank}",host="n"'
            )
            down = rank in self.DOWN
            found[f"up{{{target}}}"] = "1 1 0x38" if down else "1x40"
            if not down:
                call = f'{target},store="tcp_store",operation="wait"'
                found[f"{names.OLDEST_START.name}{{{call}}}"] = "0x40"
            if rank < 2:
                barrier = f'{target},barrier="b"'
                found[f"{names.BARRIER_MISSING.name}{{{barrier}}}"] = "3x40"
                for missing in self.DOWN:
                    who = f'{barrier},missing_rank="{missing}",missing_host="m"'
                    found[f"{names.BARRIER_RANK_MISSING.name}{{{who}}}"] = "1x40"
        return [{"series": name, "values": values} for name, values in found.items()]

    def test_one_alert_each(self, tmp_path: Path) -> None:
        """By run, and by barrier or store."""
        firing = 'ALERTS{alertstate="firing"}'
        labels = {
            "TracedstoreBarrierStalled": ',barrier="b"',
            "TracedstoreOperationStalled": ',operation="wait",store="tcp_store"',
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
            "input_series": self.series(),
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

        done = run("promtool", "test", "rules", tmp_path / "test.yaml")

        assert done.returncode == 0, done.stdout + done.stderr


def severity(name: str) -> str:
    """How bad an alert is."""
    (found,) = [alert for alert in ALERTS if alert["alert"] == name]
    said: str = found["labels"]["severity"]
    return said


class TestLoki:
    """The rules on logs."""

    def test_parse(self) -> None:
        """By Grafana's own grammar."""
        told = query_errors([("loki", alert["expr"]) for alert in LOKI_ALERTS])

        assert told == [""] * len(LOKI_ALERTS)

    def test_the_parser_complains(self) -> None:
        """About what is no query."""
        told = query_errors(
            [("loki", "sum by (x) (rate({a=1}[5m]))"), ("tempo", "{ a")]
        )

        assert all(told)

    def test_about_real_events(self) -> None:
        """Events and their fields are those of the schema."""
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
            assert {f'{label}="' in alert["expr"] for label in by} == {True}


class TestAlertmanager:
    """One page a run and barrier."""

    CONFIG: dict[str, Any] = yaml.safe_load(
        (ROOT / "deploy/alertmanager/alertmanager.yml").read_text("utf-8")
    )

    def test_grouping(self) -> None:
        """By nothing that ranks differ in."""
        assert self.CONFIG["route"]["group_by"] == ["run_id", "barrier"]

    def test_inhibition_is_about_real_alerts(self) -> None:
        """A name that is misspelled inhibits nothing."""
        known = [alert["alert"] for alert in ALERTS + LOKI_ALERTS]
        for rule in self.CONFIG["inhibit_rules"]:
            for matcher in rule["source_matchers"] + rule["target_matchers"]:
                (pattern,) = re.findall(r'alertname=~?"(.*)"', matcher)
                assert any(re.fullmatch(pattern, name) for name in known), matcher
