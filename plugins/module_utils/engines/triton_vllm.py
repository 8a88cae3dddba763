# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Triton with the vLLM backend: a model repository, served through Triton's OpenAI frontend.

``engine_version`` is that of the vLLM in the image, as model.json holds vLLM's engine arguments. Read from
Triton's and the backend's sources; see docs/engines.md for what was run.
"""

from __future__ import annotations

from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.engines.base import (
    CONFIG_DIR,
    MODEL_DIR,
    RELEASE,
    Context,
    Drain,
    EngineError,
    File,
    Health,
    Log,
    Metrics,
    Mount,
    Option,
    completion_body,
    reason,
    version_of,
)
from ansible_collections.metal.serve.plugins.module_utils.engines.features import SERVER_ONLY
from ansible_collections.metal.serve.plugins.module_utils.engines.vllm import Vllm

REPOSITORY = "model_repository"
FRONTEND = "/opt/tritonserver/python/openai/openai_frontend/main.py"


class TritonVllm(Vllm):
    """The ``triton_vllm`` kind: vLLM's settings, checked as vLLM's, in another form."""

    kind = "triton_vllm"

    def options(self, context: Context) -> list[Option]:
        """Return the keys of model.json: fields of vLLM's engine arguments, with underscores."""
        version = version_of(context.replica["engine_version"])
        pool = str(context.replica["pool"])
        chosen = dict(context.settings)
        for name in chosen:
            if name in SERVER_ONLY:
                where = f"metalserve_pools.{pool}.settings.{name}"
                raise EngineError(f"{where}: an option of vLLM's own server, which does not run in Triton")
            self.check(name, version, pool)
        found = [
            Option("model", MODEL_DIR, "the sealed folder, mounted read-only"),
            Option("disable_log_stats", False, "without statistics there are no metrics"),
        ]
        for which in ("tensor", "pipeline"):
            size = context.parallel(which)
            chosen.pop(f"{which}_parallel_size", None)
            if size > 1:
                found.append(Option(f"{which}_parallel_size", size, "GPUs that share a replica"))
        chosen.pop("data_parallel_size", None)
        chosen.pop("disable_log_stats", None)
        found += [
            Option(name, value, reason(context, name, "planned, see the release's plan"))
            for name, value in sorted(chosen.items())
            if value is not None
        ]
        return found

    def files(self, context: Context) -> tuple[File, ...]:
        """Return the model repository: one model under its served name, one version."""
        name = model_name(context)
        return (
            File(f"{REPOSITORY}/{name}/config.pbtxt", "triton/config.pbtxt.j2"),
            File(f"{REPOSITORY}/{name}/1/model.json", "triton/model.json.j2"),
        )

    def secrets(self) -> tuple[str, ...]:
        """Return none: the frontend takes a key as an argument alone, where ps shows it. The firewall keeps
        others out.
        """
        return ()

    def release_mounts(self, context: Context) -> tuple[Mount, ...]:
        """Return the repository as one folder, so that a version that is added there can be loaded."""
        del context
        return (Mount(f"{RELEASE}/{REPOSITORY}", f"{CONFIG_DIR}/{REPOSITORY}"),)

    def environment(self, context: Context) -> dict[str, str]:
        """Return vLLM's, without what belongs to its server."""
        found = super().environment(context)
        del found["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"]
        return found

    def command(self, context: Context) -> tuple[str, ...]:
        """Return the OpenAI frontend's command line; it starts Triton in its own process."""
        return (
            "python3",
            FRONTEND,
            "--model-repository",
            f"{CONFIG_DIR}/{REPOSITORY}",
            "--backend",
            "vllm",
            "--tokenizer",
            MODEL_DIR,
            "--host",
            str(context.replica["address"]),
            "--openai-port",
            str(context.replica["port"]),
            # A version that is added beside this one is loaded when it is asked for, not when its files appear.
            "--model-control-mode",
            "explicit",
            "--load-model",
            model_name(context),
        )

    def health(self, context: Context) -> Health:
        """Return the frontend's paths; it serves Triton's metrics as well."""
        return Health(
            live="/health/ready",
            models="/v1/models",
            completion="/v1/completions",
            body=completion_body(model_name(context)),
            answer=("choices", 0, "text"),
            metrics="/metrics",
            metrics_port=int(context.replica["port"]),
        )

    def drain(self, context: Context) -> Drain:
        """The frontend has no bound of its own for requests in flight: a drain at the gateway must come first."""
        del context
        return Drain("SIGTERM", 0.0, graceful=False, tells_health=False)

    def log(self) -> Log:
        """Return vLLM's sentences and Triton's."""
        inner = super().log()
        return Log(
            fatal=(*inner.fatal, r"failed to load '\S+' version \d+", r"failed to load all models"),
            stages=(
                (r"Model repository|loading: ", "starting Triton"),
                *inner.stages[:-1],
                (r"successfully loaded '", "model loaded"),
                (r"Uvicorn running on|Application startup complete", "server listening"),
            ),
            core=inner.core,
        )

    def metrics(self) -> Metrics:
        """Return what the backend reports; running, waiting and KV usage it does not."""
        return Metrics(
            running="",
            waiting="",
            kv_usage="",
            progress="vllm:generation_tokens_total",
            rejected="",
        )


def model_name(context: Context) -> str:
    """Return the model's name in the repository: what clients send, which must be a folder's name here."""
    name: Any = str(context.pool["served_name"])
    if "/" in name or name.startswith("."):
        raise EngineError(
            f"metalserve_pools.{context.replica['pool']}.served_name {name!r} must be a folder's name for Triton"
        )
    return str(name)
