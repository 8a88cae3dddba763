# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The rules, rendered by Ansible from the roles' own defaults, under the programs that will read them.

Each alert fires, and does not fire.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from . import render

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "alerts.yml").read_text(encoding="utf-8"))


@functools.cache
def groups_of(rules: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(rules)["groups"]
    return groups


def alerts(rules: str) -> list[dict[str, Any]]:
    return [rule for group in groups_of(rules) for rule in group["rules"] if "alert" in rule]


def selector(case: dict[str, Any], situation: dict[str, Any]) -> str:
    labels = {"alertname": case["alert"], "alertstate": "firing", **situation.get("labels", {})}
    return "ALERTS{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}"


def as_promtool(case: dict[str, Any], situation: dict[str, Any], fires: bool) -> dict[str, Any]:
    query = f"count({selector(case, situation)} > 0) > 0"
    return {
        "name": f"{case['alert']} {case.get('name', '')} {'fires' if fires else 'is silent'}",
        "interval": case.get("step", "15s"),
        "input_series": [{"series": name, "values": values} for name, values in situation["series"].items()],
        "promql_expr_test": [
            {
                "expr": f"clamp_max({query}, 1) or vector(0)",
                "eval_time": situation["at"],
                "exp_samples": [{"labels": "{}", "value": 1 if fires else 0}],
            }
        ],
    }


def situations(case: dict[str, Any]) -> list[dict[str, Any]]:
    found = [as_promtool(case, case["fires"], True)] if "fires" in case else []
    return found + [as_promtool(case, situation, False) for situation in case.get("silent", [])]


def part_of(rules: str, alert: str) -> str:
    """Return the rules that one alert needs: itself and recorded series. All of them for each test take a minute."""
    groups = copy.deepcopy(groups_of(rules))
    text = json.dumps([rule for group in groups for rule in group["rules"] if rule.get("alert") == alert])
    for group in groups:
        group["rules"] = [one for one in group["rules"] if one.get("alert") == alert or one.get("record", "-") in text]
    return json.dumps({"groups": [group for group in groups if group["rules"]]})


def run_promtool(folder: Path, rules: str, cases: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    names = []
    for number, case in enumerate(cases):
        (folder / f"rules-{number}.yml").write_text(part_of(rules, case["alert"]), encoding="utf-8")
        document = {
            "rule_files": [f"rules-{number}.yml"],
            "evaluation_interval": case.get("step", "15s"),
            "tests": situations(case),
        }
        names.append(f"tests-{number}.yml")
        (folder / names[-1]).write_text(json.dumps(document), encoding="utf-8")
    # Each test has a database of its own, gone soon after: collected less often, that takes a seventh less time.
    environment = {**os.environ, "GOGC": "400"}
    return subprocess.run(
        ["promtool", "test", "rules", *names],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("inventory", ["gpu", "cpu"])
def test_promtool_accepts_the_rules(inventory: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(render.rendered(inventory)["rules/metalserve.yml"], encoding="utf-8")
    result = subprocess.run(
        ["promtool", "check", "rules", "--lint=all", "--lint-fatal", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_fires_and_stays_silent(tmp_path: Path) -> None:
    result = run_promtool(tmp_path, render.rendered("gpu")["rules/metalserve.yml"], CASES)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_alert_with_a_wrong_threshold_is_caught(tmp_path: Path) -> None:
    rules = render.rendered("gpu")["rules/metalserve.yml"].replace(
        "metalserve_gpu_utilization_ratio > 0.9", "metalserve_gpu_utilization_ratio > 0.95"
    )
    busy = [case for case in CASES if case["alert"] == "MetalserveGpuBusy"]
    assert run_promtool(tmp_path, rules, busy).returncode != 0


def test_inventory_series_that_vanish_are_an_alert(tmp_path: Path) -> None:
    groups = yaml.safe_load(render.rendered("gpu")["rules/metalserve.yml"])
    groups["groups"] = [group for group in groups["groups"] if group["name"] != "metalserve-inventory"]
    case = {"alert": "MetalserveInventoryUnknown", "fires": {"at": "10m", "series": {}}}
    result = run_promtool(tmp_path, yaml.safe_dump(groups), [case])
    assert result.returncode == 0, result.stdout + result.stderr


def test_each_alert_has_both_tests() -> None:
    written = {rule["alert"] for rule in alerts(render.rendered("gpu")["rules/metalserve.yml"])}
    fires = {case["alert"] for case in CASES if "fires" in case} | {"MetalserveInventoryUnknown"}
    silent = {case["alert"] for case in CASES if case.get("silent")} | {"Watchdog"}
    assert written <= fires, f"no firing test for {written - fires}"
    assert written <= silent, f"no silent test for {written - silent}"


def test_each_alert_says_what_happened() -> None:
    for inventory in ("gpu", "cpu"):
        for rule in alerts(render.rendered(inventory)["rules/metalserve.yml"]):
            assert rule["annotations"]["summary"].endswith(".")
            assert rule["labels"]["severity"] in ("none", "info", "warning", "critical")


def test_the_briefs_thresholds_are_the_defaults() -> None:
    by_name = {rule["alert"]: rule for rule in alerts(render.rendered("gpu")["rules/metalserve.yml"])}
    assert "> 0.9" in by_name["MetalserveGpuBusy"]["expr"]
    assert by_name["MetalserveGpuBusy"]["for"] == "5m"
    assert by_name["MetalserveGpuBusy"]["labels"]["severity"] == "info"
    assert by_name["MetalserveGpuMemoryUnplanned"]["expr"].endswith("> 0.35")
    assert "> 0.01" in by_name["MetalserveRejected"]["expr"]
    assert "> 0.01" in by_name["MetalserveErrorRate"]["expr"]
    assert "> 120" in by_name["MetalserveModelLoadSlow"]["expr"]
    assert "> 0.9" in by_name["MetalserveGpuMemoryHigh"]["expr"]
    short = [
        rule
        for rule in alerts(render.rendered("gpu")["rules/metalserve.yml"])
        if rule["alert"] == "MetalserveP99High" and rule["labels"]["pool"] == "short"
    ]
    assert short[0]["expr"].count("> 1.5") == 3


def test_cpu_inventories_get_no_gpu_rule() -> None:
    assert not [rule for rule in alerts(render.rendered("cpu")["rules/metalserve.yml"]) if "Gpu" in rule["alert"]]


@pytest.mark.parametrize("inventory", ["gpu", "cpu"])
def test_alertmanager_accepts_its_configuration(inventory: str, tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(render.rendered(inventory)["alertmanager.yml"], encoding="utf-8")
    result = subprocess.run(["amtool", "check-config", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_watchdog_has_a_route_of_its_own() -> None:
    route = yaml.safe_load(render.rendered("gpu")["alertmanager.yml"])["route"]
    assert route["receiver"] == "on-call"
    assert route["routes"][0]["matchers"] == ['alertname = "Watchdog"']
    assert route["routes"][0]["repeat_interval"] == "5m"


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    files = render.rendered("gpu")
    (tmp_path / "rules.yml").write_text(files["rules/metalserve.yml"], encoding="utf-8")
    (tmp_path / "targets.json").write_text(json.dumps(files["targets"]), encoding="utf-8")
    text = files["prometheus.yml"].replace("/etc/prometheus/rules/metalserve.yml", str(tmp_path / "rules.yml"))
    text = text.replace("/etc/prometheus/targets/metalserve.json", str(tmp_path / "targets.json"))
    (tmp_path / "prometheus.yml").write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
