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
from ansible_collections.metal.serve.plugins.module_utils.planner.model import (
    DTYPE_BYTES,
    ModelShape,
    Quantization,
)

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


def safe_utilization(shape: ModelShape, given: MemoryInput) -> float:
    """Return the highest utilization (two decimals) at which nothing runs over later."""
    plan = memory.predict(shape, given)
    outside = 0 if plan.graphs_inside else plan.graphs
    room = plan.total - memory.CONTEXT_BYTES - MARGIN_BYTES - outside - plan.uncounted
    return max(0.05, math.floor(100 * room / plan.total) / 100)


def _check_start(plan: MemoryPlan, given: MemoryInput, where: str) -> None:
    """Raise DoesNotFitError for a share that is not free at the start: the engine then refuses to start (request_memory)."""
    free = plan.total - memory.CONTEXT_BYTES
    if plan.requested > free and given.kv_cache_memory_bytes is None:
        most = math.floor(100 * free / plan.total) / 100
        raise DoesNotFitError(
            f"{where}gpu_memory_utilization is {given.utilization:g}, {plan.requested / GIB:.2f} GiB; beside CUDA's own "
            f"{memory.CONTEXT_BYTES / GIB:.2f} GiB only {free / GIB:.2f} are free at a start, and the engine refuses.",
            [f"set gpu_memory_utilization to {most:g} or less"],
        )


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
        if size <= given.tensor or not weights.divisible(shape, size, given.data, given.expert_parallel):
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


def _fewer_tokens(shape: ModelShape, given: MemoryInput) -> list[str]:
    """Return the largest usual step size below the given one that works; the ladder tried those of a free value already."""
    for size in (8192, 4096, 2048, 1024):
        if given.max_num_seqs <= size < given.max_num_batched_tokens:
            better = _concurrency(shape, dataclasses.replace(given, max_num_batched_tokens=size))
            if better >= 1:
                return [f"set max_num_batched_tokens to {size} (then {better:.2f} requests)"]
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
    found += _fewer_tokens(shape, given)
    longest = _longest_that_fits(shape, given)
    if longest:
        found.append(f"set max_model_len to {longest} or less")
    if given.kv_cache_memory_bytes is not None:
        found.append(f"set kv_cache_memory_bytes to {memory.predict(shape, given).capacity.request_bytes} or more")
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


ALIKE = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}
AT_START = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_block"), Quantization("fp8", 8)),
    "bitsandbytes": Quantization("bitsandbytes", 4, 64),
}
"""What vLLM makes of plain weights while it loads them; every other method needs files in its form."""

BLOCK_STEP, LARGEST_BLOCK = 16, 1024


def as_asked(shape: ModelShape, fixed: Mapping[str, Any], where: str) -> ModelShape:
    """Return the model as the fixed ``dtype`` and ``quantization`` make it. Raises PlanError where its files do not allow it."""
    dtype, wanted = fixed.get("dtype"), fixed.get("quantization")
    if dtype not in (None, "auto"):
        if dtype not in DTYPE_BYTES:
            raise PlanError(f"{where}dtype is {dtype!r}; it must be one of auto, {', '.join(DTYPE_BYTES)}.")
        shape = dataclasses.replace(shape, dtype=str(dtype), dtype_bytes=DTYPE_BYTES[str(dtype)])
    if wanted is None:
        return shape
    if shape.quantization is not None:
        method = shape.quantization.method
        if ALIKE.get(str(wanted), wanted) != ALIKE.get(method, method):
            raise PlanError(f"{where}quantization is {wanted!r}; the model's files are {method}: leave it out.")
        return shape
    if wanted not in AT_START:
        raise PlanError(
            f"{where}quantization is {wanted!r}; config.json has no quantization_config, and of plain weights only "
            f"{', '.join(AT_START)} can be made at a start: leave it out, or take the model's files in that form."
        )
    return dataclasses.replace(shape, quantization=AT_START[str(wanted)])


def _cache_dtype(shape: ModelShape, target: Target, fixed: Mapping[str, Any]) -> tuple[str, str]:
    """Return the KV cache's type and, where the plan itself names it, why. Raises PlanError for one that the engine lacks."""
    known = kv.known_dtypes(shape, target.engine)
    wanted = fixed.get("kv_cache_dtype")
    if wanted is None:
        needed, why = kv.needed_dtype(shape, target.engine)
        return needed or "auto", why
    if wanted not in known:
        raise PlanError(
            f"{target.where}kv_cache_dtype is {wanted!r}; {target.engine} has for {shape.architecture} one of {', '.join(known)}."
        )
    return str(wanted), ""


def _check_sizes(shape: ModelShape, target: Target, fixed: Mapping[str, Any]) -> None:
    """Raise PlanError for sizes that the engine refuses, whatever the memory."""
    where = target.where
    if target.pipeline > shape.layers:
        raise PlanError(
            f"{where}pipeline_parallel is {target.pipeline}; config.json has num_hidden_layers {shape.layers}, so that is the "
            "most."
        )
    block = _fixed_number(fixed, "block_size", where)
    if block is not None and (block % BLOCK_STEP or block > LARGEST_BLOCK):
        raise PlanError(
            f"{where}block_size is {block}; it must be a multiple of {BLOCK_STEP}, {LARGEST_BLOCK} at most."
        )


