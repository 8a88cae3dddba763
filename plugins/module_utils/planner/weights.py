# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, counted parameter by parameter from the model's shape. See docs/planning.md#weights."""

from __future__ import annotations

from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape


def weight_bytes(shape: ModelShape, tensor_parallel: int = 1) -> int:
    """Return the bytes of weights that one GPU holds."""
    hidden = shape.hidden
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = hidden * q + 2 * hidden * kv + q * hidden + 2 * hidden
    if shape.qkv_bias:
        layer += q + 2 * kv
    layer += 3 * hidden * shape.intermediate
    embedding = shape.vocab * hidden
    total = shape.layers * layer + embedding * (1 if shape.tied else 2) + hidden
    return total * shape.dtype_bytes // tensor_parallel
