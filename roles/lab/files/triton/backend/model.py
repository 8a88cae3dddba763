# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""vLLM behind Triton's python backend: the lab's own `vllm` backend, small, on processors.

It reads the model repository that production reads: `model.json` beside this version holds fields of vLLM's engine arguments,
config.pbtxt says REPORT_CUSTOM_METRICS. Tensors and metrics have the names that the vendor's backend gives them.
"""

from __future__ import annotations

import asyncio
import json
import locale
import multiprocessing
import os
import shutil
import threading
import time
from typing import Any

# The embedded interpreter starts in the C locale, in which torch cannot read its own files.
locale.setlocale(locale.LC_ALL, "C.UTF-8")
# The engine core is a process of its own; a fork of Triton's stub, which has threads, may hang.
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
multiprocessing.set_executable(shutil.which("python3") or "python3")

import numpy as np
import triton_python_backend_utils as pb_utils
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

INPUTS = {
    "text_input": "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "exclude_input_in_output": "TYPE_BOOL",
    "return_finish_reason": "TYPE_BOOL",
    "return_num_input_tokens": "TYPE_BOOL",
    "return_num_output_tokens": "TYPE_BOOL",
}
OUTPUTS = {
    "text_output": "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
}
SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]
COUNTERS = {
    "vllm:prompt_tokens_total": "Number of prefill tokens processed.",
    "vllm:generation_tokens_total": "Number of generation tokens processed.",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("Histogram of time to first token in seconds.", SECONDS),
    "vllm:time_per_output_token_seconds": ("Histogram of time per output token in seconds.", SECONDS),
    "vllm:e2e_request_latency_seconds": ("Histogram of end to end request latency in seconds.", SECONDS),
    "vllm:request_prompt_tokens": ("Number of prefill tokens processed.", TOKENS),
    "vllm:request_generation_tokens": ("Number of generation tokens processed.", TOKENS),
    "vllm:request_params_n": ("Histogram of the n request parameter.", [1, 2, 5, 10, 20]),
}


class Metrics:
    """The eight families that the vendor's backend reports; nothing where config.pbtxt does not ask for them."""

    def __init__(self, wanted: bool, labels: dict[str, str]) -> None:
        """Register them for a model and its version."""
        self._metrics: dict[str, Any] = {}
        self._families: list[Any] = []
        for name, text in COUNTERS.items() if wanted else ():
            self._add(name, labels, description=text, kind=pb_utils.MetricFamily.COUNTER)
        for name, (text, buckets) in HISTOGRAMS.items() if wanted else ():
            self._add(name, labels, buckets=buckets, description=text, kind=pb_utils.MetricFamily.HISTOGRAM)

    def _add(self, name: str, labels: dict[str, str], buckets: list[float] | None = None, **family: Any) -> None:
        made = pb_utils.MetricFamily(name=name, **family)
        self._families.append(made)
        more = {"buckets": [float(bucket) for bucket in buckets]} if buckets else {}
        self._metrics[name] = made.Metric(labels=labels, **more)

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        if name in self._metrics:
            self._metrics[name].increment(value)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        if name in self._metrics:
            self._metrics[name].observe(value)


