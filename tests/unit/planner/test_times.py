# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The chain of times: its order, its lint, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import times
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError


@given(
    engine=st.sampled_from(sorted(times.ENGINE_KEEPALIVE_S)),
    stream=st.floats(1, 86400),
    tokens=st.integers(1, 4_000_000),
    rate=st.floats(1, 1e6),
    wait=st.floats(0, 1e4),
)
def test_every_chain_is_strictly_ordered(engine: str, stream: float, tokens: int, rate: float, wait: float) -> None:
    chain = times.derive(engine, stream, tokens, rate, wait)
    assert times.lint(chain) == []
    order = [
        "drain_s",
        "engine_shutdown_s",
        "container_stop_s",
        "unit_stop_s",
        "dockerd_shutdown_s",
        "docker_unit_stop_s",
    ]
    values = [chain[name] for name in order]
    assert values == sorted(set(values))
    assert chain["longest_stream_s"] <= chain["drain_s"]
    assert chain["wedged_after_s"] >= max(10, 1.5 * chain["longest_silent_prefill_s"])


def test_the_documented_example() -> None:
    chain = times.derive("vllm", 300, 32768, 4000)
    assert chain["longest_silent_prefill_s"] == 9
    assert chain["wedged_after_s"] == 14
    assert chain["gateway_read_s"] == 60


def test_a_dead_replica_is_out_within_five_seconds() -> None:
    worst = times.PROBE_FAILURES * times.PROBE_INTERVAL_S + times.PROBE_TIMEOUT_S
    assert worst <= 5


@pytest.mark.parametrize("rule", times.ORDER, ids=lambda rule: f"{rule[0]}{rule[1]}{rule[2]}")
def test_lint_names_every_broken_rule(rule: tuple[str, str, str]) -> None:
    left, relation, right = rule
    chain = times.derive("vllm", 300, 32768, 4000)
    chain[left] = chain[right] + 1
    found = times.lint(chain)
    assert any(left in text and right in text and relation in text for text in found)
    chain[left] = chain[right]
    assert (relation == "<=") is not any(left in text and right in text for text in times.lint(chain))


def test_lint_names_what_is_missing_or_no_number() -> None:
    chain = dict(times.derive("sglang", 300, 32768, 4000))
    del chain["drain_s"]
    assert any("drain_s" in text for text in times.lint(chain))
    assert any("unit_stop_s is '5'" in text for text in times.lint({**chain, "unit_stop_s": "5"}))


@pytest.mark.parametrize(
    ("engine", "stream", "tokens", "rate", "named"),
    [
        ("tgi", 300, 1, 1, "engine is 'tgi'"),
        ("vllm", 0, 1, 1, "longest_stream_s is 0"),
        ("vllm", 300, 0, 1, "max_model_len is 0"),
        ("vllm", 300, 1, -3, "minimums.prefill_tokens_per_s is -3"),
        ("vllm", True, 1, 1, "longest_stream_s is True"),
    ],
)
def test_wrong_input_is_named(engine: str, stream: float, tokens: int, rate: float, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        times.derive(engine, stream, tokens, rate)
