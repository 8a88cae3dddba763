# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Refit the memory model's constants from one start-up log of the engine on the target (docs/planning.md#calibrate)."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner import constants, memory
from ansible_collections.metal.serve.plugins.module_utils.planner.constants import EngineConstants
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.memory import GIB, MIB, MemoryInput
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape

MOST_LOG_BYTES = 64 * 1024 * 1024
CALIBRATED_ERROR_GIB = 0.1
"""What is left after a refit: the log rounds each part to 0.01 GiB, and another setting moves the peak."""

_GIB = r"([\d.]+) GiB"
_PATTERNS = {
    "version": re.compile(r"(?:V1 LLM engine \(v|vLLM API server version |version )(\d+\.\d+[\w.+]*)"),
    "max_model_len": re.compile(r"Using max model len (\d+)"),
    "max_num_batched_tokens": re.compile(r"max_num_batched_tokens(?:=|': )(\d+)"),
    "weights_gib": re.compile(rf"Model loading took {_GIB}"),
    "kv_cache_gib": re.compile(rf"Available KV cache memory: {_GIB}"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),
    "max_concurrency": re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.,]+)x"),
    "graphs_gib": re.compile(rf"Graph capturing finished in .* took {_GIB}"),
    "activation_gib": re.compile(rf"{_GIB} for peak activation"),
    "non_torch_gib": re.compile(rf"{_GIB} for non-torch memory"),
    "utilization": re.compile(r"Desired GPU memory utilization is \(([\d.]+),"),
    "total_gib": re.compile(rf"Free memory on device \([\d.]+/{_GIB}\)"),
    "tensor": re.compile(r"tensor_parallel_size=(\d+)"),
    "pipeline": re.compile(r"pipeline_parallel_size=(\d+)"),
    "kv_cache_dtype": re.compile(r"kv_cache_dtype=(\w+)"),
    "max_num_seqs": re.compile(r"'max_num_seqs': (\d+)"),
}
_WHOLE = ("max_model_len", "max_num_batched_tokens", "kv_cache_tokens", "tensor", "pipeline", "max_num_seqs")
_NEEDED = ("weights_gib", "activation_gib", "non_torch_gib", "kv_cache_tokens", "utilization")


@dataclass(frozen=True)
class Reported:
    """What an engine's start-up log says; None where a line is missing. GiB as logged, two decimals."""

    version: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    weights_gib: float | None = None
    kv_cache_gib: float | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    graphs_gib: float | None = None
    activation_gib: float | None = None
    non_torch_gib: float | None = None
    utilization: float | None = None
    total_gib: float | None = None
    tensor: int | None = None
    pipeline: int | None = None
    kv_cache_dtype: str | None = None
    enforce_eager: bool = False


def parse_log(text: str) -> Reported:
    """Return what a vLLM start-up log says. The first value of each kind is taken; later ones are other ranks'."""
    found: dict[str, Any] = {}
    for line in text[:MOST_LOG_BYTES].splitlines():
        for name, pattern in _PATTERNS.items():
            if name in found:
                continue
            match = pattern.search(line)
            if match is None:
                continue
            value = match.group(1).replace(",", "") if name != "version" else match.group(1).rstrip(".")
            if name in ("version", "kv_cache_dtype"):
                found[name] = value
            else:
                found[name] = int(value) if name in _WHOLE else float(value)
        if "enforce_eager=True" in line:
            found["enforce_eager"] = True
    return Reported(**found)


def input_of(reported: Reported, gpu_name: str, total_mib: int, reserved_mib: float | None = None) -> MemoryInput:
    """Return the memory model's input for the run that a log tells of; defaults as the engine has them on this GPU."""
    batched, seqs = engine_defaults(gpu_name, total_mib)
    return MemoryInput(
        gpu_name=gpu_name,
        total_mib=total_mib,
        reserved_mib=reserved_mib,
        version=reported.version or constants.ENGINES[constants.FALLBACK].version,
        tensor=reported.tensor or 1,
        pipeline=reported.pipeline or 1,
        utilization=reported.utilization or memory.DEFAULT_UTIL,
        max_model_len=reported.max_model_len or 8192,
        max_num_batched_tokens=reported.max_num_batched_tokens or batched,
        max_num_seqs=reported.max_num_seqs or seqs,
        kv_cache_dtype=reported.kv_cache_dtype or "auto",
        enforce_eager=reported.enforce_eager,
    )


