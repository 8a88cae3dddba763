# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whether tokens come through the gateway one by one: times of a stream, direct and through, and their judgement.

A proxy that buffers is known by two things at once: the first token comes late, because it waited for a full buffer,
and the tokens after it come faster than the engine makes them, because they come in lumps. Either alone is no proof: a
late first token may be a queue, fast tokens a faster replica. See docs/gateway.md#streaming.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

BUFFERED_ITL_RATIO = 0.5
"""Tokens that come in less than half of the engine's own time between them come in lumps."""

BUFFERED_TTFT_FACTOR = 4.0
"""... and the first one waited for at least this many tokens more,"""

BUFFERED_TTFT_MS = 20.0
"""... and at least for this long: below it two runs differ by chance."""

SLOW_TTFT_MS = 50.0
"""A first token that is later than direct by more than this and by half is slow, whatever the reason."""

MIN_TOKENS = 4
"""Fewer tokens than this have no rhythm to compare."""


@dataclass(frozen=True)
class Timing:
    """One stream: milliseconds to the first token, mean milliseconds between tokens, number of tokens."""

    ttft_ms: float
    itl_ms: float
    tokens: int


@dataclass(frozen=True)
class Judgement:
    """``verdict`` is ok, slow, buffered or unknown; ``reason`` is one sentence with the numbers."""

    verdict: str
    reason: str


def timing(sent_s: float, arrivals_s: Sequence[float]) -> Timing:
    """Return the timing of a stream from the moment it was asked for and those at which its tokens came (seconds).

    Raises ValueError when no token came.
    """
    if not arrivals_s:
        raise ValueError("the stream had no token")
    gaps = [later - earlier for earlier, later in zip(arrivals_s, arrivals_s[1:])]
    return Timing(
        ttft_ms=(arrivals_s[0] - sent_s) * 1000,
        # The mean, not the median: of ten tokens that come in two lumps the median gap is 0, with or without a proxy.
        itl_ms=sum(gaps) / len(gaps) * 1000 if gaps else 0.0,
        tokens=len(arrivals_s),
    )


def combine(timings: Sequence[Timing]) -> Timing:
    """Return the median of several streams, value by value. Raises ValueError for none."""
    if not timings:
        raise ValueError("no stream was timed")
    return Timing(
        ttft_ms=median(t.ttft_ms for t in timings),
        itl_ms=median(t.itl_ms for t in timings),
        tokens=min(t.tokens for t in timings),
    )


def judge(direct: Timing, through: Timing) -> Judgement:
    """Compare a stream through the gateway with one straight from the engine.

    ``buffered``: the first token is later by BUFFERED_TTFT_FACTOR tokens and BUFFERED_TTFT_MS, and the others come in
    less than BUFFERED_ITL_RATIO of the time. ``slow``: the first token is later by SLOW_TTFT_MS and by half.
    ``unknown``: fewer than MIN_TOKENS tokens, or an engine whose own tokens come all at once.
    """
    numbers = (
        f"first token {through.ttft_ms:.1f} ms through the gateway and {direct.ttft_ms:.1f} ms direct, "
        f"then {through.itl_ms:.2f} and {direct.itl_ms:.2f} ms a token"
    )
    if min(direct.tokens, through.tokens) < MIN_TOKENS:
        return Judgement("unknown", f"Fewer than {MIN_TOKENS} tokens came, too few to compare: {numbers}.")
    if direct.itl_ms <= 0:
        return Judgement("unknown", f"The engine itself sends its tokens all at once: {numbers}.")
    later = through.ttft_ms - direct.ttft_ms
    lumped = through.itl_ms < BUFFERED_ITL_RATIO * direct.itl_ms
    if lumped and later > max(BUFFERED_TTFT_MS, BUFFERED_TTFT_FACTOR * direct.itl_ms):
        return Judgement("buffered", f"Something holds tokens back and lets them go in lumps: {numbers}.")
    if later > max(SLOW_TTFT_MS, 0.5 * direct.ttft_ms):
        return Judgement("slow", f"The first token is late through the gateway: {numbers}.")
    return Judgement("ok", f"Tokens come one by one: {numbers}.")


def token_in(line: str) -> str | None:
    """Return the text that one line of a server-sent stream carries; None for comments, blanks, roles and [DONE].

    Reads OpenAI's completions and chat completions, and the text of Triton's generate_stream. Raises ValueError with
    the message of an error event, which some engines send inside a 200.
    """
    if not line.startswith("data:"):
        return None
    payload = line[5:].strip()
    if not payload or payload == "[DONE]":
        return None
    event = json.loads(payload)
    if not isinstance(event, dict):
        return None
    if event.get("error"):
        error = event["error"]
        raise ValueError(str(error.get("message", error) if isinstance(error, dict) else error))
    choices = event.get("choices") or [{"text": event.get("text_output")}]
    choice = choices[0] if isinstance(choices[0], dict) else {}
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    return str(text) if text else None


def texts(lines: Iterable[str]) -> str:
    """Return the whole text of a server-sent stream."""
    return "".join(text for text in map(token_in, lines) if text)
