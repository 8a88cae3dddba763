# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache, and how many tokens and requests a cache of a given size holds, as vLLM counts them.

Follows v1/kv_cache_interface.py (bytes of a page by kind of attention) and v1/core/kv_cache_utils.py (layers in groups
of equal size, one pool of blocks for all groups; 'Maximum concurrency' = blocks / blocks that one request of
max_model_len takes). See docs/planning.md#kv.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape

KV_BYTES = {
    "auto": 0.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_ds_mla": 1.0,
    "int8": 1.0,
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5625,
}
"""Bytes per element; 0 means the model's own. nvfp4 keeps one scale byte for 16 elements."""

PER_HEAD_SCALES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "int8")
DS_MLA_BYTES = 656
"""DeepSeek V3.2: 512 fp8 + 16 scales + 128 of bf16 rope (mla_attention.py)."""

INDEXER_SCALE_BYTES = 4
V4_RECORD_BYTES = 584
V4_INDEX_BYTES = 132
V4_WINDOW = 128
V4_BLOCK = 256
SPARSE_BLOCK = 64
GPU_BLOCK = 16


@dataclass(frozen=True)
class KvCapacity:
    """What a KV cache of a given size holds."""

    bytes_per_token: float
    block_tokens: int
    blocks: int
    tokens: int
    max_concurrency: float
    request_bytes: int
    """Bytes that one request of max_model_len takes."""


def check_dtype(kv_dtype: str) -> None:
    """Raise PlanError for a KV type that no engine has."""
    if kv_dtype not in KV_BYTES:
        raise PlanError(f"kv_cache_dtype is {kv_dtype!r}; it must be one of {', '.join(KV_BYTES)}.")


def _head_token_bytes(shape: ModelShape, tensor: int, kv_dtype: str) -> float:
    """Return bytes per token of one ordinary layer; key heads are replicated when ranks outnumber them."""
    width = KV_BYTES[kv_dtype] or shape.dtype_bytes
    heads = math.ceil(shape.kv_heads / tensor)
    scales = 2 * heads * 4 if kv_dtype in PER_HEAD_SCALES else 0
    return 2 * heads * shape.head_dim * width + scales


def layer_token_bytes(shape: ModelShape, tensor: int, kv_dtype: str) -> float:
    """Return bytes per token of one attention layer on one GPU (compressed layers aside)."""
    check_dtype(kv_dtype)
    if shape.latent is None:
        return _head_token_bytes(shape, tensor, kv_dtype)
    elements = shape.latent.kv_rank + shape.latent.rope_dim
    if shape.indexer is not None:
        # 'auto' is the packed 656-byte record here: the sparse kernels read nothing else.
        plain = kv_dtype in ("bfloat16", "float16")
        main = elements * 2.0 if plain else float(DS_MLA_BYTES)
        return main + shape.indexer.head_dim + INDEXER_SCALE_BYTES
    return elements * (KV_BYTES[kv_dtype] or shape.dtype_bytes)


def _compressed_token_bytes(shape: ModelShape) -> float:
    """Return bytes per token of all layers of a DeepSeek-V4-type model, without the fixed window of each sequence."""
    total = 0.0
    for kind in shape.layer_kinds:
        if kind.startswith("compressed:"):
            rate = int(kind.split(":")[1])
            total += V4_RECORD_BYTES / rate
            if rate == 4:
                total += V4_INDEX_BYTES / rate
    return total


def bytes_per_token(shape: ModelShape, tensor: int = 1, kv_dtype: str = "auto", pipeline: int = 1) -> float:
    """Return the bytes that one more token of a long sequence takes on one GPU (sliding and linear layers: none)."""
    check_dtype(kv_dtype)
    if shape.compressed:
        return _compressed_token_bytes(shape) / pipeline
    growing = shape.layers - sum(1 for kind in shape.layer_kinds if kind in ("sliding", "linear"))
    if shape.layer_kinds and growing == 0:
        growing = shape.layers
    return layer_token_bytes(shape, tensor, kv_dtype) * math.ceil(growing / pipeline)


def capacity(
    shape: ModelShape,
    kv_bytes: int,
    max_model_len: int,
    tensor: int = 1,
    pipeline: int = 1,
    kv_dtype: str = "auto",
    batched: int = 8192,
    in_flight_batches: int = 2,
    block: int = 0,
) -> KvCapacity:
    """Return what ``kv_bytes`` of one GPU hold; ``batched`` x ``in_flight_batches`` bounds what sliding layers keep."""
    per_token = bytes_per_token(shape, tensor, kv_dtype, pipeline)
    kv_bytes = max(0, kv_bytes)
    if shape.compressed:
        fixed = V4_WINDOW * V4_RECORD_BYTES * shape.layers / pipeline
        request = int(per_token * max_model_len + fixed)
        concurrency = kv_bytes / request
        tokens = int(concurrency * max_model_len)
        return KvCapacity(per_token, V4_BLOCK, tokens // V4_BLOCK, tokens, concurrency, request)
    block = block or (SPARSE_BLOCK if shape.indexer is not None else GPU_BLOCK)
    token = layer_token_bytes(shape, tensor, kv_dtype)
    kinds = shape.layer_kinds or ("full",) * shape.layers
    kinds = kinds[: math.ceil(shape.layers / pipeline)] if pipeline > 1 else kinds
    counts = {kind: kinds.count(kind) for kind in ("full", "sliding", "linear") if kinds.count(kind)}
    if "linear" in counts and shape.linear_state is not None:
        # The attention block grows until its page is no smaller than a linear layer's state.
        block = max(block, GPU_BLOCK * math.ceil(shape.linear_state.bytes_per_sequence / token / GPU_BLOCK))
    largest, smallest = max(counts.values()), min(counts.values())
    group = largest if largest < smallest * 1.5 else smallest
    page = token * block
    blocks = int(kv_bytes // (page * group))
    per_request = 0
    for kind, count in counts.items():
        groups = math.ceil(count / group)
        if kind == "full":
            pages = math.ceil(max_model_len / block)
        elif kind == "sliding":
            kept = min(shape.sliding_window - 1 + batched * in_flight_batches, max_model_len)
            pages = math.ceil(kept / block) + 1
        else:
            pages = 1
        per_request += groups * pages
    concurrency = blocks / per_request
    return KvCapacity(
        bytes_per_token=per_token,
        block_tokens=block,
        blocks=blocks,
        tokens=int(concurrency * max_model_len),
        max_concurrency=concurrency,
        request_bytes=int(per_request * page * group),
    )
