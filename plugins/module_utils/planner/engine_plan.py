# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of one engine and the memory they lead to: what fits, what is lowered to fit, what is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner import batching, kv, memory, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import DOC, Workload, number
from ansible_collections.metal.serve.plugins.module_utils.planner.constants import EngineConstants
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.memory import GIB, MemoryInput, MemoryPlan
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, Quantization

MARGIN_BYTES = int(0.35 * GIB)
MOST_WAYS_OUT = 4


@dataclass(frozen=True)
class Target:
    """The GPUs of one replica and what runs on them. ``available`` GPUs of this kind could be used at most."""

    gpu_name: str
    total_mib: int
    reserved_mib: float | None
    engine: str
    version: str
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    available: int = 1
    where: str = ""
    index_bytes: int | None = None
    calibration: EngineConstants | None = None


@dataclass(frozen=True)
class EnginePlan:
    """Settings in vLLM's vocabulary, the memory they lead to, a reason for each number, and what to know."""

    settings: dict[str, Any]
    memory: MemoryPlan
    reasons: dict[str, str]
    warnings: list[str] = field(default_factory=list)


def safe_utilization(shape: ModelShape, given: MemoryInput) -> tuple[float, bool]:
    """Return the highest utilization (two decimals, at most the engine's default) at which nothing runs over later."""
    plan = memory.predict(shape, given)
    outside = 0 if plan.graphs_inside else plan.graphs
    room = plan.total - memory.CONTEXT_BYTES - MARGIN_BYTES - outside - plan.uncounted
    safe = math.floor(100 * room / plan.total) / 100
    if safe >= memory.DEFAULT_UTIL:
        return memory.DEFAULT_UTIL, False
    return max(0.05, safe), True


def check_context(shape: ModelShape, length: int, where: str) -> None:
    """Raise PlanError when more context is asked for than the model has positions (rope scaling counted)."""
    limit = shape.context_limit
    if limit and length > limit:
        raise DoesNotFitError(
            f"{where}max_model_len is {length}; config.json has max_position_embeddings {shape.max_position}"
            f"{'' if shape.rope_scaling else ' and no rope_scaling'}, so {limit} tokens are the most.",
            [f"set max_model_len to {limit} or less", f"give config.json a rope_scaling that reaches {length}"],
        )


def _longest_that_fits(shape: ModelShape, given: MemoryInput) -> int:
    """Return the longest context (multiple of the block) of which one request fits; 0 where not even a block does."""

    def fits(blocks: int) -> bool:
        plan = memory.predict(shape, dataclasses.replace(given, max_model_len=blocks * kv.GPU_BLOCK))
        return plan.capacity.max_concurrency >= 1

    low, high = 0, math.ceil(given.max_model_len / kv.GPU_BLOCK)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low * kv.GPU_BLOCK


def _concurrency(shape: ModelShape, given: MemoryInput) -> float:
    """Return how many requests of max_model_len fit, 0 where the engine would not even start."""
    try:
        return memory.predict(shape, given).capacity.max_concurrency
    except PlanError:
        return 0.0


def _more_gpus(shape: ModelShape, given: MemoryInput, available: int) -> list[str]:
    """Return the smallest larger parallelism that works: more tensor parallelism, else a second node."""
    for size in (2, 4, 8, 16):
        if size <= given.tensor or shape.heads % size:
            continue
        more = _concurrency(shape, dataclasses.replace(given, tensor=size))
        if more >= 1:
            missing = size * given.pipeline * given.data - available
            have = "" if missing <= 0 else f", {missing} more GPU(s)"
            return [f"set tensor_parallel to {size} (then {more:.2f} requests{have})"]
    stages = 2 * given.pipeline
    two = _concurrency(shape, dataclasses.replace(given, pipeline=stages))
    if two >= 1:
        return [f"span two nodes: nodes_per_replica 2 and pipeline_parallel {stages} (then {two:.2f} requests)"]
    return []


def _smaller_weights(shape: ModelShape, given: MemoryInput) -> list[str]:
    """Return the first quantization of the weights that works; nothing for a model that is quantized already."""
    if shape.quantization is not None or shape.compressed:
        return []
    plain = dataclasses.replace(given, index_bytes=None)
    for label, scheme in (("FP8", Quantization("fp8", 8)), ("4-bit AWQ", Quantization("awq", 4, 128, True))):
        smaller = dataclasses.replace(shape, quantization=scheme)
        if _concurrency(smaller, plain) >= 1:
            size = weights.weights(smaller, given.tensor, given.pipeline).exact
            return [f"take {label} weights ({size / GIB:.1f} GiB per GPU)"]
    return []


