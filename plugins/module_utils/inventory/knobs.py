# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Names that people set in good faith: what tuning articles call things, old options, names of other engines.

Each gets an answer with the real knob for each engine, never just "unknown". To add one, add an entry to ``KNOBS``.
``MOVED`` is for names that Metalserve itself has under another name or in another place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """An answer: what is wrong with the name, what to do instead, and what each engine really has.

    ``gone_in`` is the first vLLM version without the option, ``since`` the first one with it; a pool whose engine
    version is on the good side is left alone.
    """

    why: str
    instead: str
    vllm: str = ""
    sglang: str = ""
    triton: str = ""
    gone_in: tuple[int, ...] = ()
    since: tuple[int, ...] = ()

    def real(self, vllm: tuple[int, ...]) -> bool:
        """Tell whether a vLLM of this version (``()``: another engine, or not known) does have the option."""
        if self.since:
            return not vllm or vllm >= self.since
        return bool(self.gone_in and vllm and vllm < self.gone_in)

    def right(self, engine: str = "") -> str:
        """Return what to do, and what each engine has (or the one of this kind), in one text."""
        engines = (
            ("vllm", "vLLM", self.vllm),
            ("sglang", "SGLang", self.sglang),
            ("triton_vllm", "Triton with vLLM", self.triton),
        )
        chosen = [entry for entry in engines if entry[0] == engine] or engines
        real = "; ".join(f"{name} has: {text}" for _kind, name, text in chosen if text)
        return f"{self.instead}. {real}" if real else self.instead


_DELAY = Knob(
    why="no LLM engine waits to fill a batch: new requests join at every step",
    instead="remove it",
    vllm="nothing like it, the nearest is prefill_schedule_interval (0.33)",
    sglang="prefill_delayer_max_delay_ms (with DP attention) or prefill_decode_interval",
    triton="max_queue_delay_microseconds, but it cannot apply, for the vLLM backend forces max_batch_size 0",
)
_WINDOW = Knob(
    why="no LLM engine has a batching window: each step's batch is put together anew",
    instead="remove it; how much one step may hold is settings.max_num_batched_tokens",
    vllm="max_num_batched_tokens",
    sglang="chunked_prefill_size",
    triton="max_num_batched_tokens in model.json; dynamic_batching cannot apply to the vLLM backend",
)
_BATCH_TOKENS = Knob(
    why="no engine has an option of this name",
    instead="write settings.max_num_batched_tokens in the pool, or leave it to the plan",
    vllm="max_num_batched_tokens",
    sglang="chunked_prefill_size and max_prefill_tokens",
    triton="max_num_batched_tokens in model.json",
)
_BATCH_COUNT = Knob(
    why="no engine has an option of this name: there is one running batch, and it is limited in sequences",
    instead="write settings.max_num_seqs in the pool, or leave it to the plan",
    vllm="max_num_seqs",
    sglang="max_running_requests",
    triton="max_num_seqs in model.json (max_batch_size is forced to 0)",
)
_IDLE = Knob(
    why="no engine has an option of this name",
    instead="remove it: the plan derives all idle times (times.engine_keepalive_s stays above the gateway's)",
    vllm="the environment variable VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5 s unless set",
    sglang="the environment variable SGLANG_TIMEOUT_KEEP_ALIVE, 5 s unless set",
    triton="5 s built into its OpenAI frontend",
)
_HEARTBEAT = Knob(
    why="no engine has an option of this name",
    instead="remove it",
    vllm="sse_keep_alive_interval (0.33) sends comment lines in a stream",
    sglang="nothing like it",
    triton="nothing like it",
)
_PENDING = Knob(
    why="no engine limits pending connections",
    instead="write queue in the pool: the gateway answers 429 above it (default 100 at most, for the pool)",
    vllm="max_num_queued_reqs from 0.29 on, which counts waiting and running requests",
    sglang="max_queued_requests",
    triton="nothing, for max_queue_size never sees the vLLM backend's queue",
)
_LONG = Knob(
    why="no engine has such a switch: connections are kept open as long as the idle times allow",
    instead="remove it: the gateway keeps connections to clients and to engines open",
)
_PREEMPTION = Knob(
    why="the choice is gone: a preempted request is always computed again",
    instead="remove it",
    vllm="scheduling_policy: priority, with a priority in each request",
    sglang="enable_priority_scheduling and priority_scheduling_preemption_threshold",
    triton="scheduling_policy in model.json",
)
_SWAP = Knob(
    why="vLLM has no swap space any more (gone since 0.18)",
    instead="write settings.kv_offloading_size (GiB) in the pool, or remove it",
    vllm="kv_offloading_size, kv_offloading_backend",
    sglang="enable_hierarchical_cache, hicache_ratio, hicache_size",
    triton="kv_offloading_size in model.json",
    gone_in=(0, 18),
)
_PARTIAL = Knob(
    why="vLLM has no cap on prompts that are computed at once (the option was last seen in 0.26)",
    instead="give long prompts a pool of their own (max_model_len)",
    vllm="long_prefill_token_threshold",
    sglang="prefill_max_requests",
    triton="long_prefill_token_threshold in model.json",
)
_RADIX = Knob(
    why="SGLang has no such threshold: RadixAttention shares every common prefix",
    instead="remove it",
    vllm="enable_prefix_caching, on unless switched off",
    sglang="disable_radix_cache, radix_eviction_policy",
)
_SLICE = Knob(
    why="no engine schedules in time slices: each step decides anew",
    instead="remove it; give long prompts a pool of their own (max_model_len)",
    vllm="long_prefill_token_threshold",
    sglang="chunked_prefill_size",
)
_GPU_CACHE = Knob(
    why="this is the old name of a metric, not an option",
    instead="remove it; memory for the KV cache is settings.gpu_memory_utilization",
    vllm="gpu_memory_utilization or kv_cache_memory_bytes; the metric is vllm:kv_cache_usage_perc",
    sglang="mem_fraction_static; the metric is sglang:token_usage",
)
_COMPACTION = Knob(
    why="no engine compacts its KV cache: it is paged, so nothing falls apart",
    instead="remove it",
)
_LENGTH = Knob(
    why="no engine has an option of this name",
    instead="write max_model_len in the pool (prompt plus answer, in tokens)",
    vllm="max_model_len",
    sglang="context_length",
    triton="max_model_len in model.json",
)
_LOG_REQUESTS = Knob(
    why="vLLM has removed this option: requests are not logged unless asked for",
    instead="remove it",
    vllm="enable_log_requests",
)
_ATTENTION = Knob(
    why="vLLM does not read this environment variable any more",
    instead="write settings.attention_backend in the pool",
    vllm="attention_backend",
    sglang="attention_backend",
    triton="attention_backend in model.json",
)
_QUEUED = Knob(
    why="this vLLM has no such option: it came with 0.29",
    instead="write queue in the pool: the gateway answers 429 above it, with any engine version",
    since=(0, 29),
)

