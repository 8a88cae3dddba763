# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Configurations as they are published: left-out keys, other names for the same thing, and what the engine makes of them.

The values behind are vLLM 0.26.0's (model_executor/models, transformers_utils/model_arch_config_convertor.py,
v1/core/kv_cache_utils.py) and transformers' own configuration classes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from ansible_collections.metal.serve.plugins.module_utils.planner import estimator, kv, offline, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import DoesNotFitError, PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import parse_config

from .helpers import config, shape

GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
ROPE_8 = {"factor": 8.0, "rope_type": "linear"}
GEMMA_3_4B = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
GEMMA_3_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "sliding_window": 1024,
}
LLAMA_4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 2,
        "max_position_embeddings": 1048576,
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "vocab_size": 202048,
        "torch_dtype": "bfloat16",
    },
}
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_interval": 1,
    "vocab_size": 103424,
    "tie_word_embeddings": True,
}
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax",
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "vocab_size": 200064,
}
QWEN_3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "attn_output_gate": True,
        "head_dim": 256,
        "hidden_size": 4096,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 15,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 64,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 60,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 1024,
        "vocab_size": 248320,
    },
}


def gemma(text: dict[str, Any]) -> dict[str, Any]:
    """Return a published Gemma 3 configuration around its language part."""
    return {**GEMMA_3, "text_config": {"model_type": "gemma3_text", "rope_scaling": ROPE_8, **text}}


def planned(
    model: dict[str, Any], gpu: str = "NVIDIA H200:143771:8", engine: str = "vllm", **fixed: Any
) -> dict[str, Any]:
    """Return scripts/plan's JSON of a model."""
    version = "0.26.0" if engine == "vllm" else "0.5.23"
    return offline.plan(offline.Request(config=model, gpu=gpu, engine=engine, version=version, fixed=fixed))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        (gemma(GEMMA_3_4B), 3.88),
        (gemma(GEMMA_3_12B), 11.77),
        (LLAMA_4, 400.71),
        (ERNIE, 21.83),
        (MINIMAX_M2, 228.69),
        (QWEN_3_5, 396.35),
    ],
)
def test_published_sizes(model: dict[str, Any], billions: float) -> None:
    """The language parts of Gemma 3 4B and 12B, Llama 4 Maverick, ERNIE 4.5 21B, MiniMax M2, Qwen3.5 397B."""
    assert estimator.parameters(parse_config(model)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_what_gemma_3_leaves_out_is_what_its_class_assumes() -> None:
    model = parse_config(gemma(GEMMA_3_12B))
    assert (model.head_dim, model.vocab, model.tied) == (256, 262208, True)
    assert model.context_limit == 131072  # its positions have the rope scaling in them
    assert model.layer_kinds.count("full") == 8
    assert parse_config(gemma({**GEMMA_3_4B, "sliding_window": None})).sliding_window == 0  # said, so not assumed


def test_llama_4_looks_at_chunks() -> None:
    model = parse_config(LLAMA_4)
    assert (model.layer_kinds.count("full"), model.layer_kinds.count("chunked")) == (12, 36)
    assert kv.bytes_per_token(model) == 12 * 2 * 8 * 128 * 2
    # Twelve layers are a group: one of whole attention, three of chunks, each with its own blocks.
    held = kv.capacity(model, 40 * 2**30, 1_048_576, batched=8192, in_flight_batches=2)
    blocks = 40 * 2**30 // (16 * 2 * 8 * 128 * 2 * 12)
    per_request = 1_048_576 // 16 + 3 * (8192 + 2 * 8192) // 16
    assert held.max_concurrency == pytest.approx(blocks / per_request)
    named = {**LLAMA_4["text_config"], "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12}
    assert parse_config({**LLAMA_4, "text_config": named}).layer_kinds == model.layer_kinds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_experts": 8, "num_experts_per_tok": 2}, "moe_experts"),
        ({"num_routed_experts": 160}, "num_routed_experts"),
        ({"num_kv_shared_layers": 10}, "share a KV cache"),
        ({"global_head_dim": 512}, "differ in size"),
        ({"attn_type_list": [0, 1] * 16}, "layers of several kinds"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "recurrent layers"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "model_type minicpm3 has kv_lora_rank"),
    ],
)
def test_what_would_be_counted_as_another_model_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=r"config\.json") as found:
        shape("llama-3-8b", **changes)
    assert words in found.value.message