def _check_cache(plan: MemoryPlan, given: MemoryInput, where: str) -> None:
    """Raise DoesNotFitError for a fixed size of the KV cache that the GPU does not have."""
    room = int(plan.total - plan.weights - plan.activation - plan.non_torch)
    if given.kv_cache_memory_bytes is not None and given.kv_cache_memory_bytes > room:
        raise DoesNotFitError(
            f"{where}kv_cache_memory_bytes is {given.kv_cache_memory_bytes}; beside weights and activation the GPU has "
            f"{max(0, room)} bytes.",
            ["leave it out: the engine takes what gpu_memory_utilization leaves"],
        )


def _held_requests(plan: MemoryPlan, prompt: float, load: Workload, caching: bool) -> tuple[int, str]:
    """Return how many requests of mean length the KV cache holds, 8 at least and a multiple of 8, and that as a sentence."""
    once = (load.shared_prefix or 0.0) * prompt if caching else 0.0
    tokens = max(1.0, prompt - once + (load.output_mean or 0))
    hold = max(8, 8 * int((plan.capacity.tokens - once) / tokens / 8))
    beside = f" beside {once:.0f} that all share" if once else ""
    return hold, f"the KV cache holds {hold} requests of {tokens:.0f} tokens{beside}"


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
    shape = as_asked(shape, fixed, where)
    _check_sizes(shape, target, fixed)
    check_context(shape, max_model_len, where)
    reasons = dict(batch.reasons)
    warnings: list[str] = []
    dtype, why_dtype = _cache_dtype(shape, target, fixed)
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
        block_size=_fixed_number(fixed, "block_size", where) or 0,
        prefix_caching=_flag(fixed, "enable_prefix_caching", where),
        calibration=target.calibration,
    )
    wish = _fixed_number(fixed, "gpu_memory_utilization", where, whole=False)
    safe = safe_utilization(shape, given)
    lowered = safe < memory.DEFAULT_UTIL
    if wish is None:
        given = dataclasses.replace(given, utilization=min(safe, memory.DEFAULT_UTIL))
        reasons["settings.gpu_memory_utilization"] = (
            f"lowered from the engine's {memory.DEFAULT_UTIL}: graphs and sampler state come on top of it; "
            if lowered
            else "the engine's own default: what comes on top of it fits beside; "
        ) + f"see {DOC}#utilization"
    else:
        given = dataclasses.replace(given, utilization=wish)
        reasons["settings.gpu_memory_utilization"] = "fixed in the settings"
        if wish > safe:
            warnings.append(f"gpu_memory_utilization {wish:g} leaves too little beside it; {safe:g} is safe")
    plan = memory.predict(shape, given)
    _check_start(plan, given, where)
    _check_cache(plan, given, where)
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
        # What prompts have in common is in the cache once, for all of them; with hybrid models only where it is asked for.
        caching = fixed.get("enable_prefix_caching", not shape.hybrid)
        hold, why = _held_requests(plan, load.prompt_mean, load, bool(caching))
        if hold < given.max_num_seqs:
            reasons["settings.max_num_seqs"] += f"; lowered from {given.max_num_seqs}: {why}; see {DOC}#max-num-seqs"
            given = dataclasses.replace(given, max_num_seqs=hold)
            plan = memory.predict(shape, given)
    settings: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": given.max_num_batched_tokens,
        "max_num_seqs": given.max_num_seqs,
        "gpu_memory_utilization": given.utilization,
    }
    if why_dtype:
        settings["kv_cache_dtype"] = dtype
        reasons["settings.kv_cache_dtype"] = f"{why_dtype}; see {DOC}#kv"
    if load.priorities:
        settings["scheduling_policy"] = "priority"
        reasons["settings.scheduling_policy"] = f"the workload has priorities; see {DOC}#scheduling"
    for name, value in fixed.items():
        settings[name] = value
        reasons.setdefault(f"settings.{name}", "fixed in the settings")
    reasons.update(_memory_reasons(plan, given))
    warnings += plan.warnings
    return EnginePlan(settings=settings, memory=plan, reasons=reasons, warnings=warnings)


def _tokens_reason(plan: MemoryPlan, given: MemoryInput) -> str:
    """Return how the tokens follow from the bytes: by the token, or by the request where it holds more than its tokens."""
    held = plan.capacity
    left = f"{plan.kv_bytes / GIB:.2f} GiB left"
    if held.max_concurrency <= 0 or abs(held.tokens * held.bytes_per_token / plan.kv_bytes - 1) < 0.02:
        return f"{left} at {held.bytes_per_token:g} bytes a token"
    each = plan.kv_bytes / held.max_concurrency / GIB
    return (
        f"{left}; a request of {given.max_model_len} tokens takes {each:.2f} GiB, windows, states and padding included"
    )


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
        "memory.kv_cache_tokens": f"{_tokens_reason(plan, given)}; see {DOC}#kv",
        "memory.max_concurrency": (f"requests of {given.max_model_len} tokens, the engine's own formula; see {DOC}#kv"),
        "memory.expected_error_pct": (
            f"{plan.expected_overhead_gib:g} GiB of uncertainty in activation, graphs and the rest; see {DOC}#error"
        ),
    }
