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
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5625,
}
"""Bytes per element; 0 means the model's own. nvfp4 keeps one scale byte for 16 elements."""

PER_HEAD_SCALES = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
DS_MLA = "fp8_ds_mla"
DS_MLA_BYTES = 656
"""DeepSeek V3.2: 512 fp8 + 16 scales + 128 of bf16 rope (mla_attention.py)."""

INDEXER_SCALE_BYTES = 4
V4_RECORD_BYTES = 584
V4_INDEX_BYTES = 132
V4_WINDOW = 128
V4_BLOCK = 256
V4_ALIGNMENT = 576
"""Pages are padded to it (deepseek_v4/attention.py)."""

V4_HEAD, V4_INDEX_HEAD = 512, 128
V4_STATE_BLOCK = {4: 4, 128: 8}
"""Tokens of a block of compressor states by rate (deepseek_v4/compressor.py)."""

V4_WINDOW_BLOCK = 64
SPARSE_BLOCK = 64
GPU_BLOCK = 16
BOUNDED = ("sliding", "chunked", "linear")
"""Layers whose cache does not grow with the sequence."""


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


def known_dtypes(shape: ModelShape, engine: str) -> tuple[str, ...]:
    """Return the KV types that an engine kind has for a model.

    vLLM 0.26: the ``supported_kv_cache_dtypes`` of the attention backends, config/cache.py for the rest; the packed record
    exists for sparse attention alone. SGLang 0.5.23: its own names and fp8, whatever the model.
    """
    if engine == "sglang":
        return ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    if shape.compressed:
        return ("fp8", DS_MLA)
    if shape.indexer is not None:
        return ("auto", "bfloat16", "fp8", DS_MLA)
    if shape.latent is not None:
        return ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
    return tuple(name for name in KV_BYTES if name != DS_MLA)


def needed_dtype(shape: ModelShape, engine: str) -> tuple[str, str]:
    """Return the KV type that a plan names because the engine's own choice would be worse, and why; empty where it is good.

    Left to itself vLLM keeps 16-bit records for DeepSeek V3.2 (mla_attention.py, only an fp8 type is made the packed
    record), and does not start a V4 (deepseek_v4/attention.py asserts an fp8 type).
    """
    if engine == "sglang":
        return "", ""
    if shape.compressed:
        return "fp8", "its compressed layers exist in this type alone: the engine does not start with another"
    if shape.indexer is not None:
        return (
            DS_MLA,
            "packed records, as the model was published; left to itself the engine keeps 16-bit ones, 1.6 times larger",
        )
    return "", ""


def _width(shape: ModelShape, kv_dtype: str) -> float:
    """Return bytes per element; 'auto' is what the model's files ask for, else the model's own type."""
    if kv_dtype == "auto" and shape.kv_dtype:
        kv_dtype = shape.kv_dtype
    return KV_BYTES[kv_dtype] or shape.dtype_bytes


def _head_token_bytes(shape: ModelShape, tensor: int, kv_dtype: str) -> float:
    """Return bytes per token of one ordinary layer; key heads are replicated when ranks outnumber them."""
    width = _width(shape, kv_dtype)
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
        # Every fp8 type is made the packed record (mla_attention.py, _canonicalize_sparse_mla_kv_cache_dtype).
        width = _width(shape, kv_dtype)
        main = float(DS_MLA_BYTES) if width < shape.dtype_bytes else elements * width
        return main + shape.indexer.head_dim + INDEXER_SCALE_BYTES
    return elements * _width(shape, kv_dtype)


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
    """Return the bytes that one more token of a long sequence takes on one GPU; layers with a window, chunk or state: none."""
    check_dtype(kv_dtype)
    if shape.compressed:
        return _compressed_token_bytes(shape) / pipeline
    growing = shape.layers - sum(1 for kind in shape.layer_kinds if kind in BOUNDED)
    if shape.layer_kinds and growing == 0:
        growing = shape.layers
    return layer_token_bytes(shape, tensor, kv_dtype) * math.ceil(growing / pipeline)


def _fewest_padded(counts: list[int], least: int) -> int:
    """Return the group size from ``least`` on that pads ``counts`` least, the larger of equals (_approximate_gcd)."""
    sizes = range(least, max([least, *counts]) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))


