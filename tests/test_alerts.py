"""`deploy/alerts.yml`: rules that Prometheus reads, of metrics that exist, and that can fire."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.promql import check
from write_operations_docs import RULES, rules

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_can_fire(rule: dict[str, Any]) -> None:
    """It names metrics that exist, and its sides have the same labels."""
    check(rule["expr"], set())
    jobs = {job["job_name"] for job in PROMETHEUS["scrape_configs"]}
    assert set(re.findall(r'job="([^"]*)"', rule["expr"])) <= jobs


def test_every_rule_has_the_fields_of_an_alert_and_no_other() -> None:
    """Prometheus refuses the whole file for one that it does not know."""
    content = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert set(content) == {"groups"}
    for group in content["groups"]:
        assert set(group) == {"name", "rules"}
    for rule in rules():
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1s"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        templates = re.findall(r"\{\{(.*?)\}\}", str(rule["annotations"]))
        assert templates == [" $labels.instance "]
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) == 8


def test_prometheus_finds_the_rules_where_compose_mounts_them() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    mounts = compose["services"]["prometheus"]["volumes"]
    [config] = [mount for mount in mounts if "/prometheus.yml:" in mount]
    folder = config.split(":")[1].rpartition("/")[0]
    assert PROMETHEUS["rule_files"] == [RULES.name]  # beside the file that says so
    assert f"./{RULES.relative_to(ROOT)}:{folder}/{RULES.name}:ro" in mounts


def test_an_alert_whose_sides_never_meet_is_found() -> None:
    active = 'nv_trt_llm_request_metrics{request_type="active"} > 0'
    counter = 'increase(nv_trt_llm_general_metrics{general_type="iteration_counter"}[2m]) == 0'
    with pytest.raises(AssertionError, match="never meet"):
        check(f"{active} and {counter}", set())
    with pytest.raises(AssertionError, match="never meet"):
        check(f"{active} and ignoring (request_type) {counter}", set())
    check(f"{active} and ignoring (request_type, general_type) {counter}", set())
