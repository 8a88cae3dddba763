# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""ReplicaPlan: placement, settings that fit, refusals with ways out (the cases of the KV calculator among them)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import batching, engine_plan, memory
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.hostfacts import parse_node
from ansible_collections.metal.serve.plugins.module_utils.planner.placement import place
from ansible_collections.metal.serve.plugins.module_utils.planner.pools import pool_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.replica import replica_plans
from ansible_collections.metal.serve.plugins.module_utils.planner.types import ReplicaPlan

from .helpers import H200, H200_MIB, HOSTVARS, MODELS, ROOT, config, facts, node, pool, shape

SCHEMA = json.loads((ROOT / "schemas" / "plan.json").read_text(encoding="utf-8"))
GROUPS = {"short": ["node-a", "node-b"], "long": ["node-a"], "lab": ["node-c"]}


def valid(value: Any, kind: str) -> None:
    schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(json.loads(json.dumps(value)))


def planned(
    pools: dict[str, Any], model: str = "llama-3-8b", host: str = "node-a", accelerator: str = "nvidia", **values: Any
) -> list[ReplicaPlan]:
    plans = [plan.to_dict() for plan in pool_plans(pools, GROUPS, HOSTVARS)]
    for one in plans:
        valid(one, "poolPlan")
    made = replica_plans(pools, plans, host, accelerator, node(**values), {"m": config(model)}, {"m": "rev"})
    for plan in made:
        valid(plan.to_dict(), "replicaPlan")
    return made


def target(**changes: Any) -> engine_plan.Target:
    base = engine_plan.Target(
        gpu_name=H200, total_mib=H200_MIB, reserved_mib=None, engine="vllm", version="0.26.0", where="pool."
    )
    return dataclasses.replace(base, **changes)


def batch(tokens: int = 8192, seqs: int = 256) -> batching.Batching:
    return batching.Batching(
        tokens,
        seqs,
        100,
        seqs + 100,
        0.0,
        {"settings.max_num_batched_tokens": "tier", "settings.max_num_seqs": "x"},
    )


# Case I21: does the KV cache hold it.


def test_i21_the_cache_holds_fewer_tokens_than_asked() -> None:
    # 32 layers, 32 key heads of 128, fp16: 512 KiB a token; 229 blocks of 16 = 3,664 tokens, 4,096 asked.
    fixed = {"kv_cache_memory_bytes": 229 * 16 * 512 * 1024}
    with pytest.raises(DoesNotFitError, match=r"max_model_len is 4096.*holds 3664 tokens.*3664 or less"):
        engine_plan.plan_engine(shape("llama-2-7b"), target(), 4096, batch(), batching.Workload(), fixed)
    plan = engine_plan.plan_engine(shape("llama-2-7b"), target(), 3664, batch(), batching.Workload(), fixed)
    assert plan.memory.capacity.max_concurrency == 1.0


def test_i21_a_long_context_in_a_small_cache() -> None:
    # 32 layers, 8 key heads of 128, bf16: 128 KiB a token; 39,024 tokens are 4.76 GiB, 131,072 asked.
    long = shape("llama-3-8b", max_position_embeddings=131072)
    fixed = {"kv_cache_memory_bytes": 39024 * 128 * 1024}
    with pytest.raises(DoesNotFitError, match=r"131072.*39024 tokens \(4\.76 GiB\)") as caught:
        engine_plan.plan_engine(long, target(), 131072, batch(), batching.Workload(), fixed)
    assert caught.value.ways_out[0] == "set max_model_len to 39024 or less"


