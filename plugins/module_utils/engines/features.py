# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What a service like this is asked for, and what each engine really has for it; the table in docs/engines.md is made of it.

An entry names options in each engine's own words. Whether a version has them is for the catalogue to say, so a new version needs
no new line here. ``instead`` is the answer where nothing is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS

TITLES: Mapping[str, str] = {"vllm": "vLLM", "triton_vllm": "Triton with vLLM", "sglang": "SGLang"}

SERVER_ONLY = (
    "shutdown_timeout",
    "sse_keep_alive_interval",
    "disable_access_log_for_endpoints",
    "disable_uvicorn_access_log",
    "enable_server_load_tracking",
    "chat_template",
    "tool_call_parser",
    "enable_auto_tool_choice",
)
"""Options of vLLM's own HTTP server, which does not run in Triton: model.json takes engine arguments alone."""


@dataclass(frozen=True)
class Feature:
    """A wish: the options that grant it, by engine, and what to do where they are missing."""

    wish: str
    vllm: tuple[str, ...] = ()
    sglang: tuple[str, ...] = ()
    vllm_instead: str = "nothing like it"
    sglang_instead: str = "nothing like it"
    triton_instead: str = ""

    def options(self, kind: str) -> tuple[str, ...]:
        """Return its options in an engine's words."""
        return self.sglang if kind == "sglang" else self.vllm

    def instead(self, kind: str) -> str:
        """Return what to do where the engine has none of them."""
        if kind == "triton_vllm" and self.triton_instead:
            return self.triton_instead
        return self.sglang_instead if kind == "sglang" else self.vllm_instead


_QUEUE = "the pool's `queue`: the gateway answers 429 above it"
_STEPS = "nothing: new requests join at every step"
_POOLS = "pools of their own for long prompts"

FEATURES: tuple[Feature, ...] = (
    Feature("tokens of one step", ("max_num_batched_tokens",), ("chunked_prefill_size", "max_prefill_tokens")),
    Feature("requests at once", ("max_num_seqs",), ("max_running_requests",)),
    Feature("batch delay", ("prefill_schedule_interval",), ("prefill_delayer_max_delay_ms",), _STEPS, _STEPS),
    Feature("batch window", (), (), _STEPS, _STEPS),
    Feature(
        "limit of the queue", ("max_num_queued_reqs", "max_num_queued_tokens"), ("max_queued_requests",), _QUEUE, _QUEUE
    ),
    Feature("chunked prefill", ("enable_chunked_prefill",), ("chunked_prefill_size", "enable_mixed_chunk")),
    Feature(
        "short prompts beside long ones", ("long_prefill_token_threshold",), ("prefill_max_requests",), _POOLS, _POOLS
    ),
    Feature("limit of partial prefills", ("max_num_partial_prefills", "max_long_partial_prefills"), (), _POOLS, _POOLS),
    Feature("priorities", ("scheduling_policy",), ("enable_priority_scheduling", "schedule_policy")),
    Feature(
        "mode of preemption",
        ("preemption_mode",),
        ("priority_scheduling_preemption_threshold", "retraction_policy"),
        "nothing: a preempted request is always computed again",
    ),
    Feature(
        "prefix caching, RadixAttention", ("enable_prefix_caching",), ("disable_radix_cache", "radix_eviction_policy")
    ),
    Feature(
        "threshold of shared prefixes",
        (),
        ("radix_threshold",),
        "nothing: whole blocks are shared",
        "nothing: every shared prefix is used",
    ),
    Feature(
        "CUDA graphs",
        ("cudagraph_capture_sizes", "max_cudagraph_capture_size", "enforce_eager"),
        ("cuda_graph_max_bs_decode", "disable_decode_cuda_graph"),
    ),
    Feature("attention backend", ("attention_backend",), ("attention_backend",)),
    Feature("quantization", ("quantization",), ("quantization",)),
    Feature("type of the KV cache", ("kv_cache_dtype",), ("kv_cache_dtype",)),
    Feature(
        "KV tiering to CPU memory",
        ("kv_offloading_size", "kv_offloading_backend"),
        ("enable_hierarchical_cache", "hicache_size"),
    ),
    Feature("KV tiering to disk", ("kv_transfer_config",), ("hicache_storage_backend",)),
    Feature(
        "swap space", ("swap_space",), (), "`kv_offloading_size`", "`enable_hierarchical_cache` with `hicache_size`"
    ),
    Feature(
        "tracing",
        ("otlp_traces_endpoint", "collect_detailed_traces"),
        ("enable_trace", "otlp_traces_endpoint"),
    ),
    Feature("statistics", ("disable_log_stats",), ("enable_metrics",)),
    Feature("sleep", ("enable_sleep_mode",), ("enable_memory_saver",)),
    Feature("LoRA", ("enable_lora", "max_loras", "max_lora_rank"), ("enable_lora", "lora_paths")),
    Feature("experts in parallel", ("enable_expert_parallel",), ("ep_size",)),
    Feature(
        "several nodes",
        ("nnodes", "node_rank", "master_addr"),
        ("nnodes", "node_rank", "dist_init_addr"),
        triton_instead="nothing: a `vllm` pool spans nodes",
    ),
    Feature(
        "time to finish at a stop",
        ("shutdown_timeout",),
        (),
        "a drain at the gateway",
        "nothing: it waits without a bound; the container's stop timeout is the bound",
        "a drain at the gateway",
    ),
    Feature(
        "signs of life in a silent stream",
        ("sse_keep_alive_interval",),
        (),
        "the gateway's read timeout",
        "the gateway's read timeout",
        "the gateway's read timeout",
    ),
)


def _names(kind: str, version: str) -> set[str]:
    names = {word.partition(":")[0] for word in OPTIONS.get(kind, {}).get(version, "").split()}
    return names - set(SERVER_ONLY) if kind == "triton_vllm" else names


def available(feature: Feature, kind: str, version: str) -> tuple[str, ...]:
    """Return the options that an engine of this version has for a wish, by its catalogue."""
    there = _names(kind, version)
    return tuple(name for name in feature.options(kind) if name in there)


def instead(kind: str, version: str, name: str) -> str:
    """Return what to do where an engine of this version lacks an option that a wish names; ``""`` for other names."""
    for feature in FEATURES:
        if name in (*feature.vllm, *feature.sglang):
            there = available(feature, kind, version)
            return f"use {', '.join(there)}" if there else f"use {feature.instead(kind).replace('`', '')}"
    return ""


def table() -> str:
    """Return the table of wishes and engine versions as Markdown."""
    columns = [(kind, version) for kind in TITLES for version in OPTIONS.get(kind, {})]
    lines = [
        "| wanted | " + " | ".join(f"{TITLES[kind]} {version}" for kind, version in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for feature in FEATURES:
        cells = []
        for kind, version in columns:
            there = available(feature, kind, version)
            cells.append(", ".join(f"`{name}`" for name in there) if there else f"none: {feature.instead(kind)}")
        lines.append(f"| {feature.wish} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
