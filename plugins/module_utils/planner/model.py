# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A model's own config.json as the numbers a memory plan needs. Unknown shapes are refused, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts part: sizes in elements, counts per MoE layer."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    first_dense: int
    every: int
    shared_gate: bool = False
    router_bias: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2 and later): ranks and head sizes in elements."""

    kv_rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of DeepSeek V3.2: one key per token and layer."""

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class Quantization:
    """How the weights are stored: ``bits`` per element of a linear layer, group size (0: one scale per output)."""

    method: str
    bits: int
    group: int
    zero_points: bool = False
    skip: tuple[str, ...] = ()
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class ModelShape:
    """Everything the planner reads from config.json. Element counts; ``dtype_bytes`` for unquantized weights."""

    architecture: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    dtype: str
    dtype_bytes: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    gated_mlp: bool = True
    rope_scaling: bool = False
    sliding_window: int = 0
    layer_kinds: tuple[str, ...] = ()
    """Attention of each layer: full, sliding, linear, csa, hca; empty means all full."""
    experts: Experts | None = None
    latent: Latent | None = None
    indexer: Indexer | None = None
    quantization: Quantization | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a whole number of 1 or more from config.json, or ``default`` where the key is missing or null."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise PlanError(
                f"config.json has no {name}; the planner needs it. Is this the folder of a causal language model?"
            )
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlanError(f"config.json has {name} = {value!r}; it must be a whole number, 0 or more.")
    return value


def parse_config(config: Any) -> ModelShape:
    """Return the shape that config.json describes. Raises PlanError naming the key that is missing or wrong."""
    if not isinstance(config, Mapping):
        raise PlanError(f"config.json holds {type(config).__name__}; it must be a JSON object.")
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**text, "architectures": config.get("architectures", text.get("architectures"))}
    architectures = config.get("architectures") or []
    model_type = str(config.get("model_type", ""))
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else model_type
    if not architecture:
        raise PlanError("config.json names neither architectures nor model_type; the planner needs one of them.")
    hidden = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    if hidden < 1 or heads < 1:
        raise PlanError(f"config.json has hidden_size {hidden} and num_attention_heads {heads}; both must be above 0.")
    layers = _whole(config, "num_hidden_layers")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").replace("torch.", "")
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"config.json has torch_dtype {dtype!r}; known are {', '.join(sorted(DTYPE_BYTES))}.")
    latent = None
    if config.get("kv_lora_rank"):
        latent = Latent(
            kv_rank=_whole(config, "kv_lora_rank"),
            q_rank=_whole(config, "q_lora_rank", 0),
            nope_dim=_whole(config, "qk_nope_head_dim"),
            rope_dim=_whole(config, "qk_rope_head_dim"),
            v_dim=_whole(config, "v_head_dim"),
        )
    kind = model_type or architecture.lower()
    qwen2 = kind.startswith("qwen2")
    return ModelShape(
        architecture=architecture,
        model_type=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=_whole(config, "head_dim", hidden // heads),
        intermediate=_whole(config, "intermediate_size", 0),
        vocab=_whole(config, "vocab_size"),
        max_position=_whole(config, "max_position_embeddings", 0),
        dtype=dtype,
        dtype_bytes=DTYPE_BYTES[dtype],
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", qwen2)) or qwen2,
        o_bias=bool(config.get("attention_bias", False)) and not qwen2,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=kind.startswith("qwen3"),
        rope_scaling=bool(config.get("rope_scaling")),
        latent=latent,
    )
