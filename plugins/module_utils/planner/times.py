# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The one chain of times that engines, containers, units, Docker and the gateway share, and its lint.

All values are seconds. Nothing else in the project types a timeout: it comes from here, so that no outer bound can
cut an inner one short. See docs/planning.md#times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

STEP_S = 15
"""Seconds between one bound of the shutdown chain and the next: room to log, stop threads and remove a container."""

DOCKERD_STEP_S = 30
"""Seconds that dockerd gets above the slowest container, and docker.service above dockerd."""

PROBE_TIMEOUT_S = 1.0
PROBE_INTERVAL_S = 1.25
PROBE_FAILURES = 3
"""Three failed probes: worst case 3 x 1.25 + 1 = 4.75 s from death to ejection, inside 5 s."""

ENGINE_KEEPALIVE_S = {"vllm": 180, "sglang": 180, "triton_vllm": 5}
"""Idle time after which the engine closes a connection. vLLM and SGLang take it from an environment variable
(VLLM_HTTP_TIMEOUT_KEEP_ALIVE, SGLANG_TIMEOUT_KEEP_ALIVE); Triton's OpenAI frontend has 5 s built in."""

GATEWAY_KEEPALIVE_S = {"vllm": 120, "sglang": 120, "triton_vllm": 4}
"""Idle time after which the gateway closes its side: always the shorter, or a request meets a closing connection."""

CLIENT_KEEPALIVE_S = 180
CONNECT_S = 1
SEND_S = 30

DEFAULT_LONGEST_STREAM_S = 300
DEFAULT_PREFILL_TOKENS_PER_S = {"nvidia": 4000, "cpu": 200}
"""What the slowest replica must do where metalserve_pools.<pool>.minimums does not say: a bound, not a measurement."""

ORDER = (
    ("longest_stream_s", "<=", "drain_s"),
    ("drain_s", "<", "engine_shutdown_s"),
    ("engine_shutdown_s", "<", "container_stop_s"),
    ("container_stop_s", "<", "unit_stop_s"),
    ("unit_stop_s", "<", "dockerd_shutdown_s"),
    ("dockerd_shutdown_s", "<", "docker_unit_stop_s"),
    ("gateway_upstream_keepalive_s", "<", "engine_keepalive_s"),
    ("probe_timeout_s", "<", "probe_interval_s"),
    ("longest_silent_prefill_s", "<", "gateway_read_s"),
    ("longest_silent_prefill_s", "<", "wedged_after_s"),
)
"""Every rule of the chain as (left, relation, right); ``lint`` checks them all."""

Times = dict[str, float]


def derive(
    engine: str,
    longest_stream_s: float,
    longest_prompt_tokens: int,
    prefill_tokens_per_s: float,
    queue_wait_s: float = 0.0,
) -> Times:
    """Return the chain for one pool, in seconds.

    ``longest_prompt_tokens`` / ``prefill_tokens_per_s`` bounds the longest time in which a healthy engine says nothing;
    ``queue_wait_s`` is what a request may spend waiting before that. Raises PlanError for an unknown engine or a value
    that is not positive.
    """
    if engine not in ENGINE_KEEPALIVE_S:
        raise PlanError(f"engine is {engine!r}; it must be one of {', '.join(sorted(ENGINE_KEEPALIVE_S))}.")
    for name, value in (
        ("longest_stream_s", longest_stream_s),
        ("max_model_len", longest_prompt_tokens),
        ("minimums.prefill_tokens_per_s", prefill_tokens_per_s),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise PlanError(f"{name} is {value!r}; it must be a number above 0.")
    silent = math.ceil(longest_prompt_tokens / prefill_tokens_per_s)
    drain = math.ceil(longest_stream_s)
    engine_shutdown = drain + STEP_S
    container_stop = engine_shutdown + STEP_S
    unit_stop = container_stop + STEP_S
    dockerd = unit_stop + DOCKERD_STEP_S
    times: Times = {
        "longest_stream_s": longest_stream_s,
        "drain_s": drain,
        "engine_shutdown_s": engine_shutdown,
        "container_stop_s": container_stop,
        "unit_stop_s": unit_stop,
        "dockerd_shutdown_s": dockerd,
        "docker_unit_stop_s": dockerd + DOCKERD_STEP_S,
        "engine_keepalive_s": ENGINE_KEEPALIVE_S[engine],
        "gateway_upstream_keepalive_s": GATEWAY_KEEPALIVE_S[engine],
        "client_keepalive_s": CLIENT_KEEPALIVE_S,
        "probe_interval_s": PROBE_INTERVAL_S,
        "probe_timeout_s": PROBE_TIMEOUT_S,
        "longest_silent_prefill_s": silent,
        "gateway_connect_s": CONNECT_S,
        "gateway_send_s": SEND_S,
        "gateway_read_s": max(60, 2 * silent + math.ceil(queue_wait_s)),
        "wedged_after_s": max(10, math.ceil(1.5 * silent), silent + 1),
    }
    problems = lint(times)
    if problems:
        raise PlanError("The chain of times is broken: " + "; ".join(problems) + ".")
    return times


def lint(times: Mapping[str, Any]) -> list[str]:
    """Return every rule of the chain that ``times`` breaks, as sentences with both numbers; empty when it holds.

    Keys that are missing or not numbers are problems too.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for left, relation, right in ORDER:
        bad = False
        for name in (left, right):
            value = times.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                bad = True
                if name not in seen:
                    problems.append(f"{name} is {value!r}, not a number of seconds")
                    seen.add(name)
        if bad:
            continue
        holds = times[left] <= times[right] if relation == "<=" else times[left] < times[right]
        if not holds:
            problems.append(f"{left} ({times[left]:g} s) must be {relation} {right} ({times[right]:g} s)")
    return problems
