# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights on one GPU, tensor by tensor as vLLM lays them out, and what the allocator makes of them.

vLLM fuses q, k and v into one tensor and gate and up into another (model_executor/layers/linear.py), replicates key and
value heads when there are more ranks than heads, pads the vocabulary to 64 (vocab_parallel_embedding.py) and splits
expert tensors along their inner size. See docs/planning.md#weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape, Quantization

MIB = 1024**2
VOCAB_PAD = 64
INDEX_TOLERANCE = 0.02


@dataclass(frozen=True)
class Tensor:
    """``count`` equal tensors of one GPU: ``elements`` each, ``rows`` outputs; linear ones may be quantized."""

    name: str
    count: int
    elements: int
    rows: int = 0
    linear: bool = False
    width: int = 0

    @property
    def columns(self) -> int:
        """Return the input size of a linear tensor."""
        return self.elements // self.rows if self.rows else 0


@dataclass(frozen=True)
class Weights:
    """Bytes on one GPU: ``exact`` as stored, ``allocated`` as the engine's 'Model loading took' counts them."""

    exact: int
    allocated: int
    source: str
    warnings: tuple[str, ...] = ()


def split(total: int, parts: int) -> int:
    """Return the share of one of ``parts`` ranks, rounded up."""
    return -(-total // parts)


PARALLEL_SIZES = (1, 2, 4, 8, 16)


def _indivisible(shape: ModelShape, tensor: int, data: int, whole_experts: bool) -> str:
    """Return why the engine would refuse this tensor parallelism, as what it must be; empty where it would not.

    linear.py (``divide``, QKVParallelLinear), vocab_parallel_embedding.py, fused_moe/layer.py.
    """
    if shape.heads % tensor:
        return f"it must divide num_attention_heads ({shape.heads})"
    kv = shape.kv_heads
    if shape.latent is None and not shape.compressed and max(kv, tensor) % min(kv, tensor):
        return f"it must divide num_key_value_heads ({kv}) or be a multiple of them"
    vocab = VOCAB_PAD * math.ceil(shape.vocab / VOCAB_PAD)
    experts = shape.experts
    sizes = [("the padded vocabulary", vocab, tensor)]
    if experts is None or experts.dense_layers:
        sizes.append(("intermediate_size", shape.intermediate, tensor))
    if experts is not None:
        sizes.append(("the experts' intermediate size", experts.intermediate, 1 if whole_experts else tensor * data))
        sizes.append(("the shared experts' intermediate size", experts.shared_intermediate, tensor))
    if shape.linear_state is not None:
        state = shape.linear_state
        sizes.append(("linear_num_value_heads", state.value_heads, tensor))
        sizes.append(("the linear layers' keys", state.key_dim, tensor))
    for name, size, parts in sizes:
        if size % parts:
            return f"it must divide {name} ({size})"
    return _splits_blocks(shape, tensor, data, whole_experts)


def _splits_blocks(shape: ModelShape, tensor: int, data: int, whole_experts: bool) -> str:
    """Return why a rank's part of quantized weights is no whole number of their blocks or groups, empty where it is.

    quantization/utils/fp8_utils.py (validate_fp8_block_shape), quantization/fp8.py and auto_awq.py. Experts in groups
    are left out: a kernel with smaller groups takes over there (moe_wna16.py).
    """
    scheme = shape.quantization
    unit = 0 if scheme is None else scheme.block[0] if scheme.block is not None else scheme.group
    if scheme is None or scheme.method not in ("fp8", "awq", "gptq") or unit <= 1:
        return ""
    sizes = []
    if tensor > 1 and (shape.experts is None or shape.experts.dense_layers):
        sizes.append(("intermediate_size", shape.intermediate, tensor))
    if tensor > 1 and shape.latent is None:
        sizes.append(("the attention's output", shape.heads * shape.head_dim, tensor))
    if shape.experts is not None and scheme.block is not None and not whole_experts and tensor * data > 1:
        sizes.append(("the experts' intermediate size", shape.experts.intermediate, tensor * data))
    for name, size, parts in sizes:
        if (size // parts) % unit:
            return f"{name} ({size}) over {parts} GPUs is {size // parts}, no multiple of the quantization's {unit}"
    return ""


def divisible(shape: ModelShape, tensor: int, data: int = 1, whole_experts: bool = False) -> bool:
    """Return whether the engine takes this tensor parallelism for the model."""
    return not _indivisible(shape, tensor, data, whole_experts)


def check_divisible(shape: ModelShape, tensor: int, data: int = 1, whole_experts: bool = False) -> None:
    """Raise PlanError when the engine would refuse this tensor parallelism for the model."""
    why = _indivisible(shape, tensor, data, whole_experts)
    if not why:
        return
    fitting = [str(size) for size in PARALLEL_SIZES if divisible(shape, size, data, whole_experts)]
    ways = [f"set tensor_parallel to {' or '.join(fitting)}"] if fitting else []
    if shape.experts is not None and not whole_experts and divisible(shape, tensor, data, True):
        ways.append("set enable_expert_parallel to true, which leaves experts whole")
    raise PlanError(f"tensor_parallel is {tensor}; {why}.", ways)


def _linear(name: str, count: int, rows: int, columns: int, bias: bool = False) -> list[Tensor]:
    """Return ``count`` linear layers (and their biases); nothing where a size is 0."""
    if not (count and rows and columns):
        return []
    found = [Tensor(name, count, rows * columns, rows, True)]
    if bias:
        found.append(Tensor(name + ".bias", count, rows))
    return found


def _latent_attention(shape: ModelShape, count: int, heads: int) -> list[Tensor]:
    """Return the tensors of ``count`` layers of multi-head latent attention with ``heads`` heads on this GPU."""
    latent = shape.latent
    if latent is None:
        raise AssertionError("latent is known here")
    width = latent.nope_dim + latent.rope_dim
    low = latent.kv_rank + latent.rope_dim
    out = [Tensor("kv_a_layernorm", count, latent.kv_rank)]
    if latent.q_rank:
        out += _linear("fused_qkv_a_proj", count, latent.q_rank + low, shape.hidden)
        out += _linear("q_b_proj", count, heads * width, latent.q_rank)
        out.append(Tensor("q_a_layernorm", count, latent.q_rank))
    else:
        out += _linear("q_proj", count, heads * width, shape.hidden)
        out += _linear("kv_a_proj_with_mqa", count, low, shape.hidden)
    out += _linear("kv_b_proj", count, heads * (latent.nope_dim + latent.v_dim), latent.kv_rank)
    out += _linear("o_proj", count, shape.hidden, heads * latent.v_dim)
    if shape.indexer is not None:
        index = shape.indexer
        out += _linear("indexer.wq_b", count, index.heads * index.head_dim, latent.q_rank or shape.hidden)
        out += _linear("indexer.wk_weights_proj", count, index.head_dim + index.heads, shape.hidden)
        out.append(Tensor("indexer.k_norm", count, 2 * index.head_dim, width=4))
    return out


def _attention(shape: ModelShape, count: int, tensor: int) -> list[Tensor]:
    """Return the tensors of ``count`` attention layers on one GPU."""
    heads = shape.heads // tensor
    if shape.latent is not None:
        return _latent_attention(shape, count, heads)
    kv = max(1, shape.kv_heads // tensor)
    queries = heads * (2 if shape.output_gate else 1)
    out = _linear("qkv_proj", count, (queries + 2 * kv) * shape.head_dim, shape.hidden, shape.qkv_bias)
    out += _linear("o_proj", count, shape.hidden, heads * shape.head_dim, shape.o_bias)
    if shape.qk_norm:
        out += [Tensor("q_norm", count, shape.head_dim), Tensor("k_norm", count, shape.head_dim)]
    return out


def _linear_attention(shape: ModelShape, count: int, tensor: int) -> list[Tensor]:
    """Return the tensors of ``count`` gated-delta-net layers on one GPU."""
    state = shape.linear_state
    if state is None or not count:
        return []
    keys, values, heads = (split(size, tensor) for size in (state.key_dim, state.value_dim, state.value_heads))
    out = _linear("in_proj_qkvz", count, 2 * keys + 2 * values, shape.hidden)
    out += _linear("in_proj_ba", count, 2 * heads, shape.hidden)
    out += _linear("out_proj", count, shape.hidden, values)
    out.append(Tensor("conv1d", count, (2 * keys + values) * state.kernel))
    out += [
        Tensor("gates", count, 2 * heads, width=4),
        Tensor("gated_norm", count, state.value_dim // state.value_heads),
    ]
    return out


def _mixture(shape: ModelShape, count: int, tensor: int, ranks: int, whole: bool) -> list[Tensor]:
    """Return the tensors of ``count`` mixture-of-experts layers on one GPU.

    ``ranks`` GPUs (tensor x data parallelism) share the experts: each expert is divided, or with ``whole`` (expert
    parallelism) each GPU has its part of them undivided.
    """
    experts = shape.experts
    if experts is None or not count:
        return []
    size = experts.intermediate if whole else split(experts.intermediate, ranks)
    local = split(experts.count, ranks) if whole else experts.count
    shared = split(experts.shared_intermediate, tensor)
    out = _linear("experts.w13", count, local * 2 * size, shape.hidden)
    out += _linear("experts.w2", count, local * shape.hidden, size)
    out.append(Tensor("mlp.gate", count, experts.count * shape.hidden))
    if experts.router_bias:
        out.append(Tensor("mlp.gate.bias", count, experts.count, width=4))
    out += _linear("shared_experts.gate_up_proj", count, 2 * shared, shape.hidden)
    out += _linear("shared_experts.down_proj", count, shape.hidden, shared)
    if shared and experts.shared_gate:
        out.append(Tensor("shared_expert_gate", count, shape.hidden))
    return out


def tensors(
    shape: ModelShape, tensor: int = 1, pipeline: int = 1, data: int = 1, whole_experts: bool = False
) -> list[Tensor]:
    """Return the weight tensors of the fullest GPU: with several stages, one that holds an embedding table."""
    check_divisible(shape, tensor, data, whole_experts)
    layers = split(shape.layers, pipeline)
    dense = layers if shape.experts is None else min(layers, shape.experts.dense_layers)
    attention = layers - sum(1 for kind in shape.layer_kinds[:layers] if kind == "linear")
    inner = split(shape.intermediate, tensor)
    out = _attention(shape, attention, tensor)
    out += _linear_attention(shape, layers - attention, tensor)
    out += _linear("gate_up_proj", dense, 2 * inner, shape.hidden, shape.mlp_bias)
    out += _linear("down_proj", dense, shape.hidden, inner, shape.mlp_bias)
    out += _mixture(shape, layers - dense, tensor, tensor * data, whole_experts)
    out.append(Tensor("layer_norms", layers * shape.norms_per_layer, shape.hidden))
    out.append(Tensor("norm", 1, shape.hidden))
    vocab = split(VOCAB_PAD * math.ceil(shape.vocab / VOCAB_PAD), tensor)
    out.append(Tensor("embed_tokens", 1, vocab * shape.hidden))
    if not shape.tied and pipeline == 1:
        out.append(Tensor("lm_head", 1, vocab * shape.hidden))
    return out


FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj", "qkv_proj", "self_attn"),
    "o_proj": ("o_proj", "self_attn"),
    "gate_up_proj": ("gate_proj", "up_proj", "gate_up_proj", "mlp"),
    "down_proj": ("down_proj", "mlp"),
    "experts.w13": ("experts", "gate_proj", "up_proj", "mlp"),
    "experts.w2": ("experts", "down_proj", "mlp"),
}
"""Last words in a checkpoint's names that stand for a fused tensor here."""


def skipped(tensor: Tensor, quantization: Quantization) -> bool:
    """Return whether a quantization leaves this tensor as it is: whether its skip list names this kind of tensor.

    A pattern that names single layers (a number in it) is not taken for all of them.
    """
    if not tensor.linear:
        return True
    shared = tensor.name.startswith("shared_expert")
    plain = tensor.name.rsplit(".", 1)[-1]
    names = FUSED.get(plain if shared else tensor.name, (plain,))
    if shared:
        names = (*names, "shared_expert", "shared_experts")
    for pattern in quantization.skip:
        words = [word.strip("*^$") for word in pattern.replace("re:", "").replace("\\", "").split(".")]
        words = [word for word in words if word]
        if not words or any(word.isdigit() for word in words):
            continue
        if ("shared_expert" in pattern) == shared and words[-1] in names:
            return True
    return False


def stored_bytes(tensor: Tensor, shape: ModelShape) -> list[int]:
    """Return the bytes of each allocation that one such tensor makes (weights, scales, zeros)."""
    width = tensor.width or shape.dtype_bytes
    quantization = shape.quantization
    if quantization is None or skipped(tensor, quantization):
        return [tensor.elements * width]
    rows, columns = tensor.rows, tensor.columns
    sizes = [tensor.elements * quantization.bits // 8]
    if quantization.block is not None:
        sizes.append(math.ceil(rows / quantization.block[0]) * math.ceil(columns / quantization.block[1]) * 4)
    elif quantization.group:
        groups = rows * math.ceil(columns / quantization.group)
        scale = 1 if quantization.bits == 4 and quantization.group <= 32 else shape.dtype_bytes
        sizes.append(groups * scale)
        if quantization.zero_points:
            sizes.append(groups * quantization.bits // 8)
    else:
        sizes.append(rows * 4)
    return sizes


def allocated(size: int) -> int:
    """Return the bytes that torch's allocator counts for one allocation made while vLLM loads a model.

    Blocks are multiples of 512 bytes; from 10 MiB on a segment is rounded up to 2 MiB, and vLLM forbids splitting
    those of 20 MiB and more while it loads (gpu_worker.py, _scoped_allocator_max_split), so their tail stays counted.
    """
    if size >= 10 * MIB:
        segment = 2 * MIB * math.ceil(size / (2 * MIB))
        return segment if size >= 20 * MIB or segment - size <= MIB else 512 * math.ceil(size / 512)
    return 512 * math.ceil(size / 512)


def rope_bytes(shape: ModelShape) -> int:
    """Return the bytes of the rotary cache, a row for each position (rotary_embedding/base.py); DeepSeek's is fp32."""
    width = 4 if shape.latent is not None else shape.dtype_bytes
    return shape.max_position * shape.rotary_dim * width


SMALLEST_INDEX, LARGEST_INDEX = 10**6, 10**14
"""Bytes that a language model can have: a smaller sum is no sum."""


def parse_index(index: Any) -> int:
    """Return metadata.total_size of a model.safetensors.index.json in bytes. Raises PlanError where it is not there."""
    meta = index.get("metadata") if isinstance(index, Mapping) else None
    size = meta.get("total_size") if isinstance(meta, Mapping) else None
    if isinstance(size, bool) or not isinstance(size, (int, float)) or not SMALLEST_INDEX <= size <= LARGEST_INDEX:
        raise PlanError(
            f"model.safetensors.index.json has metadata.total_size {size!r}; it must be bytes, {SMALLEST_INDEX} or more."
        )
    return int(size)


def weights(
    shape: ModelShape,
    tensor: int = 1,
    pipeline: int = 1,
    other_mib: float = 8.6,
    index_bytes: int | None = None,
    data: int = 1,
    whole_experts: bool = False,
) -> Weights:
    """Return the weights of one GPU. ``index_bytes`` (a safetensors index's total_size) corrects the count where given.

    Raises PlanError where neither the shape nor an index says how large they are.
    """
    if shape.compressed and index_bytes is None:
        raise PlanError(
            f"{shape.architecture} stores its layers in several formats that config.json does not tell.",
            ["give the model's model.safetensors.index.json (--index), which has their size"],
        )
    parts = [(item, stored_bytes(item, shape)) for item in tensors(shape, tensor, pipeline, data, whole_experts)]
    exact = sum(item.count * sum(sizes) for item, sizes in parts)
    counted = sum(item.count * sum(allocated(size) for size in sizes) for item, sizes in parts)
    source = "counted from config.json"
    notes: list[str] = []
    if index_bytes is not None:
        if shape.dtype in ("float32", "float") and shape.quantization is None:
            index_bytes //= 2  # stored in 32 bits, served in 16
        whole = sum(i.count * sum(stored_bytes(i, shape)) for i in tensors(shape))
        share = exact / whole
        difference = index_bytes / whole - 1
        if abs(difference) > INDEX_TOLERANCE and not shape.compressed:
            notes.append(
                f"the safetensors index says {index_bytes / 1024**3:.2f} GiB, config.json makes {whole / 1024**3:.2f}; "
                "the index is believed"
            )
        if abs(difference) > 1e-4:
            counted += int(share * index_bytes) - exact
            exact = int(share * index_bytes)
            source = "metadata.total_size of the safetensors index"
    extra = rope_bytes(shape) + int(other_mib * MIB)
    return Weights(exact, counted + extra, source, tuple(notes))
