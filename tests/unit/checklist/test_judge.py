# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The judge: no fault of a check passes, waivers end, exit codes mean what they say."""

from __future__ import annotations

import datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import REGISTRY, areas_of, policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.describe import policy_schema
from ansible_collections.metal.serve.plugins.module_utils.checklist.judge import count, exit_code, judge
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import (
    Finding,
    Registry,
    Verdict,
    failed,
    not_applicable,
    passed,
    unknown,
    warned,
)
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import (
    DEFAULT_POLICY,
    PolicyError,
    merge_policy,
)
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import HostFacts, Metalserve, ProbeState

from .helpers import registry, verdict

POLICY_SCHEMA = policy_schema()
TODAY = datetime.date(2027, 1, 31)


def words(verdicts: list[Verdict]) -> dict[str, str]:
    return {one.id: one.verdict for one in verdicts}


def test_a_check_that_raises_is_unknown_and_the_others_are_judged() -> None:
    checks = registry(a__boom=KeyError("x"), a__fine=passed("seen")).all()
    verdicts = judge(None, merge_policy(None), "node-a", checks=checks, today=TODAY)
    assert words(verdicts) == {"a.boom": "unknown", "a.fine": "pass"}
    assert "KeyError" in str(verdicts[0].current)


def test_worst_comes_first_and_waived_last() -> None:
    checks = registry(a__ok=passed(), a__warn=warned(), a__bad=failed(), a__dark=unknown("?"), a__waived=failed()).all()
    waiver = {"id": "a.waived", "reason": "known", "until": "2027-01-31"}
    verdicts = judge(None, merge_policy({"waivers": [waiver]}), "node-a", checks=checks, today=TODAY)
    assert [one.id for one in verdicts] == ["a.bad", "a.dark", "a.warn", "a.ok", "a.waived"]
    assert verdicts[-1].waiver == {"reason": "known", "until": "2027-01-31"}


def test_a_waiver_ends_after_its_day_and_holds_only_for_its_hosts() -> None:
    checks = registry(a__bad=failed()).all()
    waiver = {"id": "a.bad", "hosts": ["node-a"], "reason": "known", "until": "2027-01-31"}
    policy = merge_policy({"waivers": [waiver]})
    cases = {("node-a", TODAY): True, ("node-a", TODAY + datetime.timedelta(1)): False, ("node-b", TODAY): False}
    for (host, day), waived in cases.items():
        (only,) = judge(None, policy, host, checks=checks, today=day)
        assert (only.waiver is not None) is waived, (host, day)


def test_a_check_for_other_roles_is_not_applicable() -> None:
    policy = merge_policy({"expected": {"roles": ["gateway"]}})
    (only,) = judge(None, policy, "gw", checks=registry(a__bad=failed()).all(), today=TODAY)
    assert only.verdict == "not_applicable"


@pytest.mark.parametrize(
    ("found", "plain", "strict"),
    [
        ([], 2, 2),
        (["unknown"], 2, 2),
        (["not_applicable"], 2, 2),
        (["pass"], 0, 0),
        (["pass", "warn"], 0, 1),
        (["pass", "unknown"], 0, 1),
        (["pass", "fail"], 2, 2),
    ],
)
def test_exit_codes(found: list[str], plain: int, strict: int) -> None:
    verdicts = [verdict(f"a.{index}", word) for index, word in enumerate(found)]
    assert (exit_code(verdicts), exit_code(verdicts, strict=True)) == (plain, strict)


def facts(**states: str) -> HostFacts:
    """Return facts whose probes are in these states."""
    return HostFacts(probes={name: ProbeState(name, state) for name, state in states.items()})


