"""Alerts and dashboard: their runbook sections exist, and each metric is one of the product's.

``make test-monitoring`` runs them in Prometheus.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from emergency_ckpt.extras.metrics import METRICS

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
NODE_EXPORTER = {"node_filesystem_avail_bytes", "node_filesystem_size_bytes"}
RULES: list[dict[str, Any]] = yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"][0][
    "rules"
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def exported() -> dict[str, str]:
    """Return the series that a scrape gives, and the label of each."""
    found: dict[str, str] = {}
    for metric in METRICS:
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {metric.name + part: metric.label for part in parts}
    return found


def dashboard_queries() -> Iterator[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (v["query"]["query"] for v in dashboard["templating"]["list"] if v["name"] == "run")


def queries() -> list[str]:
    return [*(rule["expr"] for rule in RULES), *dashboard_queries()]


def test_metrics_of_rules_and_dashboard_are_exported() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for query in queries() for name in re.findall(r"\b(?:eckpt|node)[\w:]+", query)}
    assert used - recorded <= exported().keys() | NODE_EXPORTER
    assert len(used & exported().keys()) > 15


def test_labels_of_rules_and_dashboard_are_exported() -> None:
    for query in queries():
        for name, labels in re.findall(r"\b(eckpt_\w+)\{([^}]*)\}", query):
            known = {"run", exported()[name]}
            assert set(re.findall(r"(\w+)=", labels)) <= known, query


def test_alerts_have_sections_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    part = runbook.split("\n## Alerts\n")[1].split("\n## ")[0]
    sections = re.findall(r"^### (\w+)\n- \*\*Means\*\*: .*?\n- \*\*Do\*\*: \S", part, re.M | re.S)
    assert sections == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"


def test_alerts_have_tests_that_fire_and_stay_quiet() -> None:
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fired == set(ALERTS)
    assert quiet >= set(ALERTS) - {"EckptFewCopies"}