KNOBS: Mapping[str, Knob] = {
    "batch_delay": _DELAY,
    "batch_delay_ms": _DELAY,
    "batching_delay": _DELAY,
    "batch_timeout": _DELAY,
    "max_batch_delay": _DELAY,
    "max_queue_delay_microseconds": _DELAY,
    "dynamic_window": _WINDOW,
    "dynamic_batch_window": _WINDOW,
    "enable_dynamic_window": _WINDOW,
    "batch_window": _WINDOW,
    "dynamic_batching": _WINDOW,
    "enable_dynamic_batching": _WINDOW,
    "preferred_batch_size": _WINDOW,
    "max_tokens_per_batch": _BATCH_TOKENS,
    "max_batch_tokens": _BATCH_TOKENS,
    "max_batch_total_tokens": _BATCH_TOKENS,
    "max_batched_tokens": _BATCH_TOKENS,
    "max_num_batches": _BATCH_COUNT,
    "max_batch_size": _BATCH_COUNT,
    "batch_size": _BATCH_COUNT,
    "max_concurrent_requests": _BATCH_COUNT,
    "connection_max_idle": _IDLE,
    "connection_idle_timeout": _IDLE,
    "max_idle_time": _IDLE,
    "http_keepalive_timeout": _IDLE,
    "connection_keepalive_interval": _HEARTBEAT,
    "connection_keep_alive_interval": _HEARTBEAT,
    "keepalive_interval": _HEARTBEAT,
    "keep_alive_interval": _HEARTBEAT,
    "max_pending_connections": _PENDING,
    "max_queue_size": _PENDING,
    "queue_depth": _PENDING,
    "enable_long_connection": _LONG,
    "enable_long_connections": _LONG,
    "preemption_mode": _PREEMPTION,
    "preemption": _PREEMPTION,
    "swap_space": _SWAP,
    "max_num_partial_prefills": _PARTIAL,
    "max_long_partial_prefills": _PARTIAL,
    "radix_threshold": _RADIX,
    "radix_cache_threshold": _RADIX,
    "radix_attention_threshold": _RADIX,
    "time_slice": _SLICE,
    "time_slice_ms": _SLICE,
    "gpu_cache_usage_perc": _GPU_CACHE,
    "gpu_cache_usage": _GPU_CACHE,
    "gpu_cache_size": _GPU_CACHE,
    "compaction_interval": _COMPACTION,
    "kv_compaction_interval": _COMPACTION,
    "max_seq_len": _LENGTH,
    "max_sequence_length": _LENGTH,
    "max_model_length": _LENGTH,
    "max_context_length": _LENGTH,
    "disable_log_requests": _LOG_REQUESTS,
    "vllm_attention_backend": _ATTENTION,
    "max_num_queued_reqs": _QUEUED,
    "max_num_queued_tokens": _QUEUED,
}

