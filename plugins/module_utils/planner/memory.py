# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What one GPU's memory holds when an engine has started: weights, activation peak, graphs and what is left for KV.

vLLM's own sum (v1/worker/gpu_worker.py, determine_available_memory): requested = ceil(total x utilization) and
KV = requested - weights - activation peak - non-torch memory. Graphs come on top with the second model runner (its
profile_cudagraph_memory returns 0) and are taken off the KV cache with the first. See docs/planning.md#memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner import constants, kv, weights
from ansible_collections.metal.serve.plugins.module_utils.planner.batching import number
from ansible_collections.metal.serve.plugins.module_utils.planner.constants import EngineConstants
from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError
from ansible_collections.metal.serve.plugins.module_utils.planner.model import ModelShape

GIB = 1024**3
MIB = 1024**2
DEFAULT_UTIL = 0.92
"""vLLM 0.26's own default of gpu_memory_utilization (config/cache.py)."""

CONTEXT_BYTES = int(0.53 * GIB)
"""What CUDA holds before the engine asks for anything: 0.51 GiB measured on the H200 (139.80 - 139.29)."""

MLA_PREFILL_TOKENS = 64 * 1024


@dataclass(frozen=True)
class MemoryInput:
    """What the prediction needs beside the model's shape. ``total_mib`` as nvidia-smi says it."""

    gpu_name: str
    total_mib: int
    reserved_mib: float | None = None
    engine: str = "vllm"
    version: str = "0.26.0"
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    utilization: float = DEFAULT_UTIL
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    expert_parallel: bool = False
    index_bytes: int | None = None
    kv_cache_memory_bytes: int | None = None
    block_size: int = 0
    """Tokens of a block of the KV cache where they are fixed; 0: the engine's own."""

    prefix_caching: bool = False
    """Whether prefix caching is asked for; it costs KV cache with hybrid models alone."""

    calibration: EngineConstants | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The prediction for one GPU, in bytes. ``kv`` is negative-safe: 0 bytes hold 0 tokens."""

    total: int
    requested: int
    weights: int
    weights_source: str
    activation: int
    activation_phase: str
    non_torch: int
    graphs: int
    graphs_inside: bool
    uncounted: int
    kv_bytes: int
    capacity: kv.KvCapacity
    runner: str
    expected_overhead_gib: float
    fitted: bool
    warnings: tuple[str, ...] = ()

    @property
    def overhead(self) -> int:
        """Return activation + non-torch + graphs in bytes."""
        return self.activation + self.non_torch + self.graphs

    @property
    def expected_error_pct(self) -> float:
        """Return the error to expect of the KV tokens, in percent of them."""
        if self.kv_bytes <= 0:
            return 100.0
        return min(100.0, 100.0 * self.expected_overhead_gib * GIB / self.kv_bytes + 0.05)

    @property
    def planned_gpu_bytes(self) -> int:
        """Return what the process will hold of the GPU: the CUDA context, what was asked for, and what comes on top."""
        return CONTEXT_BYTES + self.requested + (0 if self.graphs_inside else self.graphs) + self.uncounted


def cuda_total(gpu_name: str, total_mib: int, reserved_mib: float | None) -> tuple[int, bool]:
    """Return the bytes that CUDA will report as the GPU's total, and whether the driver's share is known for it."""
    profile = constants.gpu_profile(gpu_name)
    if profile is not None:
        reserved, known = profile.reserved_mib, True
    elif reserved_mib is not None:
        reserved, known = float(reserved_mib), True
    else:
        reserved, known = total_mib * constants.RESERVED_RATIO, False
    return int((total_mib - reserved) * MIB), known


def runner_of(shape: ModelShape) -> str:
    """Return which of vLLM's two model runners this model gets (config/vllm.py, use_v2_model_runner)."""
    if shape.hybrid:
        return "first"
    if shape.experts is None or shape.architecture in constants.V2_RUNNER_MOE:
        return "second"
    return "first"


def capture_sizes(max_num_seqs: int, batched: int) -> list[int]:
    """Return the batch sizes that get a CUDA graph (config/vllm.py, _set_cudagraph_sizes)."""
    top = min(max_num_seqs * 2, 512, batched)
    sizes = [size for size in (1, 2, 4) if size <= top]
    if top >= 8:
        sizes += range(8, min(top + 1, 256), 8)
    if top >= 256:
        sizes += range(256, top + 1, 16)
    if batched <= top:
        sizes.append(batched)
    return sorted(set(sizes))


