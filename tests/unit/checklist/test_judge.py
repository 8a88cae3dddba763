# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The judge: no fault of a check passes, waivers end, exit codes mean what they say."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

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
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import PolicyError, merge_policy

from .helpers import registry, verdict

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
        ({"expected": {"gpu": 8}}, "expected.gpu: no such policy key; did you mean expected.gpus?"),
        ({"expected": "engine"}, "expected: 'engine' is not a mapping"),
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