ONLY_IN_SETTINGS = frozenset({"max_num_queued_reqs", "max_num_queued_tokens"})
"""Real options: as a variable of their own they are merely in the wrong place."""

AMBIGUOUS = frozenset(
    {
        "batch_size",
        "batch_timeout",
        "preemption",
        "queue_depth",
        "time_slice",
        "max_idle_time",
        "keepalive_interval",
        "keep_alive_interval",
        "batch_window",
        "max_queue_size",
    }
)
"""Names that other software uses too: as a variable without any prefix they are let alone."""

MOVED: Mapping[str, str] = {
    "metalserve_model": "metalserve_pools.<pool>.model",
    "metalserve_image": "metalserve_pools.<pool>.image",
    "metalserve_engine_image": "metalserve_pools.<pool>.image",
    "metalserve_engine": "metalserve_pools.<pool>.engine",
    "metalserve_engine_kind": "metalserve_pools.<pool>.engine",
    "metalserve_engine_version": "metalserve_pools.<pool>.engine_version",
    "metalserve_tensor_parallel": "metalserve_pools.<pool>.tensor_parallel",
    "metalserve_tensor_parallel_size": "metalserve_pools.<pool>.tensor_parallel",
    "metalserve_replicas": "metalserve_pools.<pool>.replicas_per_node",
    "metalserve_max_model_len": "metalserve_pools.<pool>.max_model_len",
    "metalserve_container": "metalserve_pools.<pool>.container",
    "metalserve_memory": "metalserve_pools.<pool>.container.memory",
    "metalserve_memory_swap": "metalserve_pools.<pool>.container.memory_swap",
    "metalserve_qps": "metalserve_pools.<pool>.workload.qps",
    "metalserve_slo": "metalserve_pools.<pool>.slo",
    "metalserve_workload": "metalserve_pools.<pool>.workload",
    "metalserve_gpus": "metalserve_expected_gpus",
    "metalserve_gpu_count": "metalserve_expected_gpus",
    "metalserve_num_gpus": "metalserve_expected_gpus",
    "metalserve_api_key": "metalserve_api_keys (clients) or metalserve_engine_api_key (engines)",
    "metalserve_receivers": "metalserve_alert_receivers",
    "metalserve_alertmanager_receivers": "metalserve_alert_receivers",
    "metalserve_data_dir": "metalserve_root",
    "metalserve_tls_certificate": "metalserve_tls.certificate",
    "metalserve_tls_private_key": "metalserve_tls.private_key",
    "metalserve_registry_address": "metalserve_registry.address",
}
"""Removed or moved names -> where it is now."""

POOL_KEYS_OF_SETTINGS: Mapping[str, str] = {
    "model": "model",
    "served_model_name": "served_name",
    "tensor_parallel_size": "tensor_parallel",
    "tp_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "pp_size": "pipeline_parallel",
    "data_parallel_size": "data_parallel",
    "dp_size": "data_parallel",
    "port": "port",
}
"""Engine options that a pool has a key for: in ``settings`` they would say it twice."""

