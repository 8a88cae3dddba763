# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Buffered and unbuffered streams are told apart by their times (case I18)."""

from __future__ import annotations

import pytest

from ansible_collections.metal.serve.plugins.module_utils.telemetry import streaming
from ansible_collections.metal.serve.plugins.module_utils.telemetry.streaming import Timing

DIRECT = Timing(22.4, 5.49, 50)


@pytest.mark.parametrize(
    ("direct", "through", "verdict"),
    [
        (DIRECT, Timing(287.2, 1.58, 50), "buffered"),
        (DIRECT, Timing(24.0, 5.6, 50), "ok"),
        (DIRECT, Timing(22.4, 5.49, 50), "ok"),
        # All at once at the end, as a proxy does that waits for the whole answer.
        (DIRECT, Timing(291.4, 0.0, 50), "buffered"),
        # Late, but with the engine's own rhythm: a queue, not a buffer.
        (DIRECT, Timing(287.2, 5.5, 50), "slow"),
        # Faster tokens with an early start: a faster replica.
        (DIRECT, Timing(20.0, 2.0, 50), "ok"),
        (DIRECT, Timing(287.2, 1.58, 3), "unknown"),
        (Timing(22.4, 0.0, 50), Timing(24.0, 0.0, 50), "unknown"),
        # A slow engine: tens of milliseconds more are noise there.
        (Timing(900.0, 80.0, 16), Timing(1100.0, 82.0, 16), "ok"),
        (Timing(900.0, 80.0, 16), Timing(2100.0, 5.0, 16), "buffered"),
    ],
)
def test_verdicts(direct: Timing, through: Timing, verdict: str) -> None:
    judgement = streaming.judge(direct, through)
    assert judgement.verdict == verdict
    assert f"{through.ttft_ms:.1f}" in judgement.reason


def test_timing_counts_from_the_request() -> None:
    timed = streaming.timing(10.0, [10.5, 10.6, 10.8])
    assert (round(timed.ttft_ms), round(timed.itl_ms), timed.tokens) == (500, 150, 3)
    assert streaming.timing(1.0, [2.0]).itl_ms == 0.0
    with pytest.raises(ValueError, match="no token"):
        streaming.timing(1.0, [])


def test_one_outlier_does_not_decide() -> None:
    combined = streaming.combine([Timing(20, 5, 9), Timing(900, 5, 8), Timing(22, 6, 9)])
    assert combined == Timing(22, 5, 8)
    with pytest.raises(ValueError, match="no stream"):
        streaming.combine([])


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('data: {"choices":[{"text":" two"}]}', " two"),
        ('data: {"choices":[{"delta":{"content":"x"}}]}', "x"),
        ('data: {"choices":[{"delta":{"role":"assistant"}}]}', None),
        ('data: {"choices":[],"usage":{}}', None),
        ('data: {"text_output":"t"}', "t"),
        ("data: [DONE]", None),
        (": keep-alive", None),
        ("", None),
    ],
)
def test_lines_of_a_stream(line: str, text: str | None) -> None:
    assert streaming.token_in(line) == text


def test_an_error_inside_a_200_is_an_error() -> None:
    with pytest.raises(ValueError, match="queue is full"):
        streaming.token_in('data: {"error":{"message":"queue is full","code":503}}')


def test_the_text_of_a_whole_stream() -> None:
    assert streaming.texts(['data: {"choices":[{"text":"a"}]}', "", 'data: {"choices":[{"text":"b"}]}']) == "ab"
