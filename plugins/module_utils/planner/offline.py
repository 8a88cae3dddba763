# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A plan from files and words alone: what scripts/plan prints. No host, no inventory."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines import registry
from ansible_collections.metal.serve.plugins.module_utils.planner import (
    batching,
    calibration,
    estimator,
    kv,
    memory,
    split,
    times,
    weights,
)
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import DOC, number
from ansible_collections.metal.serve.plugins.module_utils.planner.constants import EngineConstants, gpu_profile
from ansible_collections.metal.serve.plugins.module_utils.planner.engine_plan import EnginePlan, Target, plan_engine
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, parse_config
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import ENGINES

VERSION = re.compile(r"\A[0-9]{1,4}\.[0-9]{1,4}(\.[0-9]{1,4})?((a|b|rc|\.post|\.dev)[0-9]{1,4})?(\+[a-z0-9.]{1,20})?\Z")
FIRST_CONTAINER = 18
"""Triton's images are called after year and month since 18.xx; no vLLM has such a version."""

PARALLEL = ("tensor_parallel", "pipeline_parallel", "data_parallel")
NUMBERS = {
    "max_model_len": (1, True),
    "max_num_batched_tokens": (1, True),
    "max_num_seqs": (1, True),
    "gpu_memory_utilization": (0.01, False),
    "kv_cache_memory_bytes": (1, True),
    "tensor_parallel": (1, True),
    "pipeline_parallel": (1, True),
    "data_parallel": (1, True),
    "long_prefill_token_threshold": (0, True),
    "max_num_queued_reqs": (1, True),
    "block_size": (1, True),
    "kv_offloading_size": (0, False),
    "prefill_schedule_interval": (1, True),
}
FLAGS = ("enforce_eager", "enable_expert_parallel", "enable_prefix_caching", "enable_chunked_prefill")
WORDS = ("kv_cache_dtype", "scheduling_policy", "attention_backend", "quantization", "dtype")
ALIASES = {f"{name}_size": name for name in PARALLEL}
NEAREST = {
    "max_tokens_per_batch": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_num_batches": "max_num_seqs",
    "batch_delay": "leave it out: no engine waits to fill a batch, new requests join at every step",
    "dynamic_window": "leave it out: each step's batch is put together anew",
    "mem_fraction_static": "gpu_memory_utilization (the plan's vocabulary is vLLM's; SGLang's adapter translates)",
    "max_running_requests": "max_num_seqs (the plan's vocabulary is vLLM's; SGLang's adapter translates)",
    "chunked_prefill_size": "max_num_batched_tokens (the plan's vocabulary is vLLM's; SGLang's adapter translates)",
    "swap_space": "kv_offloading_size",
    "radix_threshold": "leave it out: every shared prefix is used, whatever its length",
    "preemption_mode": "leave it out: a preempted request is computed again; scheduling_policy=priority says who yields",
    "max_queue_size": "max_num_queued_reqs (vLLM 0.29 and later), or the pool's queue at the gateway",
}
FEW_CONTEXTS = 4
TENSOR_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Request:
    """What scripts/plan was asked: model, GPUs, engine, fixed values, load."""

    config: Mapping[str, Any]
    gpu: str
    engine: str
    version: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    slo: Mapping[str, Any] = field(default_factory=dict)
    index_bytes: int | None = None
    calibration: EngineConstants | None = None
    model_name: str = "model"


def parse_engine(text: str) -> tuple[str, str]:
    """Return (kind, version) of ``vllm==0.26.0``. Raises PlanError naming the value and an example."""
    kind, separator, version = text.partition("==")
    kind = kind.strip().replace("-", "_")
    if kind not in ENGINES:
        raise PlanError(f"--engine is {text!r}; write kind==version with kind one of {', '.join(ENGINES)}.")
    version = version.strip()
    if not separator or not VERSION.match(version):
        raise PlanError(f"--engine is {text!r}; add the version that will run it, such as {kind}==0.26.0.")
    if kind == "triton_vllm" and int(version.partition(".")[0]) >= FIRST_CONTAINER:
        raise PlanError(
            f"--engine is {text!r}, a version of Triton's image; name the vLLM in it, such as {kind}==0.24.0."
        )
    return kind, version


def parse_set(text: str) -> tuple[str, Any]:
    """Return (name, value) of ``name=value``, the value as number, switch or word. Raises PlanError."""
    name, separator, raw = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not separator or not name:
        raise PlanError(f"--set is {text!r}; write name=value, such as max_num_batched_tokens=8192.")
    name = ALIASES.get(name, name)
    known = (*NUMBERS, *FLAGS, *WORDS)
    if name in NEAREST:
        answer = NEAREST[name] if NEAREST[name].startswith("leave") else f"use {NEAREST[name]}"
        raise PlanError(f"--set {name}: no such value in a plan; {answer}.")
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}."
        raise PlanError(f"--set {name}: no such value in a plan; {hint}")
    raw = raw.strip()
    if name in FLAGS:
        if raw.lower() not in ("true", "false"):
            raise PlanError(f"--set {name} is {raw!r}; it must be true or false.")
        return name, raw.lower() == "true"
    if name in WORDS:
        if name == "kv_cache_dtype":
            kv.check_dtype(raw)
        return name, raw
    low, whole = NUMBERS[name]
    try:
        value = json.loads(raw)
    except ValueError:
        value = raw
    what = f"a {'whole ' if whole else ''}number, {low} or more"
    return name, number(value, f"--set {name}", low, what, whole=whole)