def _layer_width(shape: ModelShape, tensor: int) -> int:
    """Return elements per token of the attention output of one layer on one GPU."""
    heads = shape.heads // tensor
    return heads * (shape.latent.v_dim if shape.latent is not None else shape.head_dim)


def moe_workspace(shape: ModelShape, tokens: int, tensor: int, expert_parallel: bool, data: int = 1) -> int:
    """Return the bytes of the fused-MoE workspace, which stays allocated (fused_moe/experts/triton_moe.py).

    With data parallelism every rank works on the tokens of all of them.
    """
    experts = shape.experts
    if experts is None or experts.dense_layers >= shape.layers:
        return 0
    size = experts.intermediate if expert_parallel else weights.split(experts.intermediate, tensor * data)
    tokens *= data
    rows = tokens * experts.per_token
    first = max(rows * max(size, shape.hidden), tokens * shape.hidden)
    second = rows * max(2 * size, shape.hidden)
    return (first + second) * shape.dtype_bytes


def activation_phases(shape: ModelShape, given: MemoryInput, fitted: EngineConstants) -> dict[str, int]:
    """Return the peak of each phase of the profile run in bytes; the largest of them is the activation peak.

    - compile: the compiler benchmarks the embedding kernel on random tensors of real size: a second embedding table
      and two hidden states. Only where the compile cache is cold (inductor, benchmark_combo_kernel).
    - layer: an MLP with its inputs: attention output, two residuals, gate and up, and their product.
    - moe: the fused-MoE workspace with hidden states, router logits and shared experts.
    - latent: room for up-projecting cached context, 64k tokens at most (mla_attention.py, forward_impl).
    - sampler: logits of max_num_seqs sequences; the first runner also holds float32 copies (gpu_model_runner.py,
      _dummy_sampler_run), the second does not (v1/worker/gpu/sample/sampler.py).

    All but the first hold the cuBLAS workspace, which the first product allocates.
    """
    tokens, tensor, width = given.max_num_batched_tokens, given.tensor, shape.dtype_bytes
    hidden = shape.hidden
    profile = constants.gpu_profile(given.gpu_name)
    hopper = profile is None or profile.hopper_or_later
    run = int((fitted.workspace_hopper_mib if hopper else fitted.workspace_mib) * MIB)
    vocab = weights.VOCAB_PAD * math.ceil(shape.vocab / weights.VOCAB_PAD)
    attention = _layer_width(shape, tensor)
    workspace = moe_workspace(shape, tokens, tensor, given.expert_parallel, given.data)
    inner = weights.split(shape.intermediate, tensor)
    phases: dict[str, int] = {}
    if not given.enforce_eager:
        phases["compile"] = weights.split(vocab, tensor) * hidden * width + 2 * tokens * hidden * width
    if shape.experts is None or shape.experts.dense_layers:
        phases["layer"] = run + int(fitted.layer_mib * MIB) + tokens * width * (attention + 2 * hidden + 3 * inner)
    if workspace and shape.experts is not None:
        shared = weights.split(shape.experts.shared_intermediate, tensor)
        router = tokens * shape.experts.count * (width + 4)
        phases["moe"] = run + workspace + router + tokens * width * (attention + 4 * hidden + 3 * shared)
    if shape.latent is not None:
        latent = shape.latent
        heads = shape.heads // tensor
        context = min(max(8 * given.max_model_len, 4 * given.max_num_seqs * kv.GPU_BLOCK), MLA_PREFILL_TOKENS)
        context = max(context, given.max_num_seqs * kv.GPU_BLOCK)
        up = context * heads * (latent.nope_dim + latent.v_dim) * width
        own = hidden + heads * (latent.nope_dim + latent.rope_dim + latent.v_dim) + latent.kv_rank + latent.rope_dim
        phases["latent"] = run + workspace + up + tokens * width * own
    sequences = min(given.max_num_seqs, tokens)
    states = tokens * hidden * width + 2 * sequences * hidden * width
    if runner_of(shape) == "second":
        gathered = 1 if tensor == 1 else 1 + 1 / tensor
        logits = int(sequences * vocab * width * gathered)
    else:
        sms = profile.sms if profile is not None else 108
        logits = int(sequences * vocab * fitted.sampler_v1_bytes) + sms * vocab * 4
        logits += int(fitted.sampler_v1_mib * MIB)
    phases["sampler"] = run + workspace + states + logits
    return phases


