# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine says only in its log: how long loading the model took, and when it was ready to serve.

No engine exports its model load time as a metric (SGLang's ``startup_time_seconds`` is the whole start), so the agent
reads it here. Lines were taken from vLLM 0.26.0 on an H200 and vLLM 0.32.0 on a CPU; SGLang's and Triton's are from
their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

GIB = 1024**3

# "Model loading took 14.32 GiB and 3.601533 seconds" (0.26), "… 14.32 GiB memory and 3.6 seconds" (0.11 and newer)
_VLLM_LOAD = re.compile(r"Model loading took (\d+(?:\.\d+)?) (GiB|GB)(?: memory)? and (\d+(?:\.\d+)?) seconds")
# "Loading weights took 1.52 seconds": what a CPU worker prints; one line per weight loader, the last one counts
_VLLM_WEIGHTS = re.compile(r"Loading weights took (\d+(?:\.\d+)?) seconds")
# "Load weight end. elapsed=3.21 s, type=…, avail mem=…, mem usage=14.3 GB."
_SGLANG_LOAD = re.compile(r"Load weight end\.(?: elapsed=(\d+(?:\.\d+)?) s,)?.*?mem usage=(\d+(?:\.\d+)?) GB")
_ENGINE_INIT = re.compile(r"init engine \(.*?\) took (\d+(?:\.\d+)?) s(?:econds)?\b")
_READY = re.compile(
    r"Application startup complete\."  # vLLM's and any uvicorn server
    r"|The server is fired up and ready to roll!"  # SGLang
    r"|Started HTTPService at "  # Triton
)


@dataclass(frozen=True)
class StartUp:
    """What the start-up part of a log says. None: the log does not say it (yet).

    ``model_load_s``: loading the weights, seconds; ``weights_bytes``: their size on the device, bytes (of the largest
    worker); ``engine_init_s``: profiling, cache and warm-up, seconds; ``ready``: the server said that it serves.
    """

    model_load_s: float | None = None
    weights_bytes: int | None = None
    engine_init_s: float | None = None
    ready: bool = False


def parse_start_up(lines: Iterable[str]) -> StartUp:
    """Return what ``lines`` of an engine's log say about its start. Never raises: a log may hold anything.

    With tensor parallelism every worker prints its line: the slowest and the largest count, as they decide.
    """
    loads: list[float] = []
    weights_only: list[float] = []
    sizes: list[int] = []
    inits: list[float] = []
    ready = False
    for line in lines:
        if match := _VLLM_LOAD.search(line):
            loads.append(float(match.group(3)))
            sizes.append(int(float(match.group(1)) * (GIB if match.group(2) == "GiB" else 10**9)))
        elif match := _VLLM_WEIGHTS.search(line):
            weights_only.append(float(match.group(1)))
        elif match := _SGLANG_LOAD.search(line):
            if match.group(1):
                loads.append(float(match.group(1)))
            sizes.append(int(float(match.group(2)) * GIB))
        elif match := _ENGINE_INIT.search(line):
            inits.append(float(match.group(1)))
        ready = ready or _READY.search(line) is not None
    seconds = loads or weights_only
    return StartUp(
        model_load_s=max(seconds) if seconds else None,
        weights_bytes=max(sizes) if sizes else None,
        engine_init_s=max(inits) if inits else None,
        ready=ready,
    )


def is_ready_line(line: str) -> bool:
    """Return whether ``line`` is the one with which an engine says that it serves from now on."""
    return _READY.search(line) is not None
