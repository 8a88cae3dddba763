# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The field reports' configurations as named, tested examples. Data only; golden plans are in tests/fixtures/plans/.

The reports name machines and loads, not always a model: where they do not, a DeepSeek-V2-Lite shape stands for 'a
DeepSeek model of that class'. See docs/planning.md#presets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

DEEPSEEK_67B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 95,
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

A100 = "NVIDIA A100-SXM4-80GB:81920"


@dataclass(frozen=True)
class Preset:
    """A named configuration: what model, on what GPUs (name:MiB:count), for what load, with what fixed."""

    title: str
    config: dict[str, Any]
    gpu: str
    engine: str
    version: str
    settings: dict[str, Any] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    "finance-qa": Preset(
        title="finance questions and answers at 50 requests/s on one node of 8 x A100-80G",
        config=DEEPSEEK_V2_LITE,
        gpu=f"{A100}:8",
        engine="vllm",
        version="0.26.0",
        settings={"max_model_len": 12288, "tensor_parallel": 1},
        workload={
            "qps": 50,
            "prompt_tokens": {"mean": 350, "p95": 1000},
            "output_tokens": {"mean": 128, "p95": 512},
            "shared_prefix": 0.6,
        },
        slo={"p99_s": 1.5},
    ),
    "contracts-128k": Preset(
        title="legal contracts of up to 128k tokens on 2 x A100-80G",
        config=DEEPSEEK_V2_LITE,
        gpu=f"{A100}:2",
        engine="sglang",
        version="0.5.23",
        settings={"max_model_len": 131072, "tensor_parallel": 2},
        workload={
            "qps": 1,
            "prompt_tokens": {"mean": 24000, "p95": 64000},
            "output_tokens": {"mean": 400, "p95": 1000},
            "shared_prefix": 0.4,
            "priorities": True,
            "lengths": [
                {"up_to": 1000, "share": 0.7, "mean": 500},
                {"up_to": 32000, "share": 0.25, "mean": 12000},
                {"up_to": 64000, "share": 0.03, "mean": 48000},
                {"up_to": 131072, "share": 0.02, "mean": 96000},
            ],
        },
        slo={"p99_s": 1.5},
    ),
    "chat-67b": Preset(
        title="67B chat on 4 x A100-80G",
        config=DEEPSEEK_67B,
        gpu=f"{A100}:4",
        engine="triton_vllm",
        version="0.24.0",
        settings={"max_model_len": 2048, "tensor_parallel": 4},
        workload={
            "qps": 20,
            "prompt_tokens": {"mean": 256, "p95": 1024},
            "output_tokens": {"mean": 128, "p95": 128},
            "priorities": True,
        },
        slo={"p99_s": 0.2, "ttft_s": 0.08},
    ),
    "conservative": Preset(
        title="emergencies: 4,096 batched tokens and a queue of 100, on one node of 8 x A100-80G",
        config=DEEPSEEK_V2_LITE,
        gpu=f"{A100}:8",
        engine="vllm",
        version="0.26.0",
        settings={
            "max_model_len": 12288,
            "tensor_parallel": 1,
            "max_num_batched_tokens": 4096,
            "gpu_memory_utilization": 0.85,
        },
        workload={
            "qps": 50,
            "prompt_tokens": {"mean": 350, "p95": 1000},
            "output_tokens": {"mean": 128, "p95": 512},
        },
        slo={"p99_s": 3.0},
    ),
}