@pytest.mark.parametrize(
    ("state", "severity", "code"),
    [
        ("timeout", "critical", 2),
        ("denied", "critical", 2),
        ("error", "critical", 2),
        ("not_collected", "critical", 0),
        ("timeout", "major", 0),
    ],
)
def test_a_critical_check_that_a_failed_reading_left_in_the_dark_is_no_good_news(
    state: str, severity: str, code: int
) -> None:
    made = Registry()
    declare: dict[str, Any] = {"title": "t", "why": "w", "remedy": "r", "source": "s"}
    made.check("a.dark", severity=severity, **declare)(lambda facts, policy: unknown(f"nvidia_smi: {state}"))
    made.check("a.fine", severity="minor", **declare)(lambda facts, policy: passed())
    verdicts = judge(facts(nvidia_smi=state, nvidia="error"), merge_policy(None), "a", checks=made.all(), today=TODAY)
    assert exit_code(verdicts) == code
    assert verdicts[0].unread == ([] if state == "not_collected" else ["nvidia_smi"])


def test_an_ended_waiver_is_named() -> None:
    waiver = {"id": "a.bad", "reason": "known", "until": "2027-01-30"}
    (only,) = judge(None, merge_policy({"waivers": [waiver]}), "a", checks=registry(a__bad=failed()).all(), today=TODAY)
    assert (only.waiver, only.ended_waiver) == (None, {"reason": "known", "until": "2027-01-30"})


def test_a_waiver_names_a_check_that_there_is() -> None:
    waiver = {"id": "gpu.cout", "reason": "r", "until": "2027-01-30"}
    with pytest.raises(PolicyError, match=r"waivers\[0\].id: there is no check 'gpu.cout'; did you mean gpu.count\?"):
        policy_of({"waivers": [waiver]})


@pytest.mark.parametrize("until", ["2027-2-1", "20270131", "2027-02-30", "tomorrow", None, 20270131])
def test_the_last_day_is_a_day(until: Any) -> None:
    with pytest.raises(PolicyError, match="is not a date such as 2027-01-31"):
        merge_policy({"waivers": [{"id": "a.b", "reason": "r", "until": until}]})


def test_areas_are_chosen_by_word_and_a_wrong_one_is_refused() -> None:
    assert areas_of(["all"]) == ()
    assert areas_of(["gpu", "driver"]) == ("driver", "gpu")
    with pytest.raises(ValueError, match="no area 'gpuu' of checks; did you mean gpu"):
        areas_of(["gpuu"])


def test_a_waived_failure_does_not_fail_and_is_counted_as_waived() -> None:
    verdicts = [verdict("a.bad", "fail", waiver={"reason": "r", "until": "2027-01-31"}), verdict("a.ok", "pass")]
    assert exit_code(verdicts, strict=True) == 0
    assert (count(verdicts)["waived"], count(verdicts)["fail"]) == (1, 0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"driver_minimun": "1"}, "driver_minimun: no such policy key; did you mean driver_minimum?"),
        ({"bar1_minimum_mib": "256"}, "bar1_minimum_mib: '256' is not a number"),
        ({"bar1_minimum_mib": True}, "bar1_minimum_mib: True is not a number"),
        ({"model_deep": 1}, "model_deep: 1 is not true or false"),
        ({"expected": {"gpu": 8}}, "expected.gpu: no such policy key; did you mean expected.gpus?"),
        ({"expected": "engine"}, "expected: 'engine' is not a mapping"),
        ({"expected": None}, "expected: None is not a mapping"),
        ({"driver_minimum": "new"}, "driver_minimum: 'new' is not a text with a version"),
        ({"driver_minimum": 525}, "driver_minimum: 525 is not a text with a version"),
        ({"nofile_minimum": -1}, "nofile_minimum: -1 is not a whole number from 0"),
        ({"nofile_minimum": 2_000_000}, "nofile_minimum: 2000000 is more than nofile_maximum (1048576)"),
        ({"tls_days_minimum": float("nan")}, "tls_days_minimum: nan is not a number from 0"),
        ({"disk_free_gib_minimum": float("-inf")}, "disk_free_gib_minimum: -inf is not a number"),
        ({"container_memory": "lots"}, "container_memory: 'lots' is not a size such as 88G"),
        ({"alerts": [{"what": "x"}]}, "alerts: [{'what': 'x'}] is not a list of mappings with what"),
        ({"alerts": [{"what": "x", "metrics": ["("]}]}, "is not a list of mappings with what"),
        ({"alerts": [{"what": "x", "metrics": ["m"], "above": 0}]}, "is not a list of mappings with what"),
        ({"alerts": [{"what": "x", "metrics": ["m"], "abvoe": 1}]}, "is not a list of mappings with what"),
        ({"metrics_with_the_first_event": ["*"]}, "is not a list of regular expressions"),
        ({"expected": {"roles": ["gpu"]}}, "expected.roles: ['gpu'] is not a list of engine, gateway, monitor"),
        ({"expected": {"roles": "engine"}}, "expected.roles: 'engine' is not a list"),
        ({"expected": {"accelerator": "amd"}}, "expected.accelerator: 'amd' is not nvidia, cpu"),
        ({"expected": {"image_cuda": "soup"}}, "expected.image_cuda: 'soup' is not a text with a version"),
        ({"expected": {"gpus": "8"}}, "expected.gpus: '8' is not a whole number"),
        ({"expected": {"gpus": True}}, "expected.gpus: True is not a whole number"),
        ({"expected": {"gpu_memory_utilization": 90}}, "90 is not a share above 0 and up to 1"),
        ({"expected": {"mig": "off"}}, "expected.mig: 'off' is not true, false or null"),
        ({"expected": {"engine_ports": [0]}}, "expected.engine_ports: [0] is not a list of ports"),
        ({"expected": {"releases": {"short-0": 5}}}, "is not a mapping of replicas to mappings"),
        ({"waivers": [{"id": "a.b", "until": "2027-01-31"}]}, "waivers[0].reason: missing"),
        ({"waivers": [{"id": "a.b", "reason": "r", "until": "soon"}]}, "waivers[0].until: 'soon' is not a date"),
    ],
)
def test_a_wrong_policy_names_key_value_and_what_would_be_right(override: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError) as caught:
        merge_policy(override)
    assert said in str(caught.value)


