# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Plans as the planner makes them, small and complete."""

from __future__ import annotations

from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines.base import Context

DIGEST = "ab" * 32
GPU = "GPU-00000000-0000-0000-0000-00000000000{}"
TIMES = {
    "longest_stream_s": 300,
    "drain_s": 300,
    "engine_shutdown_s": 315,
    "container_stop_s": 330,
    "unit_stop_s": 345,
    "engine_keepalive_s": 180,
}


def replica_plan(**changes: Any) -> dict[str, Any]:
    """Return the plan of a replica on one GPU."""
    plan: dict[str, Any] = {
        "replica": "short-0",
        "pool": "short",
        "host": "node-a",
        "engine": "vllm",
        "engine_version": "0.26.0",
        "image": f"registry.test:5000/vllm@sha256:{DIGEST}",
        "model": "m",
        "revision": "r1",
        "address": "10.0.0.11",
        "port": 8100,
        "gpus": [GPU.format(0)],
        "cpuset_cpus": "0-15",
        "cpuset_mems": "0",
        "settings": {"max_model_len": 32768, "max_num_seqs": 256, "max_num_batched_tokens": 6144},
        "environment": {},
        "memory": {"weights_gib": 14.3},
        "container": {
            "memory_bytes": 88 * 1024**3,
            "memory_swap_bytes": 90 * 1024**3,
            "shm_bytes": 1024**3,
            "ipc_mode": "private",
            "nofile": 1048576,
        },
        "times": TIMES,
        "reasons": {"settings.max_num_batched_tokens": "qps 50 is in tier 30..80"},
    }
    plan.update(changes)
    return plan


def pool_plan(**changes: Any) -> dict[str, Any]:
    """Return the plan of its pool."""
    plan: dict[str, Any] = {
        "pool": "short",
        "model": "m",
        "served_name": "m-public",
        "parallel": {"tensor": 1, "pipeline": 1, "data": 1, "nodes": 1},
        "replicas": [{"replica": "short-0", "host": "node-a", "address": "10.0.0.11", "port": 8100}],
        "reasons": {},
    }
    plan.update(changes)
    return plan


def context(plan: dict[str, Any] | None = None, pool: dict[str, Any] | None = None, **changes: Any) -> Context:
    """Return what an adapter is given."""
    return Context(
        replica=plan or replica_plan(),
        pool=pool or pool_plan(),
        root="/var/lib/metalserve",
        model_path="/var/lib/metalserve/models/m/r1",
        **changes,
    )
