# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""docs/monitoring.md says what is there, docs/operations.md what to do; the command line of contracts; the dashboard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from metalserve_agent.catalogue import CATALOGUE

from . import render, scrapes

PAGE = (render.ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
ON_CALL = (render.ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_metric_of_the_agent_is_documented_as_it_is() -> None:
    for metric in CATALOGUE.values():
        assert f"| `{metric.name}` | {', '.join(metric.labels) or '-'} | {metric.help} |" in PAGE


def test_every_metric_of_the_gateway_is_documented() -> None:
    for name in scrapes.mtail().types:
        assert f"`{name}`" in PAGE


def rules() -> list[dict[str, Any]]:
    """Return every rule that some inventory gets."""
    inventories = [yaml.safe_load(render.rendered(name)["rules/metalserve.yml"])["groups"] for name in ("gpu", "cpu")]
    return [rule for groups in inventories for group in groups for rule in group["rules"]]


def test_every_recorded_name_is_documented() -> None:
    for name in {rule["record"] for rule in rules() if "record" in rule}:
        assert f"`{name}`" in PAGE or f"`{name}{{" in PAGE, name


def test_every_metric_of_ours_that_rules_and_dashboard_use_is_documented() -> None:
    texts = [str(rule["expr"]) for rule in rules()] + [scrapes.DASHBOARD.read_text(encoding="utf-8")]
    used = {name for text in texts for name in re.findall(r"\bmetalserve_[a-z0-9_]+", text)}
    assert {name for name in used if f"`{re.sub('_(bucket|count|sum)$', '', name)}`" not in PAGE} == set()


def test_every_alert_has_its_answer_for_who_is_on_call() -> None:
    """A row of operations.md: its names, its severity, when it fires, what to do; and no row for an alert that is none."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \| ([^|]+) \| ([^|]+) \|$", ON_CALL, flags=re.MULTILINE)
    documented = {name: severity for names, severity, _fires, _do in rows for name in re.findall(r"`(\w+)`", names)}
    assert documented == {rule["alert"]: rule["labels"]["severity"] for rule in rules() if "alert" in rule}


def contract(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(render.ROOT / "scripts" / "metric-contract"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_line_lists_what_is_missing(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(
        "groups: [{name: a, rules: [{record: 'a:b', expr: 'vllm:kv_cache_usage_perc'}, "
        "{alert: A, expr: 'a:b > 1 or vllm:gpu_cache_usage_perc > 1'}]}]",
        encoding="utf-8",
    )
    real = str(scrapes.FIXTURES / "vllm-0.32.0-cpu.prom")
    result = contract("--rules", str(rules), "--scrape", real, "--json")
    assert result.returncode == 2
    assert [one["metric"] for one in json.loads(result.stdout)] == ["vllm:gpu_cache_usage_perc"]
    rules.write_text(
        "groups: [{name: a, rules: [{record: 'a:b', expr: 'vllm:kv_cache_usage_perc'}]}]", encoding="utf-8"
    )
    assert contract("--rules", str(rules), "--scrape", real).returncode == 0


@pytest.mark.parametrize("text", ["", "groups: 1", "{", "groups: [{rules: [{expr: 'a{'}]}]"])
def test_what_is_no_rule_file_is_one_sentence(text: str, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(text, encoding="utf-8")
    result = contract("--rules", str(rules), "--scrape", str(scrapes.FIXTURES / "vllm-0.32.0-cpu.prom"))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("metric-contract: ")


def test_the_dashboards_panels_do_not_overlap() -> None:
    panels = json.loads(scrapes.DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