def ways_out(shape: ModelShape, given: MemoryInput, available: int) -> list[str]:
    """Return the changes that make one request of max_model_len fit, each tried and with its number, best first."""
    found: list[str] = []
    if given.utilization < memory.DEFAULT_UTIL:
        better = _concurrency(shape, dataclasses.replace(given, utilization=memory.DEFAULT_UTIL))
        if better >= 1:
            found.append(f"set gpu_memory_utilization to {memory.DEFAULT_UTIL} (then {better:.2f} requests)")
    longest = _longest_that_fits(shape, given)
    if longest:
        found.append(f"set max_model_len to {longest} or less")
    if given.kv_cache_dtype == "auto" and shape.indexer is None and not shape.compressed:
        eight = _concurrency(shape, dataclasses.replace(given, kv_cache_dtype="fp8"))
        if eight >= 1:
            found.append(f"set kv_cache_dtype to fp8 (then {eight:.2f} requests of {given.max_model_len} tokens)")
    if given.kv_cache_memory_bytes is None:
        found += _more_gpus(shape, given, available) + _smaller_weights(shape, given)
    return found[:MOST_WAYS_OUT]


def require_fit(shape: ModelShape, given: MemoryInput, plan: MemoryPlan, where: str, available: int) -> None:
    """Raise PlanError when not one request of max_model_len fits, with what is short and the ways out."""
    if plan.capacity.max_concurrency >= 1:
        return
    need = plan.capacity.request_bytes
    if plan.kv_bytes == 0:
        other = (plan.activation + plan.non_torch) / GIB
        head = (
            f"{where}tensor_parallel is {given.tensor}; {shape.architecture} does not fit: weights "
            f"{plan.weights / GIB:.2f} + activation and other {other:.2f} GiB per GPU, but gpu_memory_utilization "
            f"{given.utilization:g} allows {plan.requested / GIB:.2f}."
        )
    else:
        head = (
            f"{where}max_model_len is {given.max_model_len}; the KV cache holds {plan.capacity.tokens} tokens "
            f"({plan.kv_bytes / GIB:.2f} GiB), one request of that length takes {need / GIB:.2f} GiB."
        )
    raise DoesNotFitError(head, ways_out(shape, given, available))


def _fixed_number(fixed: Mapping[str, Any], name: str, where: str, whole: bool = True) -> Any:
    """Return a number that the settings fix, None where they do not. Raises PlanError for another type."""
    if fixed.get(name) is None:
        return None
    what = "a whole number, 1 or more" if whole else "a number above 0"
    return number(fixed[name], f"{where}{name}", 1 if whole else 0.001, what, whole=whole)


def _flag(fixed: Mapping[str, Any], name: str, where: str) -> bool:
    """Return a switch that the settings fix, false where they do not. Raises PlanError for the string 'false'."""
    value = fixed.get(name, False)
    if not isinstance(value, bool):
        raise PlanError(f"{where}{name} is {value!r}; it must be true or false, without quotes.")
    return value