def test_i21_more_context_than_positions() -> None:
    with pytest.raises(
        DoesNotFitError, match=r"max_model_len is 131072.*max_position_embeddings 8192 and no rope_scaling"
    ):
        engine_plan.plan_engine(shape("llama-3-8b"), target(), 131072, batch(), batching.Workload(), {})
    scaled = shape(
        "llama-3-8b", rope_scaling={"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    )
    engine_plan.plan_engine(scaled, target(), 131072, batch(), batching.Workload(), {})


# Refusals and what they offer.


def test_ways_out_are_tried() -> None:
    small = target(gpu_name="NVIDIA A100-PCIE-40GB", total_mib=40960, available=8)
    with pytest.raises(DoesNotFitError) as caught:
        engine_plan.plan_engine(shape("qwen2.5-32b"), small, 32768, batch(2048, 256), batching.Workload(), {})
    text = str(caught.value)
    assert "pool.tensor_parallel is 1" in text
    assert "set tensor_parallel to 4" in text
    assert "FP8" in text or "AWQ" in text
    assert len(caught.value.ways_out) <= 4
    plan = engine_plan.plan_engine(
        shape("qwen2.5-32b"), dataclasses.replace(small, tensor=4), 32768, batch(2048, 256), batching.Workload(), {}
    )
    assert plan.memory.capacity.max_concurrency >= 1


def test_two_nodes_are_a_way_out() -> None:
    card = target(available=8, tensor=8)
    with pytest.raises(DoesNotFitError) as caught:
        engine_plan.plan_engine(
            shape("deepseek-v3", quantization_config=None), card, 32768, batch(8192, 256), batching.Workload(), {}
        )
    assert any("nodes_per_replica 2" in way or "tensor_parallel to 16" in way for way in caught.value.ways_out)


def test_the_ladder_lowers_batched_tokens_first() -> None:
    model = shape("llama-3-8b")
    tight = target(gpu_name="NVIDIA L4", total_mib=23034)
    with pytest.raises(DoesNotFitError):
        engine_plan.plan_engine(
            model, tight, 8192, batch(40960), batching.Workload(), {"max_num_batched_tokens": 40960}
        )
    plan = engine_plan.plan_engine(model, tight, 8192, batch(40960), batching.Workload(), {})
    assert plan.settings["max_num_batched_tokens"] < 40960
    assert (40960 - plan.settings["max_num_batched_tokens"]) % 1024 == 0
    assert "lowered from 40960" in plan.reasons["settings.max_num_batched_tokens"]


def test_sequences_are_lowered_to_what_the_cache_holds() -> None:
    load = batching.Workload(qps=50, prompt_mean=30000, output_mean=500)
    model = shape("llama-3-8b", max_position_embeddings=131072)
    plan = engine_plan.plan_engine(model, target(), 65536, batch(8192, 256), load, {})
    assert plan.settings["max_num_seqs"] * 30500 <= plan.memory.capacity.tokens
    fixed = engine_plan.plan_engine(model, target(), 65536, batch(8192, 256), load, {"max_num_seqs": 256})
    assert fixed.settings["max_num_seqs"] == 256


def test_what_prompts_have_in_common_is_held_once() -> None:
    model = shape("llama-3-8b", max_position_embeddings=131072)

    def sequences(**changed: Any) -> int:
        settings = changed.pop("settings", {})
        load = batching.Workload(qps=50, prompt_mean=30000, output_mean=500, **changed)
        return int(
            engine_plan.plan_engine(model, target(), 65536, batch(8192, 256), load, settings).settings["max_num_seqs"]
        )

    alone, half = sequences(), sequences(shared_prefix=0.5)
    assert 1.5 * alone < half < 2.5 * alone
    assert sequences(shared_prefix=1) > half
    assert sequences(shared_prefix=0.5, settings={"enable_prefix_caching": False}) == alone


def test_utilization_leaves_room_on_a_small_card() -> None:
    plan = engine_plan.plan_engine(
        shape("llama-3-8b", num_hidden_layers=8),
        target(gpu_name="Tesla T4", total_mib=15360),
        4096,
        batch(2048, 256),
        batching.Workload(),
        {},
    )
    total, used = plan.memory.total, plan.memory.planned_gpu_bytes
    assert plan.settings["gpu_memory_utilization"] < memory.DEFAULT_UTIL
    assert used <= total
    greedy = engine_plan.plan_engine(
        shape("llama-3-8b", num_hidden_layers=8),
        target(gpu_name="Tesla T4", total_mib=15360),
        4096,
        batch(2048, 256),
        batching.Workload(),
        {"gpu_memory_utilization": 0.95},
    )
    assert any("is safe" in text for text in greedy.warnings)


def test_a_quoted_switch_is_named() -> None:
    with pytest.raises(PlanError, match=r"pool\.enforce_eager is 'false'"):
        engine_plan.plan_engine(
            shape("llama-3-8b"), target(), 4096, batch(), batching.Workload(), {"enforce_eager": "false"}
        )


@settings(max_examples=50)
@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json") if "v4" not in path.stem)),
    card=st.sampled_from(
        [("NVIDIA H200", 143771), ("NVIDIA A100-SXM4-80GB", 81920), ("NVIDIA L4", 23034), ("Tesla T4", 15360)]
    ),
    tensor=st.sampled_from([1, 2, 4]),
    length=st.integers(16, 8192),
    tokens=st.integers(1, 32768),
    seqs=st.integers(1, 1024),
)
def test_a_plan_never_promises_more_than_the_card(
    name: str, card: tuple[str, int], tensor: int, length: int, tokens: int, seqs: int
) -> None:
    model = shape(name)
    if model.heads % tensor or (model.context_limit and length > model.context_limit):
        return
    where = target(gpu_name=card[0], total_mib=card[1], tensor=tensor, available=8)
    try:
        plan = engine_plan.plan_engine(model, where, length, batch(max(tokens, seqs), seqs), batching.Workload(), {})
    except DoesNotFitError as error:
        refusal = error.message
    else:
        refusal = ""
    if refusal:
        assert "max_model_len" in refusal or "tensor_parallel" in refusal
        return
    got = plan.memory
    assert got.planned_gpu_bytes <= got.total
    assert got.capacity.max_concurrency >= 1
    assert plan.settings["max_num_batched_tokens"] >= plan.settings["max_num_seqs"]
    for key in plan.settings:
        if key != "max_model_len":
            assert plan.reasons[f"settings.{key}"]


# Whole nodes.


def test_eight_replicas_on_eight_gpus() -> None:
    plans = planned({"short": pool()})
    assert [plan.replica for plan in plans] == [f"short-{index}" for index in range(8)]
    assert sorted(uuid for plan in plans for uuid in plan.gpus) == sorted(f"GPU-{index}" for index in range(8))
    first, last = plans[0], plans[-1]
    assert (first.cpuset_cpus, first.cpuset_mems) == ("0-31", "0")
    assert (last.cpuset_cpus, last.cpuset_mems) == ("32-63", "1")
    assert first.revision == "rev"
    assert first.container["memory_bytes"] == 88 * 2**30
    assert first.container["memory_swap_bytes"] == 90 * 2**30
    assert first.container["shm_bytes"] == 2**30


def test_two_pools_share_a_node_without_sharing_gpus() -> None:
    pools = {"short": pool(replicas_per_node=4), "long": pool(replicas_per_node=1, tensor_parallel=4)}
    plans = planned(pools)
    used = [uuid for plan in plans for uuid in plan.gpus]
    assert len(used) == len(set(used)) == 8
    assert plans[-1].container["shm_bytes"] == 8 * 2**30
    assert plans[-1].warnings == []


def test_pairs_stay_on_one_numa_node() -> None:
    plans = planned({"short": pool(tensor_parallel=2)})
    assert [plan.cpuset_mems for plan in plans] == ["0", "0", "1", "1"]


def test_a_pair_across_numa_or_without_nvlink_is_said() -> None:
    three = planned({"short": pool(tensor_parallel=2, replicas_per_node=3)}, gpus=6)
    assert any("NUMA nodes 0 and 1" in text for text in three[-1].warnings)
    plain = planned({"short": pool(tensor_parallel=2)}, links="SYS")
    assert any("joined by SYS, not by NVLink" in text for text in plain[0].warnings)


def test_nvlink_pairs_are_found() -> None:
    value = facts(gpus=4, links="SYS", numa=1)
    for a, b in (("GPU0", "GPU2"), ("GPU1", "GPU3")):
        value["topology"]["matrix"][a][b] = value["topology"]["matrix"][b][a] = "NV4"
    found = place(parse_node(value), [("a", 2), ("b", 2)])
    assert [[gpu.uuid for gpu in found[name].gpus] for name in "ab"] == [["GPU-0", "GPU-2"], ["GPU-1", "GPU-3"]]
    assert found["a"].cpus == ""  # one NUMA node: nothing to pin


def test_seven_of_eight_gpus_are_refused_with_numbers() -> None:
    with pytest.raises(DoesNotFitError, match=r"has 7 GPU\(s\).*need 8"):
        planned({"short": pool()}, gpus=7)
    assert len(planned({"short": pool(replicas_per_node=7)}, gpus=7)) == 7


def test_a_node_without_known_gpus() -> None:
    with pytest.raises(DoesNotFitError, match=r"has 0 GPU\(s\)"):
        place(parse_node({"gpus": None}), [("a", 1)])
    with pytest.raises(PlanError, match="memory_total_mib None"):
        parse_node({"gpus": [{"uuid": "GPU-1"}]})
    with pytest.raises(PlanError, match="facts is list"):
        parse_node([])


def test_mixed_cards_are_planned_for_the_smallest() -> None:
    value = facts(gpus=2, numa=1)
    value["gpus"][1].update(name="NVIDIA A100-SXM4-80GB", memory_total_mib=81920)
    pools = {"long": pool(tensor_parallel=2, replicas_per_node=1)}
    plans = [plan.to_dict() for plan in pool_plans(pools, GROUPS, HOSTVARS)]
    made = replica_plans(pools, plans, "node-a", "nvidia", parse_node(value), {"m": config("llama-3-8b")}, {})
    assert made[0].memory["gpu_total_gib"] < 80
    assert any("81920 MiB" in text for text in made[0].warnings)


def test_processors() -> None:
    spec = pool(max_model_len=2048, container={"memory": "5g", "memory_swap": "5g"}, workload=None)
    plan = planned({"lab": spec}, "smollm2-135m", "node-c", "cpu", gpus=0)[0]
    assert plan.environment == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert plan.settings["max_num_seqs"] == 8
    assert plan.settings["max_model_len"] == 2048
    assert "gpu_memory_utilization" not in plan.settings
    assert plan.memory["kv_cache_tokens"] == 46592
    assert plan.container["memory_swap_bytes"] == 5 * 2**30
    assert (plan.gpus, plan.cpuset_mems, plan.cpuset_cpus) == ([], "", "")


def test_processors_with_too_little_memory() -> None:
    spec = pool(max_model_len=2048, container={"memory": "2g"}, workload=None)
    with pytest.raises(PlanError, match=r"metalserve_pools\.lab\.container\.memory"):
        planned({"lab": spec}, "smollm2-135m", "node-c", "cpu", gpus=0)


@pytest.mark.parametrize(
    ("container", "named"),
    [
        ({"memory": "lots"}, "container.memory: 'lots'"),
        ({"memory": "90G", "memory_swap": "88G"}, "container.memory_swap is 88.0 GiB"),
        ({"memory": "1G"}, "container.memory is 1.0 GiB"),
        ({"shm": -1}, "container.shm"),
        ({"nofile": 10}, "container.nofile is 10"),
    ],
)
def test_wrong_limits_are_named(container: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        planned({"short": pool(container=container)})


def test_a_replica_over_two_nodes() -> None:
    pools = {"short": pool(tensor_parallel=8, pipeline_parallel=2, nodes_per_replica=2)}
    head = planned(pools, "llama-3.1-70b", "node-a")[0]
    other = planned(pools, "llama-3.1-70b", "node-b")[0]
    assert head.multi_node == {
        "nnodes": 2,
        "node_rank": 0,
        "master_addr": "10.0.0.11",
        "master_port": 9100,
        "headless": False,
        "hosts": ["node-a", "node-b"],
    }
    assert other.multi_node is not None
    assert (other.multi_node["node_rank"], other.multi_node["headless"]) == (1, True)
    assert (len(head.gpus), other.host) == (8, "node-b")


def test_a_model_that_is_not_there_yet_keeps_its_gpus() -> None:
    pools = {"short": pool(replicas_per_node=4), "long": pool(model="other", replicas_per_node=4)}
    plans = [plan.to_dict() for plan in pool_plans(pools, GROUPS, HOSTVARS)]
    made = replica_plans(pools, plans, "node-a", "nvidia", node(), {"other": config("llama-3-8b")}, {})
    assert [plan.replica for plan in made] == [f"long-{index}" for index in range(4)]
    assert made[0].gpus == ["GPU-4"]


def test_settings_pass_through() -> None:
    plan = planned({"short": pool(settings={"kv_cache_dtype": "fp8", "max_num_seqs": 64, "enable_lora": True})})[0]
    assert plan.settings["kv_cache_dtype"] == "fp8"
    assert plan.settings["max_num_seqs"] == 64
    assert plan.settings["enable_lora"] is True
    assert plan.memory["kv_bytes_per_token"] == 65536
