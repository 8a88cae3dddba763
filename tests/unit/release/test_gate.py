# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The gate lets a good release through and says of a bad one what is wrong with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.release import gate
from ansible_collections.metal.serve.plugins.module_utils.release.gate import Expected, Golden, Measured

GOOD = Measured(
    answers=(" Paris, the city",),
    requests=20,
    failed=0,
    ttft_p99_s=0.05,
    p99_s=0.4,
    kv_tokens=100_000,
    log=("INFO ready", "ERROR 12:00 known thing 0x7f"),
)
EXPECTED = Expected(
    golden=(Golden("The capital of France is", "Paris"),),
    previous={"ttft_p99_s": 0.05, "p99_s": 0.4},
    kv_tokens=100_000,
    log=("ERROR 11:59 known thing 0x1a2b",),
)


def said(measured: Measured, expected: Expected = EXPECTED, **rules: Any) -> list[str]:
    return gate.failures(gate.judge(measured, expected, gate.policy(rules)))


def test_a_good_release_passes() -> None:
    assert said(GOOD) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"answers": ("x8 ## zz",)}, "golden prompt 'The capital of France is': 'x8 ## zz', should be a text that has"),
        ({"answers": ("problem: no answer in 60 s",)}, "no answer in 60 s"),
        ({"answers": ()}, "not asked"),
        ({"failed": 1, "first_failure": "HTTP 500"}, "1 of 20 requests failed (HTTP 500)"),
        ({"requests": 0}, "0 of 0 requests failed"),
        ({"ttft_p99_s": 0.16}, "P99 time to first token: 0.160 s, before 0.050 s, should be at most 0.150 s"),
        ({"p99_s": 0.66}, "P99 of the whole answer: 0.660 s, before 0.400 s, should be at most 0.650 s"),
        ({"kv_tokens": 90_000}, "KV cache: 90000 tokens, should be at least 95000 as planned"),
        ({"log": ("ERROR new thing",)}, "log: 1 new error lines, first: ERROR new thing"),
        ({"log": ("Traceback (most recent call last):",)}, "log: 1 new error lines"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], words: str) -> None:
    found = said(replace(GOOD, **changes))
    assert len(found) == 1
    assert words in found[0]


def test_without_a_previous_release_times_are_not_judged() -> None:
    slow = replace(GOOD, ttft_p99_s=9.0, p99_s=99.0)
    assert said(slow, replace(EXPECTED, previous={})) == []
    assert said(slow, replace(EXPECTED, previous={"p99_s": None, "ttft_p99_s": None})) == []


def test_thresholds_are_data() -> None:
    assert said(replace(GOOD, p99_s=1.9), p99_factor=5) == []
    assert said(replace(GOOD, failed=1), error_ratio=0.05) == []
    assert said(replace(GOOD, log=("ERROR benign",)), log_ignored=["benign"]) == []


@pytest.mark.parametrize(
    ("given_", "words"),
    [({"p99": 1}, "may have"), ({"p99_factor": "2"}, "a number"), ({"log_errors": "x"}, "list of regular")],
)
def test_a_policy_that_is_none_is_refused(given_: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gate.policy(given_)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_quantile_is_one_of_the_values_and_covers_its_share(values: list[float]) -> None:
    found = gate.quantile(values, 0.99)
    assert found in values
    assert sum(value <= found for value in values) >= 0.99 * len(values)


def test_quantile_of_nothing() -> None:
    assert gate.quantile([], 0.99) is None


def test_what_is_kept_has_numbers_and_no_log() -> None:
    assert "log" not in GOOD.to_dict()
    assert GOOD.to_dict()["p99_s"] == 0.4