def graph_bytes(shape: ModelShape, given: MemoryInput, fitted: EngineConstants) -> int:
    """Return the memory of the captured CUDA graphs: a constant, the shared pool, and attention's split buffers.

    FlashAttention 3 splits a decode's keys into up to 32 parts while a whole graph is captured and keeps a float32
    result of each: splits x sequences x heads x head size x 4 bytes for the largest decode size (config/attention.py,
    v1/attention/backends/flash_attn.py). That, not the number of layers, is most of it. Cards before Hopper have no
    such buffers; there the figure is an upper bound.
    """
    if given.enforce_eager:
        return 0
    sizes = capture_sizes(given.max_num_seqs, given.max_num_batched_tokens)
    decode = max((size for size in sizes if size <= given.max_num_seqs), default=0)
    first = runner_of(shape) == "first"
    copies = fitted.graph_split_copies_first if first else fitted.graph_split_copies
    values = shape.head_dim
    if shape.latent is not None:
        values = shape.latent.kv_rank
        copies = min(copies, fitted.graph_split_copies_latent)
    splits = fitted.graph_splits * decode * (shape.heads // given.tensor) * values * 4
    dense = shape.experts is None or shape.experts.dense_layers > 0
    inner = weights.split(shape.intermediate, given.tensor) if dense else 0
    top = sizes[-1]
    pool = top * shape.dtype_bytes * (_layer_width(shape, given.tensor) + 2 * shape.hidden + 3 * inner)
    if not dense:
        pool += moe_workspace(shape, top, given.tensor, given.expert_parallel, given.data)
    base = fitted.graph_first_mib if first else fitted.graph_mib
    return int(base * MIB + copies * splits) + pool


def uncounted_bytes(shape: ModelShape, seqs: int) -> int:
    """Return what the second model runner allocates and its profile does not count: token counts for penalties.

    v1/worker/gpu/sample/penalties.py: one int32 per sequence and vocabulary entry, and two bit masks.
    """
    if runner_of(shape) == "first":
        return 0
    return seqs * shape.vocab * 4 + 2 * seqs * math.ceil(shape.vocab / 32) * 4


def predict(shape: ModelShape, given: MemoryInput) -> MemoryPlan:
    """Return the memory of one GPU under ``given``. Raises PlanError for values that no engine would take.

    What does not fit is not an error here: ``kv_bytes`` is then 0 or too small, and the caller says what to do.
    """
    number(given.utilization, "gpu_memory_utilization", 0.01, "a share of the GPU's memory above 0 and up to 1")
    if given.utilization > 1:
        raise PlanError(
            f"gpu_memory_utilization is {given.utilization!r}; it must be a share of the memory above 0 and up to 1."
        )
    for name, value in (
        ("GPU memory", given.total_mib),
        ("tensor_parallel", given.tensor),
        ("pipeline_parallel", given.pipeline),
        ("data_parallel", given.data),
        ("max_model_len", given.max_model_len),
        ("max_num_batched_tokens", given.max_num_batched_tokens),
        ("max_num_seqs", given.max_num_seqs),
    ):
        number(value, name, 1, "a whole number, 1 or more", whole=True)
    kv.check_dtype(given.kv_cache_dtype)
    fitted, same = constants.engine_constants(given.version)
    if given.calibration is not None:
        fitted, same = given.calibration, True
    profile = constants.gpu_profile(given.gpu_name)
    total, known_total = cuda_total(given.gpu_name, given.total_mib, given.reserved_mib)
    loaded = weights.weights(
        shape,
        given.tensor,
        given.pipeline,
        fitted.loader_mib,
        given.index_bytes,
        given.data,
        given.expert_parallel,
    )
    phases = activation_phases(shape, given, fitted)
    phase = max(phases, key=lambda name: phases[name])
    activation = phases[phase] + int(fitted.activation_mib * MIB)
    ranks = given.tensor * given.pipeline * given.data
    non_torch = int((fitted.non_torch_mib + (fitted.nccl_mib if ranks > 1 else 0)) * MIB)
    graphs = graph_bytes(shape, given, fitted)
    inside = runner_of(shape) == "first" and graphs > 0
    requested = math.ceil(total * given.utilization)
    left = requested - loaded.allocated - activation - non_torch
    if inside:
        left -= int(graphs * fitted.graph_estimate_ratio)
    if given.kv_cache_memory_bytes is not None:
        left = int(given.kv_cache_memory_bytes)
    pipeline_batches = given.pipeline + 1 if runner_of(shape) == "second" else max(2, given.pipeline)
    held = kv.capacity(
        shape,
        left,
        given.max_model_len,
        given.tensor,
        given.pipeline,
        given.kv_cache_dtype,
        given.max_num_batched_tokens,
        pipeline_batches,
        given.block_size,
        given.prefix_caching,
    )
    error = fitted.expected_overhead_gib
    if ranks > 1:
        error += fitted.tensor_parallel_error_gib
    if not (same and profile is not None and profile.match == "H200"):
        error += 0.2
    if not known_total:
        error += total * 0.01 / GIB
    if shape.compressed or shape.hybrid:
        error += 0.05 * max(0, left) / GIB
    notes = [*shape.notes, *loaded.warnings]
    if not same:
        notes.append(f"no constants for engine version {given.version}: those of {fitted.version} are used")
    if not known_total:
        notes.append(f"GPU {given.gpu_name!r} is not in the table: 0.6 % of its memory is taken as the driver's")
    if given.engine == "sglang":
        notes.append(
            "the constants are vLLM's: SGLang's activation lies outside its static part; calibrate on the target"
        )
        error += 0.5
    return MemoryPlan(
        total=total,
        requested=requested,
        weights=loaded.allocated,
        weights_source=loaded.source,
        activation=activation,
        activation_phase=phase,
        non_torch=non_torch,
        graphs=graphs,
        graphs_inside=inside,
        uncounted=uncounted_bytes(shape, given.max_num_seqs),
        kv_bytes=max(0, left),
        capacity=held,
        runner=runner_of(shape),
        expected_overhead_gib=round(error, 2),
        fitted=same,
        warnings=tuple(notes),
    )


def parse_gpu(text: str) -> tuple[str, int, int]:
    """Return (name, MiB, count) of ``name:MiB:count``. Raises PlanError naming the value and an example."""
    parts = text.rsplit(":", 2)
    sample = "write name:MiB:count, such as 'NVIDIA H200:143771:1'"
    if len(parts) != 3 or not parts[0].strip():
        raise PlanError(f"--gpu is {text!r}; {sample}.")
    name, mib, count = parts[0].strip(), parts[1].strip(), parts[2].strip()
    text = text if len(text) < 160 else text[:157] + "..."
    if len(name) > 100 or not name.isprintable():
        raise PlanError(f"--gpu has a name of {len(name)} characters, {name[:30]!r}…; {sample}.")
    if not (mib.isascii() and mib.isdigit() and len(mib) < 20) or not 1024 <= int(mib) <= 4 * 1024**2:
        raise PlanError(f"--gpu is {text!r}; its memory must be whole MiB, 1024 or more: {sample}.")
    if not (count.isascii() and count.isdigit() and len(count) < 20) or not 1 <= int(count) <= 1024:
        raise PlanError(f"--gpu is {text!r}; its count must be 1..1024: {sample}.")
    return name, int(mib), int(count)


def to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the ``memory`` part of a ReplicaPlan (docs/architecture.md, 'Plans')."""

    def gib(value: float) -> float:
        return round(value / GIB, 3)

    values: Mapping[str, Any] = {
        "gpu_total_gib": gib(plan.total),
        "requested_gib": gib(plan.requested),
        "weights_gib": gib(plan.weights),
        "activation_gib": gib(plan.activation),
        "activation_phase": plan.activation_phase,
        "non_torch_gib": gib(plan.non_torch),
        "graphs_gib": gib(plan.graphs),
        "overhead_gib": gib(plan.overhead),
        "kv_cache_gib": gib(plan.kv_bytes),
        "kv_bytes_per_token": round(plan.capacity.bytes_per_token, 2),
        "kv_cache_tokens": plan.capacity.tokens,
        "block_tokens": plan.capacity.block_tokens,
        "max_concurrency": round(plan.capacity.max_concurrency, 2),
        "planned_gpu_bytes": plan.planned_gpu_bytes,
        "expected_error_pct": round(plan.expected_error_pct, 2),
        "expected_overhead_error_gib": plan.expected_overhead_gib,
    }
    return dict(values)
