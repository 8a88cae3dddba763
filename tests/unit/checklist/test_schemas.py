# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The schemas are current, and what the audit writes fits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ansible_collections.metal.serve.plugins.module_utils.checklist import describe
from ansible_collections.metal.serve.plugins.module_utils.checklist.model import REGISTRY
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import DEFAULT_POLICY

from .test_page import report

ROOT = Path(__file__).resolve().parents[3]


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "schemas" / name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_they_are_current() -> None:
    assert schema("policy.json") == describe.policy_schema()
    assert schema("verdicts.json") == describe.verdicts_schema()


def test_the_default_policy_and_a_report_fit() -> None:
    jsonschema.validate(DEFAULT_POLICY, schema("policy.json"))
    jsonschema.validate(report(), schema("verdicts.json"))
    jsonschema.validate({**report(), "difference": None}, schema("verdicts.json"))


@pytest.mark.parametrize(
    "policy",
    [
        {"driver_minimun": "1"},
        {"bar1_minimum_mib": "256"},
        {"expected": {"gpus": "8"}},
        {"alerts": [{"what": "x"}]},
        {"driver_minimum": "new"},
        {"waivers": [{"id": "gpu.count"}]},
        {"expected": {"gpu": 8}},
    ],
)
def test_a_wrong_policy_does_not(policy: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(policy, schema("policy.json"))


def test_ids_are_area_and_name() -> None:
    pattern = schema("verdicts.json")["$defs"]["Verdict"]["properties"]["id"]["pattern"]
    for check in REGISTRY.all():
        jsonschema.validate(check.id, {"pattern": pattern})