class TritonPythonModel:
    """One engine; Triton calls the methods."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declare inputs and outputs; answers come in parts, and vLLM batches, not Triton."""
        config = auto_complete_model_config
        known = config.as_dict()
        there = {item["name"] for item in [*known["input"], *known["output"]]}
        for name, kind in INPUTS.items():
            if name not in there:
                config.add_input({"name": name, "data_type": kind, "dims": [1], "optional": name != "text_input"})
        for name, kind in OUTPUTS.items():
            if name not in there:
                config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine; raises what vLLM raises, which Triton shows as the reason of a failed load."""
        config = json.loads(args["model_config"])
        parameters = {name: item["string_value"] for name, item in config.get("parameters", {}).items()}
        with open(os.path.join(pb_utils.get_model_dir(), "model.json"), encoding="utf-8") as stream:
            arguments = AsyncEngineArgs(**json.load(stream))
        wanted = parameters.get("REPORT_CUSTOM_METRICS", "").lower() == "true" and not arguments.disable_log_stats
        self._metrics = Metrics(wanted, {"model": args["model_name"], "version": args["model_version"]})
        self._version = args["model_version"]
        self._running = 0
        self._number = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._engine = asyncio.run_coroutine_threadsafe(self._start(arguments), self._loop).result()
        pb_utils.Logger.log_info(f"vllm backend: version {self._version} serves")

    @staticmethod
    async def _start(arguments: Any) -> Any:
        return AsyncLLM.from_engine_args(arguments)

    def execute(self, requests: list[Any]) -> None:
        """Hand each request to the engine and return at once: answers go through the request's own sender."""
        for request in requests:
            self._running += 1
            self._number += 1
            asyncio.run_coroutine_threadsafe(
                self._answer(f"{self._version}-{self._number}", request, request.get_response_sender()), self._loop
            )

    def finalize(self) -> None:
        """Let what runs finish, then end the engine: a new version may already answer beside this one."""
        while self._running:
            time.sleep(0.2)
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _answer(self, name: str, request: Any, sender: Any) -> None:
        """Answer one request, in parts where it says `stream`."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            await self._generate(name, request, sender)
        except Exception as error:  # whatever the engine raises is the request's answer
            failure = pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(error).__name__}: {error}"))
            sender.send(failure, flags=final)
        finally:
            self._running -= 1

    async def _generate(self, name: str, request: Any, sender: Any) -> None:
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        prompt = str(_value(request, "text_input", b""), "utf-8")
        stream = bool(_value(request, "stream", False))
        given = _value(request, "sampling_parameters", b"")
        chosen = json.loads(given or request.parameters() or "{}")
        sampling = SamplingParams(**chosen, output_kind=RequestOutputKind.DELTA)
        begun = time.monotonic()
        first = 0.0
        text, tokens, prompt_tokens, reason = "", 0, 0, None
        if not _value(request, "exclude_input_in_output", stream):
            text = prompt
        async for output in self._engine.generate(prompt, sampling, name):
            if sender.is_cancelled():
                await self._engine.abort(name)
                reason = "cancelled"
                break
            part = output.outputs[0]
            first = first or time.monotonic()
            new = len(part.token_ids)
            tokens += new
            prompt_tokens = len(output.prompt_token_ids or ())
            reason = part.finish_reason
            text += part.text
            self._metrics.count("vllm:generation_tokens_total", new)
            if stream and not output.finished:
                sender.send(_response(text, None, prompt_tokens, new))
                text = ""
        sender.send(_response(text, reason or "stop", prompt_tokens, tokens), flags=final)
        self._observe(begun, first, prompt_tokens, tokens, sampling.n)

    def _observe(self, begun: float, first: float, prompt_tokens: int, tokens: int, answers: int) -> None:
        """Count a finished request."""
        now = time.monotonic()
        self._metrics.count("vllm:prompt_tokens_total", prompt_tokens)
        self._metrics.observe("vllm:time_to_first_token_seconds", (first or now) - begun)
        if tokens > 1:
            self._metrics.observe("vllm:time_per_output_token_seconds", (now - first) / (tokens - 1))
        self._metrics.observe("vllm:e2e_request_latency_seconds", now - begun)
        self._metrics.observe("vllm:request_prompt_tokens", prompt_tokens)
        self._metrics.observe("vllm:request_generation_tokens", tokens)
        self._metrics.observe("vllm:request_params_n", answers)


def _value(request: Any, name: str, otherwise: Any) -> Any:
    """Return the one element of an input, ``otherwise`` where it was not sent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return otherwise if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _response(text: str, reason: str | None, prompt_tokens: int, tokens: int) -> Any:
    """Return a part of an answer; ``tokens`` are those of this part, in the last part all of the answer."""
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor("text_output", np.asarray([text.encode("utf-8")], dtype=np.object_)),
            pb_utils.Tensor("finish_reason", np.asarray([str(reason).encode("utf-8")], dtype=np.object_)),
            pb_utils.Tensor("num_input_tokens", np.asarray([prompt_tokens], dtype=np.uint32)),
            pb_utils.Tensor("num_output_tokens", np.asarray([tokens], dtype=np.uint32)),
        ]
    )
