# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Batch sizes, sequence limits and queue limits from the wanted load alone. See docs/planning.md#tiers.

The numbers of the tiers are a documented prior from field reports; what was measured on the target beats them, and
``settings`` in the inventory beats both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

DOC = "docs/planning.md"

ENGINE_DEFAULT_BATCHED = 8192
"""vLLM's server default on cards of 70 GiB and more that are not A100 (0.26.0 engine/arg_utils.py)."""

OOM_STEP = 1024
OOM_FLOOR = 1024
QUEUE_LIMIT = 100
QUEUE_DRAIN_S = 60
SEQS_FLOOR = 256
SEQS_CAP = 384
"""Measured on an H200 with a 7B-class model (docs/evidence/serving.md): flat out, 256 and 384 sequences answered 73 to
78 requests a second, 1024 between 67 and 71."""

SEQS_HEADROOM = 2.0
DECODE_S_PER_TOKEN = 0.02
CPU_MAX_NUM_SEQS = 8
CPU_MAX_MODEL_LEN = 2048
DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Tier:
    """One row of the field report's table: below ``qps_below`` requests a second, batch so many tokens."""

    name: str
    qps_below: float
    max_num_batched_tokens: int
    delay_ms: int
    window: str


TIERS = (
    Tier("0..30", 30, 4096, 50, "on"),
    Tier("30..80", 80, 6144, 20, "on while the average length is below 6000 tokens"),
    Tier("80 and more", math.inf, 8192, 10, "off"),
)


@dataclass(frozen=True)
class Workload:
    """The wanted load of a pool. Lengths in tokens, ``qps`` in requests a second for the whole pool; None: not said."""

    qps: float | None = None
    prompt_mean: float | None = None
    prompt_p95: float | None = None
    output_mean: float | None = None
    output_p95: float | None = None
    longest_context: int | None = None
    shared_prefix: float | None = None
    priorities: bool = False
    lengths: Any = None
    """Histogram of prompt lengths as it was given; planner/split.py reads it."""


@dataclass(frozen=True)
class Batching:
    """Values in vLLM's vocabulary with a reason each; ``queue`` and ``max_in_flight`` are per replica, in requests."""

    max_num_batched_tokens: int
    max_num_seqs: int
    queue: int
    max_in_flight: int
    queue_wait_s: float
    reasons: dict[str, str] = field(default_factory=dict)


def number(value: Any, name: str, low: float, what: str, whole: bool = False, high: float = 1e15) -> Any:
    """Return ``value`` if it is a number, ``low`` to ``high``; else raise PlanError naming ``name`` and ``what``.

    The comparison takes whole numbers of any size, and no NaN or infinity.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not low <= value <= high or (whole and value != int(value)):
        text = repr(value)
        raise PlanError(f"{name} is {text if len(text) < 80 else text[:77] + '...'}; it must be {what}.")
    return int(value) if whole else value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return ``value`` if it is a mapping (None counts as empty); raise PlanError naming ``name`` otherwise."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError(f"{name} is {value!r}; it must be a mapping.")
    return value


def parse_workload(spec: Any, name: str) -> Workload:
    """Return the ``workload`` mapping of a pool as values; ``name`` is its place, for messages. Raises PlanError."""
    load = mapping(spec, name)
    known = {"qps", "prompt_tokens", "output_tokens", "longest_context", "shared_prefix", "priorities", "lengths"}
    for key in load:
        if key not in known:
            raise PlanError(f"{name}.{key} is not known; known keys are {', '.join(sorted(known))}.")

    def length(key: str) -> tuple[float | None, float | None]:
        part = load.get(key)
        if part is None:
            return None, None
        if not isinstance(part, Mapping):
            mean = number(part, f"{name}.{key}", 1, "a number of tokens or a mapping with mean and p95")
            return mean, mean
        mean = part.get("mean")
        p95 = part.get("p95", mean)
        if mean is None:
            mean = p95
        if mean is None:
            return None, None
        return (
            number(mean, f"{name}.{key}.mean", 1, "a number of tokens, 1 or more"),
            number(p95, f"{name}.{key}.p95", 1, "a number of tokens, 1 or more"),
        )

    prompt_mean, prompt_p95 = length("prompt_tokens")
    output_mean, output_p95 = length("output_tokens")
    qps = load.get("qps")
    longest = load.get("longest_context")
    shared = load.get("shared_prefix")
    return Workload(
        qps=None if qps is None else number(qps, f"{name}.qps", 0, "requests a second, 0 or more"),
        prompt_mean=prompt_mean,
        prompt_p95=prompt_p95,
        output_mean=output_mean,
        output_p95=output_p95,
        longest_context=None
        if longest is None
        else number(longest, f"{name}.longest_context", 1, "a whole number of tokens", whole=True),
        shared_prefix=None
        if shared is None
        else number(shared, f"{name}.shared_prefix", 0, "a share between 0 and 1", high=1),
        priorities=bool(load.get("priorities", False)),
        lengths=load.get("lengths"),
    )


def tier_for(qps: float) -> Tier:
    """Return the table's row for ``qps`` (requests a second)."""
    for tier in TIERS:
        if qps < tier.qps_below:
            return tier
    return TIERS[-1]


