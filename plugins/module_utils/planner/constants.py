# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every fitted number of the memory model in one place, each with its source. See docs/planning.md#constants.

Sources, by tag:

- ``h200-log``: two start-up logs of vLLM 0.26.0 on one H200 (tests/fixtures/engine-logs), 7B-class dense shape, 8192
  and 2048 batched tokens. Exact byte counts come from their ``--kv-cache-memory=`` suggestions.
- ``h200-lab``: a DeepSeek-V2-Lite shape measured on the same machine (29.34 GiB of weights, graphs 1.20 GiB).
- ``h200-table``: nine more cases measured on that card with an earlier state's constants (docs/evidence/memory.md);
  what they corrected is graphs, the cuBLAS workspace and 56 MiB of one phase.
- ``source``: read in vLLM 0.26.0's own source; the file is named in the docstring that uses it.
- ``published``: constants that llm-d-planner 0.3.3 published for vLLM 0.19 on H100.
- ``driver``: the 'reserved' line of nvidia-smi, or the total that CUDA reports in public out-of-memory messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.planner.errors import PlanError

MIB = 1024**2


@dataclass(frozen=True)
class GpuProfile:
    """What the planner knows of a GPU model. MiB; ``batched`` and ``seqs`` are vLLM's server defaults on it."""

    match: str
    reserved_mib: float
    batched: int
    seqs: int
    hopper_or_later: bool
    sms: int
    source: str


GPUS = (
    GpuProfile("H200", 615.0625, 8192, 1024, True, 132, "h200-log: CUDA sees 143,155.94 of 143,771 MiB"),
    GpuProfile("H20", 558.0, 8192, 1024, True, 78, "driver"),
    GpuProfile("H100", 469.0, 8192, 1024, True, 132, "driver: CUDA sees 79.19 of 79.65 GiB"),
    GpuProfile("H800", 469.0, 8192, 1024, True, 132, "driver, as H100"),
    GpuProfile("GH200", 615.0, 8192, 1024, True, 132, "driver, as H200"),
    GpuProfile("B200", 730.0, 8192, 1024, True, 148, "driver"),
    GpuProfile("A100", 869.0, 2048, 256, False, 108, "driver: reserved 869 of 81,920 MiB"),
    GpuProfile("A800", 869.0, 2048, 256, False, 108, "driver, as A100"),
    GpuProfile("A10", 435.0, 2048, 256, False, 72, "driver: reserved 435 of 23,028 MiB"),
    GpuProfile("L40", 480.0, 2048, 256, False, 142, "driver"),
    GpuProfile("L4", 475.0, 2048, 256, False, 58, "driver"),
    GpuProfile("T4", 388.0, 2048, 256, False, 40, "driver: reserved 388 of 15,360 MiB"),
)
"""The longest ``match`` that is a whole word of the GPU's name wins."""

RESERVED_RATIO = 0.006
"""Share that the driver keeps where the model is not in the table: between 0.4 and 2.5 % on the cards that are."""


@dataclass(frozen=True)
class EngineConstants:
    """The fitted part of the memory model for one engine version. MiB unless the name says otherwise.

    ``expected_overhead_gib`` is the error to expect of activation + non-torch + graphs together.
    """

    version: str
    non_torch_mib: float = 228.0
    """h200-log: 226..230 MiB with one GPU (CUDA context growth, modules, no NCCL)."""

    nccl_mib: float = 1922.0
    """published: non-torch is 2.10 GiB from two GPUs on; less the part above."""

    activation_mib: float = 1.0
    """h200-log: what is left of the measured peak when the formulas are subtracted (input ids, norms)."""

    loader_mib: float = 8.6
    """h200-log, h200-table: what loading takes beside weights and rotary cache, 8 to 9 MiB with four shapes."""

    workspace_hopper_mib: float = 32.0
    workspace_mib: float = 8.125
    """cuBLAS workspace: torch's defaults for compute capability 9.0 and for others; held from the first product on."""

    layer_mib: float = 56.0
    """h200-table: the MLP phase is 81..96 MiB above its tensors with three hidden sizes: the workspace and this."""

    graph_mib: float = 165.0
    graph_first_mib: float = 150.0
    """h200-log, h200-lab, h200-table: what graphs take beside pool and split buffers, second and first runner."""

    graph_splits: float = 32.0
    """source: config/attention.py, flash_attn_max_num_splits_for_cuda_graph."""

    graph_split_copies: float = 3.0
    graph_split_copies_latent: float = 2.0
    graph_split_copies_first: float = 2.0
    """h200-table: how often the split buffers of the largest decode graph are held. Seven shapes of 28 to 64 layers and
    16 to 64 heads, 0.64 to 1.86 GiB, come out within 0.12 GiB; the number of layers does not matter."""

    sampler_v1_bytes: float = 14.0
    """source: bytes per sequence and vocabulary entry in the first runner's sampler: logits 2 + fp32 4 + 4 + 4."""

    sampler_v1_mib: float = 13.0
    """published: rest of 1.89 GiB (Llama) and 2.68 GiB (Qwen3-MoE) after the formula; the same in both."""

    graph_estimate_ratio: float = 0.82
    """h200-table: the first runner takes its own estimate off the KV cache: 0.54 of 0.64 and 0.64 of 0.80 GiB."""

    expected_overhead_gib: float = 0.15
    tensor_parallel_error_gib: float = 0.35
    source: str = "vLLM 0.26.0 on H200"

    def to_dict(self) -> dict[str, Any]:
        """Return the constants as plain JSON values (the calibration file's form)."""
        return asdict(self)


ENGINES = {"0.26": EngineConstants(version="0.26.0")}
FALLBACK = "0.26"

V2_RUNNER_MOE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "GraniteMoeForCausalLM",
        "InklingForCausalLM",
        "LongcatFlashNgramForCausalLM",
        "Qwen2MoeForCausalLM",
    }
)
"""source: config/vllm.py, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES: dense models and these use the second model runner."""


def gpu_profile(name: str) -> GpuProfile | None:
    """Return what is known of a GPU by its product name, None for an unknown one."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    best: GpuProfile | None = None
    for profile in GPUS:
        hit = any(word == profile.match or word.rstrip("SG") == profile.match for word in words)
        if hit and (best is None or len(profile.match) > len(best.match)):
            best = profile
    return best


def engine_constants(version: str) -> tuple[EngineConstants, bool]:
    """Return the constants for an engine version and whether they were fitted for it (by major.minor)."""
    key = ".".join(version.split(".")[:2])
    if key in ENGINES:
        return ENGINES[key], True
    return ENGINES[FALLBACK], False


def from_dict(values: Mapping[str, Any]) -> EngineConstants:
    """Return constants from a calibration file's content. Raises PlanError naming the key that is wrong."""
    known = {f.name: f.type for f in fields(EngineConstants)}
    clean: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise PlanError(f"calibration: {name} is no constant of the memory model; make the file anew.")
        if name in ("version", "source"):
            clean[name] = str(value)
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e6 < value < 1e6:
            raise PlanError(f"calibration: {name} is {value!r}; it must be a number.")
        clean[name] = float(value)
    if "version" not in clean:
        raise PlanError("calibration: version is missing; make the file anew with --calibrate.")
    return EngineConstants(**clean)
