# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""No dead number in a plan: each key of the schema has a reader outside of the planner, and that one is named here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "schemas" / "plan.json").read_text(encoding="utf-8"))["$defs"]

UTILS = "plugins/module_utils"
GATEWAY, BASE, VLLM = f"{UTILS}/gateway/plan.py", f"{UTILS}/engines/base.py", f"{UTILS}/engines/vllm.py"
REPLICA, TARGETS = f"{UTILS}/planner/replica.py", f"{UTILS}/telemetry/targets.py"
DOCKER = "roles/container_runtime/vars/main.yml"
RULES = "templates/monitoring/rules"
PERSON = f"{UTILS}/planner/render.py"
"""For a person who asks for the plan: what explains another number and drives nothing itself."""

READERS = {
    "poolPlan": {
        **dict.fromkeys(("pool", "served_name", "engine", "max_model_len", "body_limit_bytes"), GATEWAY),
        **dict.fromkeys(("model", "engine_version", "image"), REPLICA),
        **dict.fromkeys(("replicas.replica", "replicas.host", "replicas.address", "replicas.port"), GATEWAY),
        **dict.fromkeys(("admission.max_in_flight", "admission.queue", "admission.requests_per_s"), GATEWAY),
        "batching.max_num_batched_tokens": REPLICA,
        "batching.max_num_seqs": REPLICA,
        **dict.fromkeys(("parallel.tensor", "parallel.pipeline", "parallel.data"), BASE),
        "parallel.nodes": REPLICA,
        "node_groups": REPLICA,
        "alerts.p99_s": f"{RULES}/gateway.yml.j2",
        "alerts.ttft_s": f"{RULES}/engines.yml.j2",
        "alerts.tpot_s": f"{RULES}/engines.yml.j2",
        "alerts.error_ratio": f"{RULES}/gateway.yml.j2",
        "alerts.rejected_ratio": f"{RULES}/gateway.yml.j2",
        "alerts.gpu_util_ratio": f"{RULES}/gpu.yml.j2",
        "alerts.gpu_memory_ratio": f"{RULES}/gpu.yml.j2",
        "alerts.memory_unplanned_ratio": f"{RULES}/gpu.yml.j2",
        "alerts.model_load_s": f"{RULES}/engines.yml.j2",
        "times.drain_s": GATEWAY,
        **dict.fromkeys(("times.longest_stream_s", "times.client_keepalive_s", "times.wedged_after_s"), GATEWAY),
        **dict.fromkeys(("times.gateway_upstream_keepalive_s", "times.gateway_connect_s"), GATEWAY),
        **dict.fromkeys(("times.gateway_send_s", "times.gateway_read_s", "times.longest_silent_prefill_s"), GATEWAY),
        **dict.fromkeys(("times.probe_interval_s", "times.probe_timeout_s"), GATEWAY),
        **dict.fromkeys(("times.engine_shutdown_s", "times.engine_keepalive_s"), VLLM),
        **dict.fromkeys(("times.container_stop_s", "times.unit_stop_s"), BASE),
        **dict.fromkeys(("times.dockerd_shutdown_s", "times.docker_unit_stop_s"), DOCKER),
        "reasons": PERSON,
    },
    "replicaPlan": {
        **dict.fromkeys(("replica", "pool", "engine", "engine_version", "image", "model", "revision"), BASE),
        **dict.fromkeys(("address", "port", "gpus", "cpuset_cpus", "cpuset_mems", "environment", "times"), BASE),
        "host": PERSON,
        "settings": BASE,
        **dict.fromkeys(("container.memory_bytes", "container.memory_swap_bytes", "container.shm_bytes"), BASE),
        **dict.fromkeys(("container.ipc_mode", "container.nofile"), BASE),
        "memory.weights_gib": BASE,
        "memory.kv_cache_tokens": "plugins/modules/engine_gate.py",
        "memory.planned_gpu_bytes": "roles/node_agent/files/metalserve_agent/replicas.py",
        **dict.fromkeys(("memory.activation_gib", "memory.non_torch_gib", "memory.graphs_gib"), PERSON),
        **dict.fromkeys(("memory.kv_cache_gib", "memory.max_concurrency", "memory.expected_error_pct"), PERSON),
        **dict.fromkeys(("multi_node.nnodes", "multi_node.node_rank", "multi_node.master_addr"), VLLM),
        **dict.fromkeys(("multi_node.master_port", "multi_node.headless", "multi_node.hosts"), VLLM),
        "warnings": "plugins/modules/serving_plan.py",
        "reasons": BASE,
    },
}
EXPLAIN = {
    *("gpu_total_gib", "requested_gib", "activation_phase", "overhead_gib", "kv_bytes_per_token", "block_tokens"),
    "expected_overhead_error_gib",
}
"""Steps of the memory arithmetic: only in the JSON of scripts/plan and in release.json."""


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema; a mapping whose keys are free is one key."""
    schema = SCHEMA[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    schema = schema.get("items", schema) if schema.get("type") == "array" else schema
    schema = SCHEMA[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    if prefix in ("times.", "settings.", "node_groups."):
        yield prefix[:-1]
    elif schema.get("properties"):
        for name, part in schema["properties"].items():
            yield from leaves(part, f"{prefix}{name}.")
    else:
        yield prefix[:-1]


@pytest.mark.parametrize("kind", READERS)
def test_each_key_has_a_reader(kind: str) -> None:
    for key, path in READERS[kind].items():
        text = (ROOT / path).read_text(encoding="utf-8")
        # A loop over names reads each of them.
        word = key.rsplit(".", 1)[-1]
        assert re.search(rf"\b{word}\b", text), f"{kind} {key} is not read in {path}"


@pytest.mark.parametrize("kind", READERS)
def test_each_key_of_the_schema_is_known_here(kind: str) -> None:
    known = set(READERS[kind])
    known |= {key.partition(".")[0] for key in known if key.startswith(("times.", "alerts."))}
    found = set(leaves(SCHEMA[kind])) - {f"memory.{name}" for name in EXPLAIN}
    assert found <= known, found - known
    if kind == "poolPlan":
        assert set(SCHEMA["times"]["required"]) == {key[6:] for key in known if key.startswith("times.")}