def decide(
    load: Workload,
    accelerator: str,
    replicas: int,
    max_model_len: int,
    prefill_tokens_per_s: float,
    fixed: Mapping[str, Any],
    queue_limit: int | None = None,
) -> Batching:
    """Return the batching of one replica out of ``replicas`` that share the load.

    ``queue_limit``: the pool's own ``queue``, None where it does not say.

    ``fixed`` is the pool's ``settings``: a value there wins. ``prefill_tokens_per_s`` bounds how fast a queue drains.
    """
    reasons: dict[str, str] = {}
    if accelerator == "cpu":
        batched = max_model_len
        reasons["settings.max_num_batched_tokens"] = (
            f"the longest prompt in one step ({max_model_len}): a CPU gains nothing from more; see {DOC}#cpu"
        )
    elif load.qps is None:
        batched = ENGINE_DEFAULT_BATCHED
        reasons["settings.max_num_batched_tokens"] = (
            f"no workload.qps given: the engine's own default for large cards; see {DOC}#tiers"
        )
    else:
        tier = tier_for(load.qps)
        batched = tier.max_num_batched_tokens
        reasons["settings.max_num_batched_tokens"] = f"qps {load.qps:g} is in tier {tier.name}; see {DOC}#tiers"
        reasons["settings.batch_delay"] = (
            f"not set: the tier's {tier.delay_ms} ms delay and window ({tier.window}) exist in no engine, which batch "
            f"at every step; see {DOC}#batch-delay"
        )
    if "max_num_batched_tokens" in fixed:
        batched = number(
            fixed["max_num_batched_tokens"],
            "settings.max_num_batched_tokens",
            1,
            "a whole number of tokens, 1 or more",
            whole=True,
        )
        reasons["settings.max_num_batched_tokens"] = "fixed in the pool's settings"

    if accelerator == "cpu":
        seqs = CPU_MAX_NUM_SEQS
        reasons["settings.max_num_seqs"] = f"CPU profile: measured with {seqs}; see {DOC}#cpu"
    elif load.qps is None or load.output_p95 is None:
        seqs = SEQS_FLOOR
        reasons["settings.max_num_seqs"] = f"no workload given: {seqs}, the prior; see {DOC}#max-num-seqs"
    else:
        residence = 1.0 + load.output_p95 * DECODE_S_PER_TOKEN
        needed = SEQS_HEADROOM * load.qps / max(1, replicas) * residence
        seqs = min(SEQS_CAP, max(SEQS_FLOOR, 32 * math.ceil(needed / 32)))
        reasons["settings.max_num_seqs"] = (
            f"{load.qps:g} requests/s over {replicas} replica(s), each there for about {residence:.1f} s, twofold "
            f"headroom: {needed:.0f}, within {SEQS_FLOOR}..{SEQS_CAP}; see {DOC}#max-num-seqs"
        )
    if "max_num_seqs" in fixed:
        seqs = number(
            fixed["max_num_seqs"], "settings.max_num_seqs", 1, "a whole number of sequences, 1 or more", whole=True
        )
        reasons["settings.max_num_seqs"] = "fixed in the pool's settings"
    if batched < seqs:
        if "max_num_batched_tokens" in fixed:
            raise PlanError(
                f"settings.max_num_batched_tokens is {batched}; it must be at least settings.max_num_seqs ({seqs}), "
                "because every running sequence takes one token a step."
            )
        batched = seqs
        reasons["settings.max_num_batched_tokens"] += f"; raised to max_num_seqs ({seqs})"

    mean_prompt = load.prompt_mean or max_model_len / 4
    drains = int(QUEUE_DRAIN_S * prefill_tokens_per_s / mean_prompt)
    queue = max(1, min(QUEUE_LIMIT, drains))
    reasons["admission.queue"] = (
        f"the smaller of {QUEUE_LIMIT} and what {QUEUE_DRAIN_S} s of prefill at {prefill_tokens_per_s:g} tokens/s can "
        f"work off ({drains} prompts of {mean_prompt:.0f} tokens); see {DOC}#queue"
    )
    if queue_limit is not None:
        queue = queue_limit
        reasons["admission.queue"] = "the pool's queue says so"
    reasons["admission.max_in_flight"] = f"max_num_seqs {seqs} + queue {queue}; see {DOC}#queue"
    return Batching(
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        queue=queue,
        max_in_flight=seqs + queue,
        queue_wait_s=queue * mean_prompt / prefill_tokens_per_s,
        reasons=reasons,
    )