OWNED: Mapping[str, str] = {
    "host": "engines listen on metalserve_address of their node",
    "api_key": "the key is metalserve_engine_api_key; it reaches the engine in a file",
    "shutdown_timeout": "the plan derives it from the pool's longest_stream_s",
    "nnodes": "the plan derives it from the pool's nodes_per_replica",
    "node_rank": "the plan derives it from the pool's nodes_per_replica",
    "master_addr": "the plan derives it from the pool's nodes_per_replica",
    "master_port": "the plan derives it from the pool's nodes_per_replica",
}
"""Engine options that are Metalserve's to set."""

OWNED_ENV: Mapping[str, str] = {
    "VLLM_API_KEY": "the key is metalserve_engine_api_key; it reaches the engine in a file",
    "CUDA_VISIBLE_DEVICES": "the plan assigns GPUs by UUID",
    "NVIDIA_VISIBLE_DEVICES": "the plan assigns GPUs by UUID",
    "HF_HUB_OFFLINE": "engines never ask a hub: the files are on the node before they start",
    "TRANSFORMERS_OFFLINE": "engines never ask a hub: the files are on the node before they start",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "the plan derives it (times.engine_keepalive_s)",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "the plan derives it (times.engine_keepalive_s)",
}
"""Environment variables that are Metalserve's to set."""


@dataclass(frozen=True)
class Option:
    """Type and bounds of an engine option that plans may fix, in vLLM's name."""

    type: str
    low: float | None = None
    high: float | None = None


SETTINGS: Mapping[str, Option] = {
    "attention_backend": Option("str"),
    "block_size": Option("int", 1),
    "compilation_config": Option("any"),
    "cpu_offload_gb": Option("number", 0),
    "cudagraph_capture_sizes": Option("list"),
    "disable_log_stats": Option("bool"),
    "dtype": Option("str"),
    "enable_chunked_prefill": Option("bool"),
    "enable_expert_parallel": Option("bool"),
    "enable_lora": Option("bool"),
    "enable_prefix_caching": Option("bool"),
    "enable_sleep_mode": Option("bool"),
    "enforce_eager": Option("bool"),
    "generation_config": Option("str"),
    "gpu_memory_utilization": Option("number", 0.01, 1),
    "kv_cache_dtype": Option("str"),
    "kv_cache_memory_bytes": Option("int", 1),
    "kv_offloading_backend": Option("str"),
    "kv_offloading_size": Option("number", 0),
    "load_format": Option("str"),
    "long_prefill_token_threshold": Option("int", 0),
    "max_cudagraph_capture_size": Option("int", 0),
    "max_logprobs": Option("int", -1),
    "max_loras": Option("int", 1),
    "max_lora_rank": Option("int", 1),
    "max_model_len": Option("int", 1),
    "max_num_batched_tokens": Option("int", 1),
    "max_num_queued_reqs": Option("int", 1),
    "max_num_queued_tokens": Option("int", 1),
    "max_num_seqs": Option("int", 1),
    "otlp_traces_endpoint": Option("str"),
    "prefix_caching_hash_algo": Option("str"),
    "quantization": Option("str"),
    "reasoning_parser": Option("str"),
    "rope_scaling": Option("any"),
    "rope_theta": Option("number", 0),
    "scheduling_policy": Option("str"),
    "seed": Option("int", 0),
    "speculative_config": Option("any"),
    "sse_keep_alive_interval": Option("number", 0),
    "tool_call_parser": Option("str"),
    "trust_remote_code": Option("bool"),
}
"""Options that are common enough to be judged here; the engine's own image judges the rest before it is started."""

WRONG_PLACE = frozenset(
    {
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "long_prefill_token_threshold",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    }
)
"""Real options that do nothing as a variable of their own."""


SECRET_NAME = re.compile(r"key|token\b|secret|passw|credential", re.IGNORECASE)
"""Names whose values are never shown, also where nobody knows the name."""


def plain(name: str) -> str:
    """Return an option's name small, with underscores, without dashes in front: ``--Max-Seqs`` -> ``max_seqs``."""
    return name.strip().lstrip("-").replace("-", "_").replace(".", "_").lower()


def version(text: object) -> tuple[int, ...]:
    """Return the numbers of a version (``0.26.0`` -> ``(0, 26, 0)``); empty where there are none."""
    match = re.match(r"(\d+(?:\.\d+)*)", text) if isinstance(text, str) else None
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()