def test_the_longest_context_is_the_engine_s() -> None:
    command_r = shape("llama-3-8b", max_position_embeddings=8192, model_max_length=131072)
    assert command_r.context_limit == 131072
    assert shape("llama-3-8b", max_position_embeddings=8192, max_seq_len=4096).context_limit == 4096
    short = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert shape("llama-3-8b", max_position_embeddings=131072, rope_scaling=short).context_limit == 32768


def test_tied_where_the_class_says_so() -> None:
    model = config("llama-3-8b", model_type="cohere", architectures=["CohereForCausalLM"])
    model.pop("tie_word_embeddings", None)
    assert parse_config(model).tied


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_a_state_is_shared_by_the_ranks_and_kept_in_the_model_s_type(tensor: int) -> None:
    """vLLM logs 'Setting attention block size to 544 tokens' for Qwen3-Next on one and two GPUs."""
    model = shape("qwen3-next-80b-a3b")
    state = 32 * 128 * 128 * 2 + (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert model.linear_state is not None
    assert model.linear_state.bytes_per_sequence == state
    token = 2 * math.ceil(2 / tensor) * 256 * 2
    held = kv.capacity(model, 40 * 2**30, 32768, tensor)
    assert held.block_tokens == 16 * math.ceil(state / tensor / (16 * token))
    assert held.block_tokens == (544 if tensor < 4 else 272)
    longer = parse_config(QWEN_3_5).linear_state
    assert longer is not None
    assert longer.bytes_per_sequence == 64 * 128 * 128 * 4 + (2 * 16 * 128 + 64 * 128) * 3 * 2  # it says float32


def test_prefix_caching_doubles_the_states_of_a_request() -> None:
    model = shape("qwen3-next-80b-a3b")
    off = kv.capacity(model, 40 * 2**30, 4352)
    on = kv.capacity(model, 40 * 2**30, 4352, prefix_caching=True)
    assert off.max_concurrency / on.max_concurrency == pytest.approx((8 + 3 * 2) / (8 + 3))
    given: dict[str, Any] = {"tensor_parallel": 2, "max_model_len": 4352}
    asked = planned(config("qwen3-next-80b-a3b"), enable_prefix_caching=True, **given)["memory"]
    assert asked["max_concurrency"] < planned(config("qwen3-next-80b-a3b"), **given)["memory"]["max_concurrency"]


def test_a_fixed_block_size_counts() -> None:
    small, large = (planned(config("llama-3-8b"), max_model_len=1000, block_size=size)["memory"] for size in (16, 256))
    assert (small["block_tokens"], large["block_tokens"]) == (16, 256)
    assert small["max_concurrency"] / large["max_concurrency"] == pytest.approx(1024 / 1008, rel=0.001)


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS, "kv_cache_scheme": SCHEME}, 0.5),
        ({"quant_method": "compressed-tensors", "config_groups": GROUPS, "kv_cache_scheme": None}, 1),
        ({"quant_method": "compressed_tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": SCHEME}, 0.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, 1),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, 0.5),
        ({"quant_method": "fp8", "kv_cache_scheme": SCHEME}, 1),
    ],
)
def test_the_cache_s_type_that_the_files_ask_for(quantization: dict[str, Any], share: float) -> None:
    model = shape("llama-3-8b", quantization_config=quantization)
    assert kv.bytes_per_token(model) == 131_072 * share
    assert kv.bytes_per_token(model, 1, "bfloat16") == 131_072  # an explicit choice wins


def test_compressed_tensors_without_groups_leave_the_weights_plain() -> None:
    plain = shape("llama-3-8b", quantization_config={"quant_method": "compressed-tensors", "kv_cache_scheme": SCHEME})
    assert plain.quantization is None
    two = {**GROUPS, "group_1": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 4, "group_size": 128}}}
    mixed = shape("llama-3-8b", quantization_config={"quant_method": "compressed-tensors", "config_groups": two})
    assert any("several widths" in note for note in mixed.notes)