def _compressed_capacity(
    shape: ModelShape, kv_bytes: int, max_model_len: int, in_flight: int, pipeline: int
) -> KvCapacity:
    """Return what ``kv_bytes`` hold of a DeepSeek-V4-type model; ``in_flight`` tokens may be scheduled and not settled.

    v1/core/kv_cache_utils.py: one group with the compressed records and the indexer's keys of all layers, and groups of
    windows and compressor states, split so that each has about as many layers of a page size as the first. A block of
    the pool has room for the largest of each page size, and is given to one group at a time: windows and states of what
    is in flight weigh more than the records themselves until contexts are very long.
    """

    def page(size: int) -> int:
        return V4_ALIGNMENT * math.ceil(size / V4_ALIGNMENT)

    kinds = shape.layer_kinds[: math.ceil(shape.layers / pipeline)]
    layers = {int(kind.split(":")[1]): kinds.count(kind) for kind in set(kinds) if kind.startswith("compressed:")}
    record = {rate: page(V4_BLOCK // rate * V4_RECORD_BYTES) for rate in layers}
    index = page(V4_BLOCK // 4 * V4_INDEX_BYTES)
    full = [(record[rate], count) for rate, count in layers.items()]
    full += [(index, layers[4])] if 4 in layers else []
    window_page = page(V4_WINDOW_BLOCK * V4_RECORD_BYTES)
    sizes = sorted({size for size, _count in full})

    def fitting(size: int) -> int:
        return next((one for one in sizes if one >= size), size)

    # Of each kind of group: its layers, the pages that one layer takes, the tokens of a block, the window.
    kept = [(len(kinds), [window_page], V4_WINDOW_BLOCK, shape.sliding_window or V4_WINDOW)]
    for rate, count in layers.items():
        copies = 2 if rate == 4 else 1
        block = V4_STATE_BLOCK.get(rate, 8)
        states = [fitting(page(block * 2 * copies * V4_HEAD * 4))]
        states += [fitting(page(block * 2 * copies * V4_INDEX_HEAD * 4))] if rate == 4 else []
        kept.append((count, states, block, copies * rate))
    least = max(count for _size, count in full)
    group = _fewest_padded([least, *(count for count, *_rest in kept)], least)
    slots: dict[int, int] = {}
    for size, count in full:
        slots[size] = slots.get(size, 0) + count
    first = sum(size * count for size, count in full)
    pages = math.ceil(max_model_len / V4_BLOCK)
    needed, all_pages, most = pages * first, pages, least
    for count, states, block, window in kept:
        held = math.ceil(min(window - 1 + in_flight, max_model_len) / block) + 1
        parts = math.ceil(count / group)
        for part in range(parts):
            mine = len(range(part, count, parts))
            most = max(most, mine)
            needed += held * mine * sum(states)
            all_pages += held
            for size in states:
                slots[size] = max(slots.get(size, 0), mine)
    pool = sum(size * count for size, count in slots.items())
    blocks = kv_bytes // pool
    concurrency = blocks / math.ceil(needed / first)
    # The engine starts only where this much is there for one request (_max_memory_usage_bytes_from_groups).
    request = all_pages * most * sum(sizes)
    if request > kv_bytes:
        concurrency = min(concurrency, kv_bytes / request)
    return KvCapacity(
        bytes_per_token=_compressed_token_bytes(shape) / pipeline,
        block_tokens=V4_BLOCK,
        blocks=blocks,
        tokens=int(concurrency * max_model_len),
        max_concurrency=concurrency,
        request_bytes=request,
    )


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
    prefix_caching: bool = False,
) -> KvCapacity:
    """Return what ``kv_bytes`` of one GPU hold; ``batched`` x ``in_flight_batches`` bounds what sliding layers keep.

    ``block``: tokens of a block where they are fixed. ``prefix_caching``: asked for, which doubles the states that a
    request of a hybrid model holds (kv_cache_interface.py, MambaSpec; the engine's default there is off).
    """
    per_token = bytes_per_token(shape, tensor, kv_dtype, pipeline)
    kv_bytes = max(0, kv_bytes)
    if shape.compressed:
        return _compressed_capacity(shape, kv_bytes, max_model_len, batched * in_flight_batches, pipeline)
    block = block or (SPARSE_BLOCK if shape.indexer is not None else GPU_BLOCK)
    token = layer_token_bytes(shape, tensor, kv_dtype)
    kinds = shape.layer_kinds or ("full",) * shape.layers
    kinds = kinds[: math.ceil(shape.layers / pipeline)] if pipeline > 1 else kinds
    counts = {kind: kinds.count(kind) for kind in ("full", *BOUNDED) if kinds.count(kind)}
    if "linear" in counts and shape.linear_state is not None:
        # The attention block grows until its page is no smaller than a linear layer's state, which the ranks share
        # (platforms/interface.py, _align_hybrid_block_size).
        block *= math.ceil(shape.linear_state.bytes_per_sequence / tensor / (token * block))
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
        elif kind == "chunked":
            pages = math.ceil(min(shape.chunk + batched * in_flight_batches, max_model_len) / block)
        else:
            pages = 2 if prefix_caching else 1
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
