# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""PoolPlan: what gateways and alerts need, from the inventory alone. No host is asked. See docs/planning.md#pools."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import MIB
from ansible_collections.metal.serve.plugins.module_utils.planner import batching, split, times
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import DOC, mapping, number
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.types import PoolPlan, ReplicaAddress

ENGINES = ("vllm", "sglang", "triton_vllm")
HOST_VARIABLES = ("metalserve_address", "ansible_host", "metalserve_expected_gpus", "metalserve_accelerator")
"""All that a plan asks of a host's variables."""

BASE_PORT = 8100
PORTS_PER_POOL = 100
MOST = 64
"""GPUs or replicas of a node, ranks of a replica, nodes of a replica: more is a slip of the keyboard."""

BODY_BYTES_PER_TOKEN = 16
"""Room for one token in a JSON body: ``\\uXXXX`` escapes take 6 bytes a character, and a token may span several."""

BODY_FLOOR = 1 * MIB
RATE_HEADROOM = 2.0
"""Requests a second that a pool may be sent, as a multiple of what it is planned for: the batches' twofold headroom."""

DEFAULT_P99_S = 1.5

ALERTS = {
    "error_ratio": 0.01,
    "rejected_ratio": 0.01,
    "gpu_util_ratio": 0.90,
    "gpu_memory_ratio": 0.90,
    "memory_unplanned_ratio": 0.35,
    "model_load_s": 120,
}


def host_accelerator(hostvars: Mapping[str, Any]) -> str:
    """Return ``metalserve_accelerator`` of a host (default nvidia); raise PlanError for another word."""
    value = hostvars.get("metalserve_accelerator", "nvidia")
    if value not in ("nvidia", "cpu"):
        raise PlanError(f"metalserve_accelerator is {value!r}; it must be nvidia or cpu.")
    return str(value)


def host_address(name: str, hostvars: Mapping[str, Any]) -> str:
    """Return the private address of a host: metalserve_address, else ansible_host, else its inventory name."""
    return str(hostvars.get("metalserve_address") or hostvars.get("ansible_host") or name)


def parallel_of(pool: str, spec: Mapping[str, Any]) -> dict[str, int]:
    """Return tensor, pipeline and data parallelism and nodes per replica of a pool. Raises PlanError."""
    where = f"metalserve_pools.{pool}"
    sizes = {}
    for key, name in (
        ("tensor", "tensor_parallel"),
        ("pipeline", "pipeline_parallel"),
        ("data", "data_parallel"),
        ("nodes", "nodes_per_replica"),
    ):
        sizes[key] = number(spec.get(name, 1), f"{where}.{name}", 1, f"a whole number, 1 to {MOST}", True, MOST)
    total = sizes["tensor"] * sizes["pipeline"] * sizes["data"]
    if total % sizes["nodes"]:
        raise PlanError(
            f"{where}.nodes_per_replica is {sizes['nodes']}; it must divide the replica's {total} GPUs "
            "(tensor_parallel x pipeline_parallel x data_parallel)."
        )
    return sizes


def gpus_per_node(parallel: Mapping[str, int]) -> int:
    """Return how many GPUs of one node a replica takes."""
    return parallel["tensor"] * parallel["pipeline"] * parallel["data"] // parallel["nodes"]


def _replicas_on(pool: str, spec: Mapping[str, Any], host: str, hostvars: Mapping[str, Any], per_node: int) -> int:
    """Return how many replicas of the pool a host runs: replicas_per_node, else all GPUs that are expected."""
    where = f"metalserve_pools.{pool}.replicas_per_node"
    if spec.get("replicas_per_node") is not None:
        return int(number(spec["replicas_per_node"], where, 1, f"a whole number, 1 to {MOST}", True, MOST))
    if host_accelerator(hostvars) == "cpu":
        return 1
    expected = hostvars.get("metalserve_expected_gpus")
    if expected is None:
        raise PlanError(
            f"{where} is not set and {host} has no metalserve_expected_gpus; set one of them, so that the number of "
            "replicas does not depend on which hosts answer."
        )
    count = int(number(expected, f"metalserve_expected_gpus of {host}", 1, f"a whole number, 1 to {MOST}", True, MOST))
    if count < per_node:
        raise PlanError(
            f"metalserve_expected_gpus of {host} is {count}; one replica of {pool} takes {per_node} GPUs of a node."
        )
    return count // per_node


