# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV cache per token, by kind of attention. See docs/planning.md#kv."""

from __future__ import annotations

import math

from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape

KV_BYTES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


def bytes_per_token(shape: ModelShape, tensor_parallel: int = 1, kv_dtype: str = "auto") -> int:
    """Return the bytes that one token takes in the KV cache of one GPU."""
    width = KV_BYTES.get(kv_dtype, 0) or shape.dtype_bytes
    if shape.latent is not None:
        return shape.layers * (shape.latent.kv_rank + shape.latent.rope_dim) * width
    heads = math.ceil(shape.kv_heads / tensor_parallel)
    return shape.layers * 2 * heads * shape.head_dim * width
