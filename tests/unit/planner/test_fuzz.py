# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in config.json, in facts or in a pool: a plan or one PlanError, never another exception."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import offline
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import pool_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.replica import replica_plans

from .helpers import HOSTVARS, MODELS, config, facts, pool

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**13), 10**13) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SMALL = st.sampled_from([0, -1, 1, 2, 3, 10**6, 0.5, "", "x", True, None, [], {}, [0], {"factor": 0}, {"type": "yarn"}])
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXTRA = [
    "rope_scaling",
    "quantization_config",
    "sliding_window",
    "layer_types",
    "partial_rotary_factor",
    "n_routed_experts",
    "num_experts",
    "kv_lora_rank",
    "index_head_dim",
    "compress_rates",
    "text_config",
    "linear_num_value_heads",
    "full_attention_interval",
    "mlp_only_layers",
]


def keys(name: str) -> list[str]:
    """Return the keys of a fixture and those that other families have."""
    return sorted({*config(name), *EXTRA})


@QUICK
@given(data=st.data(), name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))))
def test_any_config(data: st.DataObject, name: str) -> None:
    changed = config(name)
    for key in data.draw(st.lists(st.sampled_from(keys(name)), min_size=1, max_size=3)):
        changed[key] = data.draw(SMALL | JSON)
    request = offline.Request(config=changed, gpu="NVIDIA H200:143771:8", engine="vllm", version="0.26.0")
    with contextlib.suppress(PlanError):
        offline.plan(request)


@QUICK
@given(value=JSON)
def test_anything_as_a_config(value: Any) -> None:
    with contextlib.suppress(PlanError):
        offline.plan(offline.Request(config=value, gpu="NVIDIA H200:143771:8", engine="vllm", version="0.26.0"))


@QUICK
@given(data=st.data())
def test_any_pool(data: st.DataObject) -> None:
    names = [
        *pool(),
        "settings",
        "slo",
        "minimums",
        "container",
        "tensor_parallel",
        "pipeline_parallel",
        "nodes_per_replica",
        "replicas_per_node",
        "port",
        "queue",
        "longest_stream_s",
        "served_name",
    ]
    inner = st.dictionaries(
        st.sampled_from(["qps", "prompt_tokens", "output_tokens", "p99_s", "memory", "max_num_seqs", "shm", "lengths"]),
        SMALL | JSON,
        max_size=2,
    )
    changed = pool()
    for key in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        changed[key] = data.draw(SMALL | JSON | inner)
    with contextlib.suppress(PlanError):
        pools = {"short": changed}
        plans = [plan.to_dict() for plan in pool_plans(pools, {"short": ["node-a", "node-b"]}, HOSTVARS)]
        node = parse_node(facts())
        replica_plans(pools, plans, "node-a", "nvidia", node, {str(changed["model"]): config("llama-3-8b")}, {})


@QUICK
@given(data=st.data())
def test_any_facts(data: st.DataObject) -> None:
    changed = facts(gpus=2)
    place = data.draw(st.sampled_from([*changed, "gpu", "link"]))
    value = data.draw(SMALL | JSON)
    if place == "gpu":
        changed["gpus"][0][data.draw(st.sampled_from(list(changed["gpus"][0])))] = value
    elif place == "link":
        changed["topology"]["matrix"]["GPU0"] = value
    else:
        changed[place] = value
    pools = {"short": pool(tensor_parallel=2, replicas_per_node=1)}
    plans = [plan.to_dict() for plan in pool_plans(pools, {"short": ["node-a"]}, HOSTVARS)]
    with contextlib.suppress(PlanError):
        replica_plans(pools, plans, "node-a", "nvidia", parse_node(changed), {"m": config("llama-3-8b")}, {})