def max_model_len_of(
    pool: str, spec: Mapping[str, Any], accelerator: str, longest_context: int | None = None
) -> tuple[int, str]:
    """Return the longest context of a pool in tokens and the reason. settings.max_model_len wins.

    ``longest_context``: prompt and answer that must work, in tokens. Raises PlanError where the given length is shorter.
    """
    settings = mapping(spec.get("settings"), f"metalserve_pools.{pool}.settings")
    for value, name in (
        (settings.get("max_model_len"), f"metalserve_pools.{pool}.settings.max_model_len"),
        (spec.get("max_model_len"), f"metalserve_pools.{pool}.max_model_len"),
    ):
        if value is not None:
            length = int(number(value, name, 1, "a whole number of tokens", whole=True))
            if longest_context is not None and longest_context > length:
                raise PlanError(
                    f"metalserve_pools.{pool}.workload.longest_context is {longest_context}; {name} is {length}, so it "
                    "would not work: raise the one or lower the other."
                )
            return length, f"{name} says so"
    if longest_context is not None:
        return longest_context, f"not given: workload.longest_context says so; see {DOC}#max-model-len"
    if accelerator == "cpu":
        return batching.CPU_MAX_MODEL_LEN, f"not given: CPU profile; see {DOC}#cpu"
    return batching.DEFAULT_MAX_MODEL_LEN, f"not given: a safe start; see {DOC}#max-model-len"


def _replicas(
    pool: str,
    spec: Mapping[str, Any],
    hosts: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    parallel: Mapping[str, int],
    port: int,
) -> tuple[list[ReplicaAddress], dict[str, list[dict[str, str]]]]:
    """Return where the replicas answer, and for those that span nodes the hosts of each. Raises PlanError."""
    replicas: list[ReplicaAddress] = []
    node_groups: dict[str, list[dict[str, str]]] = {}
    nodes, per_node = parallel["nodes"], gpus_per_node(parallel)
    for start in range(0, len(hosts), nodes):
        group = hosts[start : start + nodes]
        head = group[0]
        count = min(_replicas_on(pool, spec, host, hostvars.get(host, {}), per_node) for host in group)
        if port + count - 1 > 65535:
            raise PlanError(f"metalserve_pools.{pool}.port is {port}; the replicas' ports must stay at or below 65535.")
        for index in range(count):
            name = f"{pool}-{index}"
            replicas.append(ReplicaAddress(name, head, host_address(head, hostvars.get(head, {})), port + index))
            if nodes > 1:
                node_groups[f"{head}/{name}"] = [
                    {"host": host, "address": host_address(host, hostvars.get(host, {}))} for host in group
                ]
    return replicas, node_groups


def _split_reason(
    load: batching.Workload, where: str, replicas: int, prefill: float, alerts: Mapping[str, float]
) -> dict[str, str]:
    """Return whether separate pools would pay, for a pool whose workload has a histogram of lengths."""
    if load.lengths is None or load.qps is None:
        return {}
    buckets = split.parse_lengths(load.lengths, f"{where}.workload.lengths")
    best, why = split.propose(buckets, load.qps, replicas, prefill, alerts["p99_s"])
    head = "separate pools would pay" if best else "one pool is right"
    return {"pools.split": f"{head}: {why} (at minimums.prefill_tokens_per_s {prefill:g}); see {DOC}#split"}