def engine_defaults(gpu_name: str, total_mib: int) -> tuple[int, int]:
    """Return vLLM's server defaults of max_num_batched_tokens and max_num_seqs (arg_utils.py, get_batch_defaults)."""
    large = total_mib * (1 - constants.RESERVED_RATIO) >= 70 * 1024 and "a100" not in gpu_name.lower()
    return (8192, 1024) if large else (2048, 256)


def calibrate(shape: ModelShape, reported: Reported, given: MemoryInput) -> EngineConstants:
    """Return constants with which the prediction for this very run gives what the log says.

    Non-torch memory, what is left of weights and activation, and graphs (scaled as one) are refitted; the formulas
    stay. Raises PlanError naming the line that the log lacks.
    """
    missing = [name for name in _NEEDED if getattr(reported, name) is None]
    if missing:
        raise PlanError(
            f"--calibrate: the log has no {', '.join(missing)}; it must be a vLLM start-up log down to the line "
            "'Desired GPU memory utilization' (0.19 to 0.31 print it)."
        )
    base, _same = constants.engine_constants(given.version)
    plan = memory.predict(shape, dataclasses.replace(given, calibration=base))
    if reported.weights_gib is None:
        raise AssertionError("reported.weights_gib is known here")
    if reported.activation_gib is None:
        raise AssertionError("reported.activation_gib is known here")
    if reported.non_torch_gib is None:
        raise AssertionError("reported.non_torch_gib is known here")
    if not 0.95 < reported.weights_gib * GIB / plan.weights < 1.05:
        raise PlanError(
            f"--calibrate: the log says {reported.weights_gib} GiB of weights, {shape.architecture} of --config makes "
            f"{plan.weights / GIB:.2f}; give the config.json of the model that the log is of."
        )
    ranks = given.tensor * given.pipeline
    loader = base.loader_mib + (reported.weights_gib * GIB - plan.weights) / MIB
    phases = memory.activation_phases(shape, given, base)
    measured_non_torch = reported.non_torch_gib * 1024
    non_torch = measured_non_torch - base.nccl_mib if ranks > 1 else measured_non_torch
    nccl = base.nccl_mib
    if non_torch < 0:
        non_torch, nccl = base.non_torch_mib, measured_non_torch - base.non_torch_mib
    added = 0.0
    if reported.graphs_gib and plan.graphs:
        added = (reported.graphs_gib * GIB - plan.graphs) / MIB
    fitted = dataclasses.replace(
        base,
        version=given.version,
        non_torch_mib=round(non_torch, 3),
        nccl_mib=round(nccl, 3),
        loader_mib=round(loader, 3),
        activation_mib=round(reported.activation_gib * 1024 - max(phases.values()) / MIB, 3),
        graph_mib=round(base.graph_mib + added, 3),
        graph_first_mib=round(base.graph_first_mib + added, 3),
        expected_overhead_gib=CALIBRATED_ERROR_GIB,
        source=f"calibrated on {given.gpu_name}, {shape.architecture}, {given.max_num_batched_tokens} batched tokens",
    )
    # The tokens say the sum of all parts to a block; what rounding left is put where it was rounded, into activation.
    again = memory.predict(shape, dataclasses.replace(given, calibration=fitted))
    if reported.kv_cache_tokens is None:
        raise AssertionError("reported.kv_cache_tokens is known here")
    tokens = again.capacity.tokens
    if tokens and abs(tokens / reported.kv_cache_tokens - 1) < 0.02:
        rest = (tokens - reported.kv_cache_tokens) * again.capacity.bytes_per_token / MIB
        fitted = dataclasses.replace(fitted, activation_mib=round(fitted.activation_mib + rest, 3))
    return fitted


def compare(shape: ModelShape, reported: Reported, given: MemoryInput) -> dict[str, Any]:
    """Return predicted and reported values side by side with the error, for what the log has."""
    plan = memory.predict(shape, given)
    rows: dict[str, Any] = {}
    for name, predicted, measured in (
        ("kv_cache_tokens", float(plan.capacity.tokens), reported.kv_cache_tokens),
        ("max_concurrency", plan.capacity.max_concurrency, reported.max_concurrency),
        ("weights_gib", plan.weights / GIB, reported.weights_gib),
        ("activation_gib", plan.activation / GIB, reported.activation_gib),
        ("non_torch_gib", plan.non_torch / GIB, reported.non_torch_gib),
        ("graphs_gib", plan.graphs / GIB, reported.graphs_gib),
    ):
        if measured is not None:
            error = 100 * (predicted / measured - 1) if measured else 0.0
            rows[name] = {"predicted": round(predicted, 3), "reported": measured, "error_pct": round(error, 3)}
    return rows