def test_the_default_policy_is_not_changed_by_an_override() -> None:
    merge_policy({"expected": {"gpus": 8}, "waivers": [{"id": "a.b", "reason": "r", "until": "2027-01-31"}]})
    assert merge_policy(None)["expected"]["gpus"] is None
    assert merge_policy(None)["waivers"] == []


def test_the_registry_refuses_what_would_confuse_later() -> None:
    made = Registry()
    declare: dict[str, Any] = {"title": "t", "severity": "major", "why": "w", "remedy": "r", "source": "s"}
    made.check("a.b", **declare)(lambda facts, policy: passed())
    with pytest.raises(ValueError, match="declared twice"):
        made.check("a.b", **declare)
    with pytest.raises(ValueError, match="no severity"):
        made.check("a.c", **{**declare, "severity": "huge"})
    with pytest.raises(ValueError, match="no verdict"):
        Finding("fine")
    assert not_applicable("no GPU").verdict == "not_applicable"


def test_a_planned_replica_that_is_not_there_is_a_failure_not_a_host_without_engines() -> None:
    found = HostFacts(metalserve=Metalserve(engines=[]))
    (ready,) = [one for one in REGISTRY.all() if one.id == "engine.ready"]
    none_planned = ready.function(found, policy_of({"expected": {"roles": ["engine"]}}))
    planned = ready.function(found, policy_of({"expected": {"roles": ["engine"], "releases": {"short-0": {}}}}))
    assert (none_planned.verdict, planned.verdict) == ("not_applicable", "fail")
    assert "short-0: planned for this host, and not there" in planned.current


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), lambda inner: st.lists(inner) |
                    st.dictionaries(st.text(), inner)))  # fmt: skip
def test_whatever_stands_in_a_policy_is_refused_or_fits_its_schema(value: Any) -> None:
    for name in (*DEFAULT_POLICY, *(f"expected.{key}" for key in DEFAULT_POLICY["expected"])):
        key, _dot, inner = name.partition(".")
        try:
            merged = merge_policy({key: {inner: value}} if inner else {key: value})
        except PolicyError:
            continue
        jsonschema.validate(merged, POLICY_SCHEMA)