def _judge(request: Request) -> None:
    """Raise PlanError for a fixed value that an engine of this version cannot have, with what to do instead."""
    for name, value in request.fixed.items():
        if name in PARALLEL:
            continue
        found = registry.lacks(request.engine, request.version, name, value)
        if found:
            raise PlanError(f"--set {name} {found[0]}; {found[1].rstrip('.?')}.")


def _context(request: Request, shape: ModelShape) -> int:
    """Return the longest context in tokens: --set max_model_len, else the workload's longest, else all that the model can."""
    wanted = batching.parse_workload(request.workload, "workload").longest_context
    length = int(request.fixed.get("max_model_len") or wanted or shape.context_limit or batching.DEFAULT_MAX_MODEL_LEN)
    if wanted is not None and wanted > length:
        raise PlanError(
            f"workload.longest_context is {wanted}; max_model_len is {length}, so it would not work: raise the one or "
            "lower the other."
        )
    return length


def _defaults(request: Request, shape: ModelShape, gpu: str, total_mib: int, replicas: int) -> batching.Batching:
    """Return the batching: from the workload where one is given, else the engine's own defaults on this GPU."""
    load = batching.parse_workload(request.workload, "workload")
    length = _context(request, shape)
    rate = times.DEFAULT_PREFILL_TOKENS_PER_S["nvidia"]
    if load.qps is not None:
        return batching.decide(load, "nvidia", replicas, length, rate, request.fixed)
    batched, seqs = calibration.engine_defaults(gpu, total_mib)
    fixed = {"max_num_batched_tokens": batched, "max_num_seqs": seqs}
    given = {name: request.fixed[name] for name in fixed if name in request.fixed}
    fixed.update(given)
    if fixed["max_num_seqs"] > fixed["max_num_batched_tokens"]:
        if "max_num_seqs" in given:
            raise PlanError(
                f"max_num_batched_tokens is {fixed['max_num_batched_tokens']}; it must be at least max_num_seqs "
                f"({fixed['max_num_seqs']}), because every running sequence takes one token a step."
            )
        fixed["max_num_seqs"] = fixed["max_num_batched_tokens"]
    batch = batching.decide(load, "nvidia", replicas, length, rate, fixed)
    why = f"the engine's own default on this GPU: no qps was given; see {DOC}#tiers"
    reasons = {
        **batch.reasons,
        "settings.max_num_batched_tokens": "fixed with --set" if "max_num_batched_tokens" in given else why,
        "settings.max_num_seqs": "fixed with --set" if "max_num_seqs" in given else why,
    }
    return dataclasses.replace(batch, reasons=reasons)


