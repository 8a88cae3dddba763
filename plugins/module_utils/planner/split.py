# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whether to serve short and long prompts from separate pools, from a histogram of lengths. See docs/planning.md#split.

A stated, simple model: a replica works off prompts in order of arrival at a fixed rate of prompt tokens (M/G/1); the
wait of a new request is Pollaczek-Khinchine's mean with an exponential tail. Two constants are fitted on two
measurements on one H200 with a 7B-class model: 50 short requests/s alone gave a P99 of 65 ms to the first token, 20
short ones beside one 30,000-token prompt a second gave 2,952 ms. Other models and cards are scaled by arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.batching import number
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

PREFILL_RATE = 54_800.0
"""Prompt tokens a second of one H200 with 7.6e9 parameters: the rate at which the model gives 2,952 ms mixed."""

BASE_S = 0.042
"""Everything that is not waiting or prefill (HTTP, tokenizing, one decode step): fitted on the 65 ms alone."""

REFERENCE_PARAMETERS = 7.6e9
REFERENCE_TFLOPS = 989.0
TFLOPS = {"H200": 989.0, "H100": 989.0, "H800": 989.0, "H20": 148.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
TFLOPS.update({"L40": 181.0, "L4": 121.0, "A10": 125.0, "T4": 65.0, "GH200": 989.0})
"""Dense 16-bit tensor-core figures from the vendor's data sheets."""

TENSOR_EFFICIENCY = 0.9
HIGHEST_LOAD = 0.85
WORTH_IT = 2.0
"""A split is proposed where it makes the short P99 this many times better, or brings it below the SLO."""


@dataclass(frozen=True)
class Bucket:
    """Prompts of up to ``up_to`` tokens: ``share`` of all requests, ``mean`` tokens long."""

    up_to: int
    share: float
    mean: float


@dataclass(frozen=True)
class Split:
    """One way to divide the replicas at a bound. P99 are seconds to the first token; inf means overloaded."""

    bound: int
    short_replicas: int
    long_replicas: int
    short_share: float
    short_p99_s: float
    long_p99_s: float
    mixed_short_p99_s: float
    short_load: float
    long_load: float


def parse_lengths(value: Any, where: str = "workload.lengths") -> list[Bucket]:
    """Return the histogram: a list of {up_to, share[, mean]}, a mapping bound -> share, or 'bound:share,bound:share'.

    Shares are scaled to a sum of 1. Raises PlanError naming what is wrong.
    """
    if isinstance(value, str):
        pairs = [part.split(":") for part in value.split(",") if part.strip()]
        if any(len(pair) != 2 for pair in pairs):
            raise PlanError(f"{where} is {value!r}; write bound:share,bound:share such as 1000:0.9,32000:0.1.")
        value = [{"up_to": _plain(pair[0], where), "share": _plain(pair[1], where)} for pair in pairs]
    elif isinstance(value, Mapping):
        value = [{"up_to": _plain(str(bound), where), "share": share} for bound, share in value.items()]
    if not isinstance(value, Sequence) or not value:
        raise PlanError(f"{where} is {value!r}; it must list buckets, each with up_to (tokens) and share.")
    buckets: list[Bucket] = []
    low = 0
    for position, item in enumerate(value):
        here = f"{where}[{position}]"
        if not isinstance(item, Mapping):
            raise PlanError(f"{here} is {item!r}; it must be a mapping with up_to and share.")
        up_to = number(item.get("up_to"), f"{here}.up_to", 1, "a whole number of tokens", whole=True)
        share = number(item.get("share"), f"{here}.share", 0, "a share or a count, 0 or more")
        if up_to <= low:
            raise PlanError(f"{here}.up_to is {up_to}; buckets must come in rising order (the last was {low}).")
        mean = item.get("mean", (low + up_to) / 2)
        mean = number(mean, f"{here}.mean", 1, "a number of tokens")
        if not low < mean <= up_to:
            raise PlanError(f"{here}.mean is {mean:g}; it must lie in its bucket, {low} to {up_to}.")
        buckets.append(Bucket(up_to, float(share), float(mean)))
        low = up_to
    total = sum(bucket.share for bucket in buckets)
    if total <= 0:
        raise PlanError(f"{where}: all shares are 0; at least one must be above 0.")
    return [Bucket(bucket.up_to, bucket.share / total, bucket.mean) for bucket in buckets]


def _plain(text: str, where: str) -> float:
    """Return a number from text. Raises PlanError."""
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"{where}: {text!r} is not a number; write bound:share such as 1000:0.9.") from None


def prefill_rate(active_parameters: float, gpu: str, tensor: int = 1) -> float:
    """Return prompt tokens a second of one replica, scaled from the measured one by parameters and card."""
    tflops = TFLOPS.get(gpu, REFERENCE_TFLOPS)
    gain = 1.0 if tensor == 1 else tensor * TENSOR_EFFICIENCY
    return PREFILL_RATE * (REFERENCE_PARAMETERS / active_parameters) * (tflops / REFERENCE_TFLOPS) * gain


