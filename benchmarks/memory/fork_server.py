# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Start vLLM servers from a process that has imported vLLM already; measure.py --preload talks to it.

Most of a small engine's start is Python importing the same modules again: for each case, its engine process and the
inspection of its architecture. This process imports them once, asks vLLM for the architectures that it is given (vLLM
keeps the answers on disk), prints READY, and forks one server for each JSON line on standard input:
{"arguments": [...], "log": FILE}. It answers with the server's process group. CUDA is never
initialised here: if an import did, it ends with code 3, because a forked child could not use the GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

SERVER = "vllm.entrypoints.openai.api_server"
MODULES = (
    SERVER,
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.compilation.backends",
    "torch._inductor.compile_fx",
)


def preload(architectures: list[str]) -> None:
    """Import what a server imports, and let vLLM inspect the architectures side by side."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not preloaded: {name}: {error}", file=sys.stderr, flush=True)
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(registry._try_inspect_model_cls, architectures))
    if importlib.import_module("torch").cuda.is_initialized():
        print("CUDA was initialised by an import: start without --preload", file=sys.stderr, flush=True)
        sys.exit(3)


def child(arguments: list[str], log: str) -> None:
    """Become a server: own session, output to the log, the module run as the command would run it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def main() -> int:
    """Serve requests until standard input ends."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    preload(sys.argv[1:])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("READY", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                child(request["arguments"], request["log"])
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException as error:  # the child must never return into this loop
                print(f"RuntimeError: {error!r}", flush=True)
                code = 1
            os._exit(code)
        print(pid, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