def _engine(
    request: Request, shape: ModelShape, gpu: str, total_mib: int, count: int, tensor: int, pipeline: int
) -> EnginePlan:
    """Return the plan with one parallelism."""
    data = int(request.fixed.get("data_parallel", 1))
    length = _context(request, shape)
    fixed = {name: value for name, value in request.fixed.items() if name not in PARALLEL}
    replicas = max(1, count // (tensor * pipeline * data))
    target = Target(
        gpu_name=gpu,
        total_mib=total_mib,
        reserved_mib=None,
        engine=request.engine,
        version=request.version,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        available=count,
        index_bytes=request.index_bytes,
        calibration=request.calibration,
    )
    batch = _defaults(request, shape, gpu, total_mib, replicas)
    return plan_engine(shape, target, length, batch, batching.parse_workload(request.workload, "workload"), fixed)


def choose_parallel(
    request: Request, shape: ModelShape, gpu: str, total_mib: int, count: int
) -> tuple[EnginePlan, int, int, str]:
    """Return (plan, tensor, pipeline, reason): the fixed parallelism, else the smallest that fits.

    Raises DoesNotFitError with the ways out when none fits.
    """
    pipeline = int(request.fixed.get("pipeline_parallel", 1))
    others = pipeline * int(request.fixed.get("data_parallel", 1))
    if "tensor_parallel" in request.fixed:
        tensor = int(request.fixed["tensor_parallel"])
        if tensor * others > count:
            ways = [f"set tensor_parallel to {count // others} or less"] if count >= others else []
            raise DoesNotFitError(
                f"tensor_parallel {tensor} x pipeline_parallel x data_parallel {others} takes {tensor * others} GPUs; "
                f"there are {count}.",
                [*ways, f"plan for {tensor * others} GPUs"],
            )
        return _engine(request, shape, gpu, total_mib, count, tensor, pipeline), tensor, pipeline, "fixed with --set"
    last: PlanError | None = None
    data = int(request.fixed.get("data_parallel", 1))
    whole = bool(request.fixed.get("enable_expert_parallel", False))
    for tensor in TENSOR_SIZES:
        if tensor * others > count or not weights.divisible(shape, tensor, data, whole):
            continue
        try:
            plan = _engine(request, shape, gpu, total_mib, count, tensor, pipeline)
        except DoesNotFitError as error:
            if "max_position_embeddings" in error.message:
                raise
            last = error
            continue
        why = (
            "one GPU holds it"
            if tensor * others == 1
            else f"the smallest at which one request of {plan.settings['max_model_len']} tokens fits"
        )
        return plan, tensor, pipeline, f"{why}; see {DOC}#placement"
    if last is None and others <= count:
        raise DoesNotFitError(f"no tensor_parallel of {count // others} GPUs or fewer is one that the engine takes.")
    raise last or DoesNotFitError(
        f"pipeline_parallel {pipeline} x data_parallel {others // pipeline} takes {others} GPUs; there are {count}.",
        [f"lower them to {count} together", f"plan for {others} GPUs"],
    )


def active_parameters(shape: ModelShape) -> float:
    """Return the parameters that one token uses: all of a dense model, the chosen experts of a mixture."""
    total = float(estimator.parameters(shape))
    experts = shape.experts
    if experts is None:
        return total
    idle = experts.count - experts.per_token
    layers = shape.layers - experts.dense_layers
    return total - layers * idle * 3 * shape.hidden * experts.intermediate


def _split(request: Request, shape: ModelShape, gpu: str, replicas: int, tensor: int) -> dict[str, Any] | None:
    """Return the proposal for separate pools, None where no histogram was given."""
    if request.workload.get("lengths") is None:
        return None
    buckets = split.parse_lengths(request.workload["lengths"])
    qps = request.workload.get("qps")
    if qps is None:
        raise PlanError("workload.lengths is given without workload.qps; a split needs the rate too.")
    profile = gpu_profile(gpu)
    rate = split.prefill_rate(active_parameters(shape), profile.match if profile else "", tensor)
    slo = request.slo.get("ttft_s") or request.slo.get("p99_s")
    best, reason = split.propose(buckets, float(qps), replicas, rate, slo)
    return {**split.to_dict(best, reason), "prefill_tokens_per_s": round(rate)}


def plan(request: Request) -> dict[str, Any]:
    """Return the whole plan as JSON values. Raises PlanError for wrong input, DoesNotFitError for what cannot fit."""
    gpu, total_mib, count = memory.parse_gpu(request.gpu)
    shape = parse_config(request.config)
    _judge(request)
    engine, tensor, pipeline, why = choose_parallel(request, shape, gpu, total_mib, count)
    data = int(request.fixed.get("data_parallel", 1))
    per_replica = tensor * pipeline * data
    replicas = count // per_replica
    load = batching.parse_workload(request.workload, "workload")
    batch = _defaults(request, shape, gpu, total_mib, replicas)
    length = int(engine.settings["max_model_len"])
    chain = times.derive(
        request.engine,
        times.DEFAULT_LONGEST_STREAM_S,
        length,
        times.DEFAULT_PREFILL_TOKENS_PER_S["nvidia"],
        batch.queue_wait_s,
    )
    warnings = list(engine.warnings)
    if count % per_replica:
        warnings.append(f"{count % per_replica} of {count} GPUs stay unused: a replica takes {per_replica}")
    if engine.memory.capacity.max_concurrency < FEW_CONTEXTS:
        warnings.append(
            f"only {engine.memory.capacity.max_concurrency:.1f} requests of {length} tokens fit at once: more GPUs per "
            "replica (--set tensor_parallel=N), a shorter max_model_len or an fp8 cache hold more"
        )
    length_typical = int((load.prompt_mean or 256) + (load.output_mean or 0))
    limit = "all that the model can (config.json)" if load.longest_context is None else "workload.longest_context"
    reasons = {
        "placement.tensor_parallel": why,
        "settings.max_model_len": "fixed with --set"
        if "max_model_len" in request.fixed
        else f"{limit}; see {DOC}#max-model-len",
        **engine.reasons,
    }
    return {
        "model": {
            "name": request.model_name,
            "architecture": shape.architecture,
            "parameters_billions": round(estimator.parameters(shape) / 1e9, 2),
            "context_limit": shape.context_limit,
        },
        "gpu": {"name": gpu, "memory_mib": total_mib, "count": count},
        "engine": {"kind": request.engine, "version": request.version, "runner": engine.memory.runner},
        "placement": {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "data_parallel": data,
            "gpus_per_replica": per_replica,
            "replicas": replicas,
        },
        "settings": engine.settings,
        "memory": memory.to_dict(engine.memory),
        "admission": {"queue": batch.queue, "max_in_flight": engine.settings["max_num_seqs"] + batch.queue},
        "times": chain,
        "pools": _split(request, shape, gpu, replicas, tensor),
        "rough": estimator.rough(shape, int(engine.settings["max_num_seqs"]), length_typical),
        "warnings": warnings,
        "reasons": reasons,
    }


def index_size(index: Any) -> int:
    """Return the size that a safetensors index tells, in bytes."""
    return weights.parse_index(index)
