# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""SGLang: one YAML file for ``--config``, an OpenAI server, and its own names for what a plan decides.

Option names are those of SGLang 0.5.23's server arguments. It was not run here; see docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.common.sizes import GIB
from ansible_collections.metal.serve.plugins.module_utils.engines import features, lint
from ansible_collections.metal.serve.plugins.module_utils.engines.base import (
    CONFIG_DIR,
    MODEL_DIR,
    Adapter,
    Context,
    Drain,
    EngineError,
    File,
    Health,
    Log,
    Metrics,
    Option,
    completion_body,
    nearest,
    reason,
    version_of,
)
from ansible_collections.metal.serve.plugins.module_utils.engines.image_lint import Known

NAMES: Mapping[str, str] = {
    "max_model_len": "context-length",
    "max_num_seqs": "max-running-requests",
    "max_num_batched_tokens": "chunked-prefill-size",
    "max_num_queued_reqs": "max-queued-requests",
    "gpu_memory_utilization": "mem-fraction-static",
    "kv_cache_dtype": "kv-cache-dtype",
    "quantization": "quantization",
    "dtype": "dtype",
    "load_format": "load-format",
    "attention_backend": "attention-backend",
    "trust_remote_code": "trust-remote-code",
    "seed": "random-seed",
}
"""Settings (vLLM's vocabulary) that are one option of SGLang under another name."""

TRANSLATED = ("enforce_eager", "scheduling_policy")
"""Settings that become other options."""

IMPLIED: Mapping[str, Any] = {"enable_chunked_prefill": True, "enable_prefix_caching": True}
"""Settings that SGLang always has; another value needs an option of its own, see ``options``."""

OWN = (
    "schedule_policy",
    "schedule_conservativeness",
    "enable_priority_scheduling",
    "priority_scheduling_preemption_threshold",
    "schedule_low_priority_values_first",
    "retraction_policy",
    "enable_mixed_chunk",
    "prefill_decode_interval",
    "max_prefill_tokens",
    "prefill_max_requests",
    "max_total_tokens",
    "max_inflight_prefill_tokens",
    "page_size",
    "radix_eviction_policy",
    "enable_hierarchical_cache",
    "hicache_ratio",
    "hicache_size",
    "hicache_write_policy",
    "hicache_storage_backend",
    "cuda_graph_max_bs_decode",
    "disable_decode_cuda_graph",
    "disable_prefill_cuda_graph",
    "stream_interval",
    "tokenizer_worker_num",
    "mem_fraction_static",
)
"""SGLang's own options that a pool may fix, with underscores, where there is no catalogue of the version."""

OWNED = (
    *(
        "model",
        "model_path",
        "host",
        "port",
        "served_model_name",
        "api_key",
        "admin_api_key",
        "config",
        "enable_metrics",
    ),
    *("tp", "tp_size", "tensor_parallel_size", "pp", "pp_size", "pipeline_parallel_size", "dp", "dp_size"),
    *("data_parallel_size", "nnodes", "node_rank", "dist_init_addr"),
)
"""What the bundle sets itself."""

REFUSED: Mapping[str, str] = {
    "radix_threshold": "nothing: every shared prefix is reused, whatever its length",
    "preemption_mode": "priority_scheduling_preemption_threshold with enable_priority_scheduling",
    "swap_space": "enable_hierarchical_cache with hicache_size",
    "kv_offloading_size": "enable_hierarchical_cache with hicache_size",
    "long_prefill_token_threshold": "max_num_batched_tokens, which is the size of a prefill chunk here",
    "shutdown_timeout": "nothing: it waits without a bound, the container's stop timeout is the bound",
    "disable_log_stats": "nothing: metrics are off without enable-metrics, which is always set here",
}


