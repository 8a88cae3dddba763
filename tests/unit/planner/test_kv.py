# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes per token by kind of attention, and the engine's own capacity formulas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.planner import kv
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

from .helpers import MODELS, shape

PER_TOKEN = [
    ("llama-3-8b", 1, "auto", 131_072),
    ("llama-3.1-70b", 1, "auto", 327_680),
    ("llama-3.1-70b", 8, "auto", 40_960),
    ("llama-3.1-70b", 16, "auto", 40_960),  # 8 key heads: replicated, not divided further
    ("qwen2-7b", 1, "auto", 57_344),  # measured
    ("llama-2-7b", 1, "auto", 524_288),
    ("llama-3-8b", 1, "fp8", 65_536),
    ("llama-3-8b", 1, "int8_per_token_head", 65_536 + 32 * 2 * 8 * 4),
    ("deepseek-v2-lite", 1, "auto", 31_104),  # measured
    ("deepseek-v3", 1, "auto", 70_272),
    ("deepseek-v3", 8, "auto", 70_272),  # latent attention is not divided by tensor parallelism
    ("deepseek-v3", 8, "fp8", 35_136),
    ("deepseek-v3.2", 8, "fp8_ds_mla", 48_068),
    ("deepseek-v3.2", 8, "fp8", 48_068),  # the engine makes it the packed record
    ("deepseek-v3.2", 8, "auto", 61 * (576 * 2 + 132)),  # left to itself it keeps 16-bit records
    ("deepseek-v4-flash", 8, "auto", 3_685),
    ("deepseek-v4-pro", 8, "auto", 5_337),
]


@pytest.mark.parametrize(("name", "tensor", "dtype", "expected"), PER_TOKEN)
def test_bytes_per_token(name: str, tensor: int, dtype: str, expected: int) -> None:
    assert kv.bytes_per_token(shape(name), tensor, dtype) == pytest.approx(expected, abs=0.1)


def test_the_measured_run_to_the_block() -> None:
    # 112.95 GiB made 2,114,896 tokens and 64.54x at 32,768 on an H200.
    held = kv.capacity(shape("qwen2-7b"), 121_276_955_239, 32768)
    assert held.tokens == 2_114_896
    assert round(held.max_concurrency, 2) == 64.54


def test_the_measured_cpu_run() -> None:
    # 1 GiB, 2 layers, 2 key heads of 32, bf16: 2,097,152 tokens and 2048.00x at 1,024.
    tiny = shape("llama-3-8b", num_hidden_layers=2, num_key_value_heads=2, head_dim=32)
    held = kv.capacity(tiny, 2**30, 1024)
    assert (held.tokens, round(held.max_concurrency, 2)) == (2_097_152, 2048.0)


def test_sliding_layers_keep_a_window() -> None:
    model = shape("gemma-3-27b-text")  # 10 full layers, 52 sliding ones of 1,024 tokens
    short = kv.capacity(model, 40 * 2**30, 2048, batched=2048)
    long = kv.capacity(model, 40 * 2**30, 131072, batched=2048)
    everything_full = kv.capacity(shape("gemma-3-27b-text", sliding_window=None), 40 * 2**30, 131072)
    assert long.tokens > 3 * everything_full.tokens
    assert long.tokens > short.tokens  # the window weighs less the longer the context
    assert kv.bytes_per_token(model) == 10 * 2 * 16 * 128 * 2


def test_linear_layers_hold_a_state_per_request() -> None:
    model = shape("qwen3-next-80b-a3b")
    assert model.hybrid
    assert kv.bytes_per_token(model) == 12 * 2 * 2 * 256 * 2
    held = kv.capacity(model, 40 * 2**30, 131072)
    assert held.block_tokens % 16 == 0
    assert held.block_tokens * kv.layer_token_bytes(model, 1, "auto") >= model.linear_state.bytes_per_sequence  # type: ignore[union-attr]


FLASH, OLDER_FLASH, PRO = [128] * 23 + [4] * 20, [0] * 2 + [128] * 20 + [4] * 21, [128] * 32 + [4] * 29


@pytest.mark.parametrize(
    ("rates", "length", "batched", "blocks", "tokens"),
    [
        (FLASH, 1_048_576, 8192, 60004, 6_103_283),
        (FLASH, 131_072, 8192, 60004, 1_169_493),
        (FLASH, 32_768, 8192, 60004, 310_079),
        (FLASH, 32_768, 2048, 60004, 1_157_275),
        (FLASH, 4_096, 2048, 60004, 156_845),
        (OLDER_FLASH, 1_048_576, 8192, 61965, 6_489_065),
        (OLDER_FLASH, 32_768, 2048, 61965, 1_251_059),
        (PRO, 1_048_576, 8192, 42837, 4_388_651),
        (PRO, 131_072, 8192, 42837, 844_193),
        (PRO, 4_096, 2048, 42837, 113_273),
    ],
)
def test_compressed_layers_as_the_engine_counts_them(
    rates: list[int], length: int, batched: int, blocks: int, tokens: int
) -> None:
    """What vLLM 0.26.0's own get_kv_cache_configs and get_kv_cache_capacity make of 60 GiB."""
    model = shape("deepseek-v4-flash", num_hidden_layers=len(rates), compress_ratios=rates)
    held = kv.capacity(model, 60 * 2**30, length, batched=batched)
    assert (held.blocks, held.tokens) == (blocks, tokens)


def test_compressed_layers_start_where_the_engine_starts() -> None:
    model = shape("deepseek-v4-flash")
    least = kv.capacity(model, 60 * 2**30, 131_072).request_bytes
    assert least == (512 + 2 * 259 + 4099 + 2065) * 23 * (37_440 + 8_640 + 1_728)
    assert kv.capacity(model, least, 131_072).max_concurrency >= 1
    assert kv.capacity(model, least - 1, 131_072).max_concurrency < 1


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(PlanError, match="kv_cache_dtype is 'fp7'"):
        kv.bytes_per_token(shape("llama-3-8b"), 1, "fp7")


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    size=st.integers(0, 2**37),
    more=st.integers(0, 2**36),
    length=st.integers(1, 200_000),
)
def test_more_memory_never_holds_less(name: str, size: int, more: int, length: int) -> None:
    model = shape(name)
    small, large = kv.capacity(model, size, length), kv.capacity(model, size + more, length)
    assert large.tokens >= small.tokens
    assert large.max_concurrency >= small.max_concurrency