def plan_engine(
    shape: ModelShape,
    target: Target,
    max_model_len: int,
    batch: batching.Batching,
    load: Workload,
    fixed: Mapping[str, Any],
) -> EnginePlan:
    """Return the plan of one engine on GPUs. ``fixed`` values are kept as they are; others may be lowered to fit.

    Raises PlanError for a wrong value, or for what cannot fit with the ways out.
    """
    where = target.where
    check_context(shape, max_model_len, where)
    reasons = dict(batch.reasons)
    warnings: list[str] = []
    dtype = str(fixed.get("kv_cache_dtype", "auto"))
    given = MemoryInput(
        gpu_name=target.gpu_name,
        total_mib=target.total_mib,
        reserved_mib=target.reserved_mib,
        engine=target.engine,
        version=target.version,
        tensor=target.tensor,
        pipeline=target.pipeline,
        data=target.data,
        max_model_len=max_model_len,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        max_num_seqs=batch.max_num_seqs,
        kv_cache_dtype=dtype,
        enforce_eager=_flag(fixed, "enforce_eager", where),
        expert_parallel=_flag(fixed, "enable_expert_parallel", where),
        index_bytes=target.index_bytes,
        kv_cache_memory_bytes=_fixed_number(fixed, "kv_cache_memory_bytes", where),
        calibration=target.calibration,
    )
    wish = _fixed_number(fixed, "gpu_memory_utilization", where, whole=False)
    safe, lowered = safe_utilization(shape, given)
    if wish is None:
        given = dataclasses.replace(given, utilization=safe)
        reasons["settings.gpu_memory_utilization"] = (
            f"lowered from the engine's {memory.DEFAULT_UTIL}: graphs and sampler state come on top of it; "
            if lowered
            else "the engine's own default: what comes on top of it fits beside; "
        ) + f"see {DOC}#utilization"
    else:
        given = dataclasses.replace(given, utilization=wish)
        reasons["settings.gpu_memory_utilization"] = "fixed in the settings"
        if wish > safe and lowered:
            warnings.append(f"gpu_memory_utilization {wish:g} leaves too little beside it; {safe:g} is safe")
    plan = memory.predict(shape, given)
    ladder = given
    while (
        plan.capacity.max_concurrency < 1
        and "max_num_batched_tokens" not in fixed
        and ladder.max_num_batched_tokens - batching.OOM_STEP >= max(batching.OOM_FLOOR, given.max_num_seqs)
    ):
        ladder = dataclasses.replace(ladder, max_num_batched_tokens=ladder.max_num_batched_tokens - batching.OOM_STEP)
        plan = memory.predict(shape, ladder)
    if plan.capacity.max_concurrency >= 1 and ladder is not given:
        reasons["settings.max_num_batched_tokens"] += (
            f"; lowered from {given.max_num_batched_tokens} in steps of {batching.OOM_STEP} until one request of "
            f"{max_model_len} tokens fits; see {DOC}#oom-ladder"
        )
        given = ladder
    plan = memory.predict(shape, given)
    require_fit(shape, given, plan, where, target.available)
    if load.prompt_mean and "max_num_seqs" not in fixed:
        tokens = load.prompt_mean + (load.output_mean or 0)
        hold = max(8, 8 * int(plan.capacity.tokens / tokens / 8))
        if hold < given.max_num_seqs:
            reasons["settings.max_num_seqs"] += (
                f"; lowered from {given.max_num_seqs}: the KV cache holds {hold} requests of {tokens:.0f} tokens; "
                f"see {DOC}#max-num-seqs"
            )
            given = dataclasses.replace(given, max_num_seqs=hold)
            plan = memory.predict(shape, given)
    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "max_num_seqs": given.max_num_seqs,
        "gpu_memory_utilization": given.utilization,
    }
    if load.priorities:
        settings["scheduling_policy"] = "priority"
        reasons["settings.scheduling_policy"] = f"the workload has priorities; see {DOC}#scheduling"
    for name, value in fixed.items():
        settings[name] = value
        reasons.setdefault(f"settings.{name}", "fixed in the settings")
    reasons.update(_memory_reasons(plan, given))
    warnings += plan.warnings
    return EnginePlan(settings=settings, memory=plan, reasons=reasons, warnings=warnings)


def _memory_reasons(plan: MemoryPlan, given: MemoryInput) -> dict[str, str]:
    """Return a reason for each number of the memory part."""
    phases = {
        "compile": "the compiler's trial of the embedding kernel",
        "layer": "one MLP layer",
        "moe": "one mixture-of-experts layer",
        "latent": "latent attention over cached context",
        "sampler": f"logits of {given.max_num_seqs} sequences",
    }
    return {
        "memory.weights_gib": f"{plan.weights_source}, with the allocator's rounding; see {DOC}#weights",
        "memory.activation_gib": (
            f"largest at {phases[plan.activation_phase]}, {given.max_num_batched_tokens} batched tokens; "
            f"see {DOC}#activation"
        ),
        "memory.non_torch_gib": (
            "CUDA context and modules" + (" and NCCL" if given.tensor * given.pipeline * given.data > 1 else "")
        )
        + f"; see {DOC}#non-torch",
        "memory.graphs_gib": f"CUDA graphs, {'inside' if plan.graphs_inside else 'on top of'} the requested memory; "
        f"see {DOC}#graphs",
        "memory.overhead_gib": f"activation + context, NCCL + graphs; see {DOC}#memory",
        "memory.planned_gpu_bytes": f"what the process will hold of the GPU in all; see {DOC}#memory",
        "memory.kv_cache_gib": (
            f"{plan.requested / GIB:.2f} GiB requested, less weights, activation"
            f"{', graphs' if plan.graphs_inside else ''} and context; see {DOC}#memory"
        ),
        "memory.kv_cache_tokens": (
            f"{plan.kv_bytes / GIB:.2f} GiB left at {plan.capacity.bytes_per_token:g} bytes a token; see {DOC}#kv"
        ),
        "memory.max_concurrency": (f"requests of {given.max_model_len} tokens, the engine's own formula; see {DOC}#kv"),
        "memory.expected_error_pct": (
            f"{plan.expected_overhead_gib:g} GiB of uncertainty in activation, graphs and the rest; see {DOC}#error"
        ),
    }
