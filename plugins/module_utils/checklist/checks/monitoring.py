# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Monitoring: exporters answer, the thresholds are loaded, every metric exists, every rule can fire."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional

from ansible_collections.metal.serve.plugins.module_utils.checklist.checks.support import (
    Policy,
    by_one,
    content_of,
    desired_out,
    not_read,
    part,
    unread,
    why_down,
    worst,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    CheckFunction,
    Finding,
    check,
    failed,
    not_applicable,
    passed,
    unknown,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts, Rule
from ansible_collections.metal.serve.plugins.module_utils.hardware.probe import ABSENT, ERROR
from ansible_collections.metal.serve.plugins.module_utils.telemetry.contract import (
    ExpressionError,
    missing_metrics,
    selectors,
)
from ansible_collections.metal.serve.plugins.module_utils.telemetry.metrics import Scrape, ScrapeError, parse_scrape

TAGS = ("monitoring",)
SHARE = re.compile(r"(_ratio|:ratio|cache_usage_perc|kv_cache_usage:max|token_usage)\Z")
# Labels that the scrape configuration and the rules themselves give; no exporter says them.
TARGET_LABELS = ("node", "pool", "replica", "kind", "instance", "job")


def needs_rules(function: CheckFunction) -> CheckFunction:
    """Wrap a check of rules: not applicable without Prometheus, unknown where neither API nor files were read."""

    def checked(facts: HostFacts, policy: Policy) -> Finding:
        if rules(facts):
            return function(facts, policy)
        # No rule at all may be a file that could not be read: only a machine without Prometheus has none by right.
        if facts.probe("prometheus").state == ABSENT and facts.probe("prometheus_files").state == ABSENT:
            return not_applicable("no Prometheus on this host")
        if facts.monitoring.rules is None:
            return not_read(facts, "prometheus", "prometheus_files")
        return failed("Prometheus has loaded no rule", "the rules of this bundle")

    return checked


def rules(facts: HostFacts) -> list[Rule]:
    """Return the rules that are loaded, or those in the files where Prometheus was not asked."""
    loaded = facts.monitoring.rules
    return loaded if loaded is not None else facts.monitoring.rules_in_files or []


@check(
    "monitoring.exporters",
    title="Exporters of this host answer, and engines give their metrics",
    severity="major",
    tags=TAGS,
    why="an exporter that does not answer makes every rule on it blind",
    remedy="systemctl status of the exporter; start it",
    source="deployment checklist: metrics exporter deployed",
)
def exporters(facts: HostFacts, policy: Policy) -> Finding:
    expected = _expected_exporters(facts, policy)
    if not expected:
        if facts.metalserve.engines is None:
            return not_read(facts, "engines")
        return not_applicable("no exporter is expected on this host")
    found = {scrape.name: scrape for scrape in facts.monitoring.scrapes}

    def one(name: str) -> Optional[tuple[str, str]]:
        scrape = found.get(name)
        if scrape is None or scrape.state == "not_collected":
            return "unknown", f"{name}: not scraped"
        if scrape.state == "denied":
            return "unknown", f"{name}: {scrape.error or scrape.state}"
        if scrape.state != "ok" or not scrape.metrics:
            return "fail", f"{name}: {scrape.error or ('nothing listens' if scrape.state == ABSENT else scrape.state)}"
        return None

    failures, warnings, unknowns = by_one(expected, one)
    if facts.metalserve.engines is None and "agent" in expected:
        unknowns.append("engines: which there are was not read")
    down = [
        f"{one.job} {one.instance}: {one.error or one.health}"
        for one in facts.monitoring.targets or []
        if one.health == "down"
    ]
    return worst((failures + down, warnings, unknowns), "all answer", ", ".join(expected))


@check(
    "monitoring.running",
    title="Prometheus and Alertmanager run",
    severity="critical",
    applies_to=("monitor",),
    tags=TAGS,
    why="a monitor that is down raises no alarm, its own least of all: silence looks like health",
    remedy="systemctl status prometheus prometheus-alertmanager; site.yml --tags monitoring starts them",
    source="docs/monitoring.md",
)
def running(facts: HostFacts, policy: Policy) -> Finding:
    found = {
        what: [facts.services[name] for name in names if _is_there(facts, name)] for what, names, _port in MONITORS
    }
    here = "monitor" in policy["expected"]["roles"] or any(found.values())
    if not here and facts.probe("prometheus").state == ABSENT:
        return not_applicable("no Prometheus on this host")
    if unread(facts, "systemd_units"):
        return not_read(facts, "systemd_units")
    listeners, wrong = facts.network.listeners, []
    for what, _names, port in MONITORS:
        units = found[what]
        wrong += [why_down(unit) for unit in units if why_down(unit)]
        if not units and listeners is None:
            return not_read(facts, "sockets", "proc_net_tcp")
        if not units and not any(one.port == port for one in listeners or []):
            wrong.append(f"no unit of {what}, and nothing listens on port {port}")
    # A unit says that it runs; whether it answers too is known where it was asked.
    if not wrong and facts.probe("prometheus").state == ERROR:
        wrong.append(facts.probe("prometheus").error)
    return failed("; ".join(wrong), "both active") if wrong else passed("both active", "both active")


MONITORS = (
    ("Prometheus", ("prometheus.service",), 9090),
    ("Alertmanager", ("prometheus-alertmanager.service", "alertmanager.service"), 9093),
)


def _is_there(facts: HostFacts, name: str) -> bool:
    return name in facts.services and facts.services[name].load_state not in ("not-found", "masked")


def _expected_exporters(facts: HostFacts, policy: Policy) -> list[str]:
    """Return what must answer here: by the declared roles, else by what is seen (engines, nginx, a monitor)."""
    roles = policy["expected"]["roles"]
    engines = [one.replica for one in facts.metalserve.engines or [] if not desired_out(one)]
    names = ["node"] if roles or engines or facts.nginx.config or facts.monitoring.rules else []
    if "engine" in roles or engines:
        names += ["agent", *engines]
    if "gateway" in roles or (not roles and facts.nginx.config):
        names += ["nginx", "gateway_log"]
    if "metalserve-dcgm.service" in facts.services and facts.services["metalserve-dcgm.service"].load_state == "loaded":
        names.append("dcgm")
    return names


@check(
    "monitoring.alert_thresholds",
    title="The checklist's alerts are loaded with its thresholds",
    severity="major",
    applies_to=("monitor",),
    tags=TAGS,
    why="a threshold that is written and not loaded, or looser than was agreed, alarms nobody",
    remedy="load the rules of this bundle; thresholds of a pool come from its slo and the plan's alerts",
    source="deployment checklist: gpu_util > 90 % for 5 minutes, memory_fragmentation > 35 %, rejected_requests > 1 %",
)
@needs_rules
def alert_thresholds(facts: HostFacts, policy: Policy) -> Finding:
    loaded = facts.monitoring.rules
    if loaded is None:
        return unknown("rules are in files; whether Prometheus has loaded them is not known")
    cpu_only = _without_gpus(loaded, policy)
    wanted = [one for one in policy["alerts"] if not (one.get("gpu") and cpu_only)]

    def one(alert: Mapping[str, Any]) -> Optional[tuple[str, str]]:
        pattern = re.compile("|".join(alert["metrics"]))
        rules_on_it = [rule for rule in loaded if rule.kind == "alerting" and pattern.search(rule.expr)]
        if not rules_on_it:
            return "fail", f"{alert['what']}: no alert on it"
        good = [rule for rule in rules_on_it if _tight(rule, alert) and (rule.for_s or 0) <= alert.get("for_s", 86400)]
        if good:
            return None
        shown = ", ".join(
            f"{rule.name}: {' '.join(rule.expr.split())[:80]}, for {rule.for_s:g} s"
            if rule.for_s is not None
            else rule.name
            for rule in rules_on_it[:2]
        )
        return "fail", f"{alert['what']}: {shown}"

    return worst(by_one(wanted, one), [alert["what"] for alert in wanted], [alert["what"] for alert in wanted])


def _without_gpus(loaded: list[Rule], policy: Policy) -> bool:
    """Tell whether there is no GPU to watch: so declared, or by this bundle's own rules about what must be there."""
    recorded = {rule.name for rule in loaded if rule.kind == "recording"}
    if "metalserve:expected_gpus" in recorded or policy["expected"]["accelerator"] == "nvidia":
        return False
    return policy["expected"]["accelerator"] == "cpu" or "metalserve:expected_targets" in recorded


def _tight(rule: Rule, alert: Mapping[str, Any]) -> bool:
    """Tell whether a rule compares with a number no looser than the checklist's; per cents count as shares."""
    above = alert.get("above")
    on_it = re.compile("|".join(alert["metrics"]))
    # Only the comparison of the metric itself counts: a floor of requests beside it is a number, too.
    parts = [part for part in re.split(r"\b(?:and|or|unless)\b", rule.expr) if on_it.search(part)]
    numbers = [float(text) for part in parts for text in re.findall(r">\s*(\d+(?:\.\d+)?(?:e-?\d+)?)", part)]
    if above is None:
        return bool(numbers)
    shares = [number / 100 if above <= 1 < number else number for number in numbers]
    return any(0 < number <= above * 1.0001 for number in shares)


@check(
    "monitoring.metric_contract",
    title="Every metric that a rule or dashboard uses exists",
    severity="major",
    applies_to=("monitor", "engine"),
    why="a rule on a metric that was renamed does not fail: it is silent for ever, and a panel is empty",
    remedy="use the names of the pinned engine version (scripts/metric-contract lists what is missing)",
    source="reports: panels empty after gpu_cache_usage_perc became kv_cache_usage_perc",
)
def metric_contract(facts: HostFacts, policy: Policy) -> Finding:
    loaded, on_disk = facts.monitoring.rules or [], facts.monitoring.rules_in_files or []
    sources = [rule.expr for rule in (*loaded, *on_disk)]
    sources += [one for found in facts.monitoring.dashboards.values() for one in found]
    if not sources:
        return _no_rules(facts)
    asked = facts.monitoring.metric_names
    odd = [one for one in sources if not _readable(one)]
    readable = [one for one in sources if one not in odd and (asked is not None or not _elsewhere(one, facts))]
    scrapes = {name for scrape in facts.monitoring.scrapes for name in scrape.metrics or []}
    known = scrapes | set(asked or [])
    if not known:
        return unknown(
            "no scrape to compare with", None, *(f"{one.name}: {one.state}" for one in facts.monitoring.scrapes)
        )
    recorded = {rule.name for rule in rules(facts) if rule.kind == "recording"}
    later = re.compile("|".join(policy["metrics_with_the_first_event"]) or r"(?!)")
    # Without Prometheus' own list only families that an exporter here speaks of can be judged.
    families = {_family(name) for name in known | recorded}
    missing, dark = set(), set()
    for one in missing_metrics(readable, _scrape(known), recorded=recorded):
        if later.fullmatch(one.name):
            continue
        if asked is not None or _family(one.name) in families:
            missing.add(str(one))
        else:
            dark.add(str(one))
    if missing:
        listed = sorted(missing)
        return failed(f"missing: {', '.join(listed)}", "every name in a scrape", *listed)
    if dark:
        return unknown(f"no exporter was read that would have {', '.join(sorted(dark)[:8])}", "every name in a scrape")
    if odd:
        return unknown(f"not PromQL: {' '.join(odd[0].split())[:120]}", "every name in a scrape")
    return passed(f"{len(readable)} expressions", "every name in a scrape")


def _no_rules(facts: HostFacts) -> Finding:
    if unread(facts, "prometheus", "prometheus_files", "dashboards"):
        return not_read(facts, "prometheus", "prometheus_files", "dashboards")
    return not_applicable("no rule and no dashboard on this host")


def _readable(expression: str) -> bool:
    try:
        selectors(expression)
    except ExpressionError:
        return False  # monitoring.rules_can_fire names it
    return True


def _elsewhere(expression: str, facts: HostFacts) -> bool:
    """Tell whether an expression asks for engines of another kind than those whose scrapes are at hand."""
    kinds = {str(part(content_of(one), "engine").get("kind")) for one in facts.metalserve.engines or []}
    wanted = {
        label[2] for one in selectors(expression) for label in one.labels if label[0] == "kind" and label[1] == "="
    }
    return bool(kinds and wanted) and not kinds & wanted


def _family(name: str) -> str:
    """Return who exports a metric, by its first words: ``vllm:``, ``node_``, ``metalserve_replica_``."""
    if ":" in name:
        return name.partition(":")[0] + ":"
    words = name.split("_")
    return "_".join(words[: 2 if words[0] in ("metalserve", "DCGM", "nv") else 1]) + "_"


def _scrape(names: set[str]) -> Scrape:
    return Scrape((), dict.fromkeys(names, "gauge"))


@check(
    "monitoring.rules_can_fire",
    title="Every rule can fire",
    severity="major",
    applies_to=("monitor",),
    why="a rule that is not PromQL, that Prometheus cannot evaluate, or that compares a share with 90 is an alarm without a bell",
    remedy="mend the expression; promtool test rules shows whether it fires",
    source='reports: absent(x{l="v"}) and absent(y) never fires; thresholds in the wrong unit',
)
@needs_rules
def rules_can_fire(facts: HostFacts, policy: Policy) -> Finding:
    samples = _samples(facts)

    def one(rule: Rule) -> Optional[tuple[str, str]]:
        if rule.health == "err" or rule.error:
            return "fail", f"{rule.name}: {rule.error or 'cannot be evaluated'}"
        reason = never(rule, samples)
        return ("fail", f"{rule.name}: {reason}") if reason else None

    alerting = [rule for rule in rules(facts) if rule.kind == "alerting"]
    recording = [rule for rule in rules(facts) if rule.kind == "recording"]
    if not alerting:
        return failed("no alerting rule is loaded", "the rules of this bundle")
    return worst(by_one([*alerting, *recording], one), "each can fire", f"{len(alerting)} alerts")


def never(rule: Rule, samples: Scrape) -> str:
    """Return why a rule can never give a result; empty where nothing speaks against it.

    ``samples`` are series of real scrapes: a selector on a label that none of a metric's series has selects nothing.
    """
    try:
        chosen = selectors(rule.expr)
        absents = [selectors(text) for text in re.findall(r"absent\(([^()]*)\)", rule.expr)]
        labels = missing_metrics([rule.expr], samples, target_labels=TARGET_LABELS, check_labels=True)
    except ExpressionError as error:
        return str(error)
    if re.search(r"absent\([^()]*\)\s+and\s+absent\(", rule.expr) and len({_equal_labels(one) for one in absents}) > 1:
        return "absent(...) and absent(...) with different labels never match; say on ()"
    for name, number in re.findall(r"([a-zA-Z_:][\w:]*)(?:\{[^{}]*\})?\s*>=?\s*(\d+(?:\.\d+)?)", rule.expr):
        if SHARE.search(name) and float(number) > 1:
            return f"{name} is a share from 0 to 1, compared with {number}"
    wrong = [one for one in labels if one.label and any(samples.select(selector.name) for selector in chosen)]
    return str(wrong[0]) if wrong else ""


def _equal_labels(chosen: Any) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted(label for selector in chosen for label in selector.labels if label[1] == "="))


def _samples(facts: HostFacts) -> Scrape:
    """Return the series of this host's scrapes as far as the facts keep them."""
    lines = [f"{series} {value!r}" for scrape in facts.monitoring.scrapes for series, value in scrape.samples.items()]
    try:
        return parse_scrape("\n".join(lines))
    except ScrapeError:
        return Scrape((), {})