def test_a_plan_names_the_cache_type_that_the_engine_would_not_take_by_itself() -> None:
    sparse = planned(config("deepseek-v3.2"))
    assert sparse["settings"]["kv_cache_dtype"] == "fp8_ds_mla"
    assert "16-bit" in sparse["reasons"]["settings.kv_cache_dtype"]
    assert sparse["memory"]["kv_bytes_per_token"] == 48_068
    itself = planned(config("deepseek-v3.2"), kv_cache_dtype="auto")
    assert itself["settings"]["kv_cache_dtype"] == "auto"
    assert itself["memory"]["kv_bytes_per_token"] == 61 * (576 * 2 + 132)
    assert "kv_cache_dtype" not in planned(config("deepseek-v2-lite"))["settings"]
    assert "kv_cache_dtype" not in planned(config("deepseek-v3.2"), engine="sglang")["settings"]


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    [
        ("llama-3-8b", "vllm", "fp8_ds_mla"),
        ("llama-3-8b", "vllm", "int8"),
        ("deepseek-v3.2", "vllm", "nvfp4"),
        ("deepseek-v3.2", "vllm", "fp8_e5m2"),
        ("deepseek-v2-lite", "vllm", "int8_per_token_head"),
        ("llama-3-8b", "sglang", "nvfp4"),
    ],
)
def test_a_cache_type_that_no_kernel_has_is_refused(name: str, engine: str, dtype: str) -> None:
    with pytest.raises(PlanError, match=f"kv_cache_dtype is '{dtype}'; .*one of auto"):
        planned(config(name), engine=engine, kv_cache_dtype=dtype)


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("name", "changes", "tensor", "words"),
    [
        (
            "llama-3-8b",
            {"num_attention_heads": 40, "num_key_value_heads": 10, "head_dim": 128},
            4,
            "num_key_value_heads (10)",
        ),
        ("llama-3-8b", {"intermediate_size": 14338}, 8, "intermediate_size (14338)"),
        ("llama-3-8b", {"num_attention_heads": 40, "num_key_value_heads": 5, "head_dim": 128}, 5, "padded vocabulary"),
        ("qwen3-30b-a3b", {"quantization_config": BLOCKS}, 4, "over 4 GPUs is 192"),
        ("llama-3-8b", {"quantization_config": AWQ, "intermediate_size": 14336 - 512}, 8, "over 8 GPUs is 1728"),
    ],
)
def test_a_parallelism_that_the_engine_refuses_is_refused(
    name: str, changes: dict[str, Any], tensor: int, words: str
) -> None:
    with pytest.raises(PlanError, match=f"tensor_parallel is {tensor}") as found:
        planned(config(name, **changes), tensor_parallel=tensor)
    assert not isinstance(found.value, DoesNotFitError)
    assert words in found.value.message
    assert found.value.ways_out
    model = shape(name, **changes)
    for size in (1, 2, 4, 8, 16):
        offered = str(size) in found.value.ways_out[0].split()
        assert offered == weights.divisible(model, size)


def test_whole_experts_need_no_whole_blocks() -> None:
    model = config("qwen3-30b-a3b", quantization_config=BLOCKS)
    with pytest.raises(PlanError) as found:
        planned(model, tensor_parallel=4)
    assert found.value.ways_out[-1].startswith("set enable_expert_parallel to true")
    planned(model, tensor_parallel=4, enable_expert_parallel=True)


def test_the_chosen_parallelism_is_one_that_the_engine_takes() -> None:
    odd = config("llama-3.1-70b", intermediate_size=28676)  # over 2 and 4 GPUs, not over 8
    assert planned(odd, gpu="NVIDIA A100-SXM4-80GB:81920:8", max_model_len=4096)["placement"]["tensor_parallel"] in (
        2,
        4,
    )


@pytest.mark.parametrize("share", [1, 0.999, 0.997])
def test_more_than_is_free_at_a_start_is_refused(share: float) -> None:
    with pytest.raises(DoesNotFitError, match="free at a start") as found:
        planned(config("llama-3-8b"), gpu_memory_utilization=share)
    assert found.value.ways_out == ["set gpu_memory_utilization to 0.99 or less"]


def test_a_share_that_leaves_too_little_beside_it_is_said() -> None:
    high = planned(config("llama-3-8b"), gpu_memory_utilization=0.99)
    assert any("leaves too little beside it" in text for text in high["warnings"])
    assert not any("leaves too little" in text for text in planned(config("llama-3-8b"))["warnings"])


@pytest.mark.parametrize(
    ("name", "words"), [("llama-3-8b", "131072 bytes a token"), ("gemma-3-27b-text", "windows, states")]
)
def test_the_reason_for_the_tokens_is_arithmetic_that_holds(name: str, words: str) -> None:
    plan = planned(config(name), max_model_len=8192)
    assert words in plan["reasons"]["memory.kv_cache_tokens"]