def p99_wait(arrivals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (load, P99 of the wait in seconds) of one server with (requests/s, seconds each) per class.

    Pollaczek-Khinchine: mean wait = sum(rate x s^2) / 2 / (1 - load); tail = load x exp(-t x load / mean).
    """
    load = sum(rate * seconds for rate, seconds in arrivals)
    if load >= 1:
        return load, math.inf
    mean = sum(rate * seconds**2 for rate, seconds in arrivals) / 2 / (1 - load)
    if load <= 0.01 or mean <= 0:
        return load, 0.0
    return load, mean / load * math.log(load / 0.01)


def first_token_p99(buckets: Sequence[Bucket], own: Sequence[Bucket], qps: float, rate: float) -> tuple[float, float]:
    """Return (load, P99 to the first token) of the requests in ``own`` on a replica that gets ``buckets`` at ``qps``.

    ``buckets`` carry shares of ``qps``; the own prefill is that of the longest bucket of ``own`` that has requests.
    """
    load, wait = p99_wait([(qps * bucket.share, bucket.mean / rate) for bucket in buckets])
    longest = max((bucket.mean for bucket in own if bucket.share > 0), default=0.0)
    return load, BASE_S + longest / rate + wait


def candidates(buckets: Sequence[Bucket], qps: float, replicas: int, rate: float) -> list[Split]:
    """Return the best division of the replicas for each bound between buckets, the best short P99 first."""
    found: list[Split] = []
    for position in range(len(buckets) - 1):
        short, long = list(buckets[: position + 1]), list(buckets[position + 1 :])
        share = sum(bucket.share for bucket in short)
        if not 0 < share < 1:
            continue
        _load, mixed = first_token_p99(buckets, short, qps / replicas, rate)
        best: Split | None = None
        for count in range(1, replicas):
            load, p99 = first_token_p99(short, short, qps / count, rate)
            long_load, long_p99 = first_token_p99(long, long, qps / (replicas - count), rate)
            option = Split(
                buckets[position].up_to, count, replicas - count, share, p99, long_p99, mixed, load, long_load
            )
            if max(load, long_load) > HIGHEST_LOAD:
                continue
            if best is None or option.short_p99_s < best.short_p99_s:
                best = option
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda split: (split.short_p99_s, split.bound))


def propose(
    buckets: Sequence[Bucket], qps: float, replicas: int, rate: float, slo_s: float | None = None
) -> tuple[Split | None, str]:
    """Return the split to make (None: serve all from one pool) and the reason."""
    if replicas < 2:
        return None, "one replica cannot be divided; a second one would be its own pool"
    options = candidates(buckets, qps, replicas, rate)
    if not options:
        load = sum(bucket.share * bucket.mean for bucket in buckets) * qps / replicas / rate
        return None, f"no division keeps both pools below {HIGHEST_LOAD:.0%} load (all together: {load:.0%})"
    best = options[0]
    gain = best.mixed_short_p99_s / best.short_p99_s
    helps = gain >= WORTH_IT or (slo_s is not None and best.short_p99_s <= slo_s < best.mixed_short_p99_s)
    if not helps:
        return None, (
            f"a split at {best.bound} tokens would make the short P99 {best.short_p99_s * 1000:.0f} ms instead of "
            f"{best.mixed_short_p99_s * 1000:.0f}: not worth a second pool"
        )
    mixed = "without bound" if math.isinf(best.mixed_short_p99_s) else f"{best.mixed_short_p99_s * 1000:.0f} ms"
    return best, (
        f"short P99 to the first token {best.short_p99_s * 1000:.0f} ms with the split at {best.bound} tokens, "
        f"{mixed} without"
    )


def to_dict(split: Split | None, reason: str) -> dict[str, Any]:
    """Return a proposal as JSON values; an unbounded wait is null."""
    if split is None:
        return {"split": False, "reason": reason, "pools": []}

    def seconds(value: float) -> float | None:
        return None if math.isinf(value) else round(value, 4)

    return {
        "split": True,
        "reason": reason,
        "bound_tokens": split.bound,
        "mixed_short_p99_s": seconds(split.mixed_short_p99_s),
        "pools": [
            {
                "pool": "short",
                "prompt_tokens_max": split.bound,
                "replicas": split.short_replicas,
                "request_share": round(split.short_share, 4),
                "load": round(split.short_load, 3),
                "ttft_p99_s": seconds(split.short_p99_s),
            },
            {
                "pool": "long",
                "prompt_tokens_min": split.bound + 1,
                "replicas": split.long_replicas,
                "request_share": round(1 - split.short_share, 4),
                "load": round(split.long_load, 3),
                "ttft_p99_s": seconds(split.long_p99_s),
            },
        ],
    }