def pool_plan(
    pool: str,
    position: int,
    spec: Mapping[str, Any],
    hosts: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
) -> PoolPlan:
    """Return the plan of one pool. ``position`` is its place among the pools of its nodes (decides its first port).

    Raises PlanError, naming the variable.
    """
    where = f"metalserve_pools.{pool}"
    spec = mapping(spec, where)
    for name in ("model", "engine"):
        if not isinstance(spec.get(name), str) or not spec[name]:
            raise PlanError(f"{where}.{name} is {spec.get(name)!r}; it must be a name.")
    engine = str(spec["engine"])
    if engine not in ENGINES:
        raise PlanError(f"{where}.engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    for name, what in (
        ("engine_version", 'the version that the image holds, such as "0.26.0"'),
        ("image", "a name"),
        ("served_name", "a name"),
    ):
        if spec.get(name) is not None and not isinstance(spec[name], str):
            raise PlanError(f"{where}.{name} is {spec[name]!r}; it must be {what}, in quotes.")
    if not hosts:
        raise PlanError(f"group {pool} has no host; a pool needs at least one node in the group of its name.")
    port = number(
        spec.get("port", BASE_PORT + PORTS_PER_POOL * position), f"{where}.port", 1, "a port, 1..65535", whole=True
    )
    parallel = parallel_of(pool, spec)
    nodes = parallel["nodes"]
    if len(hosts) % nodes:
        raise PlanError(
            f"{where}.nodes_per_replica is {nodes}; group {pool} has {len(hosts)} host(s), which is no multiple of it."
        )
    accelerators = {host_accelerator(hostvars.get(host, {})) for host in hosts}
    accelerator = "cpu" if accelerators == {"cpu"} else "nvidia"
    replicas, node_groups = _replicas(pool, spec, hosts, hostvars, parallel, port)

    load = batching.parse_workload(spec.get("workload"), f"{where}.workload")
    max_model_len, why_len = max_model_len_of(pool, spec, accelerator, load.longest_context)
    settings = mapping(spec.get("settings"), f"{where}.settings")
    minimums = mapping(spec.get("minimums"), f"{where}.minimums")
    prefill = number(
        minimums.get("prefill_tokens_per_s", times.DEFAULT_PREFILL_TOKENS_PER_S[accelerator]),
        f"{where}.minimums.prefill_tokens_per_s",
        1,
        "tokens a second, 1 or more",
    )
    queue = spec.get("queue")
    if queue is not None:
        queue = number(queue, f"{where}.queue", 0, "a whole number of requests, 0 or more", whole=True)
    batch = batching.decide(load, accelerator, len(replicas), max_model_len, prefill, settings, queue)
    stream = spec.get("longest_stream_s", times.DEFAULT_LONGEST_STREAM_S)
    number(stream, f"{where}.longest_stream_s", 1, "seconds, 1 or more")
    chain = times.derive(engine, stream, max_model_len, prefill, batch.queue_wait_s)
    body = max(BODY_FLOOR, MIB * math.ceil(max_model_len * BODY_BYTES_PER_TOKEN / MIB))
    slo = mapping(spec.get("slo"), f"{where}.slo")
    alerts: dict[str, float] = {"p99_s": DEFAULT_P99_S, **ALERTS}
    for name in ("p99_s", "ttft_s", "tpot_s"):
        if slo.get(name) is not None:
            alerts[name] = number(slo[name], f"{where}.slo.{name}", 0.001, "seconds, above 0")
    reasons = {
        "max_model_len": why_len,
        "body_limit_bytes": f"{max_model_len} tokens x {BODY_BYTES_PER_TOKEN} bytes, at least 1 MiB; see {DOC}#body",
        "times.drain_s": f"longest_stream_s {stream:g}: a stream that long ends inside a drain; see {DOC}#times",
        "times.longest_silent_prefill_s": (
            f"{max_model_len} tokens at minimums.prefill_tokens_per_s {prefill:g}; see {DOC}#times"
        ),
        "times.wedged_after_s": f"max(10, 1.5 x longest silent prefill); see {DOC}#times",
        "times.gateway_read_s": f"2 x longest silent prefill + {batch.queue_wait_s:.0f} s queue; see {DOC}#times",
        "admission.requests_per_s": (
            f"{RATE_HEADROOM:g} x workload.qps: gateways refuse more where gateway_limit_rates says so; see {DOC}#rates"
            if load.qps
            else f"no workload.qps given: no limit of the rate; see {DOC}#rates"
        ),
        "alerts.p99_s": "slo.p99_s" if "p99_s" in slo else f"not given: {DEFAULT_P99_S}; see {DOC}#alerts",
        **batch.reasons,
        **_split_reason(load, where, len(replicas), prefill, alerts),
    }
    return PoolPlan(
        pool=pool,
        model=str(spec["model"]),
        served_name=str(spec.get("served_name") or spec["model"]),
        engine=engine,
        engine_version=str(spec.get("engine_version", "")),
        image=str(spec.get("image", "")),
        replicas=replicas,
        max_model_len=max_model_len,
        body_limit_bytes=body,
        times=chain,
        admission={
            "max_in_flight": batch.max_in_flight,
            "queue": batch.queue,
            "requests_per_s": math.ceil(RATE_HEADROOM * (load.qps or 0)),
        },
        alerts=alerts,
        batching={
            "max_num_batched_tokens": batch.max_num_batched_tokens,
            "max_num_seqs": batch.max_num_seqs,
        },
        parallel=parallel,
        node_groups=node_groups,
        reasons=reasons,
    )


def port_places(hosts_of: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return each pool's place among the pools that share a node with it: 0, or the lowest that none before it has.

    A pool that has its nodes for itself is always at 0: a pool that is added, removed or moved elsewhere in
    metalserve_pools moves no port of it, and so needs no redeploy of it.
    """
    places: dict[str, int] = {}
    for pool, hosts in hosts_of.items():
        taken = {place for other, place in places.items() if not set(hosts).isdisjoint(hosts_of[other])}
        places[pool] = min(set(range(len(taken) + 1)) - taken)
    return places


def pool_plans(
    pools: Any, groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]
) -> list[PoolPlan]:
    """Return the plan of every pool in the order of metalserve_pools. Raises PlanError for the first thing wrong."""
    pools = mapping(pools, "metalserve_pools")
    if not pools:
        raise PlanError("metalserve_pools is empty; describe at least one pool.")
    places = port_places({str(name): list(groups.get(name, [])) for name in pools})
    plans = [
        pool_plan(str(name), places[str(name)], spec, list(groups.get(name, [])), hostvars)
        for name, spec in pools.items()
    ]
    taken: dict[tuple[str, int], str] = {}
    for plan in plans:
        for replica in plan.replicas:
            other = taken.setdefault((replica.host, replica.port), replica.replica)
            if other != replica.replica:
                raise PlanError(
                    f"metalserve_pools.{plan.pool}.port: {replica.replica} and {other} would share port "
                    f"{replica.port} of {replica.host}; give the pool another port."
                )
    return plans
