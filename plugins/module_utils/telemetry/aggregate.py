# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Several engines of one node (or pool) as one figure: requests are summed, shares are never summed.

One process exports one series per ``engine`` label and a node may hold several processes. Taking the last series hides
load, and adding two KV-cache shares of 0.40 and 0.90 gives 1.30, which is no share of anything: the fullest cache is
what decides whether a request must wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .metrics import Sample, Scrape

# What each kind of engine calls the same thing (vLLM 0.26-0.33, SGLang 0.5.23, tritonserver 2.51).
# Triton's own families know nothing of an LLM engine's batch, so its running requests and cache stay unknown.
RUNNING = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}
WAITING = {
    "vllm": "vllm:num_requests_waiting",
    "sglang": "sglang:num_queue_reqs",
    "triton_vllm": "nv_inference_pending_request_count",
}
KV_USAGE = {"vllm": "vllm:kv_cache_usage_perc", "sglang": "sglang:token_usage"}
KINDS = ("vllm", "sglang", "triton_vllm")


@dataclass(frozen=True)
class EngineLoad:
    """The load of a group of engines. None: no engine reported it (unknown, which is not zero).

    ``running`` and ``waiting`` are requests, summed; ``kv_usage`` is a share 0..1, the largest; ``series`` is how many
    series the running requests came from, so a caller can compare it with the engines it expected.
    """

    running: float | None
    waiting: float | None
    kv_usage: float | None
    series: int


def engine_load(scrapes: Iterable[Scrape], kind: str) -> EngineLoad:
    """Return the load over all ``scrapes`` of engines of one ``kind`` (``vllm``, ``sglang``, ``triton_vllm``).

    A NaN sample is ignored, as it says nothing. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"engine kind {kind!r} is unknown; it is one of {', '.join(KINDS)}")
    samples = [sample for scrape in scrapes for sample in scrape.samples if not math.isnan(sample.value)]
    running = _values(samples, RUNNING.get(kind))
    waiting = _values(samples, WAITING.get(kind))
    usage = _values(samples, KV_USAGE.get(kind))
    return EngineLoad(
        running=sum(running) if running else None,
        waiting=sum(waiting) if waiting else None,
        kv_usage=max(usage) if usage else None,
        series=len(running),
    )


def _values(samples: Iterable[Sample], name: str | None) -> list[float]:
    return [sample.value for sample in samples if sample.name == name] if name else []