class Sglang(Adapter):
    """The ``sglang`` kind."""

    kind = "sglang"

    def options(self, context: Context) -> list[Option]:
        """Return the configuration in the order of the file."""
        version_of(context.replica["engine_version"])
        found = [
            Option("model-path", MODEL_DIR, "the sealed folder, mounted read-only"),
            Option("served-model-name", context.pool["served_name"], "what clients send as `model`"),
            Option("host", context.replica["address"], "the private address, behind the firewall's set of gateways"),
            Option("port", context.replica["port"], "one port per replica of the node"),
            Option("enable-metrics", True, "without it there is no /metrics"),
        ]
        for which, option in (("tensor", "tp-size"), ("pipeline", "pp-size"), ("data", "dp-size")):
            size = context.parallel(which)
            if size > 1:
                found.append(Option(option, size, reason(context, f"parallel.{which}", "GPUs that share a replica")))
        for name, value in sorted(context.settings.items()):
            if value is not None and not name.endswith("_parallel_size"):
                found += self.translated(context, name, value)
        return found

    def translated(self, context: Context, name: str, value: Any) -> list[Option]:
        """Return what one setting becomes here; nothing where SGLang always does it. Raises EngineError."""
        why = reason(context, name, "planned, see the release's plan")
        where = f"metalserve_pools.{context.replica['pool']}.settings.{name}"
        if name in REFUSED:
            raise EngineError(f"{where}: SGLang does not have it; use {REFUSED[name]}")
        if name == "enforce_eager":
            options = ("disable-decode-cuda-graph", "disable-prefill-cuda-graph")
            return [Option(option, True, why) for option in options] if value else []
        if name == "scheduling_policy":
            return [Option("enable-priority-scheduling", True, why)] if value == "priority" else []
        if name == "enable_prefix_caching" and value is False:
            return [Option("disable-radix-cache", True, why)]
        if name == "enable_chunked_prefill" and value is False:
            return [Option("chunked-prefill-size", -1, why)]
        if name in IMPLIED:
            return []
        if name == "gpu_memory_utilization" and "mem_fraction_static" not in context.settings:
            fraction = static_fraction(float(value), context.replica.get("memory", {}))
            words = f"{value:g} of the card less what lies outside of weights and KV cache; {why}"
            return [Option(NAMES[name], fraction, words)]
        if name == "gpu_memory_utilization":
            return []
        if name == "kv_cache_dtype":
            return [Option(NAMES[name], {"fp8": "fp8_e4m3"}.get(value, value), why)]
        if name in NAMES:
            return [Option(NAMES[name], value, why)]
        if name in OWNED:
            raise EngineError(f"{where}: this is derived from the inventory and cannot be set here")
        version = ".".join(str(part) for part in version_of(context.replica["engine_version"]))
        catalogue: Mapping[str, Known] = lint.known("sglang", version)
        if name in (catalogue or OWN):
            off = value is False and name in catalogue and not catalogue[name].negatable
            return [] if off else [Option(name.replace("_", "-"), value, why)]
        answer = features.instead("sglang", version, name)
        raise EngineError(f"{where}: not known for SGLang{f'; {answer}' if answer else nearest(name, [*NAMES, *OWN])}")

    def files(self, context: Context) -> tuple[File, ...]:
        """Return the configuration."""
        del context
        return (File("config.yaml", "sglang/config.yaml.j2"),)

    def secrets(self) -> tuple[str, ...]:
        """Return none: SGLang prints its arguments, the key among them, and shows them at /server_info.

        The firewall is what keeps others out.
        """
        return ()

    def environment(self, context: Context) -> dict[str, str]:
        """Return the idle time of connections, and patience for the health check during long prefills."""
        return {
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(round(context.times["engine_keepalive_s"])),
            "SGLANG_HEALTH_CHECK_TIMEOUT": str(round(context.times.get("wedged_after_s", 20))),
        }

    def command(self, context: Context) -> tuple[str, ...]:
        """Return the server's command line."""
        del context
        return ("python3", "-m", "sglang.launch_server", "--config", f"{CONFIG_DIR}/config.yaml")

    def health(self, context: Context) -> Health:
        """Return the OpenAI paths; /health generates a token and is 503 while it starts and drains."""
        return Health(
            live="/health",
            models="/v1/models",
            completion="/v1/completions",
            body=completion_body(context.pool["served_name"]),
            answer=("choices", 0, "text"),
            metrics="/metrics",
            metrics_port=int(context.replica["port"]),
        )

    def drain(self, context: Context) -> Drain:
        """SIGTERM waits for requests in flight without a bound: the container's stop timeout is the bound."""
        return Drain("SIGTERM", context.times["container_stop_s"], graceful=True, tells_health=True)

    def log(self) -> Log:
        """Return the sentences of its sources."""
        return Log(
            fatal=(
                r"Scheduler hit an exception",
                r"Received sigquit from a child process",
                r"launch_server\.py: error: ",
            ),
            stages=(
                (r"Init torch distributed begin", "starting the workers"),
                (r"Load weight begin", "loading the weights"),
                (r"Load weight end", "weights loaded"),
                (r"KV Cache is allocated", "KV cache allocated"),
                (r"Capture cuda graph begin", "capturing CUDA graphs"),
                (r"Uvicorn running on", "server listening"),
                (r"The server is fired up and ready to roll", "ready"),
            ),
            core=r"sglang::scheduler",
        )

    def metrics(self) -> Metrics:
        """Return its names; it counts no rejections of its own."""
        return Metrics(
            running="sglang:num_running_reqs",
            waiting="sglang:num_queue_reqs",
            kv_usage="sglang:token_usage",
            progress="sglang:generation_tokens_total",
            rejected="",
        )


def static_fraction(utilization: float, memory: Mapping[str, Any]) -> float:
    """Return SGLang's static fraction (weights and KV cache alone) for a share of the card that all may use.

    ``memory`` is the plan's: ``planned_gpu_bytes`` (= share x card) and ``overhead_gib``. Without them 6 % are
    left free.
    """
    planned = float(memory.get("planned_gpu_bytes", 0) or 0)
    overhead = float(memory.get("overhead_gib", 0) or 0) * GIB
    if planned <= 0 or utilization <= 0:
        return round(utilization * 0.94, 3)
    return round(max(0.1, utilization * (1 - overhead / planned)), 3)
