# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM: one YAML file for ``--config``, an OpenAI server, and the differences between its versions.

Read from the wheels of 0.26.0 and 0.32.0 and from runs of both; see docs/engines.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ansible_collections.metal.serve.plugins.module_utils.engines import features, lint
from ansible_collections.metal.serve.plugins.module_utils.engines.base import (
    CACHE_DIR,
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
from ansible_collections.metal.serve.plugins.module_utils.engines.catalogue import OPTIONS


@dataclass(frozen=True)
class Quirk:
    """An option that not every version has: first and last (major, minor) that do, and what to use instead."""

    since: tuple[int, int] | None
    until: tuple[int, int] | None
    instead: str


QUIRKS: Mapping[str, Quirk] = {
    "max_num_queued_reqs": Quirk((0, 29), None, "the gateway's queue limit (metalserve_pools.<pool>.queue)"),
    "max_num_queued_tokens": Quirk((0, 29), None, "the gateway's queue limit (metalserve_pools.<pool>.queue)"),
    "shutdown_timeout": Quirk((0, 18), None, "a drain at the gateway before the stop"),
    "disable_access_log_for_endpoints": Quirk((0, 26), None, "disable_uvicorn_access_log"),
    "sse_keep_alive_interval": Quirk((0, 32), None, "the gateway's read timeout"),
    "max_num_partial_prefills": Quirk(None, (0, 26), "separate pools by prompt length"),
    "max_long_partial_prefills": Quirk(None, (0, 26), "separate pools by prompt length"),
    "swap_space": Quirk(None, (0, 17), "kv_offloading_size"),
    "preemption_mode": Quirk(None, (0, 7), "nothing: preempted requests are always computed again"),
    "disable_log_requests": Quirk(None, (0, 10), "enable_log_requests: false, which is the default"),
}
"""Checked in the wheels of 0.26.0 and 0.32.0; the bounds outside of them come from the projects' release notes."""

NOT_OPTIONS: Mapping[str, str] = {
    "max_tokens_per_batch": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "batch_delay": "nothing: the engine batches at every step, there is no delay to set",
    "max_num_batches": "max_num_seqs",
}

MULTI_NODE = ("nnodes", "node_rank", "master_addr", "master_port", "headless")
OWNED = ("model", "host", "port", "served_model_name", "api_key", "config", "uds", *MULTI_NODE)
"""What the bundle sets itself; a pool may not set it, or nothing would find the engine."""


class Vllm(Adapter):
    """The ``vllm`` kind."""

    kind = "vllm"

    def options(self, context: Context) -> list[Option]:
        """Return the configuration in the order of the file: where it listens, what it serves, how it batches."""
        version = version_of(context.replica["engine_version"])
        chosen = dict(context.settings)
        for name in chosen:
            self.check(name, version, str(context.replica["pool"]))
        found = [
            Option("model", MODEL_DIR, "the sealed folder, mounted read-only"),
            Option("served-model-name", [context.pool["served_name"]], "what clients send as `model`"),
            Option("host", context.replica["address"], "the private address, behind the firewall's set of gateways"),
            Option("port", context.replica["port"], "one port per replica of the node"),
        ]
        if "disable_access_log_for_endpoints" not in chosen and self._has("disable_access_log_for_endpoints", version):
            quiet = "/health,/metrics,/v1/models"
            why = "probes and scrapes would be most of the log"
            found.append(Option("disable-access-log-for-endpoints", quiet, why))
        for which, word in (("tensor", "layer"), ("pipeline", "stage"), ("data", "rank")):
            size = context.parallel(which)
            chosen.pop(f"{which}_parallel_size", None)
            if size > 1:
                why = reason(context, f"parallel.{which}", f"GPUs that share each {word}")
                found.append(Option(f"{which}-parallel-size", size, why))
        group = context.replica.get("multi_node") or {}
        for name in MULTI_NODE:
            if group.get(name) is not None and group[name] is not False:
                why = f"one replica over the nodes {', '.join(group.get('hosts', []))}"
                found.append(Option(name.replace("_", "-"), group[name], why))
        found += [
            Option(name.replace("_", "-"), value, reason(context, name, "planned, see the release's plan"))
            for name, value in sorted(chosen.items())
            if value is not None
        ]
        if self._has("shutdown_timeout", version) and "shutdown_timeout" not in chosen:
            seconds = round(context.times["engine_shutdown_s"])
            why = "seconds that requests in flight may take after SIGTERM; the default 0 cuts them"
            found.append(Option("shutdown-timeout", seconds, why))
        return found

    def check(self, name: str, version: tuple[int, int, int], pool: str) -> None:
        """Raise EngineError where a setting of the pool is not an option of this version, naming the way out."""
        where = f"metalserve_pools.{pool}.settings.{name}"
        if name in OWNED:
            raise EngineError(f"{where}: this is derived from the inventory and cannot be set here")
        if name in NOT_OPTIONS:
            raise EngineError(f"{where}: vLLM has no such option; use {NOT_OPTIONS[name]}")
        if not name.replace("_", "").isalnum() or name != name.lower() or "-" in name:
            raise EngineError(f"{where}: write vLLM's option name with underscores, in small letters")
        if name in QUIRKS and not self._has(name, version):
            quirk = QUIRKS[name]
            bound = (
                f"exists from {quirk.since[0]}.{quirk.since[1]} on"
                if quirk.since and version[:2] < quirk.since
                else f"was removed after {quirk.until[0]}.{quirk.until[1]}"
                if quirk.until
                else "is not there"
            )
            text = ".".join(str(part) for part in version)
            raise EngineError(f"{where}: vLLM {text} does not have it ({bound}); use {quirk.instead}")
        self.check_name(name, version, where)

    @staticmethod
    def check_name(name: str, version: tuple[int, int, int], where: str) -> None:
        """Raise EngineError for a name that the version's catalogue lacks.

        A version without a catalogue is judged by those of the others: an abbreviation (argparse would take it)
        and a near miss are refused, a name like none of theirs is left to the engine itself.
        """
        text = ".".join(str(part) for part in version)
        versions = {key: list(lint.known("vllm", key)) for key in OPTIONS["vllm"]}
        known = versions.get(text) or sorted({option for names in versions.values() for option in names})
        if name in known:
            return
        if text in versions:
            answer = features.instead("vllm", text, name)
            raise EngineError(
                f"{where}: vLLM {text} has no such option{f'; {answer}' if answer else nearest(name, known)}"
            )
        longer = [option for option in known if option.startswith(name)]
        close = longer[0] if longer else next(iter(difflib.get_close_matches(name, known, 1, 0.85)), "")
        if close:
            raise EngineError(f"{where}: vLLM has no such option (nearest: {close})")

    @staticmethod
    def _has(name: str, version: tuple[int, int, int]) -> bool:
        quirk = QUIRKS.get(name)
        if quirk is None:
            return True
        return not (
            (quirk.since is not None and version[:2] < quirk.since)
            or (quirk.until is not None and version[:2] > quirk.until)
        )

    def files(self, context: Context) -> tuple[File, ...]:
        """Return the configuration and the script that hands over the key."""
        del context
        return (File("config.yaml", "vllm/config.yaml.j2"), File("start.sh", "vllm/start.sh.j2"))

    def environment(self, context: Context) -> dict[str, str]:
        """Return what has no option: the idle time of connections, the cache, no usage statistics."""
        return {
            # uvicorn closes idle connections after 5 s by default; the gateway keeps them longer.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(round(context.times["engine_keepalive_s"])),
            "VLLM_CACHE_ROOT": f"{CACHE_DIR}/vllm",
            "VLLM_NO_USAGE_STATS": "1",
        }

    def command(self, context: Context) -> tuple[str, ...]:
        """Return the start script; the module form of the server works in images without the `vllm` command too."""
        del context
        return (
            "/bin/sh",
            f"{CONFIG_DIR}/start.sh",
            "python3",
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--config",
            f"{CONFIG_DIR}/config.yaml",
        )

    def health(self, context: Context) -> Health:
        """Return the OpenAI paths. /health is 200 until the engine is dead, also while it drains."""
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
        """SIGTERM finishes what is in flight; new requests get 500 meanwhile and /health stays 200."""
        version = version_of(context.replica["engine_version"])
        graceful = self._has("shutdown_timeout", version)
        seconds = context.times["engine_shutdown_s"] if graceful else 0.0
        return Drain("SIGTERM", seconds, graceful, tells_health=False)

    def log(self) -> Log:
        """Return the sentences of 0.26 and 0.32. A traceback alone is no failure: optional imports print them."""
        return Log(
            fatal=(
                r"EngineCore failed to start",
                r"Engine core initialization failed",
                r"EngineCore encountered a fatal error",
                r"EngineDeadError",
                r"WorkerProc failed to start",
                r"Worker proc \S+ died unexpectedly",
                r"error: (unrecognized arguments|argument |the following arguments|ambiguous option)",
            ),
            stages=(
                (r"Initializing a V1 LLM engine", "starting the engine"),
                (r"Loading model|Starting to load model|Loading safetensors", "loading the weights"),
                (r"Model loading took|Loading weights took", "weights loaded"),
                (r"Compiling a graph|torch\.compile", "compiling"),
                (r"GPU KV cache size|CPU KV cache size|Maximum concurrency", "KV cache allocated"),
                (r"[Aa]utotun", "tuning kernels"),
                (r"Capturing CUDA graph|Graph capturing", "capturing CUDA graphs"),
                (r"Starting vLLM (API )?server|Application startup complete", "server listening"),
            ),
            core=r"VLLM::EngineCor",
        )

    def metrics(self) -> Metrics:
        """Return the names of the V1 engine."""
        return Metrics(
            running="vllm:num_requests_running",
            waiting="vllm:num_requests_waiting",
            kv_usage="vllm:kv_cache_usage_perc",
            progress="vllm:iteration_tokens_total_count",
            rejected="vllm:admission_rejections_total",
        )
