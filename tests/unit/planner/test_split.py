# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Pools from a histogram: the model's two fitted figures, its answers, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import split
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

SHORT = split.Bucket(1000, 1.0, 350)
MIXED = [split.Bucket(1000, 20 / 21, 350), split.Bucket(32000, 1 / 21, 30000)]


def test_the_two_measured_figures() -> None:
    _load, alone = split.first_token_p99([SHORT], [SHORT], 50, split.PREFILL_RATE)
    _load, mixed = split.first_token_p99(MIXED, MIXED[:1], 21, split.PREFILL_RATE)
    assert alone == pytest.approx(0.065, rel=0.03)
    assert mixed == pytest.approx(2.952, rel=0.03)


def test_two_replicas_are_divided() -> None:
    best, reason = split.propose(MIXED, 21, 2, split.PREFILL_RATE, 1.5)
    assert best is not None
    assert (best.bound, best.short_replicas, best.long_replicas) == (1000, 1, 1)
    assert best.short_p99_s < 0.1 < best.mixed_short_p99_s
    assert "1000 tokens" in reason
    value = split.to_dict(best, reason)
    assert [pool["pool"] for pool in value["pools"]] == ["short", "long"]
    assert sum(pool["request_share"] for pool in value["pools"]) == pytest.approx(1)


def test_one_replica_or_equal_prompts_are_left_alone() -> None:
    assert split.propose(MIXED, 21, 1, split.PREFILL_RATE)[0] is None
    even = split.parse_lengths("300:0.5,400:0.5")
    best, reason = split.propose(even, 5, 4, split.PREFILL_RATE)
    assert best is None
    assert "not worth" in reason


def test_overload_is_said() -> None:
    best, reason = split.propose(MIXED, 500, 2, split.PREFILL_RATE)
    assert best is None
    assert "load" in reason


def test_a_larger_model_or_a_slower_card_is_slower() -> None:
    base = split.prefill_rate(7.6e9, "H200")
    assert base == split.PREFILL_RATE
    assert split.prefill_rate(70e9, "H200") < base / 9
    assert split.prefill_rate(7.6e9, "A100") == pytest.approx(base * 312 / 989)
    assert base < split.prefill_rate(7.6e9, "H200", 2) < 2 * base


@pytest.mark.parametrize(
    "value",
    [
        "1000:0.9,32000:0.1",
        {"1000": 0.9, 32000: 0.1},
        [{"up_to": 1000, "share": 90}, {"up_to": 32000, "share": 10, "mean": 16500}],
    ],
)
def test_forms_of_a_histogram(value: object) -> None:
    assert split.parse_lengths(value) == [split.Bucket(1000, 0.9, 500.0), split.Bucket(32000, 0.1, 16500.0)]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("", "must list buckets"),
        ("1000", "bound:share"),
        ("a:1", "'a' is not a number"),
        ("1000:1,500:1", "rising order"),
        ([{"up_to": 10, "share": 0}], "all shares are 0"),
        ([{"up_to": 10, "share": 1, "mean": 11}], "mean is 11"),
        ([3], r"lengths\[0\] is 3"),
        (7, "must list buckets"),
        ({"1000": -1}, "share is -1"),
    ],
)
def test_a_wrong_histogram_is_named(value: object, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        split.parse_lengths(value)


@given(
    shares=st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 1)), min_size=2, max_size=6),
    qps=st.floats(0, 1000),
    replicas=st.integers(1, 16),
)
def test_a_proposal_always_helps(shares: list[tuple[int, float]], qps: float, replicas: int) -> None:
    low, buckets = 0, []
    for width, share in shares:
        buckets.append({"up_to": low + width + 1, "share": share})
        low += width + 1
    parsed = split.parse_lengths(buckets)
    best, _reason = split.propose(parsed, qps, replicas, split.PREFILL_RATE)
    if best is not None:
        assert best.short_replicas + best.long_replicas == replicas
        assert best.short_p99_s * split.WORTH_IT <= best.mixed_short_p99_s
        assert max(best.short_load, best.long_load) <= split.HIGHEST_LOAD
        assert math.isfinite(best.short_p99_s)
