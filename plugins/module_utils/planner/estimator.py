# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The field report's rough estimator, kept beside the exact plan with its limits named. See docs/planning.md#rough."""

from __future__ import annotations

from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape
from ansible_collections.metal.serve.plugins.module_utils.planner.weights import stored_bytes, tensors

BASE_GB = {7: 14.0, 13: 26.0, 33: 65.0, 67: 130.0}
"""GB of weights by size in billions, as reported; sizes between are taken as 2 bytes a parameter."""

LIMITS = (
    "knows four sizes and 16-bit weights only",
    "takes the KV cache as proportional to the model's size, whatever its attention",
    "knows no tensor parallelism, no activation peak, no CUDA graphs",
    "its own example (128 requests of 256 tokens, 67B, 'about 198 GB') is not what its formula gives (235 GB)",
)


def parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole model, counted from its shape."""
    return sum(item.count * item.elements for item in tensors(shape))


def rough_gb(billions: float, batch: int, length: int) -> dict[str, float]:
    """Return the report's estimate in GB: base + batch x length x size x 2 / 1e6 + 1.5 x size (size in billions)."""
    near = min(BASE_GB, key=lambda size: abs(size - billions))
    base = BASE_GB[near] if abs(near - billions) <= 0.15 * near else 2.0 * billions
    cache = batch * length * billions * 2 / 1e6
    extra = 1.5 * billions
    return {"base_gb": base, "kv_gb": round(cache, 2), "extra_gb": extra, "total_gb": round(base + cache + extra, 2)}


def rough(shape: ModelShape, batch: int, length: int) -> dict[str, Any]:
    """Return the rough estimate for a shape, with its limits."""
    billions = parameters(shape) / 1e9
    values: dict[str, Any] = dict(rough_gb(billions, batch, length))
    values["parameters_billions"] = round(billions, 2)
    values["weights_exact_gb"] = round(sum(t.count * sum(stored_bytes(t, shape)) for t in tensors(shape)) / 1e9, 2)
    values["limits"] = list(LIMITS)
    return values
